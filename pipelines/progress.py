"""A training run while it goes on: progress, live plots, cancellation."""

import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import dagster as dg

from mamba_ops.metrics import HISTORY, StepMetrics, describe
from mamba_ops.training_state import TrainingState, checkpoints, save_checkpoint

OBSERVATION_SECONDS = 1.0
"""An observation costs about 50 ms."""


def watched(
    context: dg.AssetExecutionContext,
    steps: Iterator[StepMetrics],
    state: TrainingState,
    run: Path,
    every: float,
) -> None:
    """Run all steps and report every so many seconds, in the log and as observations that the UI plots.

    When the run is cancelled or its process gone, the state is saved after the step at hand and
    dagster.Failure raised: a step that is only interrupted would be retried under a retry policy.
    """
    since: StepMetrics | None = None
    logged = observed = time.monotonic()
    context.log.info(f"{state.trainable:,} parameters train; checkpoints in {run}")
    with stop_requests() as reason_to_stop:
        for metrics in steps:
            now = time.monotonic()
            last = metrics.step == metrics.total_steps
            if metrics.skipped:
                context.log.warning(f"step {metrics.step} is skipped: {metrics.skipped}")
            if now - logged >= every or last:
                context.log.info(describe(metrics, since))
                if now - observed >= OBSERVATION_SECONDS or last:
                    context.log_event(observation(context, metrics))
                    observed = now
                since, logged = metrics, now
            if reason := reason_to_stop():
                save_now(run, state)
                raise dg.Failure(
                    f"training {reason} at step {metrics.step} of {metrics.total_steps}; the next run continues there",
                    allow_retries=False,
                )


def observation(context: dg.AssetExecutionContext, metrics: StepMetrics) -> dg.AssetObservation:
    """Return a step's numbers as Dagster plots them; those that are not finite are left out."""
    values = {
        "train/step": metrics.step,
        "train/loss": metrics.loss,
        "train/learning_rate": metrics.learning_rate,
        "train/grad_norm": metrics.grad_norm,
        "train/tokens_seen": metrics.tokens_seen,
    }
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return dg.AssetObservation(context.asset_key, metadata=finite)


def save_now(run: Path, state: TrainingState) -> None:
    """Save the state after the step at hand, unless the run has just done so."""
    done = checkpoints(run)
    if not done or done[-1].name != f"step-{state.step:08d}":
        with open(run / HISTORY, "ab") as history:
            save_checkpoint(run, state, history)


@contextmanager
def stop_requests() -> Iterator[Callable[[], str]]:
    """Yield a function that says why to stop, empty for no reason.

    Reasons are SIGINT and SIGTERM, which so wait for the end of a step (a second one does not), and in a child
    process the end of its parent, after which nobody would hear of the result.
    """
    received: list[int] = []
    parent = multiprocessing.parent_process()

    def reason() -> str:
        if received:
            return f"stopped by {signal.Signals(received[0]).name}"
        return "stopped because the run's process is gone" if parent and not parent.is_alive() else ""

    if threading.current_thread() is not threading.main_thread():
        yield reason
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)])

    try:
        for number in before:
            signal.signal(number, receive)
        yield reason
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
