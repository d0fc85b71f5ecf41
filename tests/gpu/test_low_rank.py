"""Adapters of small weights against NumPy in float64, and dropout's masks bit for bit."""

import numpy as np
import pytest

from mamba_ops.gpu.low_rank import add_dropped, dropped
from mamba_ops.gpu.workspace import range_of
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Adapter, Columns, Dropout

WEIGHT = "backbone.layers.0.mixer.conv1d.weight"
SHAPES = [
    ((1, 1), 1),
    ((1, 1, 4), 1),
    ((7, 1, 3), 3),
    ((5, 16), 8),
    ((67, 1, 4), 4),
    ((131, 16), 1),
    ((300, 1, 4), 3),
    ((65, 129), 64),
]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def arrays_of(shape, rank):
    """A weight and its adapter's tensors, on the host, and the upstream gradient."""
    rng = np.random.default_rng(shape[0])
    width = int(np.prod(shape[1:]))
    host = {WEIGHT: normal(rng, *shape), "A": normal(rng, rank, width), "B": normal(rng, shape[0], rank)}
    return host, normal(rng, *shape)


def poisoned(ops, params, names):
    """Gradient buffers that hold NaN, as from a step before."""
    grads = GradientBuffers(params, names, ops)
    for array in grads.arrays.values():
        ops.write_parameter(array, np.full(array.shape, np.nan, np.float32))
    return grads


@pytest.mark.parametrize("scale", [1.0, 0.75])
@pytest.mark.parametrize(("shape", "rank"), SHAPES)
def test_forward_is_weight_and_product(ops, assert_close, shape, rank, scale):
    host, _ = arrays_of(shape, rank)
    params = {name: ops.upload(array) for name, array in host.items()}
    W, A, B = (host[name].astype(np.float64) for name in (WEIGHT, "A", "B"))
    found = ops.low_rank_forward(params, WEIGHT, Adapter("A", "B", scale))
    assert found.shape == shape
    assert_close(ops.read(found), W + scale * (B @ A).reshape(shape), 1e-5)
    assert ops.read(params[WEIGHT]).tobytes() == host[WEIGHT].tobytes()


@pytest.mark.parametrize("need", ["A", "B", "AB", ""])
@pytest.mark.parametrize(("shape", "rank"), SHAPES)
def test_backward(ops, assert_close, shape, rank, need):
    host, dweight = arrays_of(shape, rank)
    params = {name: ops.upload(array) for name, array in host.items()}
    dW = dweight.reshape(shape[0], -1).astype(np.float64)
    A, B = host["A"].astype(np.float64), host["B"].astype(np.float64)
    expected = {"A": 1.5 * B.T @ dW, "B": 1.5 * dW @ A.T}
    grads = poisoned(ops, params, need)
    for calls in (1, 2):
        ops.low_rank_backward(ops.upload(dweight), params, Adapter("A", "B", 1.5), grads, need)
        for name in need:
            assert_close(ops.read(grads.arrays[name]), calls * expected[name], 1e-5, f"d{name}, {calls=}")


def test_an_adapter_that_adds_nothing_changes_no_bit(ops):
    host, _ = arrays_of((67, 1, 4), 3)
    params = {name: ops.upload(array if name != "B" else np.zeros_like(array)) for name, array in host.items()}
    assert ops.read(ops.low_rank_forward(params, WEIGHT, Adapter("A", "B", 2.0))).tobytes() == host[WEIGHT].tobytes()


MASKS = [
    ((1, 1), Dropout(0.5, 0, 0)),
    ((3, 5), Dropout(0.1, 1, 2, 3)),
    ((67, 131), Dropout(0.3, 2**31, 10_000)),
    ((300, 5), Dropout(0.9, 7, 1, 2**32 - 150)),
    ((5, 300), Dropout(0.5, 7, 2, 2**40 + 11)),
    ((9, 40), Dropout(1 - 2**-20, 7, 3)),
    ((9, 40), Dropout(2**-20, 7, 3)),
    ((9, 40), Dropout(0.0, 7, 3)),
]


@pytest.mark.parametrize(("shape", "dropout"), MASKS)
def test_masks_bit_for_bit(ops, kept_of, shape, dropout):
    """Of ranges of columns, forward and backward; what lies beside them is neither read nor written."""
    rows, columns = shape
    outer = np.full((rows, columns + 3), np.nan, np.float32)
    outer[:, 2:-1] = 1
    x = range_of(Columns(ops.upload(outer), 2, columns))
    found = dropped(ops, x, rows, "w", dropout)
    found = ops.device.read(found.buffer, np.float32, rows * columns).reshape(shape)
    expected = kept_of(dropout, "w", rows, columns).astype(np.float32) * np.float32(1 / (1 - dropout.rate))
    assert found.tobytes() == expected.tobytes()

    outer[:, 2:-1] = 0
    out = ops.upload(outer)
    add_dropped(
        ops, range_of(ops.upload(np.ones(shape, np.float32))), rows, "w", dropout, range_of(Columns(out, 2, columns))
    )
    outer[:, 2:-1] = expected
    np.testing.assert_array_equal(ops.read(out), outer)


def test_values_are_scaled_and_added(ops, assert_close, kept_of):
    rng, dropout = np.random.default_rng(0), Dropout(0.4, 3, 5)
    x, start = normal(rng, 31, 70), normal(rng, 31, 70)
    expected = np.where(kept_of(dropout, "w", 31, 70), x.astype(np.float64) / 0.6, 0)
    found, out = dropped(ops, range_of(ops.upload(x)), 31, "w", dropout), ops.upload(start)
    assert_close(ops.device.read(found.buffer, np.float32, x.size).reshape(x.shape), expected, 1e-6)
    add_dropped(ops, range_of(ops.upload(x)), 31, "w", dropout, range_of(out))
    assert_close(ops.read(out), start.astype(np.float64) + expected, 1e-6)


def test_more_elements_than_one_dimension_of_workgroups(gpu_once, kept_of):
    rows, columns = 66_001, 256
    found = dropped(
        gpu_once, range_of(gpu_once.upload(np.ones((rows, columns), np.float32))), rows, "w", Dropout(0.5, 0, 1)
    )
    found = gpu_once.device.read(found.buffer, np.float32, rows * columns).reshape(rows, columns)
    np.testing.assert_array_equal(found[-3:] != 0, kept_of(Dropout(0.5, 0, 1, rows - 3), "w", 3, columns))
    assert set(np.unique(found)) == {0, 2}
    assert np.count_nonzero(found) == pytest.approx(rows * columns / 2, rel=1e-3)


def masked_ones(ops, dropout, rows, columns, weight="w"):
    found = dropped(ops, range_of(ops.upload(np.ones((rows, columns), np.float32))), rows, weight, dropout)
    return ops.device.read(found.buffer, np.float32, rows * columns).reshape(rows, columns)


def test_a_mask_is_the_same_again_and_however_the_rows_are_split(ops):
    dropout = Dropout(0.3, 11, 4)
    whole = masked_ones(ops, dropout, 37, 23)
    other = masked_ones(ops, dropout._replace(step=5), 37, 23)
    assert masked_ones(ops, dropout, 37, 23).tobytes() == whole.tobytes() != other.tobytes()
    pieces = [masked_ones(ops, dropout._replace(first=at), rows, 23) for at, rows in ((0, 1), (1, 20), (21, 16))]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()


def test_masks_differ_by_seed_step_and_weight(gpu_once):
    dropout = Dropout(0.5, 1, 1)
    masks = [masked_ones(gpu_once, dropout._replace(**change), 40, 50) for change in ({}, dict(seed=2), dict(step=2))]
    masks.append(masked_ones(gpu_once, dropout, 40, 50, "v"))
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < (one == other).mean() < 0.6


def test_steps_make_no_buffer_and_no_bind_group(gpu_once):
    """A value that changes every step is written into a buffer that stays."""
    x, device, held = range_of(gpu_once.upload(np.ones((9, 8), np.float32))), gpu_once.device, set()
    for step in range(4):
        for first in (0, 9):
            for weight in ("w", "v"):
                with gpu_once.scope():
                    out = dropped(gpu_once, x, 9, weight, Dropout(0.25, 0, step, first))
                    add_dropped(gpu_once, out, 9, weight, Dropout(0.25, 0, step, first), range_of(gpu_once.empty(9, 8)))
        held.add((device.held_bytes, len(device._groups), len(device._uniforms)))
    assert len(held) == 1
