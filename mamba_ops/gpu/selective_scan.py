"""The selective scan on the GPU: states in registers, kept at block starts only; see `kernels/selective_scan.wgsl`."""

from itertools import product
from typing import NamedTuple

import wgpu

from mamba_ops.gpu.device import Device, grid
from mamba_ops.gpu.workspace import DeviceArray, DeviceRows, GpuWorkspace, Range, range_of
from mamba_ops.ops import Columns, Gradients, LayerState, Need, Parameters

BLOCK = 16
"""Steps between saved states, 4, 8 or 16: the backward computes a block again, keeping the state of each 4th step."""

CHANNELS = 32
"""Channels of a workgroup, 8, 16, 32 or 64."""

FAR = True
"""Whether the forward loads a block ahead; else 4 steps ahead."""

UNROLL = False
"""Whether the backward writes the runs of a block out one by one; else it loops over them."""

SUBGROUP: int | None = None
"""Lanes that a subgroup has at least; None takes the adapter's word, which is 4 where it gives none."""

_THREADS = 256


class Plan(NamedTuple):
    """How a scan lies on the device.

    lanes: of a channel, four states each. channels, groups: of a workgroup, and workgroups across channels.
    block, blocks: steps of a block, and blocks of a row. constants: of the kernel.
    """

    lanes: int
    channels: int
    groups: int
    block: int
    blocks: int
    constants: dict[str, int]

    @property
    def runs(self) -> int:
        """Runs of four steps in a row."""
        return self.blocks * self.block // 4

    @property
    def values(self) -> int:
        """dB and dC of a step, with the states past the last."""
        return 8 * self.lanes


class Saved(NamedTuple):
    """What the backward needs: references to the inputs, and the state before each block."""

    rows: DeviceRows
    u: DeviceArray
    delta: DeviceArray
    B: DeviceArray | Columns
    C: DeviceArray | Columns
    z: DeviceArray | Columns
    params: Parameters
    A_log: str
    D: str
    delta_bias: str
    starts: DeviceArray
    plan: Plan


def selective_scan_forward(
    ops: GpuWorkspace,
    rows: DeviceRows,
    u: DeviceArray,
    delta: DeviceArray,
    B: Columns,
    C: Columns,
    z: Columns,
    params: Parameters,
    A_log: str,
    D: str,
    delta_bias: str,
    state: LayerState | None = None,
) -> tuple[DeviceArray, Saved]:
    """y_t = (C_t . h_t + D u_t) SiLU(z_t), h_t = a_t h_{t-1} + softplus(delta_t + delta_bias) B_t u_t.

    a_t = exp(-softplus(delta_t + delta_bias) exp(A_log)), and 0 where positions_t = 0.
    u, delta, z, y: (T, d_inner); B, C: (T, d_state); A_log: (d_inner, d_state); D, delta_bias: (d_inner,).
    With a state, h_0 comes from it and the last h is left in it. Raises ValueError for a d_state that the
    adapter's workgroups do not hold.
    """
    device, plan = ops.device, make_plan(ops.device, rows.seq_len, u.shape[1], B.width)
    y = ops.empty(*u.shape)
    starts = ops.empty(rows.batch * plan.blocks * plan.groups, plan.channels * plan.lanes * 4)
    saved = Saved(rows, u, delta, B, C, z, params, A_log, D, delta_bias, starts, plan)
    device.dispatch(
        device.pipeline("selective_scan", "forward", **plan.constants, CARRIED=int(state is not None)),
        _uniform(device, saved, range_of(z)),
        (*_inputs(saved), y.buffer, starts.buffer, *(() if state is None else (state.scan.buffer,))),
        (plan.groups, rows.batch, 1),
    )
    return y, saved


def selective_scan_backward(
    ops: GpuWorkspace,
    dy: DeviceArray,
    saved: Saved,
    grads: Gradients,
    need: Need,
    du: DeviceArray,
    ddelta: DeviceArray,
    dB: Columns,
    dC: Columns,
    dz: Columns,
) -> None:
    """Write du, ddelta, dB, dC and dz; ddelta is the gradient of delta before bias and softplus."""
    device, plan, batch = ops.device, saved.plan, saved.rows.batch
    d_inner, d_state = saved.u.shape[1], saved.B.width
    with ops.scope():
        partial_columns = ops.empty(batch * plan.groups * plan.runs, plan.values * 4)
        partial_parameters = ops.empty(batch, d_inner * (d_state + 2))
        dz_range = range_of(dz)
        device.dispatch(
            device.pipeline("selective_scan", "backward", **plan.constants, CARRIED=0),
            _uniform(device, saved, dz_range),
            (
                *_inputs(saved),
                *(a.buffer for a in (dy, saved.starts, du, ddelta)),
                *(dz_range.buffer, partial_columns.buffer, partial_parameters.buffer),
            ),
            (plan.groups, batch, 1),
        )
        _backward_columns(device, saved, partial_columns, range_of(dB), range_of(dC))
        _backward_parameters(ops, saved, partial_parameters, grads, need)


def _backward_columns(device: Device, saved: Saved, partial: DeviceArray, dB: Range, dC: Range) -> None:
    """Sum dB and dC over the workgroups; in one dispatch where they lie in one buffer."""
    plan, rows = saved.plan, saved.rows
    both = [(dB.buffer, 3)] if dB.buffer is dC.buffer else [(dB.buffer, 1), (dC.buffer, 2)]
    for buffer, which in both:
        ranges = dB.stride, dB.first, dC.stride, dC.first
        device.dispatch(
            device.pipeline("selective_scan", "backward_columns", **plan.constants, CARRIED=0),
            device.uniform("9I", rows.batch, rows.seq_len, plan.groups, plan.runs, which, *ranges),
            (partial.buffer, buffer),
            grid(-(-rows.batch * plan.runs * plan.values // 64)),
        )


def _backward_parameters(ops: GpuWorkspace, saved: Saved, partial: DeviceArray, grads: Gradients, need: Need) -> None:
    """Sum dA_log, dD and ddelta_bias over the batch, for names in `need`."""
    names = saved.A_log, saved.D, saved.delta_bias
    if not any(name in need for name in names):
        return
    device = ops.device
    modes: list[int] = []
    buffers: list[wgpu.GPUBuffer] = []
    for name in names:
        if name in need:
            gradient, add = grads.take(name)
            modes.append(2 if add else 1)
            buffers.append(gradient.buffer)
        else:
            modes.append(0)
            buffers.append(ops.empty(1, 1).buffer)
    device.dispatch(
        device.pipeline("selective_scan", "backward_parameters", **saved.plan.constants, CARRIED=0),
        device.uniform("5I", saved.rows.batch, saved.u.shape[1], *modes),
        (partial.buffer, *buffers),
        grid(-(-partial.width // 64)),
    )


def _inputs(saved: Saved) -> tuple[wgpu.GPUBuffer, ...]:
    ranges = tuple(range_of(x).buffer for x in (saved.u, saved.delta, saved.B, saved.C, saved.z))
    parameters = (saved.params[name].buffer for name in (saved.A_log, saved.D, saved.delta_bias))
    return saved.rows.positions.buffer, *ranges, *parameters


def _uniform(device: Device, saved: Saved, dz: Range) -> wgpu.GPUBuffer:
    rows, plan = saved.rows, saved.plan
    ranges = [(r.stride, r.first) for r in (*map(range_of, (saved.B, saved.C, saved.z)), dz)]
    sizes = rows.seq_len, saved.u.shape[1], plan.blocks, plan.groups
    return device.uniform("12I", *sizes, *(number for pair in ranges for number in pair))


def make_plan(device: Device, seq_len: int, d_inner: int, d_state: int) -> Plan:
    """Choose the longest blocks, then the most channels, that a workgroup holds, at 256 threads or at more.

    Raises ValueError where it does not hold d_state states.
    """
    lanes = 4
    while 4 * lanes < d_state:
        lanes *= 2
    most_bytes = device.limits["max-compute-workgroup-storage-size"]
    most_threads = device.limits["max-compute-invocations-per-workgroup"]
    shapes = product(
        (min(_THREADS, most_threads), most_threads),
        sorted({BLOCK, min(BLOCK, 8), min(BLOCK, 4)}, reverse=True),
        sorted({CHANNELS, min(CHANNELS, 16), 8}, reverse=True),
    )
    for threads, block, channels in shapes:
        constants = _constants(device, d_state, lanes, channels, block)
        if channels * lanes <= threads and _workgroup_bytes(constants) <= most_bytes:
            return Plan(lanes, channels, -(-d_inner // channels), block, -(-seq_len // block), constants)
    raise ValueError(f"d_state {d_state}: a workgroup of {device.name} takes {most_threads} lanes, {most_bytes} bytes")


def _constants(device: Device, d_state: int, lanes: int, channels: int, block: int) -> dict[str, int]:
    subgroup = _subgroup(device)
    runs = block // 4
    constants = dict(D_STATE=d_state, LANES=lanes, CHANNELS=channels, BLOCK=block, RUNS=runs)
    constants |= dict(FAR=int(FAR), RUNS_AHEAD=runs if FAR else 1, QUADS=-(-2 * block // channels))
    constants |= dict(UNROLL=int(UNROLL), COPIES=runs if UNROLL else 1)
    constants |= dict(SHUFFLE_TEAM=int(subgroup >= lanes))
    constants |= {f"SHUFFLE_CHANNEL_{n}": int(subgroup >= lanes * 2 << n) for n in range(3)}
    constants["EXCHANGE"] = int(subgroup < 8 * lanes)
    return constants


def _workgroup_bytes(constants: dict[str, int]) -> int:
    lanes, channels, block = (constants[name] for name in ("LANES", "CHANNELS", "BLOCK"))
    tiles = 2 * block * lanes * 16 + block // 4 * 16
    sums = block // 4 * (channels // 8) * 8 * lanes * 16
    return tiles + sums + constants["EXCHANGE"] * channels * lanes * 16


def _subgroup(device: Device) -> int:
    """Return how many lanes in a row surely share a subgroup; 0 without subgroups."""
    if not device.subgroups:
        return 0
    return SUBGROUP or int(device.info.get("stackgroup_min_size", 0)) or 4
