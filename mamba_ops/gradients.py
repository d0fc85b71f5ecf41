"""Gradient buffers that are made once and added to over a step, their global norm, and its clip."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from mamba_ops.config import MambaConfig
from mamba_ops.low_rank import with_dropout
from mamba_ops.model import losses_and_gradients
from mamba_ops.ops import NO_ADAPTERS, Adapters, Array, Batch, Dropout, Need, Ops, Parameters


class GradientBuffers:
    """One buffer a trained parameter; `take` says whether this step has already written to it.

    ops: where the parameters lie; NumPy arrays for None.
    """

    def __init__(self, params: Parameters, need: Iterable[str], ops: Ops | None = None):
        zeros_like = ops.zeros_like if ops else np.zeros_like
        self.arrays: dict[str, Array] = {name: zeros_like(params[name]) for name in need}
        self._ops = ops
        self._written: set[str] = set()

    def take(self, name: str) -> tuple[Array, bool]:
        """Return the buffer of `name` and whether to add to it (False on the first use in a step)."""
        add = name in self._written
        self._written.add(name)
        return self.arrays[name], add

    def start_step(self) -> None:
        """Make the next use of every buffer overwrite it."""
        self._written.clear()

    def finish_step(self) -> None:
        """Zero what this step has not written to, so that nothing of an earlier step is left."""
        for name in self.arrays.keys() - self._written:
            if self._ops:
                self._ops.zero(self.arrays[name])
            else:
                self.arrays[name].fill(0)


def accumulate(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    batches: Iterable[Batch],
    buffers: GradientBuffers,
    need: Need,
    gradient_checkpointing: bool = False,
    adapters: Adapters = NO_ADAPTERS,
    dropout: Dropout | None = None,
) -> tuple[float, int]:
    """Set `buffers` to the gradients of the negative log-likelihood summed over every target of the batches.

    Returns that sum in nats and the number of targets. A batch without targets adds 0. Divided by the number
    of targets, loss and gradients do not depend on how the rows are split into batches. dropout: of the adapters.
    """
    buffers.start_step()
    nll, tokens, first = 0.0, 0, 0
    for batch in batches:
        count = batch.target_count
        used = with_dropout(adapters, dropout._replace(first=first)) if dropout else adapters
        first += batch.ids.size
        if count:
            with ops.scope():
                rows = ops.rows(batch)
                nll += losses_and_gradients(ops, params, config, rows, buffers, need, gradient_checkpointing, used)
            tokens += count
    buffers.finish_step()
    return nll, tokens


def total_norm(norms: Mapping[str, float]) -> float:
    """Return max * sqrt(sum (norm / max)^2) over tensors, in float64; nan or inf where a norm is."""
    if first_non_finite(norms) is not None:
        return math.nan if any(map(math.isnan, norms.values())) else math.inf
    largest = max(norms.values(), default=0.0)
    if largest == 0:
        return 0.0
    return largest * math.sqrt(math.fsum((norm / largest) ** 2 for norm in norms.values()))


def first_non_finite(norms: Mapping[str, float]) -> str | None:
    """Return the first name whose norm is nan or infinite."""
    return next((name for name, norm in norms.items() if not math.isfinite(norm)), None)


def clip_factor(norm: float, max_norm: float) -> float:
    """Return min(1, max_norm / norm), and 1 for max_norm 0 (never clip); norm: finite, at least 0."""
    return 1.0 if max_norm == 0 or norm <= max_norm else max_norm / norm
