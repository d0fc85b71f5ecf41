"""Token embedding on the GPU, by row parts of the weight, with a low-rank adapter of it."""

from mamba_ops.gpu.device import grid
from mamba_ops.gpu.products import gemm
from mamba_ops.gpu.workspace import DeviceArray, DeviceRows, GpuWorkspace, Part, range_of
from mamba_ops.ops import Adapter, Gradients, Need, Parameters

COLUMNS = 32


def embedding_forward(
    ops: GpuWorkspace,
    rows: DeviceRows,
    params: Parameters,
    weight: str,
    out: DeviceArray,
    adapter: Adapter | None = None,
) -> None:
    """out_t = weight[ids_t] + scale B A[:, ids_t].

    weight: (vocab_size, d_model), out: (T, d_model), A: (r, vocab_size), B: (d_model, r). Raises ValueError when the
    rows hold an id that the weight has no row for.
    """
    w = params[weight]
    vocab_size, d_model = w.shape
    if rows.largest >= vocab_size:
        raise ValueError(f"{weight} has {vocab_size} rows, the batch holds the id or target {rows.largest}")
    for part in w.parts:
        _gather(ops, rows, part, vocab_size, (d_model, 1), out)
    if adapter is None:
        return
    A, B = params[adapter.A], params[adapter.B]
    T, rank = out.shape[0], A.shape[0]
    with ops.scope():
        g = _columns_of_ids(ops, rows, A)
        gemm(ops, "nt", range_of(g), range_of(B), range_of(out), T, d_model, rank, add=True, scale=adapter.scale)


def embedding_backward(
    ops: GpuWorkspace,
    dy: DeviceArray,
    rows: DeviceRows,
    params: Parameters,
    weight: str,
    grads: Gradients,
    need: Need,
    adapter: Adapter | None = None,
) -> None:
    """dweight[i] += sum of dy_t over the t with ids_t = i; repeated ids add up, in a fixed order.

    With an adapter, dA[:, i] += scale B^T times that sum, and dB += scale sum_t dy_t A[:, ids_t]^T.
    """
    if weight in need:
        gradient, add = grads.take(weight)
        if not add:
            ops.zero(gradient)
        for part in gradient.parts:
            _scatter(ops, dy, rows, part, gradient.shape[0], (gradient.width, 1))
    if adapter is None:
        return
    A, B = params[adapter.A], params[adapter.B]
    (T, d_model), (rank, vocab_size) = dy.shape, A.shape
    with ops.scope():
        if adapter.A in need:
            gradient, add = grads.take(adapter.A)
            if not add:
                ops.zero(gradient)
            e = ops.empty(T, rank)
            gemm(ops, "nn", range_of(dy), range_of(B), range_of(e), T, rank, d_model, scale=adapter.scale)
            _scatter(ops, e, rows, Part(0, vocab_size, gradient.buffer), vocab_size, (1, vocab_size))
        if adapter.B in need:
            gradient, add = grads.take(adapter.B)
            g, target = range_of(_columns_of_ids(ops, rows, A)), range_of(gradient)
            gemm(ops, "tn", range_of(dy), g, target, d_model, rank, T, add=add, scale=adapter.scale)


def _columns_of_ids(ops: GpuWorkspace, rows: DeviceRows, A: DeviceArray) -> DeviceArray:
    """Return A[:, ids]^T: (T, r). A: (r, vocab_size)"""
    rank, vocab_size = A.shape
    out = ops.empty(rows.batch * rows.seq_len, rank)
    _gather(ops, rows, Part(0, vocab_size, A.buffer), vocab_size, (1, vocab_size), out)
    return out


def _gather(
    ops: GpuWorkspace, rows: DeviceRows, part: Part, vocab_size: int, strides: tuple[int, int], out: DeviceArray
) -> None:
    """out_t = row ids_t of a table, where it lies in the part. strides: of the table's rows and columns."""
    T, columns = out.shape
    device = ops.device
    device.dispatch(
        device.pipeline("embedding", "forward"),
        device.uniform("7I", T, columns, vocab_size, part.first, part.rows, *strides),
        (rows.ids.buffer, part.buffer, out.buffer),
        grid(T),
    )


def _scatter(
    ops: GpuWorkspace, dy: DeviceArray, rows: DeviceRows, part: Part, vocab_size: int, strides: tuple[int, int]
) -> None:
    """Add to each row of a table that lies in the part the dy_t of its tokens. strides: as in `_gather`."""
    T, columns = dy.shape
    device = ops.device
    x, y, _ = grid(rows.runs)
    device.dispatch(
        device.pipeline("embedding", "backward"),
        device.uniform("7I", T, columns, vocab_size, part.first, part.rows, *strides),
        (dy.buffer, rows.order.buffer, rows.distinct.buffer, rows.starts.buffer, part.buffer),
        (-(-columns // COLUMNS), x, y),
    )
