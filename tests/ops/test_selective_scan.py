"""The selective scan against a plain sequential one, central differences, and itself cut in other ways."""

import tracemalloc
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ops import gradcheck
from mamba_ops.cpu import CpuOps, open_cpu, workspace
from mamba_ops.cpu.scan_plan import BLOCK, CHUNK
from mamba_ops.cpu.workspace import Rows
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Columns, LayerState

NAMES = ("A_log", "D", "delta_bias")


@dataclass(frozen=True)
class Scan:
    """u, delta, z, dy: (batch, seq_len, d_inner); B, C: (batch, seq_len, d_state); positions: (batch, seq_len)."""

    positions: np.ndarray
    u: np.ndarray
    delta: np.ndarray
    z: np.ndarray
    B: np.ndarray
    C: np.ndarray
    dy: np.ndarray
    params: dict[str, np.ndarray]

    def cut(self, b: slice, t: slice) -> "Scan":
        """Some batch elements, some steps."""
        parts = {name: getattr(self, name)[b, t] for name in ("positions", "u", "delta", "z", "B", "C", "dy")}
        return replace(self, **parts)


def random_scan(batch, seq_len, d_inner, d_state, starts=(0,), seed=0) -> Scan:
    """Random inputs; documents start at `starts` in every row."""
    rng = np.random.default_rng(seed)
    params = {
        "A_log": rng.uniform(-1, 1, (d_inner, d_state)),
        "D": rng.standard_normal(d_inner),
        "delta_bias": rng.standard_normal(d_inner) - 1,
    }
    channels = [rng.standard_normal((batch, seq_len, d_inner)) for _ in range(4)]
    states = [rng.standard_normal((batch, seq_len, d_state)) for _ in range(2)]
    index = np.arange(seq_len)
    last = np.maximum.accumulate(np.where(np.isin(index, starts), index, 0))
    positions = np.tile((index - last).astype(np.uint32), (batch, 1))
    u, delta, z, dy = channels
    return Scan(positions, u, delta, z, *states, dy, params)


def reference(scan: Scan, h0: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The definition, one step after the other; gradients by going back the same way. h: (batch, d_state, d_inner)."""
    batch, seq_len, d_inner = scan.u.shape
    A = -np.exp(scan.params["A_log"]).T
    raw = scan.delta + scan.params["delta_bias"]
    delta = np.logaddexp(0, raw)
    sigma = 0.5 * (1 + np.tanh(scan.z / 2))
    keep = (scan.positions != 0)[:, :, None, None]
    a = np.exp(delta[:, :, None] * A) * keep
    h = [np.zeros((batch, len(A), d_inner)) if h0 is None else h0]
    y, inner = np.empty_like(scan.u), np.empty_like(scan.u)
    for t in range(seq_len):
        h.append(a[:, t] * h[t] + scan.B[:, t, :, None] * (delta[:, t] * scan.u[:, t])[:, None])
        inner[:, t] = (scan.C[:, t, :, None] * h[t + 1]).sum(1) + scan.params["D"] * scan.u[:, t]
        y[:, t] = inner[:, t] * scan.z[:, t] * sigma[:, t]
    dinner = scan.dy * scan.z * sigma
    d = {
        "dz": scan.dy * inner * sigma * (1 + scan.z * (1 - sigma)),
        "du": dinner * scan.params["D"],
        "D": (dinner * scan.u).sum((0, 1)),
        "dB": np.empty_like(scan.B),
        "dC": np.empty_like(scan.C),
        "A_log": np.zeros((d_inner, len(A))),
    }
    ddelta, dh = np.empty_like(raw), np.zeros_like(h[0])
    for t in reversed(range(seq_len)):
        dh = dh + scan.C[:, t, :, None] * dinner[:, t, None]
        d["dC"][:, t] = (h[t + 1] * dinner[:, t, None]).sum(2)
        d["dB"][:, t] = (dh * (delta[:, t] * scan.u[:, t])[:, None]).sum(2)
        dx = (dh * scan.B[:, t, :, None]).sum(1)
        d["du"][:, t] += dx * delta[:, t]
        exponent = dh * a[:, t] * h[t]
        ddelta[:, t] = dx * scan.u[:, t] + (exponent * A).sum(1)
        d["A_log"] += (exponent * delta[:, t, None] * A).sum(0).T
        dh = dh * a[:, t]
    d["ddelta"] = ddelta * np.exp(raw - delta)
    d["delta_bias"] = d["ddelta"].sum((0, 1))
    return {"y": y, "h": h[-1]} | d


def forward(ops: CpuOps, scan: Scan, state: LayerState | None = None):
    """Run the op on copies in its own layout: B, C and z are column ranges of wider arrays."""
    batch, seq_len, d_inner = scan.u.shape
    d_state, T = scan.B.shape[2], batch * seq_len
    flat = {name: getattr(scan, name).reshape(T, -1).astype(ops.dtype) for name in ("u", "delta", "z", "B", "C")}
    nothing = np.full((T, 2), np.nan, ops.dtype)
    xbc = np.concatenate([nothing, flat["B"], flat["C"], nothing], axis=1)
    xz = np.concatenate([nothing, flat["z"]], axis=1)
    rows = Rows(batch, seq_len, None, None, scan.positions.ravel())
    params = {name: array.astype(ops.dtype) for name, array in scan.params.items()}
    B, C, z = Columns(xbc, 2, d_state), Columns(xbc, 2 + d_state, d_state), Columns(xz, 2, d_inner)
    return ops.selective_scan_forward(rows, flat["u"], flat["delta"], B, C, z, params, *NAMES, state)


def run(ops: CpuOps, scan: Scan, grads=None, need=NAMES, state: LayerState | None = None) -> dict[str, np.ndarray]:
    """Forward and backward; what the op writes beyond its destinations is an error."""
    batch, seq_len, d_inner = scan.u.shape
    d_state, T = scan.B.shape[2], batch * seq_len
    params = {name: array.astype(ops.dtype) for name, array in scan.params.items()}
    grads = GradientBuffers(params, params) if grads is None else grads
    du, ddelta = (np.full((T, d_inner), np.nan, ops.dtype) for _ in range(2))
    dxbc = np.full((T, 2 * d_state + 4), 7, ops.dtype)
    dxz = np.full((T, d_inner + 2), 7, ops.dtype)
    destinations = Columns(dxbc, 2, d_state), Columns(dxbc, 2 + d_state, d_state), Columns(dxz, 2, d_inner)
    with ops.scope():
        y, saved = forward(ops, scan, state)
        y = y.copy()
        dy = scan.dy.reshape(T, d_inner).astype(ops.dtype)
        ops.selective_scan_backward(dy, saved, grads, need, du, ddelta, *destinations)
    assert np.all(dxbc[:, [0, 1, -2, -1]] == 7)
    assert np.all(dxz[:, :2] == 7)
    dB, dC, dz = (c.array[:, c.first : c.first + c.width] for c in destinations)
    out = {"y": y, "du": du, "ddelta": ddelta, "dB": dB, "dC": dC, "dz": dz}
    return {name: array.reshape(batch, seq_len, -1) for name, array in out.items()} | grads.arrays


def assert_close(found, expected, tolerance, names=None):
    """max|difference| <= tolerance max|expected|, by name; of delta_bias, a sum that may cancel, that of its terms."""
    for name in names or expected:
        terms = np.abs(expected["ddelta"]).sum((0, 1)) if name == "delta_bias" else np.abs(expected[name])
        scale = terms.max()
        difference = np.abs(found[name] - expected[name]).max()
        assert difference <= tolerance * scale, f"{name}: {difference} of {scale}"


def zero_state(ops: CpuOps, scan: Scan) -> LayerState:
    return ops.layer_state(len(scan.u), scan.u.shape[2], scan.B.shape[2], 4)


def case_of(scan: Scan) -> gradcheck.Case:
    """The scalar sum(y dy) of every input and parameter, for differences."""
    ops = open_cpu(np.float64, threads=1)
    arrays = {"u": scan.u, "delta": scan.delta, "z": scan.z, "B": scan.B, "C": scan.C} | scan.params

    def loss() -> float:
        with ops.scope():
            return float(np.sum(forward(ops, scan)[0] * scan.dy.reshape(-1, scan.dy.shape[2])))

    def gradients() -> dict[str, np.ndarray]:
        found = run(ops, scan)
        return {name: found[name if name in NAMES else "d" + name] for name in arrays}

    return gradcheck.Case(arrays, loss, gradients)


def assert_gradients(case: gradcheck.Case):
    """Every element within 1e-6 of the tensor's largest; a gradient that is exactly 0 everywhere has no such scale."""
    for result in gradcheck.check(case):
        assert result.holds or (result.scale == 0 and result.difference < 1e-12), result


@pytest.mark.parametrize("d_inner", [1, 3, 64, 65])
def test_case_1_every_length_is_the_sequential_reference(d_inner):
    for seq_len in (1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257):
        scan = random_scan(2, seq_len, d_inner, 3, seed=seq_len)
        expected = reference(scan)
        for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-5)):
            ops = open_cpu(dtype)
            state = zero_state(ops, scan)
            found = run(ops, scan, state=state) | {"h": state.scan}
            assert all(np.all(np.isfinite(array)) for array in found.values())
            assert_close(found, expected, tolerance)


def test_case_1_smallest_input():
    scan = random_scan(1, 3, 1, 2)
    scan.params["delta_bias"][:] = -1
    assert_gradients(case_of(replace(scan, dy=np.ones((1, 3, 1)))))


@pytest.mark.parametrize(
    ("batch", "seq_len", "d_inner", "d_state", "starts"),
    [
        (1, 1, 1, 1, (0,)),
        (1, 2, 1, 1, ()),
        (3, 1, 2, 3, (0,)),
        (1, 17, 3, 2, (0, 16)),
        (2, 19, 1, 5, (0, 1, 2, 4, 7, 18)),
        (2, 37, 2, 3, (0, 15, 17)),
        (1, 67, 1, 2, (0, 64)),
    ],
)
def test_gradient_of_every_element(batch, seq_len, d_inner, d_state, starts):
    assert_gradients(case_of(random_scan(batch, seq_len, d_inner, d_state, starts)))


@pytest.mark.parametrize(("seq_len", "d_inner"), [(1, 1), (13, 3), (37, 2)])
def test_gradient_of_every_element_of_random_documents(seq_len, d_inner):
    ops = open_cpu(np.float64)
    assert_gradients(gradcheck.selective_scan(ops, np.random.default_rng(seq_len), seq_len, d_inner))


@pytest.mark.parametrize(
    "starts", [(0,), (), (0, 1, 2, 3), (0, BLOCK - 1), (0, BLOCK), (0, BLOCK + 1), (0, CHUNK), (0, CHUNK + 1, 79)]
)
def test_boundaries_at_any_place(starts):
    scan = random_scan(2, 80, 5, 4, starts)
    assert_close(
        run(open_cpu(np.float64), scan), reference(scan), 1e-12, [*NAMES, "y", "du", "ddelta", "dB", "dC", "dz"]
    )


@pytest.mark.parametrize(
    ("batch", "d_inner", "d_state"), [(1, 130, 16), (5, 33, 16), (2, 530, 16), (3, 1030, 8), (1, 3, 70)]
)
def test_shapes_that_are_cut_into_tasks(batch, d_inner, d_state):
    scan = random_scan(batch, 21, d_inner, d_state, (0, 5))
    expected = reference(scan)
    assert_close(run(open_cpu(np.float64), scan), expected, 1e-12, expected.keys() - {"h"})
    assert_close(run(open_cpu(np.float32), scan), expected, 1e-5, expected.keys() - {"h"})


@settings(max_examples=25, deadline=None)
@given(data=st.data(), batch=st.integers(1, 3), seq_len=st.integers(1, 70), d_inner=st.integers(1, 9))
def test_any_documents_are_the_sequential_reference(data, batch, seq_len, d_inner):
    starts = data.draw(st.sets(st.integers(0, seq_len)))
    scan = random_scan(batch, seq_len, d_inner, data.draw(st.integers(1, 5)), (0, *starts))
    expected = reference(scan)
    assert_close(run(open_cpu(np.float64), scan), expected, 1e-11, expected.keys() - {"h"})


@pytest.mark.parametrize("lengths", [(4, 3), (1, 1), (2, 3, 1), (16, 16), (15, 2, 47, 3)])
def test_case_18_packed_documents_are_as_alone(lengths):
    starts = np.cumsum([0, *lengths])
    scan = random_scan(1, starts[-1], 3, 4, starts[:-1])
    ops = open_cpu(np.float64)
    packed = run(ops, scan)
    alone = [run(ops, scan.cut(slice(None), slice(a, b))) for a, b in pairwise(starts)]
    joined = {name: np.concatenate([d[name] for d in alone], axis=1) for name in packed if name not in NAMES}
    summed = {name: sum(d[name] for d in alone) for name in NAMES}
    assert_close(packed, joined | summed, 1e-12)


@pytest.mark.parametrize("boundary", [1, 4, BLOCK - 1, BLOCK, BLOCK + 3])
def test_case_18_documents_are_isolated(boundary):
    scan = random_scan(1, boundary + 5, 2, 3, (0, boundary))
    before, after = slice(0, boundary), slice(boundary, None)
    ops = open_cpu(np.float64)
    plain = run(ops, scan)
    for name in ("u", "delta", "z", "B", "C"):
        for changed, other in ((before, after), (after, before)):
            array = getattr(scan, name).copy()
            array[:, changed] += 1
            found = run(ops, replace(scan, **{name: array}))
            assert not np.array_equal(found["y"][:, changed], plain["y"][:, changed])
            for output in ("y", "du", "ddelta", "dB", "dC", "dz"):
                np.testing.assert_array_equal(found[output][:, other], plain[output][:, other])
    for silent, other in ((before, after), (after, before)):
        dy = scan.dy.copy()
        dy[:, silent] = 0
        found = run(ops, replace(scan, dy=dy))
        for output in ("du", "ddelta", "dB", "dC", "dz"):
            np.testing.assert_array_equal(found[output][:, silent], 0)
            np.testing.assert_array_equal(found[output][:, other], plain[output][:, other])


@settings(max_examples=25, deadline=None)
@given(data=st.data(), seq_len=st.integers(2, 90))
def test_state_is_carried_over_any_split(data, seq_len):
    cuts = sorted(data.draw(st.sets(st.integers(1, seq_len - 1), min_size=1)))
    starts = data.draw(st.sets(st.integers(0, seq_len - 1), max_size=4))
    scan = random_scan(2, seq_len, 3, 4, tuple(starts))
    ops = open_cpu(np.float64, threads=1)
    expected = reference(scan)
    state, pieces = zero_state(ops, scan), []
    for a, b in zip([0, *cuts], [*cuts, seq_len], strict=True):
        with ops.scope():
            pieces.append(forward(ops, scan.cut(slice(None), slice(a, b)), state)[0].reshape(2, b - a, -1).copy())
    assert_close({"y": np.concatenate(pieces, axis=1), "h": state.scan}, expected, 1e-11, ("y", "h"))


def test_gradients_after_a_carried_state_hold_it_constant():
    scan = random_scan(2, 23, 3, 4, ())
    scan.positions[...] += 5
    ops = open_cpu(np.float64)
    state = zero_state(ops, scan)
    state.scan[...] = np.random.default_rng(1).standard_normal(state.scan.shape)
    expected = reference(scan, state.scan.copy())
    assert_close(run(ops, scan, state=state) | {"h": state.scan}, expected, 1e-12)


def test_position_zero_drops_a_carried_state():
    scan = random_scan(1, 5, 2, 3)
    ops = open_cpu(np.float64)
    state = zero_state(ops, scan)
    state.scan[...] = 1e6
    np.testing.assert_array_equal(forward(ops, scan, state)[0], forward(ops, scan)[0])


def test_frozen_parameters_cost_no_gradient():
    scan = random_scan(2, 20, 5, 4)
    ops = open_cpu(np.float64)
    everything = run(ops, scan)
    frozen = run(ops, scan, GradientBuffers({}, ()), need=())
    for name in ("y", "du", "ddelta", "dB", "dC", "dz"):
        np.testing.assert_array_equal(frozen[name], everything[name])
    for name in NAMES:
        buffers = GradientBuffers(scan.params, [name])
        np.testing.assert_array_equal(run(ops, scan, buffers, need=[name])[name], everything[name])


def test_second_use_in_a_step_adds():
    scan = random_scan(2, 20, 5, 4)
    ops = open_cpu(np.float64)
    buffers = GradientBuffers(scan.params, NAMES)
    once = {name: array.copy() for name, array in run(ops, scan, buffers).items()}
    twice = run(ops, scan, buffers)
    for name in NAMES:
        np.testing.assert_array_equal(twice[name], 2 * once[name])
    buffers.start_step()
    for name, array in run(ops, scan, buffers).items():
        np.testing.assert_array_equal(array, once[name])


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize(("batch", "d_inner"), [(5, 128), (1, 1100), (3, 520)])
def test_number_of_threads_changes_no_bit(monkeypatch, locked, batch, d_inner):
    monkeypatch.setattr(workspace, "INTERPRETER_IS_LOCKED", locked)
    scan = random_scan(batch, 70, d_inner, 16, (0, 33))
    first, *others = (run(open_cpu(np.float32, threads), scan) for threads in (1, 2, 3))
    for other in others:
        for name, array in first.items():
            np.testing.assert_array_equal(other[name], array)


@pytest.mark.parametrize(("batch", "d_inner"), [(5, 96), (3, 600)])
def test_batch_composition_does_not_matter(batch, d_inner):
    scan = random_scan(batch, 40, d_inner, 16, (0, 33))
    ops = open_cpu(np.float64)
    together = run(ops, scan)
    alone = [run(ops, scan.cut(slice(b, b + 1), slice(None))) for b in range(batch)]
    joined = {name: np.concatenate([d[name] for d in alone]) for name in together if name not in NAMES}
    assert_close(together, joined | {name: sum(d[name] for d in alone) for name in NAMES}, 1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_steps_and_gates_stay_finite(dtype):
    scan = random_scan(1, 40, 4, 3)
    scan.delta[0, ::5], scan.delta[0, 1::5], scan.delta[0, 2::5] = -1e4, 1e3, -50
    scan.z[0, ::3], scan.z[0, 1::3] = -1e4, 1e4
    found = run(open_cpu(dtype), scan)
    assert all(np.all(np.isfinite(array)) for array in found.values())
    with np.errstate(over="ignore"):
        expected = reference(scan)
    assert_close(found, expected, 1e-12 if dtype is np.float64 else 1e-4, expected.keys() - {"h"})


def test_no_temporary_has_the_size_of_the_states():
    scan = random_scan(2, 512, 256, 16)
    ops = open_cpu(np.float32, threads=1)
    run(ops, scan)
    states = scan.u.size * 16 * ops.dtype.itemsize
    du, ddelta, dz = (np.empty((1024, 256), np.float32) for _ in range(3))
    dB, dC = (np.empty((1024, 16), np.float32) for _ in range(2))
    dy, grads = scan.dy.reshape(1024, 256).astype(np.float32), GradientBuffers({}, ())
    with ops.scope():
        _, saved = forward(ops, scan)
        tracemalloc.start()
        ops.selective_scan_backward(
            dy, saved, grads, (), du, ddelta, Columns(dB, 0, 16), Columns(dC, 0, 16), Columns(dz, 0, 256)
        )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < states / 20
    assert ops.held_bytes() < states


def test_nothing_is_read_before_it_is_written(monkeypatch):
    scan = random_scan(2, 37, 5, 4, (0, 20))
    ops = open_cpu(np.float64, threads=1)
    expected = {name: array.copy() for name, array in run(ops, scan).items()}

    def poisoned(make):
        def fill(*args):
            array = make(*args)
            array.fill(np.nan)
            return array

        return fill

    monkeypatch.setattr(ops, "empty", poisoned(ops.empty))
    monkeypatch.setattr(ops, "scratch", poisoned(ops.scratch))
    for name, array in run(ops, scan).items():
        np.testing.assert_array_equal(array, expected[name])
