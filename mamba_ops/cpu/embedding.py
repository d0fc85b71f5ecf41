"""Token embedding on the CPU."""

import numpy as np

from mamba_ops.cpu.workspace import Rows, Workspace
from mamba_ops.ops import Gradients, Need, Parameters


def embedding_forward(ops: Workspace, rows: Rows, params: Parameters, weight: str, out: np.ndarray) -> None:
    """out_t = weight[ids_t]. weight: (vocab_size, d_model), out: (T, d_model)."""
    np.take(params[weight], rows.ids, axis=0, out=out, mode="clip")


def embedding_backward(ops: Workspace, dy: np.ndarray, rows: Rows, weight: str, grads: Gradients, need: Need) -> None:
    """dweight[i] += sum of dy_t over the t with ids_t = i; repeated ids add up, in order of t."""
    if weight not in need:
        return
    gradient, add = grads.take(weight)
    if not add:
        gradient.fill(0)
    order = np.argsort(rows.ids, kind="stable")
    ids = rows.ids[order]
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    gradient[ids[starts]] += np.add.reduceat(dy[order], starts, axis=0)
