"""Output head and cross-entropy together on the CPU, by row blocks: the logits never exist whole."""

import numpy as np

from mamba_ops.cpu.products import add_low_rank, add_product, scaled_product
from mamba_ops.cpu.workspace import Rows, Workspace
from mamba_ops.ops import IGNORED, Adapter, Gradients, Need, Parameters

BLOCK_ELEMENTS = 1 << 24
SLICE_ELEMENTS = 1 << 18


def linear_cross_entropy_forward(
    ops: Workspace,
    rows: Rows,
    x: np.ndarray,
    params: Parameters,
    weight: str,
    grads: Gradients | None = None,
    need: Need = (),
    dx: np.ndarray | None = None,
    adapter: Adapter | None = None,
) -> np.ndarray:
    """losses_t = log(sum_v exp(x_t . weight_v)) - x_t . weight_target, 0 where the target is `IGNORED`.

    x: (T, d_model), weight: (vocab_size, d_model), losses: (T,). With grads the sum is differentiated on the
    way: p = softmax - onehot, dx = p weight is written, dweight += p^T x. An adapter is that of a tied embedding,
    A: (r, vocab_size), B: (d_model, r): the logits have also scale (x B) A.
    """
    w = params[weight]
    vocab_size = len(w)
    losses = ops.empty(len(x), 1)[:, 0]
    block = max(1, BLOCK_ELEMENTS // vocab_size)
    with ops.scope():
        buffer = ops.empty(min(block, len(x)), vocab_size)
        for first in range(0, len(x), block):
            part = slice(first, first + block)
            logits = buffer[: len(x[part])]
            np.matmul(x[part], w.T, out=logits)
            if adapter is not None:
                _add_adapter(ops, x[part], params, adapter, logits)
            _softmax_losses(ops, logits, rows.targets[part], losses[part], gradient=grads is not None)
            if grads is None:
                continue
            if weight in need:
                add_product(ops, logits.T, x[part], *grads.take(weight))
            if dx is not None:
                np.matmul(logits, w, out=dx[part])
            if adapter is not None:
                _adapter_backward(ops, logits, x[part], params, adapter, grads, need, None if dx is None else dx[part])
    return losses


def _add_adapter(ops: Workspace, x: np.ndarray, params: Parameters, adapter: Adapter, logits: np.ndarray) -> None:
    """logits += scale (x B) A. x: (n, d_model), logits: (n, vocab_size)."""
    with ops.scope():
        inner = scaled_product(ops, x, params[adapter.B], adapter.scale)
        add_low_rank(ops, inner, params[adapter.A], logits)


def _adapter_backward(
    ops: Workspace,
    p: np.ndarray,
    x: np.ndarray,
    params: Parameters,
    adapter: Adapter,
    grads: Gradients,
    need: Need,
    dx: np.ndarray | None,
) -> None:
    """dA += scale (x B)^T p; with e = scale p A^T, dB += x^T e and dx += e B^T. p: (n, vocab_size), x: (n, d_model)."""
    A, B = params[adapter.A], params[adapter.B]
    with ops.scope():
        if adapter.A in need:
            add_product(ops, scaled_product(ops, x, B, adapter.scale).T, p, *grads.take(adapter.A))
        if adapter.B not in need and dx is None:
            return
        e = scaled_product(ops, p, A.T, adapter.scale)
        if adapter.B in need:
            add_product(ops, x.T, e, *grads.take(adapter.B))
        if dx is not None:
            add_low_rank(ops, e, B.T, dx)


def _softmax_losses(
    ops: Workspace, logits: np.ndarray, targets: np.ndarray, losses: np.ndarray, gradient: bool
) -> None:
    """Write the losses, and turn logits (n, vocab_size) into softmax - onehot if asked to."""
    height = max(1, SLICE_ELEMENTS // logits.shape[1])

    def task(index: int) -> None:
        part = slice(index * height, (index + 1) * height)
        values, target = logits[part], targets[part]
        counted = target != IGNORED
        picked = np.where(counted, target, 0)
        at = np.arange(len(values)), picked
        own = values[at]
        top = values.max(axis=1)
        values -= top[:, None]
        np.exp(values, out=values)
        total = values.sum(axis=1)
        losses[part] = np.where(counted, np.log(total) + (top - own), 0)
        if gradient:
            values *= np.where(counted, 1 / total, 0)[:, None].astype(values.dtype)
            values[at] -= counted

    ops.run(task, -(-len(logits) // height))
