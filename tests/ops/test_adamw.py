"""The AdamW op against its formula; parity with torch is in tests/parity."""

import itertools

import numpy as np
import pytest

from mamba_ops.cpu import adamw as module
from mamba_ops.cpu import open_cpu

SETTINGS = dict(
    learning_rate=0.1,
    beta1=0.9,
    beta2=0.99,
    epsilon=1e-8,
    weight_decay=0.1,
    gradient_scale=1.0,
    max_delta=0.0,
)


def reference(p, g, m, v, count, *, learning_rate, beta1, beta2, epsilon, weight_decay, gradient_scale, max_delta):
    g = g * gradient_scale
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    adam = m / (1 - beta1**count) / (np.sqrt(v / (1 - beta2**count)) + epsilon)
    delta = -learning_rate * (weight_decay * p + adam)
    if max_delta:
        delta = np.clip(delta, -max_delta, max_delta)
    return p + delta, m, v


@pytest.mark.parametrize("change", [{}, {"weight_decay": 0.0}, {"gradient_scale": 0.25}, {"max_delta": 0.05}])
def test_three_steps_follow_the_formula(change, monkeypatch):
    monkeypatch.setattr(module, "SLICE", 7)
    ops = open_cpu(np.float64)
    rng = np.random.default_rng(0)
    settings = SETTINGS | change
    p, m, v = rng.standard_normal((5, 9)), np.zeros((5, 9)), np.zeros((5, 9))
    expected = p, m, v
    p, m, v = p.copy(), m.copy(), v.copy()
    for count in (1, 2, 3):
        g = rng.standard_normal((5, 9))
        ops.adamw(p, g, m, v, count, **settings)
        expected = reference(*(expected[0], g, *expected[1:]), count, **settings)
        for found, wanted in zip((p, m, v), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_trust_region_clamps_decay_and_step_together():
    ops = open_cpu(np.float64)
    p, m, v = np.array([100.0, -100.0, 0.0]), np.zeros(3), np.zeros(3)
    start = p.copy()
    ops.adamw(p, np.array([1.0, 1.0, 1e-3]), m, v, 1, **SETTINGS | {"max_delta": 0.05})
    np.testing.assert_allclose(p - start, [-0.05, 0.05, -0.05], rtol=1e-9)


def test_zero_gradient_without_decay_changes_nothing():
    ops = open_cpu(np.float32)
    p, m, v = np.ones(3, np.float32), np.zeros(3, np.float32), np.zeros(3, np.float32)
    ops.adamw(p, np.zeros(3, np.float32), m, v, 1, **SETTINGS | {"weight_decay": 0.0})
    np.testing.assert_array_equal(p, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(11,), (11, 3), (11, 1, 4)])
@pytest.mark.parametrize("edges", [[0, 11], [0, 1, 2, 11], [0, 4, 4, 10, 11]])
def test_row_ranges_together_are_the_whole_step(shape, edges, dtype, monkeypatch):
    monkeypatch.setattr(module, "SLICE", 7)
    ops = open_cpu(dtype)
    rng = np.random.default_rng(0)
    whole = rng.standard_normal(shape).astype(dtype)
    cut = whole.copy()
    m, v = np.zeros_like(whole), np.zeros_like(whole)
    ranges = list(itertools.pairwise(edges))
    moments = [(np.zeros_like(whole[first:end]), np.zeros_like(whole[first:end])) for first, end in ranges]
    for count in range(1, 4):
        g = rng.standard_normal(shape).astype(dtype)
        ops.adamw(whole, g, m, v, count, **SETTINGS)
        for rows, pair in zip(ranges, moments, strict=True):
            ops.adamw(cut, g, *pair, count, **SETTINGS, rows=rows)
    assert cut.tobytes() == whole.tobytes()
    for wanted, parts in zip((m, v), zip(*moments, strict=True), strict=True):
        assert np.concatenate(parts).tobytes() == wanted.tobytes()


def test_rows_outside_a_range_stay():
    ops = open_cpu(np.float64)
    p = np.ones((5, 2))
    ops.adamw(p, np.ones((5, 2)), np.zeros((2, 2)), np.zeros((2, 2)), 1, **SETTINGS, rows=(1, 3))
    assert (p != 1).all(axis=1).tolist() == [False, True, True, False, False]
    assert (p == 1).all(axis=1).tolist() == [True, False, False, True, True]
