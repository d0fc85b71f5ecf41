"""Depthwise causal convolution over time with bias and SiLU, by row blocks that stay in cache."""

from typing import NamedTuple

import numpy as np

from mamba_ops.cpu.activations import sigmoid, silu_derivative
from mamba_ops.cpu.workspace import Rows, Workspace, view
from mamba_ops.ops import Columns, Gradients, LayerState, Need, Parameters

_ROWS = 64
_WIDTH = 512
_ELEMENTS = _ROWS * _WIDTH


class Saved(NamedTuple):
    """What the backward needs, or a task's part of it.

    x: (batch, seq_len, d_inner); before: (batch, d_conv - 1, d_inner), the inputs before the rows, none where
    these are zero; positions: (batch, seq_len); taps: (d_conv, d_inner) by lag; bias: (d_inner,);
    names: of weight and bias.
    """

    x: np.ndarray
    before: np.ndarray | None
    positions: np.ndarray
    taps: np.ndarray
    bias: np.ndarray | None
    names: tuple[str, str | None]

    @property
    def tiles(self) -> int:
        """Channel ranges; a task is one of them in one batch element."""
        return -(-self.x.shape[2] // _WIDTH)

    @property
    def block(self) -> int:
        """Rows in a block."""
        return max(_ROWS, _ELEMENTS // self.taps.shape[1] // _ROWS * _ROWS)

    def part(self, index: int) -> tuple[int, slice, "Saved"]:
        """Return a task's batch element, its channels and the views that belong to them, without batch axis."""
        b, tile = divmod(index, self.tiles)
        c = slice(tile * _WIDTH, min((tile + 1) * _WIDTH, self.x.shape[2]))
        before = None if self.before is None else self.before[b, :, c]
        bias = None if self.bias is None else self.bias[c]
        part = Saved(self.x[b, :, c], before, self.positions[b], self.taps[:, c], bias, self.names)
        return b, c, part


def causal_conv1d_forward(
    ops: Workspace,
    rows: Rows,
    x: Columns,
    params: Parameters,
    weight: str,
    bias: str | None,
    state: LayerState | None = None,
) -> tuple[np.ndarray, Saved]:
    """y_t = SiLU(bias + sum over k of weight[:, 0, d_conv - 1 - k] * x_{t-k} where positions_t >= k).

    x, y: (T, d_inner); weight: (d_inner, 1, d_conv). With a state, x before the row comes from it, and the
    last d_conv - 1 inputs are left in it.
    """
    shape = (rows.batch, rows.seq_len, x.width)
    saved = Saved(
        view(x).reshape(shape),
        None if state is None else state.conv.copy(),
        rows.positions.reshape(shape[:2]),
        np.ascontiguousarray(params[weight][:, 0, ::-1].T),
        None if bias is None else params[bias],
        (weight, bias),
    )
    y = ops.empty(rows.batch * rows.seq_len, x.width)

    def task(index: int) -> None:
        b, c, part = saved.part(index)
        out = y.reshape(shape)[b, :, c]
        for start in range(0, rows.seq_len, part.block):
            stop = min(start + part.block, rows.seq_len)
            _, sums, spare, _, _ = _sums(ops, part, start, stop)
            sigmoid(sums, out=spare)
            np.multiply(sums, spare, out=out[start:stop])

    ops.run(task, rows.batch * saved.tiles)
    if state is not None:
        _carry(saved.x, state.conv)
    return y, saved


def causal_conv1d_backward(
    ops: Workspace, dy: np.ndarray, saved: Saved, grads: Gradients, need: Need, dx: Columns
) -> None:
    """Write dx, and add the gradients of weight and bias for names in `need`. Shapes as in the forward.

    With s the sum before SiLU: ds = dy SiLU'(s); dx_t = sum over k of tap_k ds_{t+k} where positions_{t+k} >= k;
    dtap_k = sum over t of ds_t x_{t-k} where positions_t >= k; dbias = sum of ds.
    """
    batch, _, d_inner = shape = saved.x.shape
    d_conv = len(saved.taps)
    wanted = [name in need for name in saved.names]
    with ops.scope():
        dtaps = ops.empty(batch * d_conv, d_inner).reshape(batch, d_conv, d_inner)
        dbias = ops.empty(batch, d_inner)

        def task(index: int) -> None:
            b, c, part = saved.part(index)
            upstream, out = dy.reshape(shape)[b, :, c], view(dx).reshape(shape)[b, :, c]
            dtaps[b, :, c] = dbias[b, c] = 0.0
            for start in range(0, shape[1], part.block):
                _backward_rows(ops, part, start, upstream, out, dtaps[b, :, c], dbias[b, c], wanted)

        ops.run(task, batch * saved.tiles)
        totals = (dtaps.sum(axis=0)[::-1].T[:, None, :], dbias.sum(axis=0))
        for name, total, used in zip(saved.names, totals, wanted, strict=True):
            if name is not None and used:
                gradient, add = grads.take(name)
                gradient[...] = gradient + total if add else total


def _backward_rows(
    ops: Workspace,
    part: Saved,
    start: int,
    dy: np.ndarray,
    dx: np.ndarray,
    dtaps: np.ndarray,
    dbias: np.ndarray,
    wanted: list[bool],
) -> None:
    """Write a block of dx and add to dtaps and dbias. dy, dx: (seq_len, width); dtaps: (d_conv, width)."""
    seq_len, d_conv = len(part.x), len(part.taps)
    stop = min(start + part.block, seq_len)
    # the last rows of dx need ds from up to d_conv - 1 rows after them
    reach = min(stop + d_conv - 1, seq_len)
    n = stop - start
    padded, sums, spare, ds, total = _sums(ops, part, start, reach)
    sigmoid(sums, out=spare)
    silu_derivative(sums, spare, out=ds)
    np.multiply(ds, dy[start:reach], out=ds)
    np.multiply(ds[:n], part.taps[0], out=total[:n])
    if wanted[1]:
        dbias += ds[:n].sum(axis=0)
    for lag in range(d_conv):
        last = min(stop + lag, reach)
        if lag and start + lag < last:
            product = np.multiply(ds[lag : last - start], part.taps[lag], out=spare[: last - start - lag])
            _cut(product, part.positions[start + lag : last], lag)
            np.add(total[: len(product)], product, out=total[: len(product)])
        if wanted[0]:
            product = np.multiply(ds[:n], padded[d_conv - 1 - lag :][:n], out=spare[:n])
            _cut(product, part.positions[start:stop], lag)
            dtaps[lag] += product.sum(axis=0)
    dx[start:stop] = total[:n]


def _sums(ops: Workspace, part: Saved, start: int, stop: int) -> tuple[np.ndarray, ...]:
    """Return scratch: inputs from d_conv - 1 rows before `start` on, sums before SiLU, and three spare arrays."""
    n, reach, width = stop - start, len(part.taps) - 1, part.taps.shape[1]
    capacity = 5 * (part.block + 2 * reach) * width
    arrays = ops.scratch("conv", capacity, (5, n + reach, width))
    padded, (sums, spare, ds, total) = arrays[0], arrays[1:, :n]
    missing = max(reach - start, 0)
    padded[missing:] = part.x[max(start - reach, 0) : stop]
    if missing:
        padded[:missing] = 0.0 if part.before is None else part.before[start : start + missing]
    np.multiply(padded[reach:], part.taps[0], out=sums)
    for lag in range(1, reach + 1):
        product = np.multiply(padded[reach - lag :][:n], part.taps[lag], out=spare)
        _cut(product, part.positions[start:stop], lag)
        np.add(sums, product, out=sums)
    if part.bias is not None:
        np.add(sums, part.bias, out=sums)
    return padded, sums, spare, ds, total


def _cut(product: np.ndarray, positions: np.ndarray, lag: int) -> None:
    """Zero the rows whose input `lag` steps before lies in another document."""
    early = np.flatnonzero(positions < lag) if lag else ()
    if len(early):
        product[early] = 0.0


def _carry(x: np.ndarray, held: np.ndarray) -> None:
    """Move the last inputs into the state. x: (batch, seq_len, d_inner); held: (batch, d_conv - 1, d_inner)."""
    count, seq_len = held.shape[1], x.shape[1]
    if seq_len < count:
        held[:, : count - seq_len] = held[:, seq_len:].copy()
    if count:
        held[:, max(count - seq_len, 0) :] = x[:, max(seq_len - count, 0) :]
