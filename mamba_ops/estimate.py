"""How long a run will take, before it starts, from a few of its steps."""

import statistics
import time
from itertools import islice
from typing import NamedTuple

import numpy as np

from mamba_ops import optimizer
from mamba_ops.config import BatchesConfig, TrainConfig
from mamba_ops.gradients import GradientBuffers, accumulate
from mamba_ops.mirror import Mirror
from mamba_ops.ops import Ops
from mamba_ops.train import total_steps
from mamba_ops.training_data import TokenRows, load, windows, windows_per_epoch
from mamba_ops.training_state import TrainingState

PROBE_STEPS = 4
PROBE_SECONDS = 5.0


class Probe(NamedTuple):
    """Measured seconds: of a batch, forward and backward; of the rest of a step. steps: how many were measured."""

    batch: float
    rest: float
    steps: int


class TimeEstimate(NamedTuple):
    """What is left of a run: optimizer steps and seconds, and from how many measured steps that follows."""

    steps: int
    seconds: float
    measured: int

    def __str__(self) -> str:
        if not self.steps:
            return "0 steps are left"
        each = self.seconds / self.steps
        return f"{duration(self.seconds)} for {self.steps:,} steps of {duration(each)}, measured on {self.measured}"


def estimate_time(
    state: TrainingState,
    rows: TokenRows,
    train_config: TrainConfig,
    batches_config: BatchesConfig,
    ops: Ops,
    done: int = 0,
) -> TimeEstimate:
    """Return how long the run will take, checkpoints not included; `state` does not change.

    done: steps that lie in a checkpoint already. The pools of `ops` are left filled, for the run to use. A run that
    max_seconds ends is estimated to that end.
    """
    total = total_steps(rows, train_config, batches_config)
    if done >= total:
        return TimeEstimate(0, 0.0, 0)
    first, last = (_batches(rows, train_config, batches_config, steps) for steps in (done, total))
    measured = probe(state, rows, train_config, batches_config, ops, done)
    steps, seconds = total - done, (last - first) * measured.batch + (total - done) * measured.rest
    budget = train_config.max_seconds
    if budget is not None and seconds > budget:
        steps, seconds = max(1, round(steps * budget / seconds)), budget
    return TimeEstimate(steps, seconds, measured.steps)


def probe(
    state: TrainingState,
    rows: TokenRows,
    train_config: TrainConfig,
    batches_config: BatchesConfig,
    ops: Ops,
    done: int = 0,
) -> Probe:
    """Measure the run's next steps, up to PROBE_STEPS after the first or PROBE_SECONDS; parameters do not change.

    The first makes the buffers and counts only when there is no other. The optimizer steps copies, one parameter
    at a time: the probe takes no more memory than the run.
    """
    mirror = Mirror(ops, state.params)
    buffers = GradientBuffers(mirror.params, state.names, ops)
    coming = windows(rows, batches_config, train_config.gradient_accumulation_steps, done)
    kept = train_config.gradient_checkpointing
    spent: list[float] = []
    try:
        for _, window in islice(coming, 1 + PROBE_STEPS):
            batches = (load(rows, indices) for indices in window[:2])
            began = time.perf_counter()
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the run finds what is not finite
                names, adapters = state.names, state.adapters
                accumulate(ops, mirror.params, state.config, batches, buffers, names, kept, adapters, state.dropout)
            spent.append((time.perf_counter() - began) / len(window[:2]))
            if sum(spent) > PROBE_SECONDS:
                break
        rest = _rest(state, train_config, ops, buffers)
    finally:
        ops.release(buffers.arrays.values())
        mirror.close()
    counted = spent[1:] or spent
    return Probe(statistics.median(counted), rest, len(counted))


def _rest(state: TrainingState, config: TrainConfig, ops: Ops, buffers: GradientBuffers) -> float:
    """Return the seconds of norms and AdamW, of each parameter the second step on a copy."""
    decay = optimizer.decayed(state.config, state.adapters)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        began = time.perf_counter()
        ops.global_norm(buffers.arrays)
        spent = time.perf_counter() - began
        for name, gradient in buffers.arrays.items():
            copy = {name: ops.upload_parameter(name, state.params[name].copy())}
            adam = optimizer.AdamState({}, {})
            for _ in range(2):
                began = time.perf_counter()
                optimizer.step(ops, copy, {name: gradient}, adam, config, config.learning_rate, 1.0, decay)
                last = time.perf_counter() - began
            spent += last
            ops.release([copy[name], *adam.moments[name]])
    return spent


def _batches(rows: TokenRows, train: TrainConfig, batches: BatchesConfig, steps: int) -> int:
    """Return the batches of the first steps of a run."""
    accumulation, in_epoch = train.gradient_accumulation_steps, -(-len(rows.starts) // batches.batch_size)
    epochs, steps = divmod(steps, windows_per_epoch(len(rows.starts), batches, accumulation))
    return epochs * in_epoch + min(steps * accumulation, in_epoch)


def duration(seconds: float) -> str:
    """Return seconds for people: ms below 1 s, then s, min, h and days."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    for unit, length in (("s", 60), ("min", 60), ("h", 24)):
        if seconds < 2 * length:
            return f"{seconds:.3g} {unit}"
        seconds /= length
    return f"{seconds:,.0f} days" if seconds >= 100 else f"{seconds:.3g} days"
