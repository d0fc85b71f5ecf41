"""Products with a weight on the CPU, in the three layouts that forward and backward need, and with its adapter."""

import numpy as np

from mamba_ops.cpu.low_rank import keep_mask, kept_scale
from mamba_ops.cpu.products import add_low_rank, add_product, scaled_product
from mamba_ops.cpu.workspace import Workspace, view
from mamba_ops.ops import Adapter, Columns, Gradients, Need, Parameters


def linear_forward(
    ops: Workspace,
    x: np.ndarray | Columns,
    params: Parameters,
    weight: str,
    bias: str | None = None,
    residual: np.ndarray | None = None,
    out: np.ndarray | None = None,
    adapter: Adapter | None = None,
) -> np.ndarray:
    """y = x weight^T + bias + residual + scale drop(x) A^T B^T.

    x: (T, in), weight: (out, in), bias: (out,), residual, y: (T, out), A: (r, in), B: (out, r).
    """
    w = params[weight]
    x = view(x)
    y = ops.empty(len(x), len(w)) if out is None else out
    np.matmul(x, w.T, out=y)
    if adapter is not None:
        with ops.scope():
            keep = keep_mask(ops, x.shape, weight, adapter.dropout)
            inner = scaled_product(ops, _masked(ops, x, keep), params[adapter.A].T, kept_scale(adapter))
            add_low_rank(ops, inner, params[adapter.B].T, y)
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
    adapter: Adapter | None = None,
) -> None:
    """dweight += dy^T x; dbias += column sums of dy; dx = dy weight, written or added. dy: (T, out), dx: (T, in).

    With an adapter, e = scale dy B: dA += e^T drop(x), dB += scale dy^T drop(x) A^T, and dx has also drop'(e A).
    """
    dy, x, dx = view(dy), view(x), view(dx)
    if weight in need:
        add_product(ops, dy.T, x, *grads.take(weight))
    if bias is not None and bias in need:
        gradient, accumulate = grads.take(bias)
        total = dy.sum(axis=0)
        if accumulate:
            gradient += total
        else:
            gradient[...] = total
    add_product(ops, dy, params[weight], dx, add)
    if adapter is not None:
        with ops.scope():
            _adapter_backward(ops, dy, x, params, weight, adapter, grads, need, dx)


def _adapter_backward(
    ops: Workspace,
    dy: np.ndarray,
    x: np.ndarray,
    params: Parameters,
    weight: str,
    adapter: Adapter,
    grads: Gradients,
    need: Need,
    dx: np.ndarray,
) -> None:
    """Add the gradients of A and B, and what the adapter adds to dx. Shapes as in `linear_backward`."""
    A, scale = params[adapter.A], kept_scale(adapter)
    keep = keep_mask(ops, x.shape, weight, adapter.dropout)
    e = scaled_product(ops, dy, params[adapter.B], scale)
    add_low_rank(ops, e, A, dx, keep)
    if adapter.A not in need and adapter.B not in need:
        return
    x = _masked(ops, x, keep)
    if adapter.A in need:
        add_product(ops, e.T, x, *grads.take(adapter.A))
    if adapter.B in need:
        add_product(ops, dy.T, scaled_product(ops, x, A.T, scale), *grads.take(adapter.B))


def _masked(ops: Workspace, x: np.ndarray, keep: np.ndarray | None) -> np.ndarray:
    """Return x with 0 for what is dropped, in the open scope; x itself without a mask. x, keep: (T, in)."""
    return x if keep is None else np.multiply(x, keep, out=ops.empty(*x.shape))
