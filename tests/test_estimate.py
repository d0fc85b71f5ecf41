"""The time of a run is estimated from some of its steps, which change nothing."""

import time
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ops import estimate
from mamba_ops.config import BatchesConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.estimate import Probe, TimeEstimate, duration, estimate_time, probe
from mamba_ops.tensors import fingerprint
from mamba_ops.train import start, train
from mamba_ops.training_data import token_rows, windows

CONFIG = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, state_size=3)
BATCHES = BatchesConfig(seq_len=4, batch_size=2)
PROBE = Probe(10.0, 1.0, 3)
ROWS = token_rows(np.arange(4 * 7 + 1) % 11, BATCHES)  # 7 rows, 4 batches, the last of one row


def estimated(monkeypatch, done=0, measured=PROBE, **options):
    monkeypatch.setattr(estimate, "probe", lambda *_: measured)
    return estimate_time(start(CONFIG), ROWS, TrainConfig(**options), BATCHES, open_cpu(threads=1), done)


@pytest.mark.parametrize(
    ("options", "done", "steps", "batches"),
    [
        ({"num_train_epochs": 3}, 0, 12, 12),
        ({"max_steps": 5}, 0, 5, 5),
        ({"max_steps": 5}, 2, 3, 3),
        ({"num_train_epochs": 2, "gradient_accumulation_steps": 3}, 0, 4, 8),
        ({"max_steps": 5, "gradient_accumulation_steps": 3}, 0, 5, 11),
        ({"max_steps": 5, "gradient_accumulation_steps": 3}, 1, 4, 8),
    ],
)
def test_seconds_follow_from_batches_and_steps(options, done, steps, batches, monkeypatch):
    assert estimated(monkeypatch, done, **options) == TimeEstimate(steps, 10 * batches + steps, 3)


def test_a_finished_run_is_not_probed(monkeypatch):
    found = estimated(monkeypatch, done=5, measured=None, max_steps=5)
    assert found == TimeEstimate(0, 0.0, 0)
    assert str(found) == "0 steps are left"


def test_a_time_budget_ends_the_run(monkeypatch):
    assert estimated(monkeypatch, max_steps=100, max_seconds=55) == TimeEstimate(5, 55, 3)
    assert estimated(monkeypatch, max_steps=4, max_seconds=55) == TimeEstimate(4, 44, 3)
    assert estimated(monkeypatch, max_steps=4, max_seconds=0.1) == TimeEstimate(1, 0.1, 3)


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 30), batch_size=st.integers(1, 5), accumulation=st.integers(1, 5), steps=st.integers(0, 40))
def test_batches_are_those_of_the_windows(rows, batch_size, accumulation, steps):
    batches = BatchesConfig(seq_len=3, batch_size=batch_size)
    data = token_rows(np.arange(3 * rows + 1) % 11, batches)
    train_config = TrainConfig(gradient_accumulation_steps=accumulation)
    expected = sum(len(window) for _, window in islice(windows(data, batches, accumulation, 0), steps))
    assert estimate._batches(data, train_config, batches, steps) == expected


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_probe_changes_nothing(accumulation):
    """The same bytes as without it, on the same ops and after it."""
    options = TrainConfig(max_steps=3, learning_rate=1e-2, gradient_accumulation_steps=accumulation)
    ends = []
    for probed in (True, False):
        state, ops = start(CONFIG), open_cpu(threads=1)
        if probed:
            before = fingerprint(state.params)
            measured = probe(state, ROWS, options, BATCHES, ops)
            assert fingerprint(state.params) == before
            assert not any(moment.any() for pair in state.adam.moments.values() for moment in pair)
            assert set(state.adam.counts.values()) == {0}
            assert measured.batch > 0
            assert measured.rest > 0
            assert measured.steps == estimate.PROBE_STEPS
        list(train(state, ROWS, options, BATCHES, ops=ops))
        ends.append(fingerprint(state.params))
    assert ends[0] == ends[1]


def test_a_slow_step_is_measured_once(monkeypatch):
    monkeypatch.setattr(estimate, "PROBE_SECONDS", 0.0)
    assert probe(start(CONFIG), ROWS, TrainConfig(), BATCHES, open_cpu(threads=1)).steps == 1


def test_what_is_not_finite_is_left_to_the_run():
    state = start(CONFIG)
    state.params["backbone.layers.0.norm.weight"][:] = np.inf
    assert probe(state, ROWS, TrainConfig(), BATCHES, open_cpu(threads=1)).batch > 0


def test_the_probe_takes_the_buffers_that_the_run_uses():
    ops, options = open_cpu(threads=1), TrainConfig(num_train_epochs=1)
    probe(start(CONFIG), ROWS, options, BATCHES, ops)
    held = ops.held_bytes()
    list(train(start(CONFIG), ROWS, options, BATCHES, ops=ops))
    assert ops.held_bytes() == held


@pytest.mark.large
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_estimate_is_near_what_the_run_takes(accumulation):
    """Within 50 %, on a machine that does nothing else."""
    config, batches = (
        MambaConfig(vocab_size=512, hidden_size=128, num_hidden_layers=3),
        BatchesConfig(seq_len=256, batch_size=4),
    )
    rows = token_rows(np.random.default_rng(0).integers(0, 512, 256 * 64 + 1), batches)
    options = TrainConfig(max_steps=40, gradient_accumulation_steps=accumulation)
    ops, state = open_cpu(), start(config)
    expected = estimate_time(state, rows, options, batches, ops)
    began = time.perf_counter()
    list(train(state, rows, options, batches, ops=ops))
    taken = time.perf_counter() - began
    print(f"estimated {expected}, taken {taken:.2f} s")
    assert 0.5 * taken < expected.seconds < 1.5 * taken


def test_durations():
    found = [duration(s) for s in (0.0123, 1.5, 61, 119.9, 120, 3600, 7200, 86400, 200_000, 1e8)]
    assert found == [
        "12.3 ms",
        "1.5 s",
        "61 s",
        "120 s",
        "2 min",
        "60 min",
        "2 h",
        "24 h",
        "2.31 days",
        "1,157 days",
    ]
    assert str(TimeEstimate(300, 600.0, 4)) == "10 min for 300 steps of 2 s, measured on 4"
