"""Documents read end to end out of one array of ids, a part at a time."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from mamba_ops.tokenizer import check_ids


class Stream(NamedTuple):
    """Documents laid end to end; document i gives tokens_i + 1 inputs, each with the next id as its target.

    first: (documents,) index in ids of the end-of-text token that opens each. ends: (documents,) inputs up to
    the end of each. numbers: (documents,) what the caller calls each.
    """

    first: np.ndarray
    ends: np.ndarray
    numbers: np.ndarray

    @property
    def size(self) -> int:
        """Inputs of the stream, which are as many as its targets."""
        return int(self.ends[-1]) if len(self.ends) else 0


class Part(NamedTuple):
    """Consecutive inputs of a stream: four arrays of one length, int64.

    positions: inputs of the same document before this one. numbers: the document's.
    """

    inputs: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    numbers: np.ndarray


def open_stream(ids: np.ndarray, documents: pd.DataFrame, chosen: np.ndarray | None = None) -> Stream:
    """Return the stream of the documents (columns offset, tokens), or of the chosen rows of that table.

    offset: index in ids of a document's first own token, which the token opening it precedes and the one
    opening its successor follows. Raises ValueError where that is not inside ids.
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
    return Stream(offset[numbers] - 1, np.cumsum(tokens[numbers] + 1), numbers)


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
    return Part(inputs, targets, positions, stream.numbers[document])
