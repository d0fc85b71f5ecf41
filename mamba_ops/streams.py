"""Documents read end to end out of one array of ids, a part at a time."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from mamba_ops.loss_mask import is_learned, masked_runs
from mamba_ops.ops import IGNORED
from mamba_ops.tokenizer import check_ids


class Stream(NamedTuple):
    """Documents laid end to end; document i gives tokens_i + 1 inputs, each with the next id as its target.

    first: (documents,) index in ids of the end-of-text token that opens each. ends: (documents,) inputs up to
    the end of each. numbers: (documents,) what the caller calls each. masked: (runs, 2) ids that carry no loss.
    """

    first: np.ndarray
    ends: np.ndarray
    numbers: np.ndarray
    masked: np.ndarray

    @property
    def size(self) -> int:
        """Inputs of the stream, which are as many as its targets, those without loss included."""
        return int(self.ends[-1]) if len(self.ends) else 0


class Part(NamedTuple):
    """Consecutive inputs of a stream: four arrays of one length, int64.

    targets: `IGNORED` where they carry no loss. positions: inputs of the same document before this one. numbers:
    the document's.
    """

    inputs: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    numbers: np.ndarray


def open_stream(ids: np.ndarray, documents: pd.DataFrame, chosen: np.ndarray | None = None) -> Stream:
    """Return the stream of the documents (columns offset, tokens, masked), or of the chosen rows of that table.

    masked may be missing: begin and end of each run of the document's own tokens that carry no loss.

    offset: index in ids of a document's first own token, which the token opening it precedes and the one
    opening its successor follows. Raises ValueError where that is not inside ids, and where runs overlap.
    """
    offset = documents["offset"].to_numpy(np.int64)
    tokens = documents["tokens"].to_numpy(np.int64)
    outside = np.flatnonzero((offset < 1) | (tokens < 0) | (offset + tokens >= len(ids)))
    if len(outside):
        row = outside[0]
        raise ValueError(
            f"document {row} of the table: offset {offset[row]}, tokens {tokens[row]}; "
            f"expected 1 <= offset and offset + tokens < {len(ids)}, the number of ids"
        )
    numbers = np.arange(len(offset)) if chosen is None else chosen
    return Stream(offset[numbers] - 1, np.cumsum(tokens[numbers] + 1), numbers, masked_runs(documents))


def read(ids: np.ndarray, stream: Stream, begin: int, end: int, vocab_size: int) -> Part:
    """Return the inputs begin .. end - 1 of the stream, fewer where it ends before.

    Raises ValueError on an id that has no row in an embedding of vocab_size rows.
    """
    at = np.arange(begin, min(end, stream.size))
    document = np.searchsorted(stream.ends, at, side="right")
    positions = at - np.where(document > 0, stream.ends[document - 1], 0)
    index = stream.first[document] + positions
    inputs, targets = ids[index].astype(np.int64), ids[index + 1].astype(np.int64)
    check_ids(inputs, vocab_size)
    check_ids(targets, vocab_size)
    learned = is_learned(stream.masked, index + 1)
    return Part(inputs, np.where(learned, targets, IGNORED), positions, stream.numbers[document])
