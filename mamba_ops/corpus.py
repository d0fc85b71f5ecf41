"""Documents in: read, repaired, each distinct text once, split by content, fingerprinted.

The default corpus is what every CPython carries: the documentation topics of `pydoc_data.topics`, by name,
then the public top-level modules of the standard library that are Python files, by name.

A path of a user's corpus is a file, a folder or a glob. A file whose name ends in .jsonl holds a document a
line; any other file is one document. A folder is read recursively, sorted by relative path, and only files
ending in .txt, .text, .md, .rst or .jsonl; hidden names and links to folders are passed over. A glob names
files of any kind and follows no links under `**`; folders that it matches are read as folders.
"""

import hashlib
import itertools
import json
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from mamba_ops.config import CorpusConfig
from mamba_ops.files import find_files, shown
from mamba_ops.fingerprint import atomic_directory, digest, write_json

Split: TypeAlias = Literal["train", "validation"]
SPLITS: tuple[Split, Split] = ("train", "validation")
Repair: TypeAlias = Literal["undecodable", "byte_order_mark", "crlf"]

DOCUMENTS = "documents.parquet"
MANIFEST = "manifest.json"
ROW_GROUP_CHARACTERS = 1 << 23
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("text", pa.large_string()),
        ("bytes", pa.int64()),
    ]
)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """A text after repair, where it came from, and what was repaired in it."""

    source: str
    text: str
    repairs: frozenset[Repair] = frozenset()


class Manifest(BaseModel):
    """A record that lies as manifest.json beside the files it describes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str


class CorpusManifest(Manifest):
    """What a corpus holds.

    fingerprint: of each split's texts in order; neither paths nor times count. documents, bytes (UTF-8): by
    split. repeats: documents left out because their text was there already; overlaps: those of them that were
    in the training files and are kept for validation. empty: documents without text, left out. undecodable,
    byte_order_marks, crlf: documents kept in which bytes became U+FFFD, a BOM was dropped, CRLF became LF.
    ignored: files and linked folders inside given folders that are not read.
    """

    documents: dict[Split, int]
    bytes: dict[Split, int]
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
    document: Document


def default_documents() -> Iterator[Document]:
    """Yield the documentation topics and the public top-level modules of the running CPython, each by name.

    Raises FileNotFoundError when this Python came without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FileNotFoundError(
            f"the default corpus needs pydoc_data.topics, which {sys.executable} lacks; give corpus paths"
        ) from None
    for name in sorted(topics):
        yield _repaired(f"pydoc_data.topics:{name}", topics[name])
    library = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        path = library / f"{name}.py"
        if not name.startswith("_") and path.is_file():
            yield _decoded(f"stdlib:{name}.py", path.read_bytes())


def read_documents(paths: Iterable[str | Path], text_column: str) -> Iterator[Document]:
    """Yield the documents of files in the order given.

    Raises ValueError, naming file and line, where a .jsonl line is no object with a string in `text_column`.
    """
    for path in map(Path, paths):
        if path.suffix.lower() == ".jsonl":
            yield from _read_lines(path, text_column)
        else:
            yield _decoded(shown(path), path.read_bytes())


def _read_lines(path: Path, text_column: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            source = f"{shown(path)}:{number}"
            whole = _decoded(source, line)
            try:
                text = _column(json.loads(whole.text), text_column)
            except (ValueError, RecursionError) as error:
                expected = f"an object with a string under {text_column!r}"
                raise ValueError(f"{shown(path)}, line {number}: expected {expected}, got {error}") from None
            yield _repaired(source, text, whole.repairs - {"crlf"})


def _column(value: Any, name: str) -> str:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}")
    if name not in value:
        raise ValueError(f"the keys {sorted(value)}")
    if not isinstance(value[name], str):
        raise ValueError(f"a {type(value[name]).__name__} there")
    return value[name]


def _decoded(source: str, data: bytes) -> Document:
    try:
        return _repaired(source, data.decode())
    except UnicodeDecodeError:
        return _repaired(source, data.decode(errors="replace"), frozenset({"undecodable"}))


def _repaired(source: str, text: str, repairs: frozenset[Repair] = frozenset()) -> Document:
    """Turn lone surrogates (a JSON escape can make them) into U+FFFD, drop a BOM, turn CRLF into LF."""
    if _SURROGATE.search(text):
        text, repairs = _SURROGATE.sub("\ufffd", text), repairs | {"undecodable"}
    if text.startswith("\ufeff"):
        text, repairs = text[1:], repairs | {"byte_order_mark"}
    if "\r\n" in text:
        text, repairs = text.replace("\r\n", "\n"), repairs | {"crlf"}
    return Document(source, text, repairs)


def in_validation(text_digest: bytes, fraction: float) -> bool:
    """Whether the first 8 bytes of a text's SHA-256, as a share of their range, lie below `fraction`."""
    return int.from_bytes(text_digest[:8], "big") < fraction * 2**64


def build_corpus(config: CorpusConfig, directory: str | Path) -> CorpusManifest:
    """Write documents.parquet (id, source, split, text, bytes) and manifest.json into a new folder.

    id: SHA-256 of the text. The order is that of reading, validation files first. A text that is in training
    and in validation files is kept for validation. max_documents counts the distinct documents of `paths`.
    Memory: a row group or the largest document, and the ids.
    Raises FileExistsError when `directory` exists; FileNotFoundError for a path that is not there; ValueError
    for a malformed line, and for a corpus or a split without documents.
    """
    counts: Counter[str] = Counter()
    hashes = {split: hashlib.sha256() for split in SPLITS}
    with atomic_directory(directory) as folder:
        with pq.ParquetWriter(folder / DOCUMENTS, _SCHEMA) as writer:
            for group in _groups(_distinct(config, counts)):
                for kept in group:
                    hashes[kept.split].update(kept.digest)
                    counts[f"{kept.split} documents"] += 1
                    counts[f"{kept.split} bytes"] += len(kept.document.text.encode())
                    counts.update(kept.document.repairs)
                writer.write_table(_table(group))
        _check_splits(config, counts)
        manifest = CorpusManifest(
            fingerprint=digest({split: hashes[split].hexdigest() for split in SPLITS}),
            documents={split: counts[f"{split} documents"] for split in SPLITS},
            bytes={split: counts[f"{split} bytes"] for split in SPLITS},
            repeats=counts["repeats"],
            overlaps=counts["overlaps"],
            empty=counts["empty"],
            undecodable=counts["undecodable"],
            byte_order_marks=counts["byte_order_mark"],
            crlf=counts["crlf"],
            ignored=counts["ignored"],
        )
        write_json(folder / MANIFEST, manifest.model_dump())
    return manifest


def _distinct(config: CorpusConfig, counts: Counter[str]) -> Iterator[_Kept]:
    """Yield validation files first, so that what they hold is never trained on."""
    seen: dict[bytes, Split] = {}
    held_out = _files(config.validation_paths, counts)
    for kept in _unseen(read_documents(held_out, config.text_column), "validation", seen, counts):
        yield kept
    files = _files(config.paths, counts)
    documents = read_documents(files, config.text_column) if config.paths else default_documents()
    for kept in itertools.islice(_unseen(documents, "train", seen, counts), config.max_documents):
        by_hash = not config.validation_paths and in_validation(kept.digest, config.validation_fraction)
        yield kept._replace(split="validation") if by_hash else kept


def _files(entries: list[str], counts: Counter[str]) -> list[Path]:
    found: dict[Path, None] = {}
    for entry in entries:
        files, ignored = find_files(entry)
        found.update(dict.fromkeys(files))
        counts["ignored"] += ignored
    return list(found)


def _unseen(
    documents: Iterable[Document], split: Split, seen: dict[bytes, Split], counts: Counter[str]
) -> Iterator[_Kept]:
    for document in documents:
        if not document.text.strip():
            counts["empty"] += 1
            continue
        key = hashlib.sha256(document.text.encode()).digest()
        if key in seen:
            counts["repeats"] += 1
            counts["overlaps"] += seen[key] != split
            continue
        seen[key] = split
        yield _Kept(split, key, document)


def _groups(documents: Iterable[_Kept]) -> Iterator[list[_Kept]]:
    group: list[_Kept] = []
    size = 0
    for kept in documents:
        group.append(kept)
        size += len(kept.document.text)
        if size >= ROW_GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _table(group: list[_Kept]) -> pa.Table:
    columns = {
        "id": [kept.digest.hex() for kept in group],
        "source": [kept.document.source for kept in group],
        "split": [kept.split for kept in group],
        "text": [kept.document.text for kept in group],
        "bytes": [len(kept.document.text.encode()) for kept in group],
    }
    return pa.table(columns, schema=_SCHEMA)


def _check_splits(config: CorpusConfig, counts: Counter[str]) -> None:
    documents = {split: counts[f"{split} documents"] for split in SPLITS}
    left_out = f"{counts['empty']} without text and {counts['repeats']} repeats were left out"
    empty = [split for split in SPLITS if not documents[split]]
    if not empty:
        return
    names = f"corpus {config.paths or 'of this Python'}"
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


def read_table(directory: str | Path, split: Split, columns: list[str]) -> Iterator[dict[str, list]]:
    """Yield the wanted columns of a split's documents in order, a row group of the file at a time."""
    with pq.ParquetFile(Path(directory) / DOCUMENTS) as file:
        for index in range(file.num_row_groups):
            table = file.read_row_group(index, columns=[*columns, "split"])
            yield table.filter(pc.equal(table["split"], split)).select(columns).to_pydict()


def read_texts(directory: str | Path, split: Split) -> Iterator[str]:
    """Yield a split's texts in order; memory is bounded by a row group of the file."""
    for group in read_table(directory, split, ["text"]):
        yield from group["text"]
