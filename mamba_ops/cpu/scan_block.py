"""One block of steps of the selective scan, in scratch that stays in cache.

State arrays are (group, steps, d_state, width), channels last. All products that run over the whole block are
one call; only the recurrence itself goes step by step.
"""

from typing import NamedTuple

import numpy as np

from mamba_ops.cpu.scan_plan import BLOCK, Plan
from mamba_ops.cpu.workspace import Workspace

_STRIPE = 4


class Block(NamedTuple):
    """Scratch of one task, for blocks of up to `BLOCK` steps.

    rates: A, (d_state, width). decay, h, dh, exponent: (group, BLOCK, d_state, width); in a forward exponent is
    decay. start: the state before the block; later: the gradient that comes from the block after it; product,
    total: spare; all (group, d_state, width). stripes: (group, BLOCK / 4, 4 d_state, 4), block diagonal,
    and diagonal is its diagonal, (group, BLOCK / 4, 4, d_state). ones: a row.
    """

    rates: np.ndarray
    decay: np.ndarray
    exponent: np.ndarray
    h: np.ndarray
    dh: np.ndarray
    start: np.ndarray
    later: np.ndarray
    product: np.ndarray
    total: np.ndarray
    stripes: np.ndarray
    diagonal: np.ndarray
    ones: np.ndarray
    decay_steps: list[np.ndarray]
    h_steps: list[np.ndarray]
    dh_steps: list[np.ndarray]


def open_block(ops: Workspace, plan: Plan, A: np.ndarray, group: int, backward: bool) -> Block:
    """Return this thread's scratch for a task of so many batch elements. A: (d_state, width)."""
    d_state, width = A.shape
    capacity = plan.group * plan.width
    names = ("decay", "h", "dh", "exponent") if backward else ("decay", "h")
    shape = (group, BLOCK, d_state, width)
    steps = {name: ops.scratch(f"scan {name}", BLOCK * d_state * capacity, shape) for name in names}
    start, later, product, total = (
        ops.scratch(f"scan {name}", d_state * capacity, (group, d_state, width))
        for name in ("start", "later", "product", "total")
    )
    rates = ops.scratch("scan rates", d_state * capacity, (d_state, width))
    rates[...] = A
    decay, h = steps["decay"], steps["h"]
    dh, exponent = steps.get("dh", h), steps.get("exponent", decay)
    diagonal = np.zeros((group, BLOCK // _STRIPE, _STRIPE, d_state, _STRIPE), ops.dtype)
    stripes = diagonal.reshape(group, BLOCK // _STRIPE, _STRIPE * d_state, _STRIPE)
    ones = np.ones((1, max(BLOCK, d_state)), ops.dtype)
    return Block(
        rates, decay, exponent, h, dh, start, later, product, total,
        stripes, np.einsum("gsini->gsin", diagonal), ones,
        *([x[:, i] for i in range(min(BLOCK, plan.seq_len))] for x in (decay, h, dh)),
    )  # fmt: skip


def states(block: Block, dt: np.ndarray, x: np.ndarray, B: np.ndarray, reset: np.ndarray) -> np.ndarray:
    """h_t = a_t h_{t-1} + B_t x_t from `block.start`, a_t = exp(dt_t A), 0 at a reset; return the last h.

    dt, x: (group, n, width); B: (group, n, d_state); reset: (group, n) bool.
    """
    n = dt.shape[1]
    decay, exponent = block.decay[:, :n], block.exponent[:, :n]
    np.copyto(exponent, dt[:, :, None])
    np.multiply(exponent, block.rates, out=exponent)
    np.exp(exponent, out=decay)
    if reset.any():
        decay[np.nonzero(reset)] = 0.0
    _outer(block, B, x, block.h[:, :n])
    before, product = block.start, block.product
    for a, h in zip(block.decay_steps[:n], block.h_steps, strict=False):
        np.multiply(a, before, out=product)
        np.add(h, product, out=h)
        before = h
    return before


def adjoints(block: Block, C: np.ndarray, dout: np.ndarray) -> None:
    """dh_t = C_t dout_t + a_{t+1} dh_{t+1}, and a_t dh_t in place of a_t.

    a_{t+1} dh_{t+1} comes from `block.later` at the block's end, and is left there for the block before.
    dout: (group, n, width); C: (group, n, d_state).
    """
    n = dout.shape[1]
    _outer(block, C, dout, block.dh[:, :n])
    after = block.later
    for i in range(n - 1, -1, -1):
        dh, a = block.dh_steps[i], block.decay_steps[i]
        np.add(dh, after, out=dh)
        np.multiply(a, dh, out=a)
        after = a
    block.later[...] = after


def decay_gradients(block: Block, n: int) -> np.ndarray:
    """Return dlog a_t log a_t = a_t dh_t h_{t-1} dt_t A, after `adjoints`, in place of a_t dh_t."""
    decay = block.decay[:, :n]
    np.multiply(decay[:, 0], block.start, out=decay[:, 0])
    np.multiply(decay[:, 1:], block.h[:, : n - 1], out=decay[:, 1:])
    return np.multiply(decay, block.exponent[:, :n], out=decay)


def _outer(block: Block, rows: np.ndarray, columns: np.ndarray, out: np.ndarray) -> None:
    """out[g, t, n, c] = rows[g, t, n] columns[g, t, c].

    Four steps at a time are one product with a block diagonal matrix: exact, since what it adds are zeros, and
    faster than a broadcast multiplication.
    """
    group, steps, d_state, width = out.shape
    count = steps // _STRIPE
    whole = count * _STRIPE
    if count:
        block.diagonal[:, :count] = rows[:, :whole].reshape(group, count, _STRIPE, d_state)
        np.matmul(
            block.stripes[:, :count],
            columns[:, :whole].reshape(group, count, _STRIPE, width),
            out=out[:, :whole].reshape(group, count, _STRIPE * d_state, width),
        )
    if whole < steps:
        np.multiply(rows[:, whole:, :, None], columns[:, whole:, None, :], out=out[:, whole:])
