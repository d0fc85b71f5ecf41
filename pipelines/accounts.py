"""What a training run took and how it went, as metadata."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pandas as pd

from mamba_ops.available import peak_memory
from mamba_ops.metrics import StepMetrics, mean_loss
from mamba_ops.optimizer import state_bytes
from mamba_ops.training_state import TrainingState
from pipelines.pictures import plot, sketch, table, thinned

SHOWN = 40
WALL_CLOCK = ("seconds", "elapsed_seconds")


def accounts(state: TrainingState, history: Sequence[StepMetrics]) -> dict[str, Any]:
    """Return what a way of training takes: parameters, optimizer bytes, peak memory and the seconds of a step."""
    peak = peak_memory()
    made = [step.seconds for step in history if not step.skipped]
    return {
        "trainable_parameters": state.trainable,
        "optimizer_bytes": state_bytes(state.adam),
        **({"peak_memory_bytes": peak} if peak is not None else {}),
        **({"seconds_per_step": statistics.median(made)} if made else {}),
    }


def reproducible(history: Sequence[StepMetrics]) -> dict[str, list[Any]]:
    """Return the columns of the history that the same run gives again: without wall-clock times."""
    frame = pd.DataFrame(history).drop(columns=list(WALL_CLOCK))
    columns = frame.astype(object).where(frame.notna(), None)
    return {str(name): columns[name].tolist() for name in columns}


def training_metadata(state: TrainingState, history: Sequence[StepMetrics], run: Path) -> dict[str, Any]:
    """Return counts, speed, the loss curve as a picture in place and a large one, and a thinned table."""
    history = [step for step in history if not step.skipped]
    steps = np.array([step.step for step in history])
    losses = np.array([step.loss for step in history])
    shown = [history[i] for i in thinned(len(history), SHOWN)]
    smooth = pd.Series(losses).rolling(max(1, len(losses) // 100), min_periods=1).mean().to_numpy()
    at = thinned(len(history), 200)
    labels = ("step", "nats per token")
    tail = history[-max(1, len(history) // 20) :]
    return {
        "steps": state.step,
        "skipped_steps": state.skipped,
        "tokens_seen": state.tokens_seen,
        "train/final_loss": mean_loss(tail),
        "seconds": state.seconds,
        "tokens_per_second": state.tokens_seen / max(state.seconds, 1e-9),
        "run_folder": dg.MetadataValue.path(str(run)),
        "loss": sketch("loss", steps[at], smooth[at], ("step", "nats")),
        "loss_curve": plot("loss", steps, {"each step": losses, "mean": smooth}, labels),
        "history": table(
            [
                {"step": s.step, "loss": s.loss, "learning_rate": s.learning_rate, "grad_norm": s.grad_norm}
                for s in shown
            ]
        ),
    }
