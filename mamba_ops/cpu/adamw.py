"""AdamW on the CPU (Loshchilov & Hutter 2019; the order of torch.optim.AdamW), by slices that stay in cache."""

import math

import numpy as np

from mamba_ops.cpu.workspace import Workspace

SLICE = 1 << 15


def adamw(
    ops: Workspace,
    parameter: np.ndarray,
    gradient: np.ndarray,
    moment1: np.ndarray,
    moment2: np.ndarray,
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
    epsilon)), -max_delta, max_delta), unclamped for max_delta 0. All arrays C-contiguous, changed in place.
    With `rows` only the rows first .. end - 1 of parameter and gradient, which are all of the moments'.
    """
    if rows is not None:
        parameter, gradient = parameter[slice(*rows)], gradient[slice(*rows)]
    theta, grad, m, v = (array.reshape(-1) for array in (parameter, gradient, moment1, moment2))
    root = math.sqrt(1 - beta2**count)
    rate = learning_rate / (1 - beta1**count) * root
    root_scale = math.sqrt(1 - beta2) * gradient_scale

    def task(index: int) -> None:
        part = slice(index * SLICE, (index + 1) * SLICE)
        p, g, m1, m2 = theta[part], grad[part], m[part], v[part]
        size = len(p)
        t = ops.scratch("adamw_t", SLICE, (size,))
        d = ops.scratch("adamw_d", SLICE, (size,))
        m1 *= beta1
        m1 += np.multiply(g, (1 - beta1) * gradient_scale, out=t)
        m2 *= beta2
        # scaled before it is squared: a huge gradient is finite once clipped
        np.multiply(g, root_scale, out=t)
        t *= t
        m2 += t
        np.sqrt(m2, out=d)
        d += epsilon * root
        np.divide(m1, d, out=d)
        d *= rate
        if weight_decay:
            d += np.multiply(p, learning_rate * weight_decay, out=t)
        if max_delta:
            np.clip(d, -max_delta, max_delta, out=d)
        p -= d

    ops.run(task, -(-theta.size // SLICE))
