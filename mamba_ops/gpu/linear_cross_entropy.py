"""Output head and cross-entropy together on the GPU, by row blocks: the logits never exist whole."""

import math

import numpy as np

from mamba_ops.gpu.device import DeviceError, grid
from mamba_ops.gpu.products import gemm
from mamba_ops.gpu.workspace import DeviceArray, DeviceRows, GpuWorkspace, Part, Range, range_of
from mamba_ops.ops import Adapter, Gradients, Need, Parameters

BLOCK_BYTES = 1 << 28
TILE = 128
"""Rows of the products' largest tile."""

TERMS = 4096
NAN_BITS = 0x7FC00000


def linear_cross_entropy_forward(
    ops: GpuWorkspace,
    rows: DeviceRows,
    x: DeviceArray,
    params: Parameters,
    weight: str,
    grads: Gradients | None = None,
    need: Need = (),
    dx: DeviceArray | None = None,
    adapter: Adapter | None = None,
) -> DeviceArray:
    """losses_t = log(sum_v exp(x_t . weight_v)) - x_t . weight_target, 0 where the target is `IGNORED`.

    x: (T, d_model), weight: (vocab_size, d_model), losses: (T,). With grads the sum is differentiated on the
    way: p = softmax - onehot, dx = p weight is written, dweight += p^T x. An adapter is that of a tied embedding,
    A: (r, vocab_size), B: (d_model, r): the logits have also scale (x B) A. Raises ValueError when the rows hold a
    target that the weight has no row for, DeviceError when one row of logits is above the binding limit.
    """
    w = params[weight]
    T, vocab_size = x.shape[0], w.shape[0]
    if rows.largest >= vocab_size:
        raise ValueError(f"{weight} has {vocab_size} rows, the batch holds the id or target {rows.largest}")
    losses = DeviceArray((T,), ops.empty(T, 1).parts)
    stride = -(-vocab_size // 4) * 4  # so that rows are whole vec4s
    block = _block_rows(ops, T, vocab_size, stride)
    with ops.scope():
        logits = ops.empty(block, stride)
        for first in range(0, T, block):
            count = min(block, T - first)
            inputs = _rows_from(x, first)
            _logits(ops, inputs, w, logits, count)
            if adapter is not None:
                _adapter_logits(ops, inputs, params, adapter, logits, count)
            _softmax_losses(ops, rows, logits, losses, vocab_size, first, count, gradient=grads is not None)
            if grads is None:
                continue
            if weight in need:
                _weight_gradient(ops, logits, inputs, count, *grads.take(weight))
            dinputs = None if dx is None else _rows_from(dx, first)
            if dinputs is not None:
                _input_gradient(ops, logits, w, dinputs, count)
            if adapter is not None:
                _adapter_gradients(ops, logits, inputs, params, adapter, grads, need, dinputs, count)
    return losses


def total(ops: GpuWorkspace, losses: DeviceArray) -> float:
    """Return the sum of per-token losses: pairwise on the device, then in float64 on the host."""
    count = -(-losses.size // TERMS)
    device = ops.device
    with ops.scope():
        partials = ops.empty(count, 1)
        device.dispatch(
            device.pipeline("linear_cross_entropy", "forward_total", TERMS=TERMS),
            device.uniform("IIIIII", 0, 0, 0, losses.size, 0, 0),
            (losses.buffer, partials.buffer),
            (count, 1, 1),
        )
        sums = device.read(partials.buffer, np.float32, count)
    return math.fsum(sums.tolist()) if np.isfinite(sums).all() else math.nan


def _block_rows(ops: GpuWorkspace, T: int, vocab_size: int, stride: int) -> int:
    """Return how many rows of logits exist at once: no more than all, nor than BLOCK_BYTES and the binding take."""
    limit = ops.device.binding_limit
    fit = limit // (stride * 4)
    if fit == 0:
        raise DeviceError(
            f"a row of {vocab_size:,} logits: {stride * 4:,} bytes, above the binding limit of {limit:,} bytes"
        )
    most = max(1, min(T, fit, BLOCK_BYTES // (stride * 4)))
    even = -(-T // -(-T // most))
    return min(most, -(-even // TILE) * TILE)


def _rows_from(x: DeviceArray, row: int) -> Range:
    return Range(x.buffer, x.width, row * x.width, x.width)


def _columns_of(logits: DeviceArray, part: Part) -> Range:
    """The columns of the logits that belong to a part of the weight."""
    return Range(logits.buffer, logits.width, part.first, part.rows)


def _logits(ops: GpuWorkspace, x: Range, w: DeviceArray, logits: DeviceArray, count: int) -> None:
    """logits = x w^T. x: (count, d_model)."""
    for part in w.parts:
        rows = Range(part.buffer, w.width, 0, w.width)
        gemm(ops, "nt", x, rows, _columns_of(logits, part), count, part.rows, w.width, label="logits")


def _softmax_losses(
    ops: GpuWorkspace,
    rows: DeviceRows,
    logits: DeviceArray,
    losses: DeviceArray,
    vocab_size: int,
    first: int,
    count: int,
    gradient: bool,
) -> None:
    """Write the losses of the tokens from `first` on, and turn their logits into softmax - onehot if asked to."""
    device = ops.device
    device.dispatch(
        device.pipeline("linear_cross_entropy", "forward", TERMS=TERMS),
        device.uniform("IIIIII", vocab_size, logits.width // 4, first, count, int(gradient), NAN_BITS),
        (rows.targets.buffer, logits.buffer, losses.buffer),
        grid(count),
    )


def _weight_gradient(ops: GpuWorkspace, p: DeviceArray, x: Range, count: int, gradient: DeviceArray, add: bool) -> None:
    """gradient = p^T x, written or added. x: (count, d_model)."""
    width = gradient.width
    for part in gradient.parts:
        rows = Range(part.buffer, width, 0, width)
        gemm(ops, "tn", _columns_of(p, part), x, rows, part.rows, width, count, add=add, label="logits' dweight")


def _input_gradient(ops: GpuWorkspace, p: DeviceArray, w: DeviceArray, dx: Range, count: int) -> None:
    """dx = p w, summed over the parts. dx: (count, d_model)."""
    for part in w.parts:
        rows = Range(part.buffer, w.width, 0, w.width)
        add = part.first > 0
        gemm(ops, "nn", _columns_of(p, part), rows, dx, count, w.width, part.rows, add=add, label="logits' dx")


def _adapter_logits(
    ops: GpuWorkspace, x: Range, params: Parameters, adapter: Adapter, logits: DeviceArray, count: int
) -> None:
    """logits += scale (x B) A. x: (count, d_model). A is one part, whatever the parts of the weight."""
    A = params[adapter.A]
    rank, vocab_size = A.shape
    with ops.scope():
        h = _projected(ops, x, params[adapter.B], count)
        to = _rows_from(logits, 0)
        gemm(ops, "nn", h, range_of(A), to, count, vocab_size, rank, add=True, scale=adapter.scale, label="logits")


def _adapter_gradients(
    ops: GpuWorkspace,
    p: DeviceArray,
    x: Range,
    params: Parameters,
    adapter: Adapter,
    grads: Gradients,
    need: Need,
    dx: Range | None,
    count: int,
) -> None:
    """dA += scale (x B)^T p, dB += x^T q and dx += q B^T, with q = scale p A^T: (count, r). x, dx: (count, d_model)."""
    A, B = params[adapter.A], params[adapter.B]
    (rank, vocab_size), d_model, source = A.shape, B.shape[0], _rows_from(p, 0)
    with ops.scope():
        if adapter.A in need:
            gradient, add = grads.take(adapter.A)
            h, target = _projected(ops, x, B, count), range_of(gradient)
            gemm(
                ops, "tn", h, source, target, rank, vocab_size, count, add=add, scale=adapter.scale, label="logits' dA"
            )
        if adapter.B not in need and dx is None:
            return
        q = range_of(ops.empty(count, rank))
        gemm(ops, "nt", source, range_of(A), q, count, rank, vocab_size, scale=adapter.scale, label="logits' dB")
        if adapter.B in need:
            gradient, add = grads.take(adapter.B)
            gemm(ops, "tn", x, q, range_of(gradient), d_model, rank, count, add=add, label="logits' dB")
        if dx is not None:
            gemm(ops, "nt", q, range_of(B), dx, count, d_model, rank, add=True, label="logits' dx")


def _projected(ops: GpuWorkspace, x: Range, B: DeviceArray, count: int) -> Range:
    """Return x B: (count, r), in the open scope. x: (count, d_model)."""
    h = range_of(ops.empty(count, B.shape[1]))
    gemm(ops, "nn", x, range_of(B), h, count, B.shape[1], B.shape[0])
    return h
