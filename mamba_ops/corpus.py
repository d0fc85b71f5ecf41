"""A corpus: each distinct document once, split by content, fingerprinted, in two tables.

documents.parquet: a row a document: document (a number; not all are used), id, source, split, bytes.
texts.parquet: a row a part of a document, in the same order: document, role, text. A long text lies in several
rows, so that none has to be held whole. Rows of a document that is not in the first table are to be passed over.

A path of a user's corpus is a file, a folder or a glob. A folder is read recursively, sorted by relative path,
and only files ending in .txt, .text, .md, .rst, .jsonl or .parquet, also with .gz or .zst; hidden names and
links to folders are passed over. A glob names files of any kind and follows no links under `**`; folders that it
matches are read as folders.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mamba_ops.config import CorpusConfig
from mamba_ops.corpus_tables import DOCUMENTS, RowWriter, TextWriter, open_documents
from mamba_ops.documents import Document, default_documents, read_documents
from mamba_ops.fingerprint import atomic_directory, digest, write_json
from mamba_ops.progress import Report, meter
from mamba_ops.storage import Advance, File, check_unchanged, find

Split: TypeAlias = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")

MANIFEST = "manifest.json"


class Manifest(BaseModel):
    """A record that lies as manifest.json beside the files it describes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str


class CorpusManifest(Manifest):
    """What a corpus holds.

    fingerprint: of each split's documents in order; neither paths nor times count. documents, bytes (UTF-8): by
    split. masked: documents of which only a part is learned. repeats: documents left out because they were there
    already; overlaps: those of them that were in the training files and are kept for validation. empty: documents
    without text, left out. undecodable, byte_order_marks, crlf: documents kept in which bytes became U+FFFD, a BOM
    was dropped, CRLF became LF. ignored: files and linked folders inside given folders that are not read.
    """

    documents: dict[Split, int]
    bytes: dict[Split, int]
    masked: int
    repeats: int
    overlaps: int
    empty: int
    undecodable: int
    byte_order_marks: int
    crlf: int
    ignored: int


class _Kept(NamedTuple):
    split: Split
    digest: bytes
    bytes: int
    masked: bool
    document: Document


class _Sources(NamedTuple):
    """The files of the configured paths; opened grows while they are read."""

    training: list[File]
    validation: list[File]
    opened: list[File]
    advance: Advance


def in_validation(text_digest: bytes, fraction: float) -> bool:
    """Whether the first 8 bytes of a document's SHA-256, as a share of their range, lie below `fraction`."""
    return int.from_bytes(text_digest[:8], "big") < fraction * 2**64


def build_corpus(config: CorpusConfig, directory: str | Path, report: Report | None = None) -> CorpusManifest:
    """Write documents.parquet, texts.parquet and manifest.json into a new folder.

    id: SHA-256 of the text, or of roles and texts. The order is that of reading, validation files first. A
    document that is in training and in validation files is kept for validation. max_documents counts the distinct
    documents of `paths`. report: called about once a second.
    Memory: a row group or the largest line or row, and the ids; a text file may be of any size.
    Raises FileExistsError when `directory` exists; FileNotFoundError for a path that is not there; ValueError
    for a malformed line, a damaged file, a file that changes meanwhile, and for a corpus or a split without documents.
    """
    counts: Counter[str] = Counter()
    hashes = {split: hashlib.sha256() for split in SPLITS}
    sources = _sources(config, counts, report)
    with atomic_directory(directory) as folder:
        with TextWriter(folder) as texts, RowWriter(folder / DOCUMENTS) as rows:
            for kept in _distinct(config, sources, texts, counts):
                hashes[kept.split].update(kept.digest)
                rows.add(texts.number, kept.digest.hex(), kept.document.source, kept.split, kept.bytes)
                texts.keep()
                counts[f"{kept.split} documents"] += 1
                counts[f"{kept.split} bytes"] += kept.bytes
                counts["masked"] += kept.masked
                counts.update(kept.document.repairs)
        check_unchanged([*config.validation_paths, *config.paths], config.storage_options, sources.opened)
        _check_splits(config, counts)
        manifest = _manifest(digest({split: hashes[split].hexdigest() for split in SPLITS}), counts)
        write_json(folder / MANIFEST, manifest.model_dump())
    return manifest


def _manifest(fingerprint: str, counts: Counter[str]) -> CorpusManifest:
    return CorpusManifest(
        fingerprint=fingerprint,
        documents={split: counts[f"{split} documents"] for split in SPLITS},
        bytes={split: counts[f"{split} bytes"] for split in SPLITS},
        masked=counts["masked"],
        repeats=counts["repeats"],
        overlaps=counts["overlaps"],
        empty=counts["empty"],
        undecodable=counts["undecodable"],
        byte_order_marks=counts["byte_order_mark"],
        crlf=counts["crlf"],
        ignored=counts["ignored"],
    )


def _sources(config: CorpusConfig, counts: Counter[str], report: Report | None) -> _Sources:
    training, validation = (_files(paths, config, counts) for paths in (config.paths, config.validation_paths))
    total = sum(file.size for file in [*training, *validation])
    return _Sources(training, validation, [], meter("corpus", total, report))


def _files(entries: list[str], config: CorpusConfig, counts: Counter[str]) -> list[File]:
    found: dict[tuple[str, str], File] = {}
    for entry in entries:
        files, ignored = find(entry, config.storage_options)
        found.update(((file.name, file.path), file) for file in files)
        counts["ignored"] += ignored
    return list(found.values())


def _distinct(config: CorpusConfig, sources: _Sources, texts: TextWriter, counts: Counter[str]) -> Iterator[_Kept]:
    """Yield validation files first, so that what they hold is never trained on."""
    seen: dict[bytes, Split] = {}
    held_out = _read(sources.validation, config, sources)
    yield from _unseen(held_out, "validation", seen, texts, counts)
    documents = _read(sources.training, config, sources) if config.paths else default_documents(config.default)
    for kept in itertools.islice(_unseen(documents, "train", seen, texts, counts), config.max_documents):
        by_hash = not config.validation_paths and in_validation(kept.digest, config.validation_fraction)
        yield kept._replace(split="validation") if by_hash else kept


def _read(files: list[File], config: CorpusConfig, sources: _Sources) -> Iterator[Document]:
    def noted() -> Iterator[File]:
        for file in files:
            sources.opened.append(file)
            yield file

    return read_documents(noted(), config, sources.advance)


def _unseen(
    documents: Iterable[Document], split: Split, seen: dict[bytes, Split], texts: TextWriter, counts: Counter[str]
) -> Iterator[_Kept]:
    for document in documents:
        key, size, blank, masked = _write(document, texts)
        if blank:
            counts["empty"] += 1
        elif key in seen:
            counts["repeats"] += 1
            counts["overlaps"] += seen[key] != split
        else:
            seen[key] = split
            yield _Kept(split, key, size, masked, document)
            continue
        texts.drop()


def _write(document: Document, texts: TextWriter) -> tuple[bytes, int, bool, bool]:
    """Write a document's parts and return its digest, its bytes, whether it is blank, and whether it is masked."""
    sha, size, blank, role = hashlib.sha256(), 0, True, "text"
    for part in document.parts:
        data = part.text.encode()
        if part.role != role:
            role = part.role
            sha.update(b"\xff" + role.encode() + b"\xff")  # no text holds the byte 0xff
        sha.update(data)
        size += len(data)
        blank = blank and not part.text.strip()
        texts.add(part)
    return sha.digest(), size, blank, role != "text"


def _check_splits(config: CorpusConfig, counts: Counter[str]) -> None:
    documents = {split: counts[f"{split} documents"] for split in SPLITS}
    left_out = f"{counts['empty']} without text and {counts['repeats']} repeats were left out"
    empty = [split for split in SPLITS if not documents[split]]
    if not empty:
        return
    names = f"corpus {config.paths or f'of this Python ({config.default})'}"
    if config.validation_paths:
        names += f" with validation {config.validation_paths}"
    elif len(empty) == 1:
        left_out += (
            f", the others were split by content hash at validation_fraction {config.validation_fraction:g}; "
            "give validation_paths, another validation_fraction, or the text in more documents"
        )
    raise ValueError(
        f"{names}: {documents['train']} documents with text for train and {documents['validation']} for validation, "
        f"expected at least 1 for each; {left_out}"
    )


Kind = TypeVar("Kind", bound=Manifest)


def read_manifest(kind: type[Kind], directory: str | Path) -> Kind:
    """Return the record in a folder's manifest.json.

    Raises FileNotFoundError without one, ValueError when it is another kind's or damaged.
    """
    path = Path(directory) / MANIFEST
    try:
        return kind.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{path}: expected a {kind.__name__}, got a fault at {where}: {first['msg']}") from None


def read_texts(directory: str | Path, split: Split) -> Iterator[str]:
    """Yield the text of each of a split's documents in order; memory is bounded by the largest one.

    A prompt and its completion are one text, a chat is its JSON.
    """
    for _, parts in open_documents(directory, split):
        yield "".join(part.text for part in parts)
