"""Perplexities of models that only count: what a trained model has to be better than."""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from mamba_ops.ops import IGNORED
from mamba_ops.streams import Part, open_stream, read

CHUNK = 1 << 20


class Counts(NamedTuple):
    """What the targets of a training split count up to; V is the vocabulary of the model.

    unigram: (V,) c(w). pairs: sorted h * V + w of the distinct (input h, target w), with their counts
    c(h, w) in pair_counts. histories: (V,) c(h), the sum of c(h, w) over w. successors: (V,) T(h), the
    distinct w after h.
    """

    unigram: np.ndarray
    pairs: np.ndarray
    pair_counts: np.ndarray
    histories: np.ndarray
    successors: np.ndarray


def count(ids: np.ndarray, documents: pd.DataFrame, vocab_size: int, chunk: int = CHUNK) -> Counts:
    """Count the targets that carry loss, and the (input, target) pairs of those, chunk of them at a time.

    ids may be memory-mapped; documents has the columns offset and tokens, and masked if some carry none. Memory is
    that of the distinct pairs and of one chunk. Raises ValueError on an id that is not below vocab_size.
    """
    stream = open_stream(ids, documents)
    unigram = np.zeros(vocab_size, np.int64)
    sorted_runs: list[tuple[np.ndarray, np.ndarray]] = []
    for begin in range(0, stream.size, chunk):
        inputs, targets = _learned(read(ids, stream, begin, begin + chunk, vocab_size))
        unigram += np.bincount(targets, minlength=vocab_size)
        sorted_runs.append(np.unique(inputs * vocab_size + targets, return_counts=True))
        while len(sorted_runs) > 1 and len(sorted_runs[-2][0]) <= 2 * len(sorted_runs[-1][0]):
            sorted_runs.append(_merge(sorted_runs.pop(), sorted_runs.pop()))
    while len(sorted_runs) > 1:
        sorted_runs.append(_merge(sorted_runs.pop(), sorted_runs.pop()))
    pairs, pair_counts = sorted_runs[0] if sorted_runs else (np.empty(0, np.int64), np.empty(0, np.int64))
    history = pairs // vocab_size
    histories = np.zeros(vocab_size, np.int64)
    np.add.at(histories, history, pair_counts)
    return Counts(unigram, pairs, pair_counts, histories, np.bincount(history, minlength=vocab_size))


def unigram_probability(counts: Counts, w: np.ndarray) -> np.ndarray:
    """Return P(w) = (c(w) + 1) / (N + V), N being the number of training targets."""
    return (counts.unigram[w] + 1) / (counts.unigram.sum() + len(counts.unigram))


def bigram_probability(counts: Counts, h: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return P(w | h) = (c(h, w) + T(h) P(w)) / (c(h) + T(h)), and P(w) where h is unseen (Witten-Bell).

    h, w: one shape, ids below V.
    """
    unigram = unigram_probability(counts, w)
    if not len(counts.pairs):
        return unigram
    key = h * len(counts.unigram) + w
    at = np.minimum(np.searchsorted(counts.pairs, key), len(counts.pairs) - 1)
    together = np.where(counts.pairs[at] == key, counts.pair_counts[at], 0)
    successors, total = counts.successors[h], counts.histories[h] + counts.successors[h]
    return np.where(total > 0, (together + successors * unigram) / np.maximum(total, 1), unigram)


def baselines(
    ids: np.ndarray, training: pd.DataFrame, validation: pd.DataFrame, vocab_size: int, chunk: int = CHUNK
) -> dict[str, float]:
    """Return the perplexities "uniform", "unigram" and "bigram" of the validation documents' targets with loss.

    training, validation: tables of documents with the columns offset (index in ids of the first own token),
    tokens and, where not all is learned, masked. Raises ValueError when validation has no document, or an id is
    not below vocab_size.
    """
    counts = count(ids, training, vocab_size, chunk)
    stream = open_stream(ids, validation)
    if not stream.size:
        raise ValueError("no target tokens to evaluate in 0 validation documents")
    unigram, bigram, tokens = 0.0, 0.0, 0
    for begin in range(0, stream.size, chunk):
        inputs, targets = _learned(read(ids, stream, begin, begin + chunk, vocab_size))
        unigram -= float(np.log(unigram_probability(counts, targets)).sum())
        bigram -= float(np.log(bigram_probability(counts, inputs, targets)).sum())
        tokens += targets.size
    return {
        "uniform": float(vocab_size),
        "unigram": math.exp(unigram / tokens),
        "bigram": math.exp(bigram / tokens),
    }


def _learned(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of a part where the target carries loss."""
    learned = part.targets != IGNORED
    return part.inputs[learned], part.targets[learned]


def _merge(left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Add up two runs of sorted distinct keys with counts."""
    keys = np.concatenate([left[0], right[0]])
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], np.add.reduceat(np.concatenate([left[1], right[1]])[order], starts)
