"""Token embedding on the CPU, with its adapter."""

import numpy as np

from mamba_ops.cpu.products import add_low_rank, add_product, scaled_product
from mamba_ops.cpu.workspace import Rows, Workspace
from mamba_ops.ops import Adapter, Gradients, Need, Parameters


def embedding_forward(
    ops: Workspace, rows: Rows, params: Parameters, weight: str, out: np.ndarray, adapter: Adapter | None = None
) -> None:
    """out_t = weight[ids_t] + scale B A[:, ids_t].

    weight: (vocab_size, d_model), out: (T, d_model), A: (r, vocab_size), B: (d_model, r).
    """
    np.take(params[weight], rows.ids, axis=0, out=out, mode="clip")
    if adapter is not None:
        with ops.scope():
            add_low_rank(ops, _scaled_lookup(ops, rows, params, adapter).T, params[adapter.B].T, out)


def embedding_backward(
    ops: Workspace,
    dy: np.ndarray,
    rows: Rows,
    params: Parameters,
    weight: str,
    grads: Gradients,
    need: Need,
    adapter: Adapter | None = None,
) -> None:
    """dweight[i] += sum of dy_t over the t with ids_t = i; repeated ids add up, in order of t.

    With an adapter, dA[:, i] += scale B^T times that sum, and dB += scale sum_t dy_t A[:, ids_t]^T. dy: (T, d_model).
    """
    if weight in need:
        _add_by_id(rows.ids, dy, *grads.take(weight))
    if adapter is None:
        return
    with ops.scope():
        if adapter.A in need:
            gradient, add = grads.take(adapter.A)
            _add_by_id(rows.ids, scaled_product(ops, dy, params[adapter.B], adapter.scale), gradient.T, add)
        if adapter.B in need:
            add_product(ops, dy.T, _scaled_lookup(ops, rows, params, adapter).T, *grads.take(adapter.B))


def _scaled_lookup(ops: Workspace, rows: Rows, params: Parameters, adapter: Adapter) -> np.ndarray:
    """Return scale A[:, ids] in the open scope: (r, T)."""
    A = params[adapter.A]
    found = ops.empty(len(A), len(rows.ids))
    np.take(A, rows.ids, axis=1, out=found, mode="clip")
    found *= adapter.scale
    return found


def _add_by_id(ids: np.ndarray, values: np.ndarray, gradient: np.ndarray, add: bool) -> None:
    """Write or add to gradient[i] the sum of values_t over the t with ids_t = i. values: (T, n)."""
    if not add:
        gradient.fill(0)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    gradient[ids[starts]] += np.add.reduceat(values[order], starts, axis=0)
