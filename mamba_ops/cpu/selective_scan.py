"""The selective scan of Mamba-1 (Gu & Dao 2023, section 3), by blocks of time that stay in cache."""

from typing import NamedTuple

import numpy as np

from mamba_ops.cpu.activations import sigmoid, silu_derivative, softplus, softplus_derivative
from mamba_ops.cpu.workspace import Workspace, view
from mamba_ops.ops import Columns, Gradients, LayerState, Need, Parameters, Rows

_BLOCK = 16
_ELEMENTS = 8192
_PAIRS = 4


class Plan(NamedTuple):
    """How the work is cut: by shape, never by the number of threads."""

    groups: int
    group: int
    tiles: int
    width: int
    blocks: int


class Saved(NamedTuple):
    """What the backward needs: references to the inputs, and the state before each block."""

    rows: Rows
    u: np.ndarray
    delta: np.ndarray
    B: Columns
    C: Columns
    z: Columns
    params: Parameters
    A_log: str
    D: str
    delta_bias: str
    starts: np.ndarray
    plan: Plan


def _plan(batch: int, seq_len: int, d_inner: int, d_state: int) -> Plan:
    tiles = -(-d_inner * d_state // _ELEMENTS)
    width = -(-d_inner // tiles)
    width = -(-width // 16) * 16 if tiles > 1 else width
    group = max(1, min(batch, _ELEMENTS // (width * d_state)))
    return Plan(-(-batch // group), group, -(-d_inner // width), width, -(-seq_len // _BLOCK))


def selective_scan_forward(
    ops: Workspace,
    rows: Rows,
    u: np.ndarray,
    delta: np.ndarray,
    B: Columns,
    C: Columns,
    z: Columns,
    params: Parameters,
    A_log: str,
    D: str,
    delta_bias: str,
    state: LayerState | None = None,
) -> tuple[np.ndarray, Saved]:
    """y_t = (C_t . h_t + D u_t) SiLU(z_t), h_t = a_t h_{t-1} + softplus(delta_t + delta_bias) B_t u_t.

    a_t = exp(-softplus(delta_t + delta_bias) exp(A_log)), and 0 where positions_t = 0.
    u, delta, z, y: (T, d_inner); B, C: (T, d_state); A_log: (d_inner, d_state); D, delta_bias: (d_inner,).
    With a state, h_0 comes from it and the last h is left in it.
    """
    batch, seq_len, d_inner, d_state = rows.batch, rows.seq_len, u.shape[1], B.width
    plan = _plan(batch, seq_len, d_inner, d_state)
    y, soft = ops.empty(*u.shape), ops.empty(*u.shape)
    starts = ops.empty(batch * plan.blocks * d_state, d_inner).reshape(batch, plan.blocks, d_state, d_inner)
    full = (batch, seq_len, -1)
    u3, delta3, z3, y3, soft3 = (x.reshape(full) for x in (u, delta, view(z), y, soft))
    B3, C3 = view(B).reshape(full), view(C).reshape(full)
    reset = rows.positions.reshape(batch, seq_len) == 0
    A = -np.exp(params[A_log].T)

    def task(index: int) -> None:
        gi, ti = divmod(index, plan.tiles)
        g, c = _range(gi, plan.group, batch), _range(ti, plan.width, d_inner)
        size, width = g.stop - g.start, c.stop - c.start
        bias, skip, rates = params[delta_bias][c], params[D][c], np.ascontiguousarray(A[:, c])
        state_shape = (size, _BLOCK, d_state, width)
        decay, h = _scratch(ops, "scan_decay", plan, state_shape), _scratch(ops, "scan_h", plan, state_shape)
        carry = _scratch(ops, "scan_carry", plan, (size, d_state, width))
        product = _scratch(ops, "scan_product", plan, (size, d_state, width))
        if state is None:
            carry[...] = 0.0
        else:
            carry[...] = state.scan[g, :, c]
        for block in range(plan.blocks):
            t = _range(block, _BLOCK, seq_len)
            n = t.stop - t.start
            starts[g, block, :, c] = carry
            dt = softplus(delta3[g, t, c] + bias)
            soft3[g, t, c] = dt
            _states(dt, u3[g, t, c], B3[g, t], rates, reset[g, t], carry, decay[:, :n], h[:, :n], product)
            out = np.matmul(C3[g, t, None], h[:, :n])[:, :, 0]
            out += skip * u3[g, t, c]
            gate = z3[g, t, c]
            np.multiply(out, sigmoid(gate) * gate, out=y3[g, t, c])
            carry[...] = h[:, n - 1]
        if state is not None:
            state.scan[g, :, c] = carry

    ops.parallel(task, plan.groups * plan.tiles)
    return y, Saved(rows, u, soft, B, C, z, params, A_log, D, delta_bias, starts, plan)


def selective_scan_backward(
    ops: Workspace,
    dy: np.ndarray,
    saved: Saved,
    grads: Gradients,
    need: Need,
    du: np.ndarray,
    ddelta: np.ndarray,
    dB: Columns,
    dC: Columns,
    dz: Columns,
) -> None:
    """Write du, ddelta, dB, dC and dz; ddelta is the gradient of delta before bias and softplus."""
    rows, plan, params = saved.rows, saved.plan, saved.params
    batch, seq_len, d_inner, d_state = rows.batch, rows.seq_len, saved.u.shape[1], saved.B.width
    full = (batch, seq_len, -1)
    u3, soft3, z3, dy3 = (x.reshape(full) for x in (saved.u, saved.delta, view(saved.z), dy))
    B3, C3 = view(saved.B).reshape(full), view(saved.C).reshape(full)
    du3, ddelta3, dz3 = (x.reshape(full) for x in (du, ddelta, view(dz)))
    reset = rows.positions.reshape(batch, seq_len) == 0
    A = -np.exp(params[saved.A_log].T)
    dB4, dC4 = (np.empty((plan.tiles, batch, seq_len, d_state), ops.dtype) for _ in range(2))
    dA_log = np.zeros((batch, d_state, d_inner), ops.dtype)
    dD, dbias = (np.zeros((batch, d_inner), ops.dtype) for _ in range(2))

    def task(index: int) -> None:
        gi, ti = divmod(index, plan.tiles)
        g, c = _range(gi, plan.group, batch), _range(ti, plan.width, d_inner)
        size, width = g.stop - g.start, c.stop - c.start
        skip, rates = params[saved.D][c], np.ascontiguousarray(A[:, c])
        state_shape = (size, _BLOCK, d_state, width)
        decay, h, dh = (_scratch(ops, "scan_" + k, plan, state_shape) for k in ("decay", "h", "dh"))
        carry = _scratch(ops, "scan_carry", plan, (size, d_state, width))
        product = _scratch(ops, "scan_product", plan, (size, d_state, width))
        later = np.zeros((size, d_state, width), ops.dtype)
        for block in reversed(range(plan.blocks)):
            t = _range(block, _BLOCK, seq_len)
            n = t.stop - t.start
            a, hs, e = decay[:, :n], h[:, :n], dh[:, :n]
            carry[...] = saved.starts[g, block, :, c]
            dt, x = soft3[g, t, c], u3[g, t, c]
            exponent = dt[:, :, None] * rates
            _states(dt, x, B3[g, t], rates, reset[g, t], carry, a, hs, product)
            out = np.matmul(C3[g, t, None], hs)[:, :, 0]
            out += skip * x
            gate, upstream = z3[g, t, c], dy3[g, t, c]
            s = sigmoid(gate)
            np.multiply(out * upstream, silu_derivative(gate, s), out=dz3[g, t, c])
            dout = upstream * gate * s
            _outer(C3[g, t], dout, e)
            for i in reversed(range(n)):
                e[:, i] += later
                np.multiply(a[:, i], e[:, i], out=a[:, i])
                later = a[:, i]
            later = later.copy()
            dC4[ti, g, t] = np.matmul(hs, dout[..., None])[..., 0]
            dB4[ti, g, t] = np.matmul(e, (dt * x)[..., None])[..., 0]
            dx = np.matmul(B3[g, t, None], e)[:, :, 0]
            a[:, 0] *= carry
            a[:, 1:] *= hs[:, :-1]
            a *= exponent
            dA_log[g, :, c] += a.sum(axis=1)
            slope = softplus_derivative(dt)
            du3[g, t, c] = dout * skip + dx * dt
            part = (dx * x + a.sum(axis=2) / np.maximum(dt, np.finfo(ops.dtype).tiny)) * slope
            ddelta3[g, t, c] = part
            dbias[g, c] += part.sum(axis=1)
            dD[g, c] += (dout * x).sum(axis=1)

    ops.parallel(task, plan.groups * plan.tiles)
    view(dB).reshape(full)[...] = dB4.sum(axis=0)
    view(dC).reshape(full)[...] = dC4.sum(axis=0)
    for name, value in ((saved.A_log, dA_log), (saved.D, dD), (saved.delta_bias, dbias)):
        if name in need:
            buffer, add = grads.take(name)
            total = value.sum(axis=0)
            buffer[...] = buffer + total.T if add else total.T


def _states(dt, u, B, rates, reset, carry, decay, h, product) -> None:
    """Write the decays and the states of a block. dt, u: (group, n, width); decay, h: (group, n, d_state, width)."""
    np.multiply(dt[:, :, None], rates, out=decay)
    np.exp(decay, out=decay)
    decay[np.nonzero(reset)] = 0.0
    _outer(B, dt * u, h)
    before = carry
    for i in range(dt.shape[1]):
        np.multiply(decay[:, i], before, out=product)
        h[:, i] += product
        before = h[:, i]


def _outer(rows: np.ndarray, columns: np.ndarray, out: np.ndarray) -> None:
    """out[g, t, n, c] = rows[g, t, n] columns[g, t, c]."""
    np.multiply(rows[..., None], columns[..., None, :], out=out)


def _range(index: int, size: int, stop: int) -> slice:
    return slice(index * size, min((index + 1) * size, stop))


def _scratch(ops: Workspace, name: str, plan: Plan, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, ops.dtype)
