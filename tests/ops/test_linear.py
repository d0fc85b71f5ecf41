"""The linear op."""

import numpy as np
import pytest

from mamba_ops import gradcheck
from mamba_ops.cpu import open_cpu, products
from mamba_ops.cpu.low_rank import keep_mask
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Adapter, Columns, Dropout

ADAPTER = Adapter("A", "B", 0.7)
DROPOUT = Dropout(0.4, seed=3, step=5, first=11)


@pytest.mark.parametrize(("T", "width", "columns"), [(1, 1, 1), (2, 3, 5), (11, 5, 3), (67, 2, 3)])
def test_gradient_of_every_element(T, width, columns):
    rng = np.random.default_rng(T)
    for result in gradcheck.check(gradcheck.linear(open_cpu(np.float64), rng, T, width, columns)):
        assert result.holds, result


def test_writes_and_adds_only_the_named_columns():
    ops = open_cpu(np.float64)
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((3, 4))}
    dy, x = rng.standard_normal((5, 3)), rng.standard_normal((5, 4))
    dx = np.ones((5, 6))
    ops.linear_backward(dy, x, params, "w", None, GradientBuffers({}, ()), (), Columns(dx, 1, 4))
    np.testing.assert_allclose(dx[:, 1:5], dy @ params["w"], rtol=1e-14)
    ops.linear_backward(dy, x, params, "w", None, GradientBuffers({}, ()), (), Columns(dx, 1, 4), add=True)
    np.testing.assert_allclose(dx[:, 1:5], 2 * dy @ params["w"], rtol=1e-14)
    np.testing.assert_array_equal(dx[:, [0, 5]], 1)


def test_out_is_used():
    ops = open_cpu(np.float64)
    out = np.full((2, 3), np.nan)
    y = ops.linear_forward(np.ones((2, 4)), {"w": np.ones((3, 4))}, "w", out=out)
    assert y is out
    np.testing.assert_array_equal(out, 4)


def random_params(columns=3, width=4, r=2, dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"w": (columns, width), "b": (columns,), "A": (r, width), "B": (columns, r)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("part", [1, 10, 1 << 19])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("T", "width", "columns", "r"), [(1, 1, 1, 1), (2, 3, 5, 1), (11, 5, 3, 3), (23, 2, 3, 2)])
def test_gradient_of_every_element_with_an_adapter(T, width, columns, r, rate, part, monkeypatch):
    monkeypatch.setattr(products, "PART_ELEMENTS", part)
    rng = np.random.default_rng(T)
    for result in gradcheck.check(gradcheck.linear(open_cpu(np.float64), rng, T, width, columns, r, rate)):
        assert result.holds, result


@pytest.mark.parametrize("dropout", [None, DROPOUT])
@pytest.mark.parametrize("add", [False, True])
def test_an_adapter_is_the_definition(add, dropout):
    """x, dy and dx are ranges of columns; what lies beside dx stays."""
    ops, rng, params = open_cpu(np.float64), np.random.default_rng(1), random_params()
    wide_x, wide_dy, dx = rng.standard_normal((23, 7)), rng.standard_normal((23, 5)), np.ones((23, 6))
    x, dy, adapter = wide_x[:, 2:6], wide_dy[:, 1:4], ADAPTER._replace(dropout=dropout)
    keep = keep_mask(ops, x.shape, "w", dropout)
    factor = np.ones(x.shape) if keep is None else keep / 0.6
    lower = 0.7 * (x * factor) @ params["A"].T
    residual = rng.standard_normal((23, 3))
    y = ops.linear_forward(Columns(wide_x, 2, 4), params, "w", "b", residual, adapter=adapter)
    np.testing.assert_allclose(
        y, x @ params["w"].T + lower @ params["B"].T + params["b"] + residual, rtol=1e-12, atol=1e-12
    )
    grads = GradientBuffers(params, ["A", "B"])
    ops.linear_backward(
        Columns(wide_dy, 1, 3),
        Columns(wide_x, 2, 4),
        params,
        "w",
        "b",
        grads,
        ("A", "B"),
        Columns(dx, 1, 4),
        add,
        adapter,
    )
    e = 0.7 * dy @ params["B"]
    np.testing.assert_allclose(grads.arrays["A"], e.T @ (x * factor), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(grads.arrays["B"], dy.T @ lower, rtol=1e-12, atol=1e-12)
    expected = int(add) + dy @ params["w"] + factor * (e @ params["A"])
    np.testing.assert_allclose(dx[:, 1:5], expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(dx[:, [0, 5]], 1)


def test_an_adapter_is_the_merged_weight():
    ops, params = open_cpu(np.float64), random_params()
    merged = {"w": params["w"] + 0.7 * params["B"] @ params["A"]}
    x, dy = np.random.default_rng(1).standard_normal((9, 4)), np.random.default_rng(2).standard_normal((9, 3))
    np.testing.assert_allclose(
        ops.linear_forward(x, params, "w", adapter=ADAPTER), ops.linear_forward(x, merged, "w"), rtol=1e-12
    )
    with_adapter, alone = np.empty((9, 4)), np.empty((9, 4))
    ops.linear_backward(dy, x, params, "w", None, GradientBuffers({}, ()), (), with_adapter, adapter=ADAPTER)
    ops.linear_backward(dy, x, merged, "w", None, GradientBuffers({}, ()), (), alone)
    np.testing.assert_allclose(with_adapter, alone, rtol=1e-12)


@pytest.mark.parametrize("dropout", [None, DROPOUT])
@pytest.mark.parametrize("need", [(), ("A",), ("B",), ("A", "B"), ("w",), ("w", "b", "A", "B")])
def test_only_what_trains_gets_a_gradient_and_a_second_use_adds(need, dropout):
    """Above all the weight: its gradient is neither taken nor formed for its adapter."""
    ops, params, adapter = open_cpu(np.float64), random_params(), ADAPTER._replace(dropout=dropout)
    rng = np.random.default_rng(1)
    x, dy, dx, all_dx = rng.standard_normal((9, 4)), rng.standard_normal((9, 3)), np.empty((9, 4)), np.empty((9, 4))
    everything, grads = GradientBuffers(params, params), GradientBuffers(params, need)
    ops.linear_backward(dy, x, params, "w", "b", everything, params, all_dx, adapter=adapter)
    np.testing.assert_allclose(everything.arrays["w"], dy.T @ x, rtol=1e-12)
    for uses in (1, 2):
        ops.linear_backward(dy, x, params, "w", "b", grads, need, dx, adapter=adapter)
        np.testing.assert_array_equal(dx, all_dx)
        for name in need:
            np.testing.assert_allclose(grads.arrays[name], uses * everything.arrays[name], rtol=1e-12)


@pytest.mark.parametrize("dropout", [None, DROPOUT])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_adapter_of_zeros_leaves_the_output_bit_identical(dtype, dropout):
    """B = 0, as an adapter starts."""
    ops, params = open_cpu(dtype), random_params(50, 33, 4, dtype)
    params["B"][...] = 0
    x, residual = np.random.default_rng(1).standard_normal((2, 70, 50)).astype(dtype)
    x = x[:, :33]
    adapter = ADAPTER._replace(dropout=dropout)
    for more in ((), ("b",), ("b", residual)):
        alone = ops.linear_forward(x, params, "w", *more).tobytes()
        assert ops.linear_forward(x, params, "w", *more, adapter=adapter).tobytes() == alone


def test_a_rate_of_0_is_no_dropout_bit_for_bit():
    params, found = random_params(dtype=np.float32), []
    x, dy = np.random.default_rng(1).standard_normal((2, 9, 4)).astype(np.float32)
    for dropout in (None, Dropout(0.0, 1, 2, 3)):
        ops, dx, grads = open_cpu(), np.empty((9, 4), np.float32), GradientBuffers(params, ["A", "B"])
        adapter = ADAPTER._replace(dropout=dropout)
        y = ops.linear_forward(x, params, "w", adapter=adapter)
        ops.linear_backward(dy[:, :3], x, params, "w", None, grads, ("A", "B"), dx, adapter=adapter)
        found.append([array.tobytes() for array in (y, dx, *grads.arrays.values())])
    assert found[0] == found[1]


def test_the_backward_drops_what_the_forward_dropped():
    """With x = 1, a zero weight and A, B of ones, y is the count of what is kept, and dx is its mask."""
    ops = open_cpu(np.float64)
    params = {"w": np.zeros((1, 50)), "A": np.ones((1, 50)), "B": np.ones((1, 1))}
    adapter, dx = Adapter("A", "B", 0.6, DROPOUT), np.empty((40, 50))
    y = ops.linear_forward(np.ones((40, 50)), params, "w", adapter=adapter)
    ops.linear_backward(np.ones((40, 1)), np.ones((40, 50)), params, "w", None, None, (), dx, adapter=adapter)
    keep = keep_mask(ops, (40, 50), "w", DROPOUT)
    assert 0 < keep.sum() < keep.size
    np.testing.assert_allclose(dx, keep, rtol=1e-14)
    np.testing.assert_allclose(y[:, 0], keep.sum(axis=1), rtol=1e-13)


def test_an_adapter_takes_little_memory_and_never_a_copy_of_x(monkeypatch):
    monkeypatch.setattr(products, "PART_ELEMENTS", 100)
    ops, T, width, columns, r = open_cpu(), 300, 40, 20, 2
    params = random_params(columns, width, r, np.float32)
    x, dy, dx = np.ones((T, width), np.float32), np.ones((T, columns), np.float32), np.empty((T, width), np.float32)
    grads = GradientBuffers(params, ["A", "B"])
    with ops.scope():
        ops.linear_forward(x, params, "w", out=dy, adapter=ADAPTER)
        for _ in range(2):
            ops.linear_backward(dy, x, params, "w", None, grads, ("A", "B"), dx, adapter=ADAPTER)
    assert ops.held_bytes() <= 4 * (2 * T * r + 100 + 80 + r * (width + columns))
