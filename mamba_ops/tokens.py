"""Token ids in one memory-mapped file, and the rows and batches that are index tables into it.

A document is E + tokens + E, E being the end-of-text id, and one E lies between neighbours. The stream of a
split is E d1 E d2 E ... dn E; ids.bin (uint32, little-endian) holds the training stream, then the validation
stream. Every token but a stream's first is a target.

A row is `start` and `length`: its inputs are ids[start : start + length], its targets lie one to the right. A
stream is cut into rows of `seq_len`, only the last being short, so each target lies in one row of an epoch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict

from mamba_ops.config import BatchesConfig
from mamba_ops.corpus import (
    DOCUMENTS,
    MANIFEST,
    SPLITS,
    CorpusManifest,
    Manifest,
    Split,
    read_manifest,
    read_table,
)
from mamba_ops.fingerprint import atomic_directory, digest, file_digest, write_json
from mamba_ops.ops import IGNORED, Batch
from mamba_ops.tokenizer import TokenizerManifest, check_ids, encode_texts, load_tokenizer

IDS = "ids.bin"
ROWS = "rows.parquet"
DTYPE = np.dtype("<u4")


class Stream(BaseModel):
    """One split's part of ids.bin, ids[begin:end]. tokens: without ends of text. bytes: of the texts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    begin: int
    end: int
    documents: int
    tokens: int
    bytes: int

    @property
    def targets(self) -> int:
        """Tokens that are predicted: the documents' own and one end of text per document."""
        return self.end - self.begin - 1


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


def encode_corpus(
    corpus: str | Path, tokenizer: str | Path, directory: str | Path, rows: int | None = None
) -> TokenizedManifest:
    """Write ids.bin, documents.parquet and manifest.json into a new folder.

    corpus, tokenizer: folders that `build_corpus` and `build_tokenizer` wrote. rows: of the embedding that
    the ids are for, the tokenizer's for None. The table has id, source, split, offset, tokens, bytes; offset
    is the index in ids.bin of the document's first own token. Memory: a row group of the corpus and the table.
    Raises FileExistsError when `directory` exists; ValueError for an id past the embedding and for a split
    without tokens.
    """
    source, coder = read_manifest(CorpusManifest, corpus), read_manifest(TokenizerManifest, tokenizer)
    with atomic_directory(directory) as folder:
        table = _write_ids(corpus, tokenizer, folder / IDS, coder, coder.vocab_size if rows is None else rows)
        whole = table[table["tokens"] > 0]
        whole.to_parquet(folder / DOCUMENTS, index=False)
        ids_sha256 = file_digest(folder / IDS)
        manifest = TokenizedManifest(
            fingerprint=digest([source.fingerprint, coder.fingerprint, coder.end_of_text_id, ids_sha256]),
            corpus=source.fingerprint,
            tokenizer=coder.fingerprint,
            vocab_size=coder.vocab_size,
            end_of_text_id=coder.end_of_text_id,
            max_id=int(np.memmap(folder / IDS, DTYPE, mode="r").max()),
            without_tokens=len(table) - len(whole),
            ids_sha256=ids_sha256,
            streams={split: _stream(whole[whole["split"] == split], split, corpus) for split in SPLITS},
        )
        write_json(folder / MANIFEST, manifest.model_dump())
    return manifest


def _write_ids(corpus: str | Path, folder: str | Path, path: Path, coder: TokenizerManifest, rows: int) -> pd.DataFrame:
    """Write both streams and return the table of all documents, those without tokens included."""
    tokenizer = load_tokenizer(folder)
    check_ids(np.array([coder.end_of_text_id]), rows, tokenizer)
    end = np.array([coder.end_of_text_id], DTYPE).tobytes()
    table: list[tuple[str, str, str, int, int, int]] = []
    with open(path, "wb") as file:
        for split in SPLITS:
            file.write(end)
            for group in read_table(corpus, split, ["id", "source", "text", "bytes"]):
                columns = zip(group["id"], group["source"], group["bytes"], strict=True)
                encoded = encode_texts(tokenizer, group["text"])
                for (name, source, size), ids in zip(columns, encoded, strict=True):
                    check_ids(ids, rows, tokenizer)
                    table.append((name, source, split, file.tell() // DTYPE.itemsize, ids.size, size))
                    if ids.size:
                        file.write(ids.astype(DTYPE).tobytes() + end)
    return pd.DataFrame(table, columns=["id", "source", "split", "offset", "tokens", "bytes"])


def _stream(documents: pd.DataFrame, split: Split, corpus: str | Path) -> Stream:
    if documents.empty:
        raise ValueError(f"{corpus}: the documents of {split} have 0 tokens, expected at least 1")
    last = documents.iloc[-1]
    return Stream(
        begin=int(documents["offset"].iloc[0]) - 1,
        end=int(last["offset"] + last["tokens"]) + 1,
        documents=len(documents),
        tokens=int(documents["tokens"].sum()),
        bytes=int(documents["bytes"].sum()),
    )


def open_ids(directory: str | Path) -> np.memmap:
    """Return the ids that `encode_corpus` wrote, mapped for reading. ids: (tokens of both streams,) uint32.

    Raises ValueError when the file's length or largest id is not what the manifest says.
    """
    manifest = read_manifest(TokenizedManifest, directory)
    path = Path(directory) / IDS
    expected = max(stream.end for stream in manifest.streams.values()) * DTYPE.itemsize
    if path.stat().st_size != expected:
        raise ValueError(f"{path}: expected {expected} bytes as its manifest says, got {path.stat().st_size}")
    ids = np.memmap(path, DTYPE, mode="r")
    if int(ids.max()) != manifest.max_id:
        raise ValueError(f"{path}: expected {manifest.max_id} as the largest id, got {int(ids.max())}")
    return ids


def document_starts(directory: str | Path) -> np.ndarray:
    """Return the ascending indices in ids.bin of the end-of-texts that open the documents, int64."""
    offsets = pd.read_parquet(Path(directory) / DOCUMENTS, columns=["offset"])["offset"]
    return offsets.to_numpy(np.int64) - 1


def ids_array(ids: Sequence[int] | np.ndarray, rows: int | None = None) -> np.ndarray:
    """Return a caller's ids, checked: (n,) int64 below `rows` if given, in the range of uint32, n >= 2.

    Raises ValueError for fewer than 2, for anything but whole numbers, and for ids outside the range.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"ids: expected a flat list of whole numbers ({error})") from None
    if array.ndim != 1 or array.size < 2:
        raise ValueError(f"ids: expected a flat list of at least 2 tokens, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"ids: expected whole numbers, got {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > np.iinfo(DTYPE).max:
        raise ValueError(f"ids: expected 0 to {np.iinfo(DTYPE).max}, got {array.min()} to {array.max()}")
    if rows is not None:
        check_ids(array, rows)
    return array.astype(np.int64)


class BatchesManifest(Manifest):
    """How a training stream is cut. tokenized: its fingerprint. target_tokens: of an epoch, dropping none."""

    tokenized: str
    seq_len: int
    batch_size: int
    seed: int
    rows: int
    batches: int
    target_tokens: int


def make_rows(begin: int, end: int, seq_len: int) -> pd.DataFrame:
    """Return the rows of the stream ids[begin:end]: a table (row, start, length) of ceil(targets / seq_len).

    Raises ValueError when the stream has no target.
    """
    targets = end - begin - 1
    if targets < 1 or seq_len < 1:
        raise ValueError(
            f"rows: {max(end - begin, 0)} ids give {max(targets, 0)} target tokens and 0 rows of {seq_len}, "
            "expected at least 2 ids and rows of at least 1"
        )
    start = np.arange(begin, begin + targets, seq_len, dtype=np.int64)
    length = np.minimum(seq_len, begin + targets - start)
    return pd.DataFrame({"row": np.arange(len(start)), "start": start, "length": length})


def row_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch's rows, a permutation that depends on rows, seed and epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


def batch_count(rows: int, batch_size: int) -> int:
    """Return the batches of an epoch: ceil(rows / batch_size)."""
    return -(-rows // batch_size)


def epoch_batches(rows: int, batch_size: int, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Yield the rows of each batch of an epoch; the last batch may be smaller.

    Raises ValueError without rows.
    """
    if rows < 1 or batch_size < 1:
        raise ValueError(f"batches: {rows} rows in batches of {batch_size} give 0 batches, expected at least 1 of each")
    order = row_order(rows, seed, epoch)
    for first in range(0, rows, batch_size):
        yield order[first : first + batch_size]


def load_batch(
    ids: np.ndarray, document_starts: np.ndarray, starts: np.ndarray, lengths: np.ndarray, seq_len: int
) -> Batch:
    """Return the rows that begin at `starts` as (len(starts), seq_len) arrays; only they are read from `ids`.

    document_starts: ascending, the index of the end-of-text that opens each document; the first is not after
    any start. A position counts from there, or from the row's start when that is later. Past its length a row
    has id 0, target `IGNORED`, position 0.
    """
    column = np.arange(seq_len)
    filled = column < lengths[:, None]
    index = np.where(filled, starts[:, None] + column, starts[:, None])
    opening = document_starts[np.searchsorted(document_starts, index, side="right") - 1]
    positions = index - np.maximum(opening, starts[:, None])
    return Batch(
        ids=np.where(filled, ids[index], 0).astype(np.int64),
        targets=np.where(filled, ids[index + 1].astype(np.int64), IGNORED),
        positions=np.where(filled, positions, 0).astype(np.uint32),
    )


def batch_from_ids(ids: Sequence[int] | np.ndarray, rows: int | None = None) -> Batch:
    """Return plain ids as one row that is one document; no end-of-text is added. Arrays: (1, len(ids) - 1).

    rows: of the embedding. Raises ValueError as `ids_array` does.
    """
    array = ids_array(ids, rows)
    positions = np.arange(array.size - 1, dtype=np.uint32)
    return Batch(ids=array[None, :-1], targets=array[None, 1:], positions=positions[None])


def build_batches(config: BatchesConfig, tokenized: str | Path, directory: str | Path) -> BatchesManifest:
    """Write rows.parquet (row, start, length) of the training stream and manifest.json into a new folder.

    tokenized: the folder that `encode_corpus` wrote.
    Raises FileExistsError when `directory` exists, ValueError without target tokens.
    """
    source = read_manifest(TokenizedManifest, tokenized)
    stream = source.streams["train"]
    rows = make_rows(stream.begin, stream.end, config.seq_len)
    manifest = BatchesManifest(
        fingerprint=digest({"tokenized": source.fingerprint, **config.model_dump()}),
        tokenized=source.fingerprint,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
        rows=len(rows),
        batches=batch_count(len(rows), config.batch_size),
        target_tokens=int(rows["length"].sum()),
    )
    with atomic_directory(directory) as folder:
        rows.to_parquet(folder / ROWS, index=False)
        write_json(folder / MANIFEST, manifest.model_dump())
    return manifest
