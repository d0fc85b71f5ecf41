"""Products with a weight on the CPU, in the three layouts that forward and backward need."""

import numpy as np

from mamba_ops.cpu.workspace import Workspace, view
from mamba_ops.ops import Columns, Gradients, Need, Parameters


def linear_forward(
    ops: Workspace,
    x: np.ndarray | Columns,
    params: Parameters,
    weight: str,
    bias: str | None = None,
    residual: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """y = x weight^T + bias + residual. x: (T, in), weight: (out, in), bias: (out,), residual, y: (T, out)."""
    w = params[weight]
    x = view(x)
    y = ops.empty(len(x), len(w)) if out is None else out
    np.matmul(x, w.T, out=y)
    if bias is not None:
        y += params[bias]
    if residual is not None:
        y += residual
    return y


def linear_backward(
    ops: Workspace,
    dy: np.ndarray | Columns,
    x: np.ndarray | Columns,
    params: Parameters,
    weight: str,
    bias: str | None,
    grads: Gradients,
    need: Need,
    dx: np.ndarray | Columns,
    add: bool = False,
) -> None:
    """dweight += dy^T x; dbias += column sums of dy; dx = dy weight, written or added. dy: (T, out), dx: (T, in)."""
    dy, dx = view(dy), view(dx)
    if weight in need:
        add_product(ops, dy.T, view(x), *grads.take(weight))
    if bias is not None and bias in need:
        gradient, accumulate = grads.take(bias)
        total = dy.sum(axis=0)
        if accumulate:
            gradient += total
        else:
            gradient[...] = total
    add_product(ops, dy, params[weight], dx, add)


def add_product(ops: Workspace, a: np.ndarray, b: np.ndarray, out: np.ndarray, add: bool) -> None:
    """Write a b into out, or add it. a: (m, k), b: (k, n), out: (m, n), possibly strided."""
    if not add:
        np.matmul(a, b, out=out)
        return
    with ops.scope():
        product = ops.empty(*out.shape)
        np.matmul(a, b, out=product)
        out += product
