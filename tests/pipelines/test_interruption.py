"""Training that is stopped, killed or orphaned continues where it was."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from mamba_ops.metrics import read_history
from mamba_ops.run_folder import checkpoints
from mamba_ops.train import StopTraining, stop
from pipelines import training

from .running import UPSTREAM, environment, failure, merged, pointers, run, verdicts, versions


def interrupted_after(step, number):
    """Return `train` that signals this process after a step, as Ctrl-C or a cancelled run does."""
    real = training.train

    def train(*arguments, **options):
        steps = real(*arguments, **options)
        for metrics in steps:
            if metrics.step == step:
                os.kill(os.getpid(), number)
            try:
                yield metrics
            except StopTraining:
                stop(steps)
                return

    return train


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_cancelled_run_saves_the_step_at_hand_and_continues_bit_for_bit(finished, config, root, monkeypatch, number):
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", interrupted_after(7, number))
        stopped = run(config, fails=True)
    name = signal.Signals(number).name
    assert f"training stopped by {name} at step 7 of 12; the next run continues there" in failure(stopped)
    assert "trained_weights" not in pointers(root)
    assert set(verdicts(stopped)) == set(verdicts(finished.result)) - {
        ("trained_weights", "optimizer_steps"),
        ("trained_weights", "weights_finite"),
        ("perplexity", "perplexity_finite"),
        ("perplexity", "better_than_baseline"),
    }
    (folder,) = (root / training.RUNS).iterdir()
    assert checkpoints(folder)[-1].name == "step-00000007"
    again = run(config)
    assert versions(again) == versions(finished.result)
    assert [step.step for step in read_history(folder)] == list(range(1, 13))


def test_signal_handlers_are_given_back(config, monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run(config)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_stop_at_a_saved_step_saves_nothing_twice(config, root, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", interrupted_after(5, signal.SIGTERM))
        run(config, fails=True)
    (folder,) = (root / training.RUNS).iterdir()
    assert [path.name for path in checkpoints(folder)] == ["step-00000005"]


def test_a_failed_run_continues(config, root, monkeypatch):
    real = training.train

    def breaking(*arguments, **options):
        for metrics in real(*arguments, **options):
            yield metrics
            if metrics.step == 8:
                raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(training, "train", breaking)
        failed = run(config, fails=True)
    assert "disk full" in failure(failed)
    assert verdicts(failed)["trained_weights", "optimizer_steps"] is False
    run(config)
    assert pointers(root)["trained_weights"].facts["steps"] == 12


def test_a_child_of_a_killed_run_saves_and_ends(config, root, tmp_path):
    """Nobody else would stop it, and it would keep the next run out of its folder."""
    long = merged(config, {"trained_weights": {"max_steps": 100_000, "save_steps": 100_000}})
    run(long, assets=UPSTREAM)
    values = {"ops": {"trained_weights": long["ops"]["trained_weights"]}, "resources": long["resources"]}
    command = [
        sys.executable,
        "-m",
        "dagster",
        "asset",
        "materialize",
        "-m",
        "pipelines",
        "--select",
        "trained_weights",
    ]
    log = tmp_path / "log"
    with open(log, "wb") as file:
        parent = subprocess.Popen(
            [*command, "--config-json", json.dumps(values)],
            cwd=tmp_path,
            env=environment(),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )

    def begun():
        assert parent.poll() is None, log.read_text()
        return [path.parent for path in (root / training.RUNS).glob("*/metrics.jsonl") if path.stat().st_size]

    try:
        (folder,) = wait_for(begun)
        parent.kill()
        parent.wait()
        with open(folder / ".lock", "a") as lock:
            wait_for(lambda: locked(lock))
        assert checkpoints(folder)[-1].name == f"step-{read_history(folder)[-1].step:08d}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def wait_for(found, seconds=60):
    """Return what is found as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return value


def locked(lock):
    """Whether the lock could be taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
