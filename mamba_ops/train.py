"""Training: one step over a window of batches, and the generator that makes a run of them."""

import logging
import math
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from mamba_ops import optimizer
from mamba_ops.config import BatchesConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import CpuOps, open_cpu
from mamba_ops.gradients import GradientBuffers, accumulate, clip_factor, first_non_finite, total_norm
from mamba_ops.memory import require_memory
from mamba_ops.metrics import HISTORY, StepMetrics, append, open_history
from mamba_ops.mirror import Mirror
from mamba_ops.ops import NO_ADAPTERS, Adapters, Array, Batch, Dropout, Need, Ops
from mamba_ops.parameters import EMBEDDING
from mamba_ops.run_folder import load_newest, open_run_folder, save_checkpoint
from mamba_ops.schedule import learning_rate
from mamba_ops.training_data import (
    TokenRows,
    check_rows,
    data_fingerprint,
    load,
    token_rows,
    windows,
    windows_per_epoch,
)
from mamba_ops.training_state import TrainingState, check_identity, run_identity, start

__all__ = ["StepMetrics", "StepResult", "TokenRows", "start", "stop", "total_steps", "train", "train_step"]

log = logging.getLogger(__name__)


class StopTraining(Exception):
    """Thrown into a run by `stop`."""


class StepResult(NamedTuple):
    """What a step measured: loss in nats per token, targets, norm of the mean gradient before the clip.

    clipped: whether the norm was above max_grad_norm. skipped: why nothing was changed, empty when it was.
    """

    loss: float
    tokens: int
    grad_norm: float
    clipped: bool
    skipped: str


def train(
    state: TrainingState,
    data: str | Sequence[int] | np.ndarray | TokenRows,
    train_config: TrainConfig,
    batches_config: BatchesConfig,
    *,
    tokenizer: Tokenizer | None = None,
    ops: Ops | None = None,
    folder: str | Path | None = None,
) -> Generator[StepMetrics]:
    """Train `state` in place and yield the metrics of each optimizer step.

    data: token ids of one document, text (with its tokenizer), or rows of a tokenized corpus. ops: the CPU's
    for None. With a folder the run is kept there: every save_steps steps and at the end the state is saved,
    and the same call, in a new process or not, continues from the newest checkpoint, bit for bit; a finished
    run yields nothing. A step's metrics are yielded after its checkpoint; `stop` saves after the step at hand.
    Where the ops run on a device, `state` is brought up to date every save_steps steps, at the end, and when
    the generator is stopped or closed.
    The run ends after max_steps, or num_train_epochs, or at the first step past max_seconds of wall time.

    Raises ValueError on fewer than 2 tokens, ids outside the embedding, text without a tokenizer, a state or folder
    of another run, and on the CPU when memory does not suffice; RuntimeError when another process trains in the
    folder; FloatingPointError after more than max_skipped_steps non-finite steps in a row.
    """
    rows = token_rows(data, batches_config, tokenizer)
    check_rows(rows, state.config.vocab_size)
    dtype = state.params[EMBEDDING].dtype
    if ops is not None and getattr(ops, "dtype", dtype) != dtype:
        raise ValueError(f"ops: expected the dtype of the parameters, {dtype}, got {getattr(ops, 'dtype', None)}")
    ops = ops or open_cpu(dtype.type)
    if isinstance(ops, CpuOps):
        run = state.config, train_config, batches_config, len(rows.starts)
        held = sum(value.nbytes for value in state.params.values())
        require_memory(*run, **state.selection, threads=ops.threads, dtype=dtype, held=held)
    identity = run_identity(state, train_config, batches_config, data_fingerprint(rows), rows.tokenizer)
    if state.identity:
        check_identity("this state", state.identity, identity)
    return _run(state, identity, rows, train_config, batches_config, ops, folder)


def stop(steps: Generator[StepMetrics]) -> None:
    """Save the state of a run after the step it has just yielded, and end it."""
    with suppress(StopIteration, StopTraining):
        steps.throw(StopTraining())


def train_step(
    ops: Ops,
    params: dict[str, Array],
    config: MambaConfig,
    batches: Iterable[Batch],
    buffers: GradientBuffers,
    state: optimizer.AdamState,
    train_config: TrainConfig,
    learning_rate: float,
    need: Need,
    adapters: Adapters = NO_ADAPTERS,
    dropout: Dropout | None = None,
) -> StepResult:
    """Make one AdamW step on the mean loss over every target of the batches, in place.

    Loss and gradients are sums over all batches divided by their targets, so every token weighs the same.
    The norm covers each trained parameter once. When the loss, a gradient or its square is not finite, no
    parameter, moment or count changes. Raises ValueError when the batches hold no target.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what is not finite is found below
        kept = train_config.gradient_checkpointing
        nll, tokens = accumulate(ops, params, config, batches, buffers, need, kept, adapters, dropout)
        norms = ops.global_norm(buffers.arrays)
    if tokens == 0:
        raise ValueError("train_step: expected at least one target token in the batches, got 0")
    loss, norm = nll / tokens, total_norm(norms) / tokens
    bad = first_non_finite(norms)
    if bad is not None or not math.isfinite(loss):
        gradient = f"the gradient of {bad} has norm {norms[bad]}" if bad is not None else "all gradients are finite"
        return StepResult(loss, tokens, norm, False, f"the loss is {loss}, {gradient}")
    factor = clip_factor(norm, train_config.max_grad_norm)
    limit = math.sqrt(float(np.finfo(getattr(ops, "dtype", np.float32)).max))
    large = next((name for name, value in norms.items() if value * factor / tokens > limit), None)
    if large is not None:
        reason = f"the gradient of {large} has norm {norms[large] / tokens:.3g}, whose square is not finite"
        return StepResult(loss, tokens, norm, False, reason)
    decay = optimizer.decayed(config, adapters)
    optimizer.step(ops, params, buffers.arrays, state, train_config, learning_rate, factor / tokens, decay)
    return StepResult(loss, tokens, norm, factor < 1, "")


def total_steps(rows: TokenRows, train_config: TrainConfig, batches_config: BatchesConfig) -> int:
    """Return the optimizer steps of a run: max_steps, else num_train_epochs times the windows of an epoch.

    A window is gradient_accumulation_steps batches; the last one of an epoch is shorter, it does not reach
    into the next epoch.
    """
    per_epoch = windows_per_epoch(len(rows.starts), batches_config, train_config.gradient_accumulation_steps)
    return train_config.max_steps or train_config.num_train_epochs * per_epoch


def _run(
    state: TrainingState,
    identity: dict[str, Any],
    rows: TokenRows,
    config: TrainConfig,
    batches: BatchesConfig,
    ops: Ops,
    folder: str | Path | None,
) -> Generator[StepMetrics]:
    state.identity, state.ops = identity, ops.name
    total = total_steps(rows, config, batches)
    with ExitStack() as stack:
        kept: tuple[Path, BinaryIO] | None = None
        if folder is not None:
            path = stack.enter_context(open_run_folder(folder, state.identity))
            size = load_newest(path, state)
            if size == 0 and state.step:
                raise ValueError(f"{path}: expected a checkpoint of this run or a fresh state, got step {state.step}")
            kept = path, stack.enter_context(open_history(path / HISTORY, size))
        mirror = Mirror(ops, state.params, state.adam)
        buffers = GradientBuffers(mirror.params, state.names, ops)
        stack.callback(ops.release, buffers.arrays.values())
        stack.callback(mirror.close)
        began = time.monotonic() - state.seconds
        coming = windows(rows, batches, config.gradient_accumulation_steps, state.step)
        while not _finished(state, config, total):
            metrics = _next_step(state, rows, config, mirror, buffers, next(coming), total, began)
            if kept:
                append(kept[1], metrics)
            _check_skipped(state, config, metrics)
            saved = state.step % config.save_steps == 0 or _finished(state, config, total)
            if saved:
                _save(mirror, state, kept)
            try:
                yield metrics
            except GeneratorExit:
                mirror.pull()
                raise
            except StopTraining:
                if not saved:
                    _save(mirror, state, kept)
                return


def _save(mirror: Mirror, state: TrainingState, kept: tuple[Path, BinaryIO] | None) -> None:
    mirror.pull()
    if kept:
        save_checkpoint(kept[0], state, kept[1])


def _next_step(
    state: TrainingState,
    rows: TokenRows,
    config: TrainConfig,
    mirror: Mirror,
    buffers: GradientBuffers,
    window: tuple[int, list[np.ndarray]],
    total: int,
    began: float,
) -> StepMetrics:
    """Make one step and count it. began: `time.monotonic` at the start, less the seconds of earlier parts."""
    epoch, batches = window
    before = time.monotonic()
    rate = learning_rate(config, state.step + 1, total)
    loaded = (load(rows, indices) for indices in batches)
    result = train_step(
        mirror.ops,
        mirror.params,
        state.config,
        loaded,
        buffers,
        mirror.adam,
        config,
        rate,
        buffers.arrays,
        state.adapters,
        state.dropout,
    )
    now = time.monotonic()
    state.step += 1
    state.tokens_seen += result.tokens
    state.skipped += bool(result.skipped)
    state.skipped_in_a_row = state.skipped_in_a_row + 1 if result.skipped else 0
    state.seconds = now - began
    return StepMetrics(
        step=state.step,
        total_steps=total,
        epoch=epoch + 1,
        loss=result.loss,
        tokens=result.tokens,
        tokens_seen=state.tokens_seen,
        learning_rate=rate,
        grad_norm=result.grad_norm,
        clipped=result.clipped,
        skipped=result.skipped,
        seconds=now - before,
        elapsed_seconds=state.seconds,
    )


def _finished(state: TrainingState, config: TrainConfig, total: int) -> bool:
    return state.step >= total or (config.max_seconds is not None and state.seconds >= config.max_seconds)


def _check_skipped(state: TrainingState, config: TrainConfig, metrics: StepMetrics) -> None:
    """Log a skipped step; raise FloatingPointError when there were too many in a row."""
    if not metrics.skipped:
        return
    log.warning("step %d is skipped: %s", metrics.step, metrics.skipped)
    if state.skipped_in_a_row > config.max_skipped_steps:
        raise FloatingPointError(
            f"{state.skipped_in_a_row} steps in a row were not finite, max_skipped_steps allows "
            f"{config.max_skipped_steps}; step {metrics.step}: {metrics.skipped}"
        )
