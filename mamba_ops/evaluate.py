"""Perplexity of documents, with the recurrent state carried so that context is never cut."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from mamba_ops.config import EvaluateConfig, MambaConfig
from mamba_ops.loss_mask import masked_tokens
from mamba_ops.model import empty_state, losses
from mamba_ops.ops import IGNORED, Batch, Ops, Parameters
from mamba_ops.streams import Stream, open_stream, read


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Summed negative log-likelihood of documents, and what follows from it.

    document_nll: (documents,) float64, in nats. document_tokens: (documents,) int64, targets that carry loss.
    bytes: of the UTF-8 text of those. Raises ValueError without target tokens.
    """

    document_nll: np.ndarray
    document_tokens: np.ndarray
    bytes: int

    def __post_init__(self) -> None:
        _require_targets(self.document_tokens)

    @property
    def nll(self) -> float:
        """The sum in nats, the same for any order of the documents; nan unless every document's is finite."""
        return math.fsum(self.document_nll) if np.isfinite(self.document_nll).all() else math.nan

    @property
    def tokens(self) -> int:
        """Targets that carry loss: those of the documents and one end-of-text token each."""
        return int(self.document_tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens); inf where that is above the float64 range, nan where nll is."""
        try:
            return math.exp(self.nll / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """nll / (ln 2 * bytes); nan without bytes."""
        return self.nll / (math.log(2) * self.bytes) if self.bytes else math.nan


def perplexity(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    ids: np.ndarray,
    documents: pd.DataFrame,
    evaluate: EvaluateConfig,
) -> Evaluation:
    """Evaluate the documents, `evaluate.window` tokens of up to `evaluate.batch_size` of them at once.

    ids: all tokens, may be memory-mapped. documents: a table with the columns offset (index in ids of the
    first own token), tokens and bytes; and, where not all is learned, masked and learned_bytes. A document is read
    from the end-of-text token that opens it, and its targets are its own tokens that are not masked and the next
    end-of-text token. Memory does not grow with their lengths.
    Raises ValueError on no documents, on one outside ids, and on an id outside the embedding.
    """
    inputs = documents["tokens"].to_numpy(np.int64) + 1
    tokens = inputs - masked_tokens(documents)
    _require_targets(tokens)
    lanes = [open_stream(ids, documents, chosen) for chosen in _spread(inputs, evaluate.batch_size)]
    longest = max(lane.size for lane in lanes)
    window = -(-longest // -(-longest // evaluate.window))
    state = empty_state(ops, config, len(lanes))
    nll = np.zeros(len(tokens))
    for begin in range(0, longest, window):
        batch, numbers = _window(ids, lanes, begin, window, config.vocab_size)
        with ops.scope():
            token_losses = ops.read(losses(ops, params, config, ops.rows(batch), state))
        counted = batch.targets.ravel() != IGNORED
        np.add.at(nll, numbers.ravel()[counted], token_losses[counted])
    learned = "learned_bytes" if "learned_bytes" in documents else "bytes"
    return Evaluation(nll, tokens, int(documents[learned].sum()))


def combine(parts: Sequence[Evaluation]) -> Evaluation:
    """Put the evaluations of disjoint sets of documents together, as if evaluated at once."""
    return Evaluation(
        np.concatenate([np.empty(0), *(part.document_nll for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.document_tokens for part in parts)]),
        sum(part.bytes for part in parts),
    )


def _require_targets(tokens: np.ndarray) -> None:
    if tokens.sum() <= 0:
        raise ValueError(f"no target tokens to evaluate in {len(tokens)} documents")


def _spread(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Return the documents of each lane: the longest first, each to the lane that is shortest so far.

    There are no more lanes than the longest document can keep busy.
    """
    count = min(batch_size, -(-int(lengths.sum()) // int(lengths.max())))
    lanes: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, lane) for lane in range(count)]
    for document in np.argsort(-lengths, kind="stable").tolist():
        length, lane = filled[0]
        lanes[lane].append(document)
        heapq.heapreplace(filled, (length + int(lengths[document]), lane))
    return [np.array(lane) for lane in lanes]


def _window(ids: np.ndarray, lanes: list[Stream], begin: int, window: int, vocab_size: int) -> tuple[Batch, np.ndarray]:
    """Return a window of every lane, ignored past its end, and its tokens' documents: (lanes, window)."""
    shape = len(lanes), window
    inputs, numbers = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    targets, positions = np.full(shape, IGNORED, np.int64), np.zeros(shape, np.uint32)
    for lane, stream in enumerate(lanes):
        part = read(ids, stream, begin, begin + window, vocab_size)
        here = lane, slice(0, len(part.inputs))
        inputs[here], targets[here], positions[here], numbers[here] = part
    return Batch(inputs, targets, positions), numbers
