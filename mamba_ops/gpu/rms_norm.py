"""RMSNorm on the GPU: a workgroup for each row."""

from typing import NamedTuple

from mamba_ops.gpu.device import grid
from mamba_ops.gpu.workspace import DeviceArray, GpuWorkspace
from mamba_ops.ops import Gradients, Need, Parameters

TILE = 64
COLUMNS = 32


class Saved(NamedTuple):
    """x: (T, d_model); scale: (T, 1), 1 / sqrt(mean(x^2) + epsilon)."""

    x: DeviceArray
    scale: DeviceArray
    weight: DeviceArray
    name: str


def rms_norm_forward(
    ops: GpuWorkspace, x: DeviceArray, params: Parameters, weight: str, epsilon: float
) -> tuple[DeviceArray, Saved]:
    """y = weight * x / sqrt(mean(x^2) + epsilon). x, y: (T, d_model), weight: (d_model,)."""
    T, d_model = x.shape
    device, w = ops.device, params[weight]
    y, scale = ops.empty(T, d_model), ops.empty(T, 1)
    device.dispatch(
        device.pipeline("rms_norm", "forward", TILE=TILE),
        device.uniform("IIfI", T, d_model, epsilon, 0),
        (x.buffer, w.buffer, y.buffer, scale.buffer),
        grid(T),
    )
    return y, Saved(x, scale, w, weight)


def rms_norm_backward(
    ops: GpuWorkspace,
    dy: DeviceArray,
    saved: Saved,
    grads: Gradients,
    need: Need,
    dx: DeviceArray,
    add: bool,
) -> None:
    """dx = s (dy w) - x s^3 mean(dy w x), with s = 1 / sqrt(mean(x^2) + epsilon); dweight += sum_t dy x s."""
    T, d_model = dy.shape
    device = ops.device
    device.dispatch(
        device.pipeline("rms_norm", "backward", TILE=TILE),
        device.uniform("IIfI", T, d_model, 0.0, int(add)),
        (dy.buffer, saved.x.buffer, saved.scale.buffer, saved.weight.buffer, dx.buffer),
        grid(T),
    )
    if saved.name not in need:
        return
    gradient, accumulate = grads.take(saved.name)
    tiles, columns = -(-T // TILE), -(-d_model // COLUMNS)
    with ops.scope():
        partials = ops.empty(tiles, d_model)
        device.dispatch(
            device.pipeline("rms_norm", "backward_weight", TILE=TILE),
            device.uniform("IIfI", T, d_model, 0.0, 0),
            (dy.buffer, saved.x.buffer, saved.scale.buffer, partials.buffer),
            (columns, *grid(tiles)[:2]),
        )
        device.dispatch(
            device.pipeline("rms_norm", "backward_sum", TILE=TILE),
            device.uniform("IIfI", tiles, d_model, 0.0, int(accumulate)),
            (partials.buffer, gradient.buffer),
            (columns, 1, 1),
        )
