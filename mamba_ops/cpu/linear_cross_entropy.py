"""Output head and cross-entropy together on the CPU, by row blocks: the logits never exist whole."""

import numpy as np

from mamba_ops.cpu.linear import add_product
from mamba_ops.cpu.workspace import Rows, Workspace
from mamba_ops.ops import IGNORED, Gradients, Need, Parameters

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
) -> np.ndarray:
    """losses_t = log(sum_v exp(x_t . weight_v)) - x_t . weight_target, 0 where the target is `IGNORED`.

    x: (T, d_model), weight: (vocab_size, d_model), losses: (T,). With grads the sum is differentiated on the
    way: p = softmax - onehot, dx = p weight is written, dweight += p^T x.
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
            _softmax_losses(ops, logits, rows.targets[part], losses[part], gradient=grads is not None)
            if grads is None:
                continue
            if weight in need:
                add_product(ops, logits.T, x[part], *grads.take(weight))
            if dx is not None:
                np.matmul(logits, w, out=dx[part])
    return losses


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
