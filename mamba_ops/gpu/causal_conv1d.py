"""Depthwise causal convolution over time, with bias and SiLU, on the GPU; see `kernels/causal_conv1d.wgsl`."""

from typing import NamedTuple

import wgpu

from mamba_ops.gpu.device import GROUPS_PER_DIMENSION, Device, grid
from mamba_ops.gpu.workspace import DeviceArray, DeviceRows, GpuWorkspace, Range, range_of
from mamba_ops.ops import Columns, Gradients, LayerState, Need, Parameters

RUN = 32
"""Steps of a thread, a multiple of 4."""


class Saved(NamedTuple):
    """What the backward needs: references to the inputs. before: the state before the rows, if there was one."""

    rows: DeviceRows
    x: Columns
    params: Parameters
    weight: str
    bias: str | None
    before: DeviceArray | None

    @property
    def d_conv(self) -> int:
        """Taps."""
        return int(self.params[self.weight].shape[-1])

    @property
    def runs(self) -> int:
        """Runs of `RUN` steps in a row."""
        return -(-self.rows.seq_len // RUN)


def causal_conv1d_forward(
    ops: GpuWorkspace,
    rows: DeviceRows,
    x: Columns,
    params: Parameters,
    weight: str,
    bias: str | None,
    state: LayerState | None = None,
) -> tuple[DeviceArray, Saved]:
    """y_t = SiLU(bias + sum over k of weight[:, 0, d_conv - 1 - k] * x_{t-k} where positions_t >= k).

    x, y: (T, d_inner); weight: (d_inner, 1, d_conv). With a state, x before the row comes from it, and the
    last d_conv - 1 inputs are left in it.
    """
    y = ops.empty(rows.batch * rows.seq_len, x.width)
    before = None
    if state is not None and params[weight].shape[-1] > 1:
        before = _carry(ops, rows, range_of(x), state.conv)
    saved = Saved(rows, x, params, weight, bias, before)
    _dispatch(ops.device, "forward", saved, range_of(x), y.buffer)
    return y, saved


def causal_conv1d_backward(
    ops: GpuWorkspace, dy: DeviceArray, saved: Saved, grads: Gradients, need: Need, dx: Columns
) -> None:
    """Write dx, and add the gradients of weight and bias."""
    device, width, d_conv = ops.device, saved.x.width, saved.d_conv
    runs, out = saved.rows.batch * saved.runs, range_of(dx)
    with ops.scope():
        partials = ops.empty(runs * (d_conv + 1), width)
        _dispatch(device, "backward", saved, out, dy.buffer, out.buffer, partials.buffer)
        modes: list[int] = []
        buffers: list[wgpu.GPUBuffer] = []
        for name in (saved.weight, saved.bias):
            if name is not None and name in need:
                gradient, add = grads.take(name)
                modes.append(2 if add else 1)
                buffers.append(gradient.buffer)
            else:
                modes.append(0)
                buffers.append(ops.empty(1, 1).buffer)
        if any(modes):
            device.dispatch(
                device.pipeline("causal_conv1d", "backward_sums", **_constants(d_conv)),
                device.uniform("4I", runs, width, *modes),
                (partials.buffer, *buffers),
                (-(-width // 32), d_conv + 1, 1),
            )


def _dispatch(device: Device, entry: str, saved: Saved, dx: Range, *buffers: wgpu.GPUBuffer) -> None:
    """Run an entry point over all runs. dx: where the backward writes."""
    rows, x, weight = saved.rows, range_of(saved.x), saved.params[saved.weight].buffer
    # a binding that is not read still needs a buffer
    held = x.buffer if saved.before is None else saved.before.buffer
    bias = weight if saved.bias is None else saved.params[saved.bias].buffer
    flags = int(saved.bias is not None), int(saved.before is not None)
    ranges = x.stride, x.first, dx.stride, dx.first
    count = rows.batch * saved.runs
    device.dispatch(
        device.pipeline("causal_conv1d", entry, **_constants(saved.d_conv)),
        device.uniform("10I", rows.batch, rows.seq_len, x.width, saved.runs, *flags, *ranges),
        (rows.positions.buffer, x.buffer, held, weight, bias, *buffers),
        (-(-x.width // 64), min(count, GROUPS_PER_DIMENSION), -(-count // GROUPS_PER_DIMENSION)),
    )


def _carry(ops: GpuWorkspace, rows: DeviceRows, x: Range, conv: DeviceArray) -> DeviceArray:
    """Leave the last inputs in the state and return what it held: (batch * (d_conv - 1), d_inner)."""
    held = conv.shape[1]
    before = ops.empty(rows.batch * held, x.width)
    ops.device.dispatch(
        ops.device.pipeline("causal_conv1d", "forward_carry", **_constants(held + 1)),
        ops.device.uniform("5I", rows.batch, rows.seq_len, x.width, x.stride, x.first),
        (x.buffer, conv.buffer, before.buffer),
        grid(-(-rows.batch * x.width // 64)),
    )
    return before


def _constants(d_conv: int) -> dict[str, int]:
    return dict(D_CONV=d_conv, WINDOWS=-(-d_conv // 4), RUN=RUN)
