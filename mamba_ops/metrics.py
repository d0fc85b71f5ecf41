"""What a training step reports, and the file that keeps these reports: a JSON object a line."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

HISTORY = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step.

    step and epoch count from 1. loss: nats per token over all targets of the step. tokens: its targets;
    tokens_seen: those of the run so far. learning_rate: that the step used. grad_norm: global norm of the
    mean gradient before the clip. clipped: whether that norm was above max_grad_norm. skipped: why nothing
    was changed, empty for a step that was made. seconds: of this step; elapsed_seconds: of the run, all
    resumed parts together. loss and grad_norm of a skipped step may be nan or infinite.
    """

    step: int
    total_steps: int
    epoch: int
    loss: float
    tokens: int
    tokens_seen: int
    learning_rate: float
    grad_norm: float
    clipped: bool
    skipped: str
    seconds: float
    elapsed_seconds: float


def mean_loss(metrics: Iterable[StepMetrics]) -> float:
    """Return the loss in nats per token over every target of the steps that were made.

    Each token weighs the same. Raises ValueError when no step was made.
    """
    made = [(step.loss * step.tokens, step.tokens) for step in metrics if not step.skipped]
    if not made:
        raise ValueError("mean_loss: expected at least one step that was not skipped, got none")
    return math.fsum(nll for nll, _ in made) / sum(tokens for _, tokens in made)


def describe(metrics: StepMetrics, since: StepMetrics | None = None) -> str:
    """Return a progress line: step, loss, rate, norm, tokens per second and time left.

    Speed and time left are taken over the steps after `since`, or over the run.
    """
    steps = metrics.step - (since.step if since else 0)
    tokens = metrics.tokens_seen - (since.tokens_seen if since else 0)
    seconds = max(metrics.elapsed_seconds - (since.elapsed_seconds if since else 0.0), 1e-9)
    left = (metrics.total_steps - metrics.step) * seconds / max(steps, 1)
    return (
        f"step {metrics.step}/{metrics.total_steps}, epoch {metrics.epoch}: "
        f"loss {metrics.loss:.4f} nats per token, learning rate {metrics.learning_rate:.3g}, "
        f"gradient norm {metrics.grad_norm:.3g}, "
        f"{tokens / seconds:,.0f} tokens/s, {left:.0f} s left"
    )


def open_history(path: Path, size: int) -> BinaryIO:
    """Open a history to append to, cut to its first `size` bytes: later lines are of steps that were lost.

    Raises ValueError when it is shorter.
    """
    file = open(path, "a+b")  # noqa: SIM115
    found = file.seek(0, os.SEEK_END)
    if found < size:
        file.close()
        raise ValueError(f"{path}: expected at least {size} bytes, as the checkpoint says, found {found}")
    if found > size:
        file.truncate(size)
        file.seek(size)
    return file


def append(file: BinaryIO, metrics: StepMetrics) -> None:
    """Append a line; non-finite numbers become null."""
    values = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(metrics).items()
    }
    file.write(json.dumps(values, allow_nan=False).encode() + b"\n")
    file.flush()


def read_history(folder: str | Path) -> list[StepMetrics]:
    """Return the steps a run folder has recorded, null read back as nan, without a half-written last line.

    Raises FileNotFoundError when the folder has no history.
    """
    lines = (Path(folder) / HISTORY).read_bytes().split(b"\n")[:-1]
    return [_metrics(json.loads(line)) for line in lines]


def _metrics(values: dict[str, Any]) -> StepMetrics:
    numbers: dict[str, Any] = {key: math.nan if value is None else value for key, value in values.items()}
    return StepMetrics(**numbers)
