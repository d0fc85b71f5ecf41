"""The AdamW kernel against its formula in float64."""

import itertools

import numpy as np
import pytest

from mamba_ops import optimizer
from mamba_ops.config import TrainConfig
from mamba_ops.gpu import adamw as module
from mamba_ops.optimizer import AdamState, gather
from mamba_ops.ownership import shards
from mamba_ops.parameters import EMBEDDING

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
    g = g.astype(np.float64) * gradient_scale
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    adam = m / (1 - beta1**count) / (np.sqrt(v / (1 - beta2**count)) + epsilon)
    delta = -learning_rate * (weight_decay * p + adam)
    if max_delta:
        delta = np.clip(delta, -max_delta, max_delta)
    return p + delta, m, v


class Stepped:
    """A parameter with its moments on the device and, in float64, on the host."""

    def __init__(self, ops, shape, name="p", seed=0):
        self.rng = np.random.default_rng(seed)
        start = self.rng.standard_normal(shape).astype(np.float32)
        self.ops, self.p, self.count = ops, ops.upload_parameter(name, start), 0
        self.g, self.m, self.v = (ops.zeros_like(self.p) for _ in range(3))
        self.expected = start.astype(np.float64), np.zeros(shape), np.zeros(shape)

    def step(self, **settings):
        g = self.rng.standard_normal(self.p.shape).astype(np.float32)
        self.ops.write_parameter(self.g, g)
        self.count += 1
        self.ops.adamw(self.p, self.g, self.m, self.v, self.count, **settings)
        p, m, v = self.expected
        self.expected = reference(p, g, m, v, self.count, **settings)

    def found(self):
        return [self.ops.read(array) for array in (self.p, self.m, self.v)]


@pytest.mark.parametrize("change", [{}, {"weight_decay": 0.0}, {"gradient_scale": 0.25}, {"max_delta": 0.05}])
@pytest.mark.parametrize("shape", [(1,), (5, 9), (1031, 1), (17, 241)])
def test_three_steps_follow_the_formula(gpu, assert_close, shape, change):
    one = Stepped(gpu, shape)
    for _ in range(3):
        one.step(**SETTINGS | change)
    for found, wanted in zip(one.found(), one.expected, strict=True):
        assert_close(found, wanted, 1e-5)


def test_more_blocks_than_one_dimension_of_workgroups(gpu_once, assert_close, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 2)
    one = Stepped(gpu_once, (70_001, 2))
    one.step(**SETTINGS)
    for found, wanted in zip(one.found(), one.expected, strict=True):
        assert_close(found, wanted, 1e-5)


def test_settings_that_change_every_step_and_differ_between_parameters(gpu, assert_close):
    """One buffer holds them: what is written for one parameter must not reach the dispatch of another."""
    decayed, plain, late = (Stepped(gpu, (7, 3), seed=seed) for seed in range(3))
    for step in range(4):
        changing = SETTINGS | {"learning_rate": 0.1 / (step + 1), "gradient_scale": 1.0 + step}
        decayed.step(**changing)
        plain.step(**changing | {"weight_decay": 0.0})
        if step > 1:
            late.step(**changing)
    for one in (decayed, plain, late):
        for found, wanted in zip(one.found(), one.expected, strict=True):
            assert_close(found, wanted, 1e-5)


def test_nothing_grows_from_step_to_step(gpu_once):
    one = Stepped(gpu_once, (7, 3))
    held = set()
    for step in range(5):
        one.step(**SETTINGS | {"learning_rate": 0.1 / (step + 1)})
        held.add((gpu_once.device.held_bytes, gpu_once.held_bytes()))
    assert len(held) == 1


def test_trust_region_clamps_decay_and_step_together(gpu):
    start = np.array([100.0, -100.0, 0.0], np.float32)
    p, g = gpu.upload(start), gpu.upload(np.array([1, 1, 1e-3], np.float32))
    gpu.adamw(p, g, gpu.zeros_like(p), gpu.zeros_like(p), 1, **SETTINGS | {"max_delta": 0.05})
    np.testing.assert_allclose(gpu.read(p) - start, [-0.05, 0.05, -0.05], rtol=2e-4)


def test_zero_gradient_without_decay_changes_nothing(gpu):
    p = gpu.upload(np.ones(3, np.float32))
    g, m, v = (gpu.zeros_like(p) for _ in range(3))
    gpu.adamw(p, g, m, v, 1, **SETTINGS | {"weight_decay": 0.0})
    np.testing.assert_array_equal(gpu.read(p), 1)


def test_case_13_huge_gradients_scaled_to_the_clip_move_the_weights(gpu):
    p, g = gpu.upload(np.zeros(100, np.float32)), gpu.upload(np.full(100, 1e20, np.float32))
    m, v = gpu.zeros_like(p), gpu.zeros_like(p)
    gpu.adamw(p, g, m, v, 1, **SETTINGS | {"gradient_scale": 1e-21})
    np.testing.assert_allclose(gpu.read(p), -0.1, rtol=1e-5)
    np.testing.assert_allclose(gpu.read(v), 0.01 * 0.1**2, rtol=1e-5)


@pytest.mark.parametrize("limit", [512, 160, 32])
def test_case_48_row_parts_change_nothing(gpu, monkeypatch, limit):
    whole = Stepped(gpu, (40, 8), EMBEDDING)
    monkeypatch.setattr(gpu.device, "binding_limit", limit)
    cut = Stepped(gpu, (40, 8), EMBEDDING)
    assert len(cut.p.parts) > 1
    for _ in range(2):
        whole.step(**SETTINGS)
        cut.step(**SETTINGS)
    for one, other in zip(whole.found(), cut.found(), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("limit", [None, 512, 160])
@pytest.mark.parametrize("edges", [[0, 40], [0, 1, 17, 17, 39, 40], [0, 33, 40]])
def test_row_ranges_together_are_the_whole_step(gpu, monkeypatch, edges, limit):
    """Ranges reach over row parts, and above the limit their moments lie in parts of their own."""
    whole = Stepped(gpu, (40, 8), EMBEDDING)
    monkeypatch.setattr(gpu.device, "binding_limit", limit or gpu.device.binding_limit)
    cut = Stepped(gpu, (40, 8), EMBEDDING)
    assert (len(cut.p.parts) == 1) == (limit is None)
    ranges = list(itertools.pairwise(edges))
    moments = [
        [gpu.upload_parameter(EMBEDDING, np.zeros((end - first, 8), np.float32)) for _ in range(2)]
        for first, end in ranges
    ]
    for count in (1, 2):
        whole.step(**SETTINGS)
        gpu.write_parameter(cut.g, gpu.read(whole.g))
        for rows, pair in zip(ranges, moments, strict=True):
            gpu.adamw(cut.p, cut.g, *pair, count, **SETTINGS, rows=rows)
    assert gpu.read(cut.p).tobytes() == gpu.read(whole.p).tobytes()
    for wanted, parts in zip((whole.m, whole.v), zip(*moments, strict=True), strict=True):
        assert np.concatenate([gpu.read(part) for part in parts]).tobytes() == gpu.read(wanted).tobytes()


@pytest.mark.parametrize("shape", [(9,), (9, 2, 3)])
def test_rows_outside_a_range_stay(gpu, shape):
    p, g = (gpu.upload(np.ones(shape, np.float32)) for _ in range(2))
    m, v = (gpu.upload(np.zeros((3, *shape[1:]), np.float32)) for _ in range(2))
    gpu.adamw(p, g, m, v, 1, **SETTINGS, rows=(4, 7))
    changed = (gpu.read(p) != 1).reshape(9, -1)
    assert (changed.all(axis=1) == changed.any(axis=1)).all()
    assert np.flatnonzero(changed.any(axis=1)).tolist() == [4, 5, 6]


@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.parametrize("number", [1, 3, 5])
def test_steps_of_shards_are_the_whole_step(gpu_once, monkeypatch, number, limit):
    monkeypatch.setattr(gpu_once.device, "binding_limit", limit or gpu_once.device.binding_limit)
    rng = np.random.default_rng(0)
    shapes = {EMBEDDING: (21, 6), "a": (7, 6), "b": (13,)}
    start = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    whole, cut = ({name: gpu_once.upload_parameter(name, value) for name, value in start.items()} for _ in range(2))
    assert len(cut[EMBEDDING].parts) == (1 if limit is None else 2)
    grads = {name: gpu_once.zeros_like(value) for name, value in whole.items()}
    owned = shards(shapes, number)
    state, states = AdamState({}, {}), [AdamState({}, {}) for _ in owned]
    for _ in range(20):
        for value in grads.values():
            gpu_once.write_parameter(value, rng.standard_normal(value.shape).astype(np.float32))
        optimizer.step(gpu_once, whole, grads, state, TrainConfig(), 1e-2, 0.5, {"a"})
        for rows, own in zip(owned, states, strict=True):
            optimizer.step(gpu_once, cut, grads, own, TrainConfig(), 1e-2, 0.5, {"a"}, rows)
    for name in shapes:
        assert gpu_once.read(cut[name]).tobytes() == gpu_once.read(whole[name]).tobytes(), name
    host = [
        AdamState({name: tuple(map(gpu_once.read, pair)) for name, pair in own.moments.items()}, own.counts)
        for own in states
    ]
    for name, pair in gather(owned, host).moments.items():
        for one, other in zip(pair, state.moments[name], strict=True):
            assert one.tobytes() == gpu_once.read(other).tobytes(), name
