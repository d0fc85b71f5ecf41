"""The selective scan of Mamba-1 (Gu & Dao 2023, section 3), by blocks of time that stay in cache."""

from typing import NamedTuple

import numpy as np

from mamba_ops.cpu.activations import sigmoid, silu_derivative, softplus, softplus_derivative
from mamba_ops.cpu.scan_block import Block, adjoints, decay_gradients, open_block, states
from mamba_ops.cpu.scan_plan import Plan, blocks, make_plan, small
from mamba_ops.cpu.workspace import Rows, Workspace
from mamba_ops.ops import Columns, Gradients, LayerState, Need, Parameters


class Saved(NamedTuple):
    """What the backward needs, or a task's part of it.

    u, soft, z: (batch, seq_len, d_inner), soft being softplus(delta + bias); B, C: (batch, seq_len, d_state);
    reset: (batch, seq_len) bool; A: (d_state, d_inner); D: (d_inner,);
    starts: (batch, blocks, d_state, d_inner), the state before each block; names: of A_log, D and delta_bias.
    """

    plan: Plan
    u: np.ndarray
    soft: np.ndarray
    B: np.ndarray
    C: np.ndarray
    z: np.ndarray
    reset: np.ndarray
    A: np.ndarray
    D: np.ndarray
    starts: np.ndarray
    names: tuple[str, str, str]

    def part(self, g: slice, c: slice) -> "Saved":
        """Return the views that belong to some batch elements and channels."""
        u, soft, z = (x[g, :, c] for x in (self.u, self.soft, self.z))
        B, C, reset, starts = self.B[g], self.C[g], self.reset[g], self.starts[g, :, :, c]
        return Saved(self.plan, u, soft, B, C, z, reset, self.A[:, c], self.D[c], starts, self.names)


class Gradient(NamedTuple):
    """What the backward reads and writes besides, or a task's part of it: no two tasks write to one element.

    dy, du, ddelta, dz: (batch, seq_len, d_inner); dB, dC: (tiles, batch, seq_len, d_state);
    dA_log: (batch, d_state, d_inner); dD, dbias: (batch, d_inner).
    """

    dy: np.ndarray
    du: np.ndarray
    ddelta: np.ndarray
    dz: np.ndarray
    dB: np.ndarray
    dC: np.ndarray
    dA_log: np.ndarray
    dD: np.ndarray
    dbias: np.ndarray

    def part(self, tile: int, g: slice, c: slice) -> "Gradient":
        """Return the views that belong to some batch elements and channels; dB, dC: (batch, seq_len, d_state)."""
        dy, du, ddelta, dz = (x[g, :, c] for x in (self.dy, self.du, self.ddelta, self.dz))
        dB, dC = self.dB[tile, g], self.dC[tile, g]
        return Gradient(dy, du, ddelta, dz, dB, dC, self.dA_log[g, :, c], self.dD[g, c], self.dbias[g, c])


class Chunk(NamedTuple):
    """Scratch of the backward for a chunk of time, each (group, steps, width).

    x = soft u; dout: gradient of out = C . h; dx: of x; decay: sum over states of dlog a log a; the others spare.
    """

    x: np.ndarray
    out: np.ndarray
    dout: np.ndarray
    dx: np.ndarray
    decay: np.ndarray
    slope: np.ndarray
    spare: np.ndarray


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
    plan = make_plan(rows.batch, rows.seq_len, u.shape[1], B.width)
    y, soft = ops.empty(*u.shape), ops.empty(*u.shape)
    starts = ops.empty(plan.batch * plan.blocks * plan.d_state, plan.d_inner)
    saved = Saved(
        plan,
        plan.by_row(u),
        plan.by_row(soft),
        plan.by_row(B),
        plan.by_row(C),
        plan.by_row(z),
        rows.positions.reshape(plan.batch, plan.seq_len) == 0,
        -np.exp(params[A_log].T),
        params[D],
        starts.reshape(plan.batch, plan.blocks, plan.d_state, plan.d_inner),
        (A_log, D, delta_bias),
    )
    inputs, outputs, bias = plan.by_row(delta), plan.by_row(y), params[delta_bias]

    def task(index: int) -> None:
        _, g, c = plan.piece(index)
        part = saved.part(g, c)
        block = open_block(ops, plan, part.A, g.stop - g.start, backward=False)
        block.start[...] = 0.0 if state is None else state.scan[g, :, c]
        for t in plan.chunks():
            x, dt, out, gate = small(ops, plan, 4, part.u[:, t].shape)
            u, z = part.u[:, t], part.z[:, t]
            np.add(inputs[g, t, c], bias[c], out=x)
            softplus(x, out=dt, spare=x)
            part.soft[:, t] = dt
            np.multiply(dt, u, out=x)
            _forward_blocks(block, part, t, dt, x, out)
            np.multiply(u, part.D, out=x)
            np.add(out, x, out=out)
            sigmoid(z, out=gate)
            np.multiply(gate, z, out=gate)
            np.multiply(out, gate, out=outputs[g, t, c])
        if state is not None:
            state.scan[g, :, c] = block.start

    ops.run(task, plan.tasks)
    return y, saved


def _forward_blocks(block: Block, part: Saved, t: slice, dt: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """out_t = C_t . h_t over a chunk. dt, x, out: (group, steps, width)."""
    for index, b, r in blocks(t):
        part.starts[:, index] = block.start
        last = states(block, dt[:, r], x[:, r], part.B[:, b], part.reset[:, b])
        np.matmul(part.C[:, b, None], block.h[:, : b.stop - b.start], out=out[:, r, None])
        block.start[...] = last


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
    """Write du, ddelta, dB, dC and dz; ddelta is the gradient of delta before bias and softplus.

    Adds the gradients of A_log, D and delta_bias for names in `need`. Shapes as in the forward.
    """
    plan = saved.plan
    batch, seq_len, d_inner, d_state = plan.batch, plan.seq_len, plan.d_inner, plan.d_state
    with ops.scope():
        dB_parts, dC_parts = (ops.empty(plan.tiles * batch * seq_len, d_state) for _ in range(2))
        whole = Gradient(
            plan.by_row(dy),
            plan.by_row(du),
            plan.by_row(ddelta),
            plan.by_row(dz),
            dB_parts.reshape(plan.tiles, batch, seq_len, d_state),
            dC_parts.reshape(plan.tiles, batch, seq_len, d_state),
            ops.empty(batch * d_state, d_inner).reshape(batch, d_state, d_inner),
            ops.empty(batch, d_inner),
            ops.empty(batch, d_inner),
        )
        wanted = [name in need for name in saved.names]

        def task(index: int) -> None:
            tile, g, c = plan.piece(index)
            _backward_task(ops, saved.part(g, c), whole.part(tile, g, c), wanted)

        ops.run(task, plan.tasks)
        np.sum(whole.dB, axis=0, out=plan.by_row(dB))
        np.sum(whole.dC, axis=0, out=plan.by_row(dC))
        for name, sums in zip(saved.names, (whole.dA_log, whole.dD, whole.dbias), strict=True):
            if name in need:
                gradient, add = grads.take(name)
                total = sums.sum(axis=0).T
                gradient[...] = gradient + total if add else total


def _backward_task(ops: Workspace, part: Saved, gradient: Gradient, wanted: list[bool]) -> None:
    plan = part.plan
    block = open_block(ops, plan, part.A, len(part.u), backward=True)
    block.later[...] = block.total[...] = 0.0
    gradient.dD[...] = gradient.dbias[...] = 0.0
    for t in reversed(plan.chunks()):
        u, soft, z, dy = part.u[:, t], part.soft[:, t], part.z[:, t], gradient.dy[:, t]
        chunk = Chunk(*small(ops, plan, len(Chunk._fields), u.shape))
        np.multiply(soft, u, out=chunk.x)
        sigmoid(z, out=chunk.spare)
        silu_derivative(z, chunk.spare, out=chunk.slope)
        np.multiply(chunk.slope, dy, out=chunk.slope)
        np.multiply(dy, z, out=chunk.dout)
        np.multiply(chunk.dout, chunk.spare, out=chunk.dout)
        _backward_blocks(block, part, gradient, chunk, t, wanted[0])
        np.multiply(u, part.D, out=chunk.spare)
        np.add(chunk.out, chunk.spare, out=chunk.out)
        np.multiply(chunk.out, chunk.slope, out=gradient.dz[:, t])
        _delta_gradient(chunk, u, soft, out=gradient.ddelta[:, t])
        if wanted[2]:
            gradient.dbias[...] += chunk.decay.sum(axis=1)
        if wanted[1]:
            np.multiply(chunk.dout, u, out=chunk.spare)
            gradient.dD[...] += chunk.spare.sum(axis=1)
        np.multiply(chunk.dout, part.D, out=chunk.dout)
        np.multiply(chunk.dx, soft, out=chunk.dx)
        np.add(chunk.dout, chunk.dx, out=gradient.du[:, t])
    gradient.dA_log[...] = block.total


def _backward_blocks(block: Block, part: Saved, gradient: Gradient, chunk: Chunk, t: slice, A_wanted: bool) -> None:
    """Write dB, dC and the chunk's out, dx and decay, from its x and dout; add dA_log to `block.total`."""
    group, _, d_state, _ = block.h.shape
    for index, b, r in reversed(blocks(t)):
        n = b.stop - b.start
        x, dout, B, C = chunk.x[:, r], chunk.dout[:, r], part.B[:, b], part.C[:, b]
        block.start[...] = part.starts[:, index]
        states(block, part.soft[:, b], x, B, part.reset[:, b])
        h, dh = block.h[:, :n], block.dh[:, :n]
        np.matmul(C[:, :, None], h, out=chunk.out[:, r, None])
        np.matmul(h, dout[..., None], out=gradient.dC[:, b, :, None])
        adjoints(block, C, dout)
        np.matmul(dh, x[..., None], out=gradient.dB[:, b, :, None])
        np.matmul(B[:, :, None], dh, out=chunk.dx[:, r, None])
        decay = decay_gradients(block, n)
        np.matmul(block.ones[:, :d_state], decay, out=chunk.decay[:, r, None])
        if A_wanted:
            sums = block.product.reshape(group, 1, -1)
            np.matmul(block.ones[:, :n], decay.reshape(group, n, -1), out=sums)
            np.add(block.total, block.product, out=block.total)


def _delta_gradient(chunk: Chunk, u: np.ndarray, soft: np.ndarray, out: np.ndarray) -> None:
    """ddelta = (decay / soft + dx u) softplus'(delta + bias), in place of decay and in `out`."""
    # where soft underflows to 0, so do decay and the derivative: the bound only keeps 0 / 0 away
    np.maximum(soft, np.finfo(soft.dtype).tiny, out=chunk.spare)
    np.divide(chunk.decay, chunk.spare, out=chunk.decay)
    np.multiply(chunk.dx, u, out=chunk.spare)
    np.add(chunk.decay, chunk.spare, out=chunk.decay)
    softplus_derivative(soft, out=chunk.spare)
    np.multiply(chunk.decay, chunk.spare, out=chunk.decay)
    out[...] = chunk.decay
