"""Depthwise causal convolution over time, with bias and SiLU."""

from typing import NamedTuple

import numpy as np

from mamba_ops.cpu.activations import sigmoid, silu_derivative
from mamba_ops.cpu.workspace import Workspace, view
from mamba_ops.ops import Columns, Gradients, LayerState, Need, Parameters, Rows

_ROWS = 256
_WIDTH = 128


class Saved(NamedTuple):
    """What the backward needs: references to the inputs, and the sums before SiLU."""

    rows: Rows
    x: Columns
    params: Parameters
    weight: str
    bias: str | None
    sums: np.ndarray
    before: np.ndarray | None


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
    width = x.width
    shape = (rows.batch, rows.seq_len, width)
    inputs = view(x).reshape(shape)
    positions = rows.positions.reshape(shape[:2])
    sums = ops.empty(rows.batch * rows.seq_len, width)
    y = ops.empty(rows.batch * rows.seq_len, width)
    before = None if state is None else state.conv.copy()
    taps = np.ascontiguousarray(params[weight][:, 0, ::-1].T)
    tiles = -(-width // _WIDTH)

    def task(index: int) -> None:
        b, tile = divmod(index, tiles)
        columns = slice(tile * _WIDTH, min((tile + 1) * _WIDTH, width))
        for start in range(0, rows.seq_len, _ROWS):
            out = sums.reshape(shape)[b, start : start + _ROWS, columns]
            np.multiply(inputs[b, start : start + _ROWS, columns], taps[0, columns], out=out)
            if bias is not None:
                out += params[bias][columns]
            for lag in range(1, len(taps)):
                for first, source, places in _lagged(inputs, before, positions, b, start, lag, columns):
                    product = source * taps[lag, columns]
                    product[places] = 0.0
                    out[first : first + len(product)] += product
            out_y = y.reshape(shape)[b, start : start + _ROWS, columns]
            sigmoid(out, out_y)
            out_y *= out

    ops.parallel(task, rows.batch * tiles)
    if state is not None:
        _carry(inputs, state.conv)
    return y, Saved(rows, x, params, weight, bias, sums, before)


def causal_conv1d_backward(
    ops: Workspace, dy: np.ndarray, saved: Saved, grads: Gradients, need: Need, dx: Columns
) -> None:
    """Write dx, and add the gradients of weight and bias."""
    rows, width = saved.rows, saved.x.width
    shape = (rows.batch, rows.seq_len, width)
    inputs, sums, dy3 = view(saved.x).reshape(shape), saved.sums.reshape(shape), dy.reshape(shape)
    dx3, positions = view(dx).reshape(shape), rows.positions.reshape(shape[:2])
    taps = np.ascontiguousarray(saved.params[saved.weight][:, 0, ::-1].T)
    tiles = -(-width // _WIDTH)
    dtaps = np.zeros((rows.batch, len(taps), width), ops.dtype)
    dbias = np.zeros((rows.batch, width), ops.dtype)

    def task(index: int) -> None:
        b, tile = divmod(index, tiles)
        columns = slice(tile * _WIDTH, min((tile + 1) * _WIDTH, width))
        dx3[b, :, columns] = 0.0
        for start in range(0, rows.seq_len, _ROWS):
            block = sums[b, start : start + _ROWS, columns]
            dsums = silu_derivative(block, sigmoid(block))
            dsums *= dy3[b, start : start + _ROWS, columns]
            dbias[b, columns] += dsums.sum(axis=0)
            dtaps[b, 0, columns] += (dsums * inputs[b, start : start + _ROWS, columns]).sum(axis=0)
            dx3[b, start : start + _ROWS, columns] += dsums * taps[0, columns]
            for lag in range(1, len(taps)):
                for first, source, places in _lagged(inputs, saved.before, positions, b, start, lag, columns):
                    part = dsums[first : first + len(source)].copy()
                    part[places] = 0.0
                    dtaps[b, lag, columns] += (part * source).sum(axis=0)
                    at = start + first - lag
                    if at >= 0:
                        dx3[b, at : at + len(part), columns] += part * taps[lag, columns]

    ops.parallel(task, rows.batch * tiles)
    if saved.weight in need:
        _add(grads, saved.weight, dtaps.sum(axis=0)[::-1].T[:, None, :])
    if saved.bias is not None and saved.bias in need:
        _add(grads, saved.bias, dbias.sum(axis=0))


def _lagged(inputs, before, positions, b, start, lag, columns):
    """Yield (first row in the block, inputs that lie `lag` before, rows of these that do not count)."""
    stop = min(start + _ROWS, inputs.shape[1])
    if start < lag and before is not None:
        last = min(lag, stop)
        held = before.shape[1]
        yield (
            0,
            before[b, held - lag + start : held - lag + last, columns],
            positions[b, start:last] < lag,
        )
    first = max(start, lag)
    if first < stop:
        yield (
            first - start,
            inputs[b, first - lag : stop - lag, columns],
            positions[b, first:stop] < lag,
        )


def _carry(inputs: np.ndarray, held: np.ndarray) -> None:
    count, seq_len = held.shape[1], inputs.shape[1]
    if seq_len < count:
        held[:, : count - seq_len] = held[:, seq_len:].copy()
    if count:
        held[:, max(count - seq_len, 0) :] = inputs[:, max(seq_len - count, 0) :]


def _add(grads: Gradients, name: str, value: np.ndarray) -> None:
    buffer, add = grads.take(name)
    if add:
        buffer += value
    else:
        buffer[...] = value
