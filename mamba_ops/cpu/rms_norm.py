"""RMSNorm on the CPU (Zhang & Sennrich 2019), by row tiles that stay in cache."""

from typing import NamedTuple

import numpy as np

from mamba_ops.cpu.workspace import Workspace
from mamba_ops.ops import Gradients, Need, Parameters

TILE = 64


class Saved(NamedTuple):
    """x: (T, d_model); scale: (T, 1), 1 / sqrt(mean(x^2) + epsilon)."""

    x: np.ndarray
    scale: np.ndarray
    weight: np.ndarray
    name: str


def rms_norm_forward(
    ops: Workspace, x: np.ndarray, params: Parameters, weight: str, epsilon: float
) -> tuple[np.ndarray, Saved]:
    """y = weight * x / sqrt(mean(x^2) + epsilon). x, y: (T, d_model), weight: (d_model,)."""
    T, d_model = x.shape
    y, scale = ops.empty(T, d_model), ops.empty(T, 1)
    w = params[weight]

    def task(tile: int) -> None:
        part = slice(tile * TILE, (tile + 1) * TILE)
        rows, out, s = x[part], y[part], scale[part]
        np.multiply(rows, rows, out=out)
        np.mean(out, axis=1, keepdims=True, out=s)
        s += epsilon
        np.sqrt(s, out=s)
        np.divide(1, s, out=s)
        np.multiply(rows, s, out=out)
        out *= w

    ops.run(task, -(-T // TILE))
    return y, Saved(x, scale, w, weight)


def rms_norm_backward(
    ops: Workspace, dy: np.ndarray, saved: Saved, grads: Gradients, need: Need, dx: np.ndarray, add: bool
) -> None:
    """dx = s (dy w) - x s^3 mean(dy w x), with s = 1 / sqrt(mean(x^2) + epsilon); dweight += sum_t dy x s."""
    T, d_model = dy.shape
    tiles = -(-T // TILE)
    partial = ops.empty(tiles, d_model)
    wanted = saved.name in need

    def task(tile: int) -> None:
        part = slice(tile * TILE, (tile + 1) * TILE)
        rows, s, g = saved.x[part], saved.scale[part], dy[part]
        xhat = np.multiply(rows, s, out=ops.scratch("norm_xhat", TILE * d_model, g.shape))
        t = np.multiply(g, xhat, out=ops.scratch("norm_t", TILE * d_model, g.shape))
        if wanted:
            np.sum(t, axis=0, out=partial[tile])
        t *= saved.weight
        mean = np.mean(t, axis=1, keepdims=True)
        xhat *= mean
        np.multiply(g, saved.weight, out=t)
        t -= xhat
        if add:
            t *= s
            dx[part] += t
        else:
            np.multiply(t, s, out=dx[part])

    ops.run(task, tiles)
    if wanted:
        gradient, accumulate = grads.take(saved.name)
        total = partial.sum(axis=0)
        if accumulate:
            gradient += total
        else:
            gradient[...] = total
