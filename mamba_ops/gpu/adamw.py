"""AdamW on the GPU (Loshchilov & Hutter 2019; the order of torch.optim.AdamW): one pass, by row parts."""

import math
from collections.abc import Iterator

import wgpu

from mamba_ops.gpu.device import grid
from mamba_ops.gpu.workspace import DeviceArray, GpuWorkspace

BLOCK = 1024
UNBOUNDED = 3e38


def adamw(
    ops: GpuWorkspace,
    parameter: DeviceArray,
    gradient: DeviceArray,
    moment1: DeviceArray,
    moment2: DeviceArray,
    count: int,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    gradient_scale: float,
    max_delta: float,
    rows: tuple[int, int] | None = None,
) -> None:
    """m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, with g = gradient_scale * gradient; then

    theta += clamp(-learning_rate (weight_decay theta + m / (1 - beta1^count) / (sqrt(v / (1 - beta2^count)) +
    epsilon)), -max_delta, max_delta), unclamped for max_delta 0. Parameter and gradient are cut alike, and so are the
    moments. With `rows` only the rows first .. end - 1 of parameter and gradient, which are all of the moments'.
    """
    root = math.sqrt(1 - beta2**count)
    # one buffer for each set of settings that stay: what changes every step is written into it again
    values = ops.values(
        ("adamw", beta1, beta2, epsilon, weight_decay, max_delta),
        gradient_scale,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        learning_rate / (1 - beta1**count) * root,
        epsilon * root,
        learning_rate * weight_decay,
        max_delta or UNBOUNDED,
    )
    device, width = ops.device, parameter.width
    for buffers, *counts in _pieces(parameter, gradient, moment1, moment2, rows[0] if rows else 0):
        elements, first, moment = (count * width for count in counts)
        device.dispatch(
            device.pipeline("adamw", "forward", BLOCK=BLOCK),
            device.uniform("III", elements, first, moment),
            (values, *buffers),
            grid(-(-elements // BLOCK)),
        )


def _pieces(
    parameter: DeviceArray, gradient: DeviceArray, moment1: DeviceArray, moment2: DeviceArray, begin: int
) -> Iterator[tuple[tuple[wgpu.GPUBuffer, ...], int, int, int]]:
    """Yield what lies in one part of each array: its buffers, its rows, and where they start in the parts.

    begin: the row of the parameter that is the moments' first.
    """
    for p, g in zip(parameter.parts, gradient.parts, strict=True):
        for m, v in zip(moment1.parts, moment2.parts, strict=True):
            first, end = max(p.first, begin + m.first), min(p.first + p.rows, begin + m.first + m.rows)
            if first < end:
                buffers = g.buffer, p.buffer, m.buffer, v.buffer
                yield buffers, end - first, first - p.first, first - begin - m.first
