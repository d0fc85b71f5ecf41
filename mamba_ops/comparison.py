"""The change of loss between two evaluations of the same documents, with its uncertainty."""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from mamba_ops.evaluate import Evaluation

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """A change of loss in nats per token, below 0 where it fell; low, high: its 95 % interval, nan where unknown.

    documents: how many it is over, those without targets not counted.
    """

    nats_per_token: float
    low: float
    high: float
    documents: int

    def __str__(self) -> str:
        interval = f"{self.low:+.4f} to {self.high:+.4f}"
        if math.isnan(self.low):
            interval = "unknown: " + ("a loss is not finite" if self.documents > 1 else "it takes 2 documents")
        plural = "s" if self.documents != 1 else ""
        return (
            f"{self.nats_per_token:+.4f} nats per token (95 % interval {interval}; {self.documents} document{plural})"
        )


def difference(before: Evaluation, after: Evaluation) -> Difference:
    """Return R = sum d_i / sum n_i, d_i being a document's change of nll and n_i its targets, with an interval.

    The interval is R +- t sqrt(n / (n - 1) sum (d_i - R n_i)^2) / sum n_i over n documents, t being the quantile of
    Student's distribution with n - 1 degrees of freedom: documents are drawn whole, their tokens are not independent
    (W. G. Cochran, Sampling Techniques, 1977, chapter 6). It does not depend on their order, and is nan for fewer than
    2 of them or a loss that is not finite. Raises ValueError where the two do not count the same targets in each.
    """
    _require_same(before.document_tokens, after.document_tokens)
    counted = before.document_tokens > 0
    tokens = before.document_tokens[counted].astype(np.float64)
    first, second = before.document_nll[counted], after.document_nll[counted]
    documents, total = len(tokens), before.tokens
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return Difference(math.nan, math.nan, math.nan, documents)
    changes = second - first
    ratio = math.fsum(changes) / total
    if documents < 2:
        return Difference(ratio, math.nan, math.nan, documents)
    variance = documents / (documents - 1) * math.fsum((changes - ratio * tokens) ** 2)
    half = student_t(documents - 1) * math.sqrt(variance) / total
    return Difference(ratio, ratio - half, ratio + half, documents)


def student_t(degrees: int) -> float:
    """Return t with P(|T| <= t) = 0.95, T of Student's distribution with a whole number of degrees of freedom."""
    low, high = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), 13.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Return P(|T| <= t): Abramowitz & Stegun 26.7.3 for odd degrees and 26.7.4 for even ones.

    With theta = atan(t / sqrt(degrees)), a sum over powers of cos^2(theta); factors 2/3, 4/5, ... or 1/2, 3/4, ...
    """
    odd = degrees % 2
    theta = math.atan(t / math.sqrt(degrees))
    step = np.arange(1, (degrees - odd) // 2) * 2.0
    terms = np.cumprod((step - 1 + odd) / (step + odd) * math.cos(theta) ** 2)
    if not odd:
        return math.sin(theta) * (1 + float(terms.sum()))
    if degrees == 1:
        return 2 / math.pi * theta
    return 2 / math.pi * (theta + math.sin(theta) * math.cos(theta) * (1 + float(terms.sum())))


def _require_same(before: np.ndarray, after: np.ndarray) -> None:
    if len(before) != len(after):
        raise ValueError(f"evaluations of different documents: {len(before)} before, {len(after)} after")
    differing = np.flatnonzero(before != after)
    if len(differing):
        first = differing[0]
        raise ValueError(
            f"evaluations of different documents: document {first} has {before[first]} targets before and "
            f"{after[first]} after, and {len(differing) - 1} more differ"
        )
