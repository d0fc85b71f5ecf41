"""The causal convolution against its definition, central differences, and itself cut in other ways."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ops import gradcheck
from mamba_ops.cpu import CpuOps, open_cpu, workspace
from mamba_ops.cpu.workspace import Rows
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Columns, LayerState

NAMES = ("weight", "bias")


@dataclass(frozen=True)
class Conv:
    """x, dy: (batch, seq_len, d_inner); positions: (batch, seq_len)."""

    positions: np.ndarray
    x: np.ndarray
    dy: np.ndarray
    params: dict[str, np.ndarray]

    def cut(self, b: slice, t: slice) -> "Conv":
        """Some batch elements, some steps."""
        return Conv(self.positions[b, t], self.x[b, t], self.dy[b, t], self.params)


def random_conv(batch, seq_len, d_inner, d_conv, starts=(0,), seed=0) -> Conv:
    """Random inputs; documents start at `starts` in every row."""
    rng = np.random.default_rng(seed)
    params = {"weight": rng.standard_normal((d_inner, 1, d_conv)), "bias": rng.standard_normal(d_inner)}
    x, dy = (rng.standard_normal((batch, seq_len, d_inner)) for _ in range(2))
    index = np.arange(seq_len)
    last = np.maximum.accumulate(np.where(np.isin(index, starts), index, 0))
    return Conv(np.tile((index - last).astype(np.uint32), (batch, 1)), x, dy, params)


def reference(conv: Conv) -> dict[str, np.ndarray]:
    """The definition, one output and one tap after the other; zero before the rows."""
    weight, bias = conv.params["weight"], conv.params["bias"]
    batch, seq_len, _ = conv.x.shape
    d_conv = weight.shape[2]
    taps = [
        (b, t, k)
        for b in range(batch)
        for t in range(seq_len)
        for k in range(min(d_conv, t + 1, int(conv.positions[b, t]) + 1))
    ]
    s = np.tile(bias, (batch, seq_len, 1))
    for b, t, k in taps:
        s[b, t] += weight[:, 0, d_conv - 1 - k] * conv.x[b, t - k]
    sigma = 0.5 * (1 + np.tanh(s / 2))
    ds = conv.dy * sigma * (1 + s * (1 - sigma))
    dx, dweight = np.zeros_like(conv.x), np.zeros_like(weight)
    for b, t, k in taps:
        dx[b, t - k] += weight[:, 0, d_conv - 1 - k] * ds[b, t]
        dweight[:, 0, d_conv - 1 - k] += ds[b, t] * conv.x[b, t - k]
    return {"y": s * sigma, "dx": dx, "weight": dweight, "bias": ds.sum((0, 1))}


def forward(ops: CpuOps, conv: Conv, state: LayerState | None = None, bias: str | None = "bias"):
    """Run the op on a column range of a wider array."""
    batch, seq_len, d_inner = conv.x.shape
    wide = np.full((batch * seq_len, d_inner + 3), np.nan, ops.dtype)
    wide[:, 1:-2] = conv.x.reshape(-1, d_inner)
    rows = Rows(batch, seq_len, None, None, conv.positions.ravel())
    params = {name: array.astype(ops.dtype) for name, array in conv.params.items()}
    return ops.causal_conv1d_forward(rows, Columns(wide, 1, d_inner), params, "weight", bias, state)


def run(ops: CpuOps, conv: Conv, grads=None, need=NAMES, bias: str | None = "bias") -> dict[str, np.ndarray]:
    """Forward and backward; what the op writes beyond its destination is an error."""
    params = {name: array.astype(ops.dtype) for name, array in conv.params.items()}
    grads = GradientBuffers(params, params) if grads is None else grads
    d_inner = conv.x.shape[2]
    dy = conv.dy.reshape(-1, d_inner).astype(ops.dtype)
    dx = np.full((len(dy), d_inner + 3), 7, ops.dtype)
    with ops.scope():
        y, saved = forward(ops, conv, bias=bias)
        y = y.copy()
        ops.causal_conv1d_backward(dy, saved, grads, need, Columns(dx, 1, d_inner))
    assert np.all(dx[:, [0, -2, -1]] == 7)
    return {"y": y.reshape(conv.x.shape), "dx": dx[:, 1:-2].reshape(conv.x.shape)} | grads.arrays


def assert_close(found, expected, tolerance):
    """max|difference| <= tolerance max|expected|, for each name."""
    for name in expected:
        scale = np.abs(expected[name]).max()
        difference = np.abs(found[name] - expected[name]).max()
        assert difference <= tolerance * scale, f"{name}: {difference} of {scale}"


def case_of(conv: Conv) -> gradcheck.Case:
    """The scalar sum(y dy) of the input and the parameters, for differences."""
    ops = open_cpu(np.float64, threads=1)

    def loss() -> float:
        with ops.scope():
            return float(np.sum(forward(ops, conv)[0] * conv.dy.reshape(-1, conv.dy.shape[2])))

    def gradients() -> dict[str, np.ndarray]:
        found = run(ops, conv)
        return {"x": found["dx"], "weight": found["weight"], "bias": found["bias"]}

    return gradcheck.Case({"x": conv.x} | conv.params, loss, gradients)


@pytest.mark.parametrize("d_inner", [1, 3, 64, 65])
def test_case_1_every_length_is_the_sequential_reference(d_inner):
    for seq_len in (1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257):
        conv = random_conv(1, seq_len, d_inner, 4, seed=seq_len)
        expected = reference(conv)
        assert_close(run(open_cpu(np.float64), conv), expected, 1e-12)
        assert_close(run(open_cpu(np.float32), conv), expected, 1e-5)


def test_case_1_smallest_input():
    conv = random_conv(1, 3, 1, 4)
    for result in gradcheck.check(case_of(replace(conv, dy=np.ones((1, 3, 1))))):
        assert result.holds, result


@pytest.mark.parametrize(
    ("batch", "seq_len", "d_inner", "d_conv", "starts"),
    [
        (1, 1, 1, 1, (0,)),
        (1, 1, 1, 4, (0,)),
        (2, 2, 3, 4, ()),
        (1, 7, 3, 1, (0, 3)),
        (2, 13, 2, 4, (0, 1, 3, 6, 10)),
        (1, 67, 2, 3, (0, 63, 65)),
        (3, 5, 1, 2, (0, 4)),
    ],
)
def test_gradient_of_every_element(batch, seq_len, d_inner, d_conv, starts):
    for result in gradcheck.check(case_of(random_conv(batch, seq_len, d_inner, d_conv, starts))):
        assert result.holds, result


@pytest.mark.parametrize(("seq_len", "d_conv"), [(1, 4), (3, 4), (11, 1), (17, 5)])
def test_gradient_of_every_element_of_random_documents(seq_len, d_conv):
    case = gradcheck.causal_conv1d(open_cpu(np.float64), np.random.default_rng(seq_len), seq_len, d_conv)
    for result in gradcheck.check(case):
        assert result.holds, result


@settings(max_examples=30, deadline=None)
@given(data=st.data(), batch=st.integers(1, 3), seq_len=st.integers(1, 20), d_conv=st.integers(1, 6))
def test_any_documents_are_the_sequential_reference(data, batch, seq_len, d_conv):
    starts = data.draw(st.sets(st.integers(0, seq_len)))
    conv = random_conv(batch, seq_len, data.draw(st.integers(1, 4)), d_conv, (0, *starts))
    assert_close(run(open_cpu(np.float64), conv), reference(conv), 1e-12)


@pytest.mark.parametrize("starts", [(0, 62), (0, 63), (0, 64), (0, 65), (0, 61, 62, 64, 66, 128, 131), (0, 63, 64, 65)])
@pytest.mark.parametrize("d_inner", [3, 515])
def test_boundaries_at_block_edges(d_inner, starts):
    conv = random_conv(1, 132, d_inner, 4, starts)
    assert_close(run(open_cpu(np.float64), conv), reference(conv), 1e-12)


def test_rows_longer_than_a_block_of_narrow_inputs():
    conv = random_conv(1, 700, 64, 4, (0, 511, 512, 514))
    assert_close(run(open_cpu(np.float64), conv), reference(conv), 1e-12)


@pytest.mark.parametrize("lengths", [(4, 3), (1, 1), (1, 2, 3, 1), (63, 2, 1, 4)])
def test_case_18_packed_documents_are_as_alone(lengths):
    starts = np.cumsum([0, *lengths])
    conv = random_conv(1, starts[-1], 3, 4, starts[:-1])
    ops = open_cpu(np.float64)
    alone = [run(ops, conv.cut(slice(None), slice(a, b))) for a, b in pairwise(starts)]
    joined = {name: np.concatenate([d[name] for d in alone], axis=1) for name in ("y", "dx")}
    assert_close(run(ops, conv), joined | {name: sum(d[name] for d in alone) for name in NAMES}, 1e-12)


@pytest.mark.parametrize("boundary", [1, 2, 3, 4, 63, 64])
def test_case_18_documents_are_isolated(boundary):
    conv = random_conv(1, boundary + 5, 2, 4, (0, boundary))
    before, after = slice(0, boundary), slice(boundary, None)
    ops = open_cpu(np.float64)
    plain = run(ops, conv)
    for changed, other in ((before, after), (after, before)):
        x, dy = conv.x.copy(), conv.dy.copy()
        x[:, changed] += 1
        dy[:, changed] = 0
        found = run(ops, replace(conv, x=x))
        assert not np.array_equal(found["y"][:, changed], plain["y"][:, changed])
        for output in ("y", "dx"):
            np.testing.assert_array_equal(found[output][:, other], plain[output][:, other])
        silent = run(ops, replace(conv, dy=dy))
        np.testing.assert_array_equal(silent["dx"][:, changed], 0)
        np.testing.assert_array_equal(silent["dx"][:, other], plain["dx"][:, other])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seq_len=st.integers(2, 24), d_conv=st.integers(1, 6))
def test_state_is_carried_over_any_split(data, seq_len, d_conv):
    cuts = sorted(data.draw(st.sets(st.integers(1, seq_len - 1), min_size=1)))
    conv = random_conv(2, seq_len, 3, d_conv, tuple(data.draw(st.sets(st.integers(0, seq_len - 1), max_size=4))))
    ops = open_cpu(np.float64, threads=1)
    state, pieces = ops.layer_state(2, 3, 1, d_conv), []
    for a, b in zip([0, *cuts], [*cuts, seq_len], strict=True):
        with ops.scope():
            y, _ = forward(ops, conv.cut(slice(None), slice(a, b)), state)
            pieces.append(y.reshape(2, b - a, 3).copy())
    assert_close({"y": np.concatenate(pieces, axis=1)}, {"y": reference(conv)["y"]}, 1e-12)
    padded = np.concatenate([np.zeros((2, d_conv - 1, 3)), conv.x], axis=1)
    np.testing.assert_array_equal(state.conv, padded[:, padded.shape[1] - (d_conv - 1) :])


def test_gradients_after_a_carried_state_hold_it_constant():
    conv = random_conv(2, 9, 3, 4, (6,))
    whole = replace(conv, dy=np.where(np.arange(9)[:, None] < 4, 0, conv.dy))
    expected = reference(whole)
    ops = open_cpu(np.float64)
    state = ops.layer_state(2, 3, 1, 4)
    forward(ops, conv.cut(slice(None), slice(0, 4)), state)
    rest = conv.cut(slice(None), slice(4, None))
    grads, dx = GradientBuffers(conv.params, NAMES), np.empty((10, 3))
    _, saved = forward(ops, rest, state)
    ops.causal_conv1d_backward(rest.dy.reshape(-1, 3), saved, grads, NAMES, Columns(dx, 0, 3))
    found = {"dx": dx.reshape(2, 5, 3)} | grads.arrays
    assert_close(found, {"dx": expected["dx"][:, 4:]} | {name: expected[name] for name in NAMES}, 1e-12)


def test_no_bias_is_a_zero_bias():
    conv = random_conv(2, 9, 3, 4)
    zero = replace(conv, params=conv.params | {"bias": np.zeros(3)})
    expected = run(open_cpu(np.float64), zero)
    buffers = GradientBuffers(conv.params, ["weight"])
    found = run(open_cpu(np.float64), conv, buffers, bias=None)
    for name in ("y", "dx", "weight"):
        np.testing.assert_array_equal(found[name], expected[name])


def test_frozen_parameters_cost_no_gradient():
    conv = random_conv(2, 20, 5, 4)
    ops = open_cpu(np.float64)
    everything = run(ops, conv)
    frozen = run(ops, conv, GradientBuffers({}, ()), need=())
    np.testing.assert_array_equal(frozen["dx"], everything["dx"])
    for name in NAMES:
        buffers = GradientBuffers(conv.params, [name])
        np.testing.assert_array_equal(run(ops, conv, buffers, need=[name])[name], everything[name])


def test_second_use_in_a_step_adds():
    conv = random_conv(2, 20, 5, 4)
    ops = open_cpu(np.float64)
    buffers = GradientBuffers(conv.params, NAMES)
    once = {name: array.copy() for name, array in run(ops, conv, buffers).items()}
    twice = run(ops, conv, buffers)
    for name in NAMES:
        np.testing.assert_array_equal(twice[name], 2 * once[name])


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize(("batch", "d_inner"), [(5, 128), (1, 1100)])
def test_number_of_threads_changes_no_bit(monkeypatch, locked, batch, d_inner):
    monkeypatch.setattr(workspace, "INTERPRETER_IS_LOCKED", locked)
    conv = random_conv(batch, 200, d_inner, 4, (0, 33))
    first, *others = (run(open_cpu(np.float32, threads), conv) for threads in (1, 2, 3))
    for other in others:
        for name, array in first.items():
            np.testing.assert_array_equal(other[name], array)


def test_batch_composition_does_not_matter():
    conv = random_conv(3, 80, 70, 4, (0, 33))
    ops = open_cpu(np.float32)
    together = run(ops, conv)
    for b in range(3):
        alone = run(ops, conv.cut(slice(b, b + 1), slice(None)))
        for name in ("y", "dx"):
            np.testing.assert_array_equal(alone[name][0], together[name][b])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_sums_stay_finite(dtype):
    conv = random_conv(1, 12, 3, 4)
    conv.x[:, ::3] *= 1e4
    found = run(open_cpu(dtype), conv)
    assert_close(found, reference(conv), 1e-12 if dtype is np.float64 else 1e-5)


def test_nothing_is_read_before_it_is_written(monkeypatch):
    conv = random_conv(2, 70, 5, 4, (0, 65))
    ops = open_cpu(np.float64, threads=1)
    expected = {name: array.copy() for name, array in run(ops, conv).items()}

    def poisoned(make):
        def fill(*args):
            array = make(*args)
            array.fill(np.nan)
            return array

        return fill

    monkeypatch.setattr(ops, "empty", poisoned(ops.empty))
    monkeypatch.setattr(ops, "scratch", poisoned(ops.scratch))
    for name, array in run(ops, conv).items():
        np.testing.assert_array_equal(array, expected[name])
