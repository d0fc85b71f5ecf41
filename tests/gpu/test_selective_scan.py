"""The scan's kernels against the NumPy side in float64, and against themselves cut in other ways."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from mamba_ops.cpu import open_cpu
from mamba_ops.gpu import selective_scan
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Batch, Columns, LayerState

NAMES = ("A_log", "D", "delta_bias")
OUTPUTS = ("y", "du", "ddelta", "dB", "dC", "dz")
BLOCK = selective_scan.BLOCK


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
    h0: np.ndarray | None = None

    def cut(self, t: slice) -> "Scan":
        """Some steps."""
        return replace(self, **{name: getattr(self, name)[:, t] for name in ("positions", *"uzBC", "delta", "dy")})


@cache
def random_scan(batch, seq_len, d_inner, d_state=16, starts=(0,)) -> Scan:
    """Random float32 inputs; documents start at `starts` in every row."""
    rng = np.random.default_rng(seq_len * 1000 + d_inner)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    params = {"A_log": normal(d_inner, d_state) * 0.5, "D": normal(d_inner), "delta_bias": normal(d_inner) - 1}
    u, delta, z, dy = (normal(batch, seq_len, d_inner) for _ in range(4))
    B, C = (normal(batch, seq_len, d_state) for _ in range(2))
    index = np.arange(seq_len)
    last = np.maximum.accumulate(np.where(np.isin(index, starts), index, -5))
    positions = np.tile((index - last).astype(np.uint32), (batch, 1))
    return Scan(positions, u, delta, z, B, C, dy, params, normal(batch, d_state, d_inner))


def inputs(scan: Scan):
    """The arrays as the op takes them: B, C and z are column ranges of wider arrays, the rest of which is NaN."""
    T, d_state = scan.positions.size, scan.B.shape[2]
    flat = {name: getattr(scan, name).reshape(T, -1) for name in ("u", "delta", "dy", "z", "B", "C")}
    nothing = np.full((T, 3), np.nan, np.float32)
    xbc = np.concatenate([nothing, flat["B"], flat["C"], nothing], axis=1)
    xz = np.concatenate([nothing, flat["z"]], axis=1)
    return flat["u"], flat["delta"], flat["dy"], xbc, xz, (3, d_state), (3 + d_state, d_state), (3, flat["z"].shape[1])


def on_cpu(scan: Scan, carried=False) -> dict[str, np.ndarray]:
    """Outputs, last state and gradients on the NumPy side in float64."""
    cpu = open_cpu(np.float64, threads=1)
    u, delta, dy, xbc, xz, *ranges = inputs(scan)
    u, delta, dy, xbc, xz = (array.astype(np.float64) for array in (u, delta, dy, xbc, xz))
    params = {name: array.astype(np.float64) for name, array in scan.params.items()}
    rows = cpu.rows(batch_of(scan))
    state = LayerState(None, scan.h0.astype(np.float64)) if carried else None
    B, C, z = Columns(xbc, *ranges[0]), Columns(xbc, *ranges[1]), Columns(xz, *ranges[2])
    y, saved = cpu.selective_scan_forward(rows, u, delta, B, C, z, params, *NAMES, state)
    grads = GradientBuffers(params, params)
    du, ddelta, dxbc, dxz = (np.zeros_like(array) for array in (u, delta, xbc, xz))
    destinations = [Columns(array, *r) for array, r in zip((dxbc, dxbc, dxz), ranges, strict=True)]
    cpu.selective_scan_backward(dy, saved, grads, NAMES, du, ddelta, *destinations)
    found = (y, du, ddelta, *(c.array[:, c.first : c.first + c.width] for c in destinations))
    shaped = {name: array.reshape(*scan.positions.shape, -1) for name, array in zip(OUTPUTS, found, strict=True)}
    return shaped | grads.arrays | ({"h": state.scan} if carried else {})


@cache
def cached_on_cpu(*shape, carried=False):
    return on_cpu(random_scan(*shape), carried)


def batch_of(scan: Scan) -> Batch:
    nothing = np.zeros(scan.positions.shape, np.int64)
    return Batch(nothing, nothing, scan.positions)


def on_device(ops, scan: Scan, carried=False, need=NAMES, grads=None, apart=False) -> dict[str, np.ndarray]:
    """The same on the device; what it writes beyond its destinations is an error. apart: dB and dC in two arrays."""
    T = scan.positions.size
    params = {name: ops.upload(array) for name, array in scan.params.items()}
    state = LayerState(None, ops.upload(scan.h0)) if carried else None
    u, delta, dy, xbc, xz, *ranges = inputs(scan)
    grads = grads or fresh_gradients(ops, params, need)
    with ops.scope():
        rows = ops.rows(batch_of(scan))
        xbc_, xz_ = ops.upload(xbc), ops.upload(xz)
        B, C, z = Columns(xbc_, *ranges[0]), Columns(xbc_, *ranges[1]), Columns(xz_, *ranges[2])
        args = rows, ops.upload(u), ops.upload(delta), B, C, z, params, *NAMES
        y, saved = ops.selective_scan_forward(*args, state)
        # four rows more than there are steps
        du, ddelta, dxbc, dxz, other = (ops.empty(T + 4, x.shape[1]) for x in (u, u, xbc, xz, xbc))
        arrays = dxbc, other if apart else dxbc, dxz
        destinations = [Columns(array, *r) for array, r in zip(arrays, ranges, strict=True)]
        ops.selective_scan_backward(ops.upload(dy), saved, grads, need, du, ddelta, *destinations)
        y = ops.read(y)
        written = [ops.read(array) for array in (du, ddelta, *arrays)]
    assert all(np.isnan(w[T:]).all() for w in written)
    kept = ranges[0][1] if apart else 2 * ranges[0][1]
    assert np.isnan(written[2][:T]).sum() == T * (xbc.shape[1] - kept)
    assert np.isnan(written[4][:, :3]).all()
    inner = [w[:T, first : first + width] for w, (first, width) in zip(written[2:], ranges, strict=True)]
    found = y, written[0][:T], written[1][:T], *inner
    shaped = {name: array.reshape(*scan.positions.shape, -1) for name, array in zip(OUTPUTS, found, strict=True)}
    state_out = {"h": ops.read(state.scan)} if carried else {}
    return shaped | {name: ops.read(array) for name, array in grads.arrays.items()} | state_out


def fresh_gradients(ops, params, need) -> GradientBuffers:
    """Gradient buffers that hold NaN: their first use must overwrite."""
    grads = GradientBuffers(params, need, ops)
    for array in grads.arrays.values():
        ops.write_parameter(array, np.full(array.shape, np.nan, np.float32))
    return grads


@pytest.fixture
def assert_all_close(assert_close):
    """Return the comparison of every named array: 1e-4 for y and the last state, 1e-3 for gradients."""

    def compare(found, wanted):
        assert found.keys() == wanted.keys()
        for name, reference in wanted.items():
            assert_close(found[name], reference, 1e-4 if name in ("y", "h") else 1e-3, name)

    return compare


def assert_same(found, wanted, names=OUTPUTS, t=None):
    for name in names:
        a, b = (x[name] if t is None else x[name][:, t] for x in (found, wanted))
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("d_inner", [1, 3, 64, 65])
@pytest.mark.parametrize("seq_len", [1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_case_1_every_length_and_width(gpu, assert_all_close, seq_len, d_inner):
    shape = 1, seq_len, d_inner
    assert_all_close(on_device(gpu, random_scan(*shape), carried=True), cached_on_cpu(*shape, carried=True))


@pytest.mark.parametrize("subgroups", [True, False])
def test_case_1_smallest_input(gpu_with, assert_all_close, subgroups):
    scan = random_scan(1, 3, 1, 2)
    params = scan.params | {"delta_bias": np.full(1, -1, np.float32)}
    scan = replace(scan, params=params, dy=np.ones_like(scan.dy))
    assert_all_close(on_device(gpu_with(subgroups=subgroups), scan), on_cpu(scan))


@pytest.mark.parametrize(
    ("d_state", "subgroups"),
    [(1, True), (3, True), (3, False), (4, False), (17, True), (17, False), (32, True), (70, True), (70, False)],
)
def test_any_number_of_states(gpu_with, assert_all_close, d_state, subgroups):
    shape, ops = (2, 21, 9, d_state, (0, 5)), gpu_with(checks=False, subgroups=subgroups)
    assert_all_close(on_device(ops, random_scan(*shape), carried=True), cached_on_cpu(*shape, carried=True))


@pytest.mark.parametrize("shape", [(3, 37, 70), (5, 16, 33), (2, 130, 257), (67, 1, 5)])
def test_batches(gpu, assert_all_close, shape):
    assert_all_close(on_device(gpu, random_scan(*shape)), cached_on_cpu(*shape))


def test_more_states_than_a_workgroup_holds(gpu_once):
    scan = random_scan(1, 2, 1, 5000)
    with pytest.raises(ValueError, match="d_state 5000: a workgroup of"):
        on_device(gpu_once, scan)


@pytest.mark.parametrize(
    "starts", [(), (0, 1, 2, 3, 4), (0, BLOCK - 1), (0, BLOCK), (0, BLOCK + 1), (0, 3, 2 * BLOCK, 39), (0, 4, 8)]
)
def test_case_18_boundaries_at_any_place(gpu, assert_all_close, starts):
    shape = 2, 40, 5, 16, starts
    assert_all_close(on_device(gpu, random_scan(*shape), carried=True), cached_on_cpu(*shape, carried=True))


@pytest.mark.parametrize("lengths", [(4, 3), (1, 2, 3, 1), (16, 16), (15, 2, 19, 3)])
def test_case_18_packed_documents_are_as_alone(gpu, assert_all_close, lengths):
    starts = (0, *map(int, np.cumsum(lengths)))
    scan = random_scan(1, starts[-1], 3, 16, starts)
    alone = [on_device(gpu, scan.cut(slice(a, b))) for a, b in pairwise(starts)]
    joined = {name: np.concatenate([d[name] for d in alone], axis=1).astype(np.float64) for name in OUTPUTS}
    summed = {name: sum(d[name].astype(np.float64) for d in alone) for name in NAMES}
    assert_all_close(on_device(gpu, scan), joined | summed)


@pytest.mark.parametrize("boundary", [1, 2, 3, BLOCK, BLOCK + 3])
def test_case_18_documents_are_isolated(gpu, boundary):
    scan = random_scan(1, boundary + 5, 2, 16, (0, boundary))
    before, after = slice(0, boundary), slice(boundary, None)
    plain = on_device(gpu, scan)
    for changed, other in ((before, after), (after, before)):
        moved = {name: getattr(scan, name).copy() for name in ("u", "delta", "z", "B", "C")}
        for array in moved.values():
            array[:, changed] += 1
        found = on_device(gpu, replace(scan, **moved))
        assert not np.array_equal(found["y"][:, changed], plain["y"][:, changed])
        assert_same(found, plain, t=other)
        dy = scan.dy.copy()
        dy[:, changed] = 0
        found = on_device(gpu, replace(scan, dy=dy))
        assert_same(found, plain, ("du", "ddelta", "dB", "dC", "dz"), other)
        assert not any(found[name][:, changed].any() for name in OUTPUTS[1:])


@pytest.mark.parametrize("cuts", [(1,), (3, 4), (BLOCK - 1,), (BLOCK,), (BLOCK + 1, 2 * BLOCK), (5, 38)])
def test_state_is_carried_over_any_split(gpu, assert_close, cuts):
    shape = 2, 39, 5, 16, (7, 16)
    scan, state = random_scan(*shape), gpu.upload(random_scan(*shape).h0)
    pieces = []
    params = {name: gpu.upload(array) for name, array in scan.params.items()}
    for a, b in pairwise((0, *cuts, 39)):
        u, delta, _, xbc, xz, *ranges = inputs(scan.cut(slice(a, b)))
        columns = [Columns(gpu.upload(x), *r) for x, r in zip((xbc, xbc, xz), ranges, strict=True)]
        with gpu.scope():
            rows = gpu.rows(batch_of(scan.cut(slice(a, b))))
            y, _ = gpu.selective_scan_forward(
                rows, gpu.upload(u), gpu.upload(delta), *columns, params, *NAMES, LayerState(None, state)
            )
            pieces.append(gpu.read(y).reshape(2, b - a, -1))
    wanted = cached_on_cpu(*shape, carried=True)
    assert_close(np.concatenate(pieces, axis=1), wanted["y"], 1e-4)
    assert_close(gpu.read(state), wanted["h"], 1e-4)


def test_position_zero_drops_a_carried_state(gpu):
    scan = random_scan(2, 5, 3)
    assert_same(on_device(gpu, scan, carried=True), on_device(gpu, scan))


def test_frozen_parameters_take_no_gradient(gpu):
    scan = random_scan(2, 20, 5)
    everything = on_device(gpu, scan)
    for need in ((), ("A_log",), ("D",), ("delta_bias",), ("A_log", "delta_bias")):
        found = on_device(gpu, scan, need=need)
        assert_same(found, everything, (*OUTPUTS, *need))
        assert found.keys() == {*OUTPUTS, *need}


def test_the_second_use_in_a_step_adds(gpu):
    scan = random_scan(2, 20, 5)
    grads = fresh_gradients(gpu, {name: gpu.upload(array) for name, array in scan.params.items()}, NAMES)
    once = on_device(gpu, scan, grads=grads)
    assert_same(on_device(gpu, scan, grads=grads), {name: 2 * once[name] for name in NAMES}, NAMES)
    grads.start_step()
    assert_same(on_device(gpu, scan, grads=grads), once, NAMES)


def test_gradients_of_B_and_C_in_two_arrays(gpu):
    scan = random_scan(2, 20, 5)
    assert_same(on_device(gpu, scan, apart=True), on_device(gpu, scan), (*OUTPUTS, *NAMES))


def test_repeated_runs_give_the_same_bytes(gpu):
    scan = random_scan(3, 70, 67, 16, (0, 33))
    first = on_device(gpu, scan, carried=True)
    for _ in range(3):
        assert_same(on_device(gpu, scan, carried=True), first, (*OUTPUTS, *NAMES, "h"))


def test_extreme_steps_and_gates_stay_finite(gpu, assert_all_close):
    scan = random_scan(1, 40, 4)
    delta, z, params = scan.delta.copy(), scan.z.copy(), dict(scan.params)
    delta[0, ::5], delta[0, 1::5], delta[0, 2::5] = -1e4, 1e3, -50
    z[0, ::3], z[0, 1::3] = -1e4, 1e4
    params["A_log"] = np.linspace(-20, 20, 64, dtype=np.float32).reshape(4, 16)
    scan = replace(scan, delta=delta, z=z, params=params)
    assert_all_close(on_device(gpu, scan), on_cpu(scan))


@pytest.mark.parametrize("step", [1e-5, 1e-3, 0.0487, 0.0488, 0.1, 19.9, 20.1])
def test_small_and_large_step_sizes(gpu, assert_all_close, step):
    scan = random_scan(1, 24, 3)
    raw = np.log(np.expm1(np.float64(step))).astype(np.float32)
    params = scan.params | {"delta_bias": np.full(3, raw, np.float32)}
    scan = replace(scan, delta=scan.delta * np.float32(1e-3), params=params)
    assert_all_close(on_device(gpu, scan), on_cpu(scan))


@pytest.mark.parametrize(
    ("block", "channels", "far", "unroll", "subgroups"),
    [(4, 8, True, False, False), (8, 16, True, True, True), (8, 32, False, True, False), (16, 64, False, False, True)],
)
def test_every_way_to_cut_the_work(gpu_with, assert_all_close, monkeypatch, block, channels, far, unroll, subgroups):
    for name, value in (("BLOCK", block), ("CHANNELS", channels), ("FAR", far), ("UNROLL", unroll)):
        monkeypatch.setattr(selective_scan, name, value)
    shape, ops = (2, 35, 37, 16, (0, 5)), gpu_with(checks=False, subgroups=subgroups)
    assert_all_close(on_device(ops, random_scan(*shape), carried=True), cached_on_cpu(*shape, carried=True))


def test_channels_are_added_by_shuffles(gpu_with, assert_all_close, monkeypatch):
    """As far as the adapter's subgroups reach; llvmpipe has 8 lanes with vectors of 256 bits and does not say so."""
    ops = gpu_with(checks=False)
    if "256 bits" in ops.device.name:
        monkeypatch.setattr(selective_scan, "SUBGROUP", 8)
    constants = selective_scan.make_plan(ops.device, 35, 37, 16).constants
    if not constants["SHUFFLE_CHANNEL_0"]:
        pytest.skip(f"{ops.device.name} does not promise subgroups of 8")
    shape = 2, 35, 37, 16, (0, 5)
    assert_all_close(on_device(ops, random_scan(*shape), carried=True), cached_on_cpu(*shape, carried=True))
