"""Products with a weight on the GPU, and with the low-rank adapter of a frozen one."""

from mamba_ops.gpu.low_rank import add_dropped, dropped
from mamba_ops.gpu.products import column_sums, gemm
from mamba_ops.gpu.workspace import DeviceArray, GpuWorkspace, Part, Range, range_of
from mamba_ops.ops import Adapter, Columns, Gradients, Need, Parameters


def linear_forward(
    ops: GpuWorkspace,
    x: DeviceArray | Columns,
    params: Parameters,
    weight: str,
    bias: str | None = None,
    residual: DeviceArray | None = None,
    out: DeviceArray | None = None,
    adapter: Adapter | None = None,
) -> DeviceArray:
    """y = x weight^T + bias + residual + scale drop(x) A^T B^T.

    x: (T, in), weight: (out, in), bias: (out,), residual, y: (T, out), A: (r, in), B: (out, r).
    """
    w = params[weight]
    T = _rows(x)
    y = ops.empty(T, w.shape[0]) if out is None else out
    b = None if bias is None else Range(params[bias].buffer, 0, 0, w.shape[0])
    r = None if residual is None else range_of(residual)
    for part in w.parts:
        gemm(
            ops,
            "nt",
            range_of(x),
            Range(part.buffer, w.width, 0, w.width),
            _columns(range_of(y), part),
            T,
            part.rows,
            w.width,
            bias=None if b is None else _columns(b, part),
            residual=None if r is None else _columns(r, part),
        )
    if adapter is not None:
        _adapter_forward(ops, range_of(x), T, params, weight, adapter, range_of(y))
    return y


def linear_backward(
    ops: GpuWorkspace,
    dy: DeviceArray | Columns,
    x: DeviceArray | Columns,
    params: Parameters,
    weight: str,
    bias: str | None,
    grads: Gradients,
    need: Need,
    dx: DeviceArray | Columns,
    add: bool = False,
    adapter: Adapter | None = None,
) -> None:
    """dweight += dy^T x; dbias += column sums of dy; dx = dy weight, written or added. dy: (T, out), dx: (T, in).

    With an adapter, e = scale dy B: dA += e^T drop(x), dB += scale dy^T drop(x) A^T, and dx has also drop'(e A).
    """
    w = params[weight]
    T, width = _rows(x), w.width
    source = range_of(dy)
    if weight in need:
        gradient, accumulate = grads.take(weight)
        for part in gradient.parts:
            target = Range(part.buffer, width, 0, width)
            gemm(ops, "tn", _columns(source, part), range_of(x), target, part.rows, width, T, add=accumulate)
    if bias is not None and bias in need:
        gradient, accumulate = grads.take(bias)
        column_sums(ops, source, T, gradient, accumulate)
    for part in w.parts:
        rows = Range(part.buffer, width, 0, width)
        gemm(ops, "nn", _columns(source, part), rows, range_of(dx), T, width, part.rows, add=add or part.first > 0)
    if adapter is not None:
        _adapter_backward(ops, source, range_of(x), T, params, weight, adapter, grads, need, range_of(dx))


def _adapter_forward(
    ops: GpuWorkspace, x: Range, T: int, params: Parameters, weight: str, adapter: Adapter, y: Range
) -> None:
    """y += scale drop(x) A^T B^T."""
    A, B = params[adapter.A], params[adapter.B]
    (rank, width), columns = A.shape, B.shape[0]
    with ops.scope():
        h = range_of(ops.empty(T, rank))
        gemm(ops, "nt", dropped(ops, x, T, weight, adapter.dropout), range_of(A), h, T, rank, width)
        gemm(ops, "nt", h, range_of(B), y, T, columns, rank, add=True, scale=adapter.scale)


def _adapter_backward(
    ops: GpuWorkspace,
    dy: Range,
    x: Range,
    T: int,
    params: Parameters,
    weight: str,
    adapter: Adapter,
    grads: Gradients,
    need: Need,
    dx: Range,
) -> None:
    """dA += e^T drop(x), dB += scale dy^T h and dx += drop'(e A), with e = scale dy B and h = drop(x) A^T: (T, r)."""
    A, B = params[adapter.A], params[adapter.B]
    (rank, width), columns = A.shape, B.shape[0]
    with ops.scope():
        e, h = range_of(ops.empty(T, rank)), range_of(ops.empty(T, rank))
        gemm(ops, "nn", dy, range_of(B), e, T, rank, columns, scale=adapter.scale)
        with ops.scope():
            if adapter.A in need or adapter.B in need:
                x = dropped(ops, x, T, weight, adapter.dropout)
            if adapter.A in need:
                gradient, accumulate = grads.take(adapter.A)
                gemm(ops, "tn", e, x, range_of(gradient), rank, width, T, add=accumulate)
            if adapter.B in need:
                gradient, accumulate = grads.take(adapter.B)
                gemm(ops, "nt", x, range_of(A), h, T, rank, width)
                gemm(ops, "tn", dy, h, range_of(gradient), columns, rank, T, add=accumulate, scale=adapter.scale)
        if adapter.dropout is None:
            gemm(ops, "nn", e, range_of(A), dx, T, width, rank, add=True)
            return
        with ops.scope():
            product = range_of(ops.empty(T, width))
            gemm(ops, "nn", e, range_of(A), product, T, width, rank)
            add_dropped(ops, product, T, weight, adapter.dropout, dx)


def _rows(x: DeviceArray | Columns) -> int:
    return (x.array if isinstance(x, Columns) else x).shape[0]


def _columns(operand: Range, part: Part) -> Range:
    """Return the columns that stand for a part's rows."""
    return Range(operand.buffer, operand.stride, operand.first + part.first, part.rows)
