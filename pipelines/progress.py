"""A training run while it goes on: progress, live plots, cancellation."""

import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import dagster as dg

from mamba_ops.metrics import StepMetrics, describe
from mamba_ops.train import stop
from mamba_ops.training_state import TrainingState


def watched(
    context: dg.AssetExecutionContext,
    steps: Generator[StepMetrics],
    state: TrainingState,
    run: Path,
    every: float,
) -> None:
    """Run all steps and report every so many seconds, in the log and as observations that the UI plots.

    When the run is cancelled or its process gone, the state is saved after the step at hand and
    dagster.Failure raised: a step that is only interrupted would be retried under a retry policy.
    """
    context.log.info(f"{state.trainable:,} parameters train; checkpoints in {run}")
    reported = metrics = None
    due = time.monotonic() + every
    with stop_requests() as reason_to_stop:
        for metrics in steps:
            if metrics.skipped:
                context.log.warning(f"step {metrics.step} is skipped: {metrics.skipped}")
            if time.monotonic() >= due:
                report(context, metrics, reported)
                reported, due = metrics, time.monotonic() + every
            if reason := reason_to_stop():
                stop(steps)
                raise dg.Failure(
                    f"training {reason} at step {metrics.step} of {metrics.total_steps}; the next run continues there",
                    allow_retries=False,
                )
    if metrics is None:
        context.log.info(f"nothing is left to train: this run ended at step {state.step}")
    elif metrics is not reported:
        report(context, metrics, reported)


def report(context: dg.AssetExecutionContext, metrics: StepMetrics, since: StepMetrics | None) -> None:
    """Log a line, and record an observation with the same numbers; those that are not finite are left out."""
    context.log.info(describe(metrics, since))
    tokens = metrics.tokens_seen - (since.tokens_seen if since else 0)
    seconds = metrics.elapsed_seconds - (since.elapsed_seconds if since else 0.0)
    values = {
        "train/step": metrics.step,
        "train/loss": metrics.loss,
        "train/learning_rate": metrics.learning_rate,
        "train/grad_norm": metrics.grad_norm,
        "train/tokens_seen": metrics.tokens_seen,
        "train/tokens_per_second": tokens / max(seconds, 1e-9),
    }
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    context.log_event(dg.AssetObservation(context.asset_key, metadata=finite))


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
