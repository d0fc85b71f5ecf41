"""Rows and batches: index tables into token ids.

A row is `start` and `length`: its inputs are ids[start : start + length], its targets lie one to the right. A
stream is cut into rows of `seq_len`, only the last being short, so each target lies in one row of an epoch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from mamba_ops.config import BatchesConfig
from mamba_ops.corpus import MANIFEST, Manifest, read_manifest
from mamba_ops.fingerprint import atomic_directory, digest, write_json
from mamba_ops.loss_mask import NONE, is_learned, masked_before
from mamba_ops.ops import IGNORED, Batch
from mamba_ops.tokenized import DTYPE, TokenizedManifest, open_masked
from mamba_ops.tokenizer import check_ids

ROWS = "rows.parquet"


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
    """How a training stream is cut.

    tokenized: its fingerprint. target_tokens: that carry loss in an epoch, dropping none. without_targets: rows
    left out because none of their targets carries loss.
    """

    tokenized: str
    seq_len: int
    batch_size: int
    seed: int
    rows: int
    batches: int
    target_tokens: int
    without_targets: int = 0


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


def learned_targets(rows: pd.DataFrame, masked: np.ndarray) -> np.ndarray:
    """Return how many targets of each row carry loss: (rows,) int64. masked: as in `loss_mask`."""
    first = rows["start"].to_numpy() + 1
    length = rows["length"].to_numpy()
    return length - (masked_before(masked, first + length) - masked_before(masked, first))


def load_batch(
    ids: np.ndarray,
    document_starts: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    seq_len: int,
    masked: np.ndarray = NONE,
) -> Batch:
    """Return the rows that begin at `starts` as (len(starts), seq_len) arrays; only they are read from `ids`.

    document_starts: ascending, the index of the end-of-text that opens each document; the first is not after
    any start. A position counts from there, or from the row's start when that is later. Past its length a row
    has id 0, target `IGNORED`, position 0. masked: as in `loss_mask`; targets there are `IGNORED`.
    """
    column = np.arange(seq_len)
    filled = column < lengths[:, None]
    index = np.where(filled, starts[:, None] + column, starts[:, None])
    opening = document_starts[np.searchsorted(document_starts, index, side="right") - 1]
    positions = index - np.maximum(opening, starts[:, None])
    return Batch(
        ids=np.where(filled, ids[index], 0).astype(np.int64),
        targets=np.where(filled & is_learned(masked, index + 1), ids[index + 1].astype(np.int64), IGNORED),
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

    tokenized: the folder that `encode_corpus` wrote. A row without a target that carries loss is left out.
    Raises FileExistsError when `directory` exists, ValueError without target tokens.
    """
    source = read_manifest(TokenizedManifest, tokenized)
    stream = source.streams["train"]
    cut = make_rows(stream.begin, stream.end, config.seq_len)
    learned = learned_targets(cut, open_masked(tokenized))
    rows = cut[learned > 0].reset_index(drop=True).assign(row=lambda kept: np.arange(len(kept)))
    manifest = BatchesManifest(
        fingerprint=digest({"tokenized": source.fingerprint, **config.model_dump()}),
        tokenized=source.fingerprint,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        seed=config.seed,
        rows=len(rows),
        batches=batch_count(len(rows), config.batch_size),
        target_tokens=int(learned.sum()),
        without_targets=len(cut) - len(rows),
    )
    with atomic_directory(directory) as folder:
        rows.to_parquet(folder / ROWS, index=False)
        write_json(folder / MANIFEST, manifest.model_dump())
    return manifest
