"""Low-rank adapters on the GPU (Hu et al. 2021): the sum of a small weight and its adapter, and dropout's masks."""

import numpy as np

from mamba_ops.dropout import key_words, threshold
from mamba_ops.gpu.device import grid
from mamba_ops.gpu.products import gemm
from mamba_ops.gpu.workspace import DeviceArray, GpuWorkspace, Range, range_of
from mamba_ops.ops import Adapter, Dropout, Gradients, Need, Parameters

LANES = 256


def low_rank_forward(ops: GpuWorkspace, params: Parameters, weight: str, adapter: Adapter) -> DeviceArray:
    """Return weight + scale B A in the weight's shape, (out, ...). A: (r, in), B: (out, r)."""
    w, A, B = params[weight], params[adapter.A], params[adapter.B]
    out = ops.empty_like(w)
    rows, rank, width = w.shape[0], A.shape[0], w.width
    gemm(
        ops,
        "nn",
        range_of(B),
        range_of(A),
        Range(out.buffer, width, 0, width),
        rows,
        width,
        rank,
        residual=Range(w.buffer, width, 0, width),
        scale=adapter.scale,
    )
    return out


def low_rank_backward(
    ops: GpuWorkspace, dweight: DeviceArray, params: Parameters, adapter: Adapter, grads: Gradients, need: Need
) -> None:
    """dA += scale B^T dweight; dB += scale dweight A^T. dweight: (out, ...), (out, in) when flattened."""
    A, B = params[adapter.A], params[adapter.B]
    rows, rank, width = dweight.shape[0], A.shape[0], dweight.width
    source = Range(dweight.buffer, width, 0, width)
    if adapter.A in need:
        gradient, add = grads.take(adapter.A)
        gemm(ops, "tn", range_of(B), source, range_of(gradient), rank, width, rows, add=add, scale=adapter.scale)
    if adapter.B in need:
        gradient, add = grads.take(adapter.B)
        gemm(ops, "nt", source, range_of(A), range_of(gradient), rows, rank, width, add=add, scale=adapter.scale)


def dropped(ops: GpuWorkspace, x: Range, rows: int, weight: str, dropout: Dropout | None) -> Range:
    """Return drop(x): (rows, x.width), as `dropout.py` says; a copy in the open scope, or x itself without dropout."""
    if dropout is None:
        return x
    out = range_of(ops.empty(rows, x.width))
    _mask(ops, "forward", x, out, rows, weight, dropout, x)
    return out


def add_dropped(ops: GpuWorkspace, x: Range, rows: int, weight: str, dropout: Dropout, out: Range) -> None:
    """out += drop(x). x: (rows, columns), rows without a gap; out: (rows, columns)."""
    _mask(ops, "backward", x, out, rows, weight, dropout, out)


def _mask(
    ops: GpuWorkspace, entry: str, x: Range, out: Range, rows: int, weight: str, dropout: Dropout, place: Range
) -> None:
    """Run an entry point. place: the one of x and out whose rows may have gaps."""
    device = ops.device
    # what changes every step or batch lies in a buffer of the weight's own, so that its bind groups stay
    words = ops.values(("dropout", weight), *key_words(dropout, weight), dropout.first % (1 << 32), dtype=np.uint32)
    rate = threshold(dropout.rate), 1 / (1 - dropout.rate)
    device.dispatch(
        device.pipeline("low_rank", entry, LANES=LANES),
        device.uniform("5If", rows, x.width, place.stride, place.first, *rate),
        (words, x.buffer, out.buffer),
        grid(-(-rows * x.width // LANES)),
    )
