"""What a run trains on: rows of token ids, in the order of an epoch, in batches and windows of batches."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from mamba_ops.config import BatchesConfig
from mamba_ops.corpus import read_manifest
from mamba_ops.fingerprint import digest
from mamba_ops.loss_mask import NONE, check_runs
from mamba_ops.ops import Batch
from mamba_ops.tokenized import TokenizedManifest, document_starts, open_ids, open_masked
from mamba_ops.tokenizer import check_ids, encode_texts
from mamba_ops.tokens import ROWS, BatchesManifest, epoch_batches, ids_array, load_batch, make_rows

CHECKED_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens: row r has the inputs ids[starts[r]] ... ids[starts[r] + lengths[r] - 1].

    Each has the next id as its target. ids: (n,) integers, may be memory-mapped. document_starts: sorted
    indices in ids at which a document opens. starts, lengths: (rows,) int64. seq_len: what shorter rows are
    padded to. fingerprint: of the ids and documents. tokenizer: the tokenizer's fingerprint, empty where ids
    came without one. masked: (runs, 2) int64, ids that carry no loss as targets, as in `loss_mask`.
    """

    ids: np.ndarray
    document_starts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    seq_len: int
    fingerprint: str
    tokenizer: str = ""
    masked: np.ndarray = field(default_factory=lambda: NONE)


def open_rows(tokenized: str | Path, batches: str | Path) -> TokenRows:
    """Return the training rows in the folders of `encode_corpus` and `build_batches`; ids stay mapped.

    Raises ValueError when the rows were cut from another tokenized corpus.
    """
    corpus, cut = read_manifest(TokenizedManifest, tokenized), read_manifest(BatchesManifest, batches)
    if cut.tokenized != corpus.fingerprint:
        raise ValueError(f"{batches}: expected rows of {corpus.fingerprint} ({tokenized}), got {cut.tokenized}")
    table = pd.read_parquet(Path(batches) / ROWS)
    return TokenRows(
        ids=open_ids(tokenized),
        document_starts=document_starts(tokenized),
        starts=table["start"].to_numpy(np.int64),
        lengths=table["length"].to_numpy(np.int64),
        seq_len=cut.seq_len,
        fingerprint=corpus.fingerprint,
        tokenizer=corpus.tokenizer,
        masked=open_masked(tokenized),
    )


def token_rows(
    data: str | Sequence[int] | np.ndarray | TokenRows,
    batches: BatchesConfig,
    tokenizer: Tokenizer | None = None,
) -> TokenRows:
    """Return the rows of ids or text, taken as one document with no end-of-text added, or rows as they are.

    n ids have n - 1 targets, cut into rows of seq_len; only the last row may be shorter. Raises ValueError on
    fewer than 2 tokens, ids that are not whole numbers from 0 on, text without a tokenizer, no rows, and rows
    longer than seq_len.
    """
    if isinstance(data, TokenRows):
        return _checked(data, batches)
    known = ""
    if isinstance(data, str):
        if tokenizer is None:
            raise ValueError("data: text needs a tokenizer; pass tokenizer=, or token ids")
        known = digest(tokenizer.to_str())
        (data,) = encode_texts(tokenizer, [data])
    ids = ids_array(data)
    table = make_rows(0, len(ids), batches.seq_len)
    return TokenRows(
        ids=ids,
        document_starts=np.zeros(1, np.int64),
        starts=table["start"].to_numpy(np.int64),
        lengths=table["length"].to_numpy(np.int64),
        seq_len=batches.seq_len,
        fingerprint=_sha256(ids),
        tokenizer=known,
    )


def data_fingerprint(rows: TokenRows) -> str:
    """Return the fingerprint of the ids and of how they are cut into rows."""
    masked = [_sha256(rows.masked)] if len(rows.masked) else []
    return digest([rows.fingerprint, _sha256(rows.starts), _sha256(rows.lengths), *masked])


def check_rows(rows: TokenRows, vocab_size: int) -> None:
    """Raise ValueError on an id that has no row in an embedding of vocab_size rows, before any training."""
    for first in range(0, len(rows.ids), CHECKED_AT_ONCE):
        check_ids(rows.ids[first : first + CHECKED_AT_ONCE], vocab_size, first=first)


def windows_per_epoch(rows: int, batches: BatchesConfig, accumulation: int) -> int:
    """Return ceil(rows / (batch_size * accumulation))."""
    return -(-rows // (batches.batch_size * accumulation))


def windows(
    rows: TokenRows, batches: BatchesConfig, accumulation: int, first: int
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield (epoch from 0, the row indices of each batch) of window `first` and all that follow, without end.

    Each epoch has its own row order by the seed, and begins a window.
    """
    count = len(rows.starts)
    epoch, window = divmod(first, windows_per_epoch(count, batches, accumulation))
    while True:
        order = list(epoch_batches(count, batches.batch_size, batches.seed, epoch))
        for begin in range(window * accumulation, len(order), accumulation):
            yield epoch, order[begin : begin + accumulation]
        epoch, window = epoch + 1, 0


def load(rows: TokenRows, indices: np.ndarray) -> Batch:
    """Return the batch of the rows with these indices."""
    starts, lengths = rows.starts[indices], rows.lengths[indices]
    return load_batch(rows.ids, rows.document_starts, starts, lengths, rows.seq_len, rows.masked)


def _checked(rows: TokenRows, batches: BatchesConfig) -> TokenRows:
    if len(rows.starts) == 0:
        raise ValueError(f"rows: expected at least one row to train on, got 0 of {len(rows.ids)} tokens")
    if rows.seq_len != batches.seq_len:
        raise ValueError(f"rows: expected rows of seq_len {batches.seq_len}, got {rows.seq_len}")
    check_runs(rows.masked)
    end = rows.starts + rows.lengths
    wrong = (rows.starts < 0) | (rows.lengths < 1) | (rows.lengths > rows.seq_len) | (end >= len(rows.ids))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"row {row}: start {rows.starts[row]}, length {rows.lengths[row]}; "
            f"expected 1 to {rows.seq_len} targets inside {len(rows.ids)} ids"
        )
    opened = rows.document_starts
    if len(opened) == 0 or opened[0] > rows.starts.min() or (np.diff(opened) < 0).any():
        raise ValueError(f"document_starts: expected ascending indices, the first not after any row, got {opened[:5]}")
    return rows


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, dtype="<i8").data).hexdigest()
