"""The convolution's kernels against the NumPy side in float64, and against themselves cut in other ways."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from mamba_ops.cpu import open_cpu
from mamba_ops.gpu import causal_conv1d
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Batch, Columns, LayerState

RUN = causal_conv1d.RUN


@dataclass(frozen=True)
class Conv:
    """x, dy: (batch, seq_len, d_inner); positions: (batch, seq_len); held: (batch, d_conv - 1, d_inner)."""

    positions: np.ndarray
    x: np.ndarray
    dy: np.ndarray
    held: np.ndarray
    params: dict[str, np.ndarray]

    def cut(self, t: slice) -> "Conv":
        """Some steps."""
        return replace(self, positions=self.positions[:, t], x=self.x[:, t], dy=self.dy[:, t])

    @property
    def bias(self) -> str | None:
        return "bias" if "bias" in self.params else None


@cache
def random_conv(batch, seq_len, d_inner, d_conv=4, starts=(0,), biased=True) -> Conv:
    """Random float32 inputs; documents start at `starts` in every row."""
    rng = np.random.default_rng(seq_len * 1000 + d_inner)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    params = {"weight": normal(d_inner, 1, d_conv)} | ({"bias": normal(d_inner)} if biased else {})
    index = np.arange(seq_len)
    last = np.maximum.accumulate(np.where(np.isin(index, starts), index, -20))
    positions = np.tile((index - last).astype(np.uint32), (batch, 1))
    x, dy = (normal(batch, seq_len, d_inner) for _ in range(2))
    return Conv(positions, x, dy, normal(batch, d_conv - 1, d_inner), params)


def inputs(conv: Conv):
    """x as the op takes it, a column range of a wider array, the rest of which is NaN; and dy."""
    T, width = conv.positions.size, conv.x.shape[2]
    nothing = np.full((T, 2), np.nan, np.float32)
    xz = np.concatenate([nothing, conv.x.reshape(T, width), nothing], axis=1)
    return xz, conv.dy.reshape(T, width), (2, width)


def batch_of(conv: Conv) -> Batch:
    nothing = np.zeros(conv.positions.shape, np.int64)
    return Batch(nothing, nothing, conv.positions)


def on_cpu(conv: Conv, carried=False) -> dict[str, np.ndarray]:
    """Outputs, last state and gradients on the NumPy side in float64."""
    cpu = open_cpu(np.float64, threads=1)
    xz, dy, x_range = inputs(conv)
    xz, dy = xz.astype(np.float64), dy.astype(np.float64)
    params = {name: array.astype(np.float64) for name, array in conv.params.items()}
    state = LayerState(conv.held.astype(np.float64), None) if carried else None
    rows, x = cpu.rows(batch_of(conv)), Columns(xz, *x_range)
    y, saved = cpu.causal_conv1d_forward(rows, x, params, "weight", conv.bias, state)
    grads, dxz = GradientBuffers(params, params), np.zeros_like(xz)
    cpu.causal_conv1d_backward(dy, saved, grads, params, Columns(dxz, *x_range))
    found = {"y": y.reshape(conv.x.shape), "dx": dxz[:, 2:-2].reshape(conv.x.shape)} | grads.arrays
    return found | ({"held": state.conv} if carried else {})


@cache
def cached_on_cpu(*shape, carried=False):
    return on_cpu(random_conv(*shape), carried)


def on_device(ops, conv: Conv, carried=False, need=None, grads=None) -> dict[str, np.ndarray]:
    """The same on the device; what it writes beyond its destination is an error."""
    xz, dy, x_range = inputs(conv)
    params = {name: ops.upload(array) for name, array in conv.params.items()}
    need = params if need is None else need
    grads = grads or fresh_gradients(ops, params, need)
    state = device_state(ops, conv) if carried else None
    with ops.scope():
        rows, x = ops.rows(batch_of(conv)), Columns(ops.upload(xz), *x_range)
        y, saved = ops.causal_conv1d_forward(rows, x, params, "weight", conv.bias, state)
        dxz = ops.empty(len(xz) + 4, xz.shape[1])
        ops.causal_conv1d_backward(ops.upload(dy), saved, grads, need, Columns(dxz, *x_range))
        y, written = ops.read(y), ops.read(dxz)
    assert np.isnan(written[:, [0, 1, -2, -1]]).all()
    assert np.isnan(written[len(xz) :]).all()
    found = {"y": y.reshape(conv.x.shape), "dx": written[: len(xz), 2:-2].reshape(conv.x.shape)}
    state_out = {"held": ops.read(state.conv)} if carried else {}
    return found | {name: ops.read(array) for name, array in grads.arrays.items()} | state_out


def device_state(ops, conv: Conv) -> LayerState:
    batch, held, d_inner = conv.held.shape
    state = ops.layer_state(batch, d_inner, 1, held + 1)
    ops.device.write(state.conv.buffer, conv.held)
    return state


def fresh_gradients(ops, params, need) -> GradientBuffers:
    """Gradient buffers that hold NaN: their first use must overwrite."""
    grads = GradientBuffers(params, need, ops)
    for array in grads.arrays.values():
        ops.write_parameter(array, np.full(array.shape, np.nan, np.float32))
    return grads


@pytest.fixture
def assert_all_close(assert_close):
    """Return the comparison of every named array: 1e-4 for y and the state, 1e-3 for gradients."""

    def compare(found, wanted):
        assert found.keys() == wanted.keys()
        for name, reference in wanted.items():
            assert_close(found[name], reference, 1e-4 if name in ("y", "held") else 1e-3, name)

    return compare


def assert_same(found, wanted, names, t=None):
    for name in names:
        a, b = (x[name] if t is None else x[name][:, t] for x in (found, wanted))
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def ops(request, gpu_with):
    """The GPU's ops with run-time checks on and off; subgroups change nothing here."""
    return gpu_with(checks=request.param)


@pytest.mark.parametrize("d_inner", [1, 3, 64, 65])
@pytest.mark.parametrize("seq_len", [1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257])
def test_case_1_every_length_and_width(ops, assert_all_close, seq_len, d_inner):
    shape = 1, seq_len, d_inner
    assert_all_close(on_device(ops, random_conv(*shape), carried=True), cached_on_cpu(*shape, carried=True))


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("d_conv", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("carried", [True, False], ids=["state", "no state"])
def test_any_number_of_taps(ops, assert_all_close, d_conv, biased, carried):
    for seq_len in (1, 2, 7, 2 * RUN + 3):
        shape = 2, seq_len, 5, d_conv, (3, 4, RUN - 1), biased
        found = on_device(ops, random_conv(*shape), carried=carried)
        assert_all_close(found, cached_on_cpu(*shape, carried=carried))


@pytest.mark.parametrize("shape", [(3, 37, 130), (5, RUN, 33), (67, 1, 5), (2, 5 * RUN, 257)])
def test_batches(ops, assert_all_close, shape):
    assert_all_close(on_device(ops, random_conv(*shape)), cached_on_cpu(*shape))


@pytest.mark.parametrize(
    "starts", [(), (0, 1, 2, 3, 4), (0, RUN - 1), (0, RUN), (0, RUN + 1), (0, RUN - 3, RUN - 2), (0, 4, 2 * RUN, 69)]
)
def test_case_18_boundaries_at_any_place(ops, assert_all_close, starts):
    shape = 2, 70, 5, 4, starts
    assert_all_close(on_device(ops, random_conv(*shape), carried=True), cached_on_cpu(*shape, carried=True))


@pytest.mark.parametrize("lengths", [(4, 3), (1, 2, 3, 1), (RUN, RUN), (RUN - 1, 2, 19, 3)])
def test_case_18_packed_documents_are_as_alone(ops, assert_all_close, lengths):
    starts = (0, *map(int, np.cumsum(lengths)))
    conv = random_conv(1, starts[-1], 3, 4, starts)
    alone = [on_device(ops, conv.cut(slice(a, b))) for a, b in pairwise(starts)]
    joined = {name: np.concatenate([d[name] for d in alone], axis=1).astype(np.float64) for name in ("y", "dx")}
    summed = {name: sum(d[name].astype(np.float64) for d in alone) for name in ("weight", "bias")}
    assert_all_close(on_device(ops, conv), joined | summed)


@pytest.mark.parametrize("boundary", [1, 2, 3, RUN, RUN + 3])
def test_case_18_documents_are_isolated(ops, boundary):
    conv = random_conv(1, boundary + 5, 2, 4, (0, boundary))
    before, after = slice(0, boundary), slice(boundary, None)
    plain = on_device(ops, conv)
    for changed, other in ((before, after), (after, before)):
        for value in (3, np.nan):
            x = conv.x.copy()
            x[:, changed] += value
            found = on_device(ops, replace(conv, x=x))
            assert not np.array_equal(found["y"][:, changed], plain["y"][:, changed])
            assert_same(found, plain, ("y", "dx"), other)
        dy = conv.dy.copy()
        dy[:, changed] = 0
        found = on_device(ops, replace(conv, dy=dy))
        assert_same(found, plain, ("dx",), other)
        assert not found["dx"][:, changed].any()


@pytest.mark.parametrize("d_conv", [1, 2, 4, 9])
@pytest.mark.parametrize("cuts", [(1,), (1, 2, 3, 4, 5), (RUN - 1, RUN), (RUN, 38)])
def test_state_is_carried_over_any_split(ops, assert_close, d_conv, cuts):
    shape = 2, 39, 5, d_conv, (7, 16)
    conv = random_conv(*shape)
    params, state = {name: ops.upload(array) for name, array in conv.params.items()}, device_state(ops, conv)
    pieces = []
    for a, b in pairwise((0, *cuts, 39)):
        xz, _, x_range = inputs(conv.cut(slice(a, b)))
        with ops.scope():
            rows, x = ops.rows(batch_of(conv.cut(slice(a, b)))), Columns(ops.upload(xz), *x_range)
            y, _ = ops.causal_conv1d_forward(rows, x, params, "weight", "bias", state)
            pieces.append(ops.read(y).reshape(2, b - a, -1))
    wanted = cached_on_cpu(*shape, carried=True)
    assert_close(np.concatenate(pieces, axis=1), wanted["y"], 1e-4)
    np.testing.assert_array_equal(ops.read(state.conv), wanted["held"])


def test_frozen_parameters_take_no_gradient(ops):
    conv = random_conv(2, 20, 5)
    everything = on_device(ops, conv)
    for need in ((), ("weight",), ("bias",)):
        found = on_device(ops, conv, need=need)
        assert_same(found, everything, ("y", "dx", *need))
        assert found.keys() == {"y", "dx", *need}


def test_the_second_use_in_a_step_adds(ops):
    conv, names = random_conv(2, 20, 5), ("weight", "bias")
    grads = fresh_gradients(ops, {name: ops.upload(array) for name, array in conv.params.items()}, names)
    once = on_device(ops, conv, grads=grads)
    assert_same(on_device(ops, conv, grads=grads), {name: 2 * once[name] for name in names}, names)
    grads.start_step()
    assert_same(on_device(ops, conv, grads=grads), once, names)


def test_repeated_runs_give_the_same_bytes(ops):
    conv = random_conv(3, 70, 67, 4, (0, 33))
    first = on_device(ops, conv, carried=True)
    for _ in range(3):
        assert_same(on_device(ops, conv, carried=True), first, first)


def test_extreme_sums_stay_finite(ops, assert_all_close):
    conv = random_conv(1, 40, 4)
    x = conv.x.copy()
    x[0, ::3], x[0, 1::3] = -1e4, 1e4
    conv = replace(conv, x=x)
    assert_all_close(on_device(ops, conv), on_cpu(conv))


@pytest.mark.parametrize("run", [4, 8, 64])
def test_every_way_to_cut_the_work(ops, assert_all_close, monkeypatch, run):
    monkeypatch.setattr(causal_conv1d, "RUN", run)
    shape = 2, 67, 5, 4, (0, 5, 64)
    assert_all_close(on_device(ops, random_conv(*shape), carried=True), cached_on_cpu(*shape, carried=True))


def test_more_runs_than_one_dimension_of_workgroups(gpu_once, assert_close, monkeypatch):
    monkeypatch.setattr(causal_conv1d, "RUN", 4)
    shape = 1, 4 * 65_535 + 5, 1, 2
    found, wanted = on_device(gpu_once, random_conv(*shape)), on_cpu(random_conv(*shape))
    assert_close(found["y"], wanted["y"], 1e-4)
    assert_close(found["dx"], wanted["dx"], 1e-3)
