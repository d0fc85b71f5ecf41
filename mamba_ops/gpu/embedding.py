"""Token embedding on the GPU, by row parts of the weight."""

from mamba_ops.gpu.device import grid
from mamba_ops.gpu.workspace import DeviceArray, DeviceRows, GpuWorkspace
from mamba_ops.ops import Gradients, Need, Parameters

COLUMNS = 32


def embedding_forward(ops: GpuWorkspace, rows: DeviceRows, params: Parameters, weight: str, out: DeviceArray) -> None:
    """out_t = weight[ids_t]. weight: (vocab_size, d_model), out: (T, d_model).

    Raises ValueError when the rows hold an id that the weight has no row for.
    """
    w = params[weight]
    vocab_size, d_model = w.shape
    if rows.largest >= vocab_size:
        raise ValueError(f"{weight} has {vocab_size} rows, the batch holds the id or target {rows.largest}")
    T = rows.batch * rows.seq_len
    device = ops.device
    for part in w.parts:
        device.dispatch(
            device.pipeline("embedding", "forward"),
            device.uniform("IIIII", T, d_model, vocab_size, part.first, part.rows),
            (rows.ids.buffer, part.buffer, out.buffer),
            grid(T),
        )


def embedding_backward(
    ops: GpuWorkspace, dy: DeviceArray, rows: DeviceRows, weight: str, grads: Gradients, need: Need
) -> None:
    """dweight[i] += sum of dy_t over the t with ids_t = i; repeated ids add up, in a fixed order."""
    if weight not in need:
        return
    gradient, add = grads.take(weight)
    vocab_size, d_model = gradient.shape
    T = rows.batch * rows.seq_len
    device = ops.device
    if not add:
        for part in gradient.parts:
            device.clear(part.buffer)
    x, y, _ = grid(rows.runs)
    for part in gradient.parts:
        device.dispatch(
            device.pipeline("embedding", "backward"),
            device.uniform("IIIII", T, d_model, vocab_size, part.first, part.rows),
            (dy.buffer, rows.order.buffer, rows.distinct.buffer, rows.starts.buffer, part.buffer),
            (-(-d_model // COLUMNS), x, y),
        )
