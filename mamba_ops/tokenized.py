"""A corpus as token ids in one memory-mapped file, with a table of the documents in it.

A document is E + tokens + E, E being the end-of-text id, and one E lies between neighbours. The stream of a
split is E d1 E d2 E ... dn E; ids.bin (uint32, little-endian) holds the training stream, then the validation
stream. Every token but a stream's first is a target.

A prompt and its completion are encoded apart and laid end to end, so that the ids of one do not depend on the
other; so are the parts of a chat. What is not learned (a prompt, what others than the assistant say) is `masked`:
it is read, but carries no loss. The end-of-text that closes a document always does.
"""

import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer

from mamba_ops.chat import ChatTemplate, learned_parts, load_template
from mamba_ops.corpus import MANIFEST, SPLITS, CorpusManifest, Manifest, Split, read_manifest
from mamba_ops.corpus_tables import DOCUMENTS, Row, RowWriter, open_documents
from mamba_ops.encoding import cut, encode_slices
from mamba_ops.fingerprint import atomic_directory, digest, file_digest, write_json
from mamba_ops.heap import trimmer
from mamba_ops.loss_mask import masked_runs
from mamba_ops.progress import Report, meter
from mamba_ops.storage import Advance
from mamba_ops.tokenizer import TokenizerManifest, check_ids, load_tokenizer

IDS = "ids.bin"
DTYPE = np.dtype("<u4")
READ_AT_ONCE = 1 << 22
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("offset", pa.int64()),
        ("tokens", pa.int64()),
        ("bytes", pa.int64()),
        ("learned_bytes", pa.int64()),
        ("masked", pa.list_(pa.int64())),
    ]
)


class Stream(BaseModel):
    """One split's part of ids.bin, ids[begin:end].

    tokens: without ends of text. bytes: of the texts. masked: tokens that carry no loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    begin: int
    end: int
    documents: int
    tokens: int
    bytes: int
    masked: int = 0

    @property
    def targets(self) -> int:
        """Tokens that are learned: the documents' own that are not masked, and one end of text per document."""
        return self.end - self.begin - 1 - self.masked


class TokenizedManifest(Manifest):
    """What an encoded corpus holds.

    corpus, tokenizer: their fingerprints. vocab_size: embedding rows that the tokenizer's ids need. max_id:
    the largest in the file. without_tokens: documents left out because the tokenizer makes nothing of them.
    """

    corpus: str
    tokenizer: str
    vocab_size: int
    end_of_text_id: int
    max_id: int
    without_tokens: int
    ids_sha256: str
    streams: dict[Split, Stream]


class _Text(NamedTuple):
    """A text of a document that is encoded by itself; chat: special tokens that it spells are themselves."""

    row: Row
    learned: bool
    chat: bool = False

    @property
    def source(self) -> str:
        return self.row.source


class _IdFile:
    """Writes ids that have a row in the embedding; knows how many there are, the largest, and digests."""

    def __init__(self, file: BinaryIO, rows: int, tokenizer: Tokenizer):
        self._file, self._rows, self._tokenizer = file, rows, tokenizer
        self.content, self.masks = hashlib.sha256(), hashlib.sha256()
        self.count, self.largest = 0, 0

    def write(self, ids: np.ndarray, first: int = 0, source: str = "") -> None:
        largest = int(ids.max(initial=0))
        if largest >= self._rows:
            check_ids(ids, self._rows, self._tokenizer, first, source)
        data = ids.astype(DTYPE).tobytes()
        self._file.write(data)
        self.content.update(data)
        self.count += ids.size
        self.largest = max(self.largest, largest)


def encode_corpus(
    corpus: str | Path,
    tokenizer: str | Path,
    directory: str | Path,
    rows: int | None = None,
    report: Report | None = None,
    threads: int | None = None,
) -> TokenizedManifest:
    """Write ids.bin, documents.parquet and manifest.json into a new folder.

    corpus, tokenizer: folders that `build_corpus` and `build_tokenizer` wrote. rows: of the embedding that
    the ids are for, the tokenizer's for None. report: called about once a second. threads: as many as there are
    cores for None; what is written does not depend on them.
    The table has id, source, split, offset, tokens, bytes, learned_bytes, masked; offset is the index in ids.bin
    of the document's first own token; masked has the begin and end of each run of its tokens without loss.
    Memory: a row group of the corpus and what `encode_slices` needs, whatever the length of a document.
    Raises FileExistsError when `directory` exists; ValueError for an id past the embedding, for a split without
    tokens, and for messages that the tokenizer has no chat template for.
    """
    source, coder = read_manifest(CorpusManifest, corpus), read_manifest(TokenizerManifest, tokenizer)
    with atomic_directory(directory) as folder:
        with open(folder / IDS, "wb") as file, RowWriter(folder / DOCUMENTS, _SCHEMA) as table:
            ids = _IdFile(file, coder.vocab_size if rows is None else rows, load_tokenizer(tokenizer))
            encoded = functools.partial(_encoded, corpus, tokenizer, coder, threads)
            advance = meter("tokens", sum(source.bytes.values()), report)
            written = {split: _write_split(split, encoded(split), ids, coder, table, advance) for split in SPLITS}
        streams = {split: stream for split, (stream, _) in written.items()}
        empty = [split for split in SPLITS if not streams[split].documents]
        if empty:
            raise ValueError(f"{corpus}: the documents of {empty[0]} have 0 tokens, expected at least 1")
        content = [source.fingerprint, coder.fingerprint, coder.end_of_text_id, ids.content.hexdigest()]
        if any(stream.masked for stream in streams.values()):
            content.append(ids.masks.hexdigest())
        manifest = TokenizedManifest(
            fingerprint=digest(content),
            corpus=source.fingerprint,
            tokenizer=coder.fingerprint,
            vocab_size=coder.vocab_size,
            end_of_text_id=coder.end_of_text_id,
            max_id=ids.largest,
            without_tokens=sum(left_out for _, left_out in written.values()),
            ids_sha256=ids.content.hexdigest(),
            streams=streams,
        )
        write_json(folder / MANIFEST, manifest.model_dump())
    return manifest


Encoded: TypeAlias = Iterator[tuple[_Text, int, np.ndarray]]
"""Texts in pieces, in order: the text, the UTF-8 bytes and the ids of each piece."""


def _encoded(
    corpus: str | Path, folder: str | Path, coder: TokenizerManifest, threads: int | None, split: Split
) -> Encoded:
    """Encode a split's texts; those of a chat may hold special tokens, any other is plain text."""
    tokenizers: dict[bool, Tokenizer] = {}
    passed = trimmer()
    for chat, texts in itertools.groupby(_texts(corpus, folder, coder, split), key=lambda found: found[0].chat):
        if chat not in tokenizers:
            tokenizers[chat] = load_tokenizer(folder)
            tokenizers[chat].encode_special_tokens = not chat
        for piece, ids in encode_slices(tokenizers[chat], cut(tokenizers[chat], texts), threads):
            passed(len(piece.text))
            yield piece.key, len(piece.text.encode()), ids


def _texts(
    corpus: str | Path, folder: str | Path, coder: TokenizerManifest, split: Split
) -> Iterator[tuple[_Text, Iterable[str]]]:
    template: ChatTemplate | None = None
    for row, parts in open_documents(corpus, split):
        for role, group in itertools.groupby(parts, key=lambda part: part.role):
            texts = (part.text for part in group)
            if role != "messages":
                yield _Text(row, role != "prompt"), texts
                continue
            template = template or load_template(folder)
            for learned, text in learned_parts(template, json.loads("".join(texts)), coder.end_of_text, row.source):
                yield _Text(row, learned, chat=True), [text]


def _write_split(
    split: Split, encoded: Encoded, ids: _IdFile, coder: TokenizerManifest, table: RowWriter, advance: Advance
) -> tuple[Stream, int]:
    """Write a split's ids and rows; return what there is, and the number of documents without tokens."""
    begin, counts = ids.count, Counter[str]()
    end = np.array([coder.end_of_text_id], DTYPE)
    ids.write(end)
    for _, pieces in itertools.groupby(encoded, key=lambda found: found[0].row.document):
        offset, learned_bytes, masked = ids.count, 0, list[int]()
        for text, size, own in pieces:
            row, here = text.row, ids.count - offset
            ids.write(own, here, row.source)
            advance(size)
            learned_bytes += size * text.learned
            if not text.learned and own.size:
                masked = [*masked[:-1], here + own.size] if masked[-1:] == [here] else [*masked, here, here + own.size]
        tokens = ids.count - offset
        if not tokens:
            counts["without tokens"] += 1
            continue
        ids.write(end)
        table.add(row.id, row.source, split, offset, tokens, row.bytes, learned_bytes, masked)
        ids.masks.update(np.array([offset, *masked], "<i8").tobytes() if masked else b"")
        found = {"documents": 1, "tokens": tokens, "bytes": row.bytes, "masked": sum(masked[1::2]) - sum(masked[::2])}
        for key, number in found.items():
            counts[key] += number
    keys = ("documents", "tokens", "bytes", "masked")
    return Stream(begin=begin, end=ids.count, **{key: counts[key] for key in keys}), counts["without tokens"]


def open_ids(directory: str | Path) -> np.memmap:
    """Return the ids that `encode_corpus` wrote, mapped for reading. ids: (tokens of both streams,) uint32.

    Raises ValueError when the file's length or digest is not what the manifest says.
    """
    manifest, path = read_manifest(TokenizedManifest, directory), Path(directory) / IDS
    expected = max(stream.end for stream in manifest.streams.values()) * DTYPE.itemsize
    if path.stat().st_size != expected:
        raise ValueError(f"{path}: expected {expected} bytes as its manifest says, got {path.stat().st_size}")
    found = file_digest(path)
    if found != manifest.ids_sha256:
        raise ValueError(f"{path}: expected the SHA-256 {manifest.ids_sha256} as its manifest says, got {found}")
    return np.memmap(path, DTYPE, mode="r")


def largest_id(directory: str | Path) -> int:
    """Return the largest id in ids.bin, read by blocks: mapped pages would count as memory of this process."""
    with open(Path(directory) / IDS, "rb") as file:
        largest = 0
        while len(block := np.fromfile(file, DTYPE, READ_AT_ONCE)):
            largest = max(largest, int(block.max()))
    return largest


def document_starts(directory: str | Path) -> np.ndarray:
    """Return the ascending indices in ids.bin of the end-of-texts that open the documents, int64."""
    offsets = pd.read_parquet(Path(directory) / DOCUMENTS, columns=["offset"])["offset"]
    return offsets.to_numpy(np.int64) - 1


def open_masked(directory: str | Path) -> np.ndarray:
    """Return the runs of ids.bin that carry no loss, as `loss_mask` has them: (runs, 2) int64."""
    return masked_runs(pd.read_parquet(Path(directory) / DOCUMENTS, columns=["offset", "masked"]))
