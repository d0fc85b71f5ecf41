"""AdamW on the GPU (Loshchilov & Hutter 2019; the order of torch.optim.AdamW): one pass, by row parts."""

import math

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
) -> None:
    """m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, with g = gradient_scale * gradient; then

    theta += clamp(-learning_rate (weight_decay theta + m / (1 - beta1^count) / (sqrt(v / (1 - beta2^count)) +
    epsilon)), -max_delta, max_delta), unclamped for max_delta 0. All arrays cut alike, changed in place.
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
    device = ops.device
    for p, g, m, v in zip(parameter.parts, gradient.parts, moment1.parts, moment2.parts, strict=True):
        elements = p.rows * parameter.width
        device.dispatch(
            device.pipeline("adamw", "forward", BLOCK=BLOCK),
            device.uniform("I", elements),
            (values, g.buffer, p.buffer, m.buffer, v.buffer),
            grid(-(-elements // BLOCK)),
        )
