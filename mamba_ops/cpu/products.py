"""Products on the CPU that are written or added."""

import numpy as np

from mamba_ops.cpu.workspace import Workspace

PART_ELEMENTS = 1 << 19


def add_product(ops: Workspace, a: np.ndarray, b: np.ndarray, out: np.ndarray, add: bool, scale: float = 1.0) -> None:
    """Write scale a b into out, or add it. a: (m, k), b: (k, n), out: (m, n), possibly strided."""
    if not add:
        np.matmul(a, b, out=out)
        if scale != 1:
            out *= scale
        return
    with ops.scope():
        out += scaled_product(ops, a, b, scale)


def scaled_product(ops: Workspace, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Return scale a b in the open scope. a: (m, k), b: (k, n)."""
    product = ops.empty(len(a), b.shape[1])
    np.matmul(a, b, out=product)
    if scale != 1:
        product *= scale
    return product


def add_low_rank(ops: Workspace, a: np.ndarray, b: np.ndarray, out: np.ndarray, keep: np.ndarray | None = None) -> None:
    """out += a b, with `keep` only where it is true. a: (m, r), b: (r, n), keep: (m, n) bool, out: (m, n).

    The product is made by parts of rows that stay in cache: it is as large as `out`, and cheap.
    """
    height = part_height(*out.shape)
    with ops.scope():
        buffer = ops.empty(height, out.shape[1])
        for first in range(0, len(out), height):
            part = slice(first, first + height)
            product = buffer[: len(out[part])]
            np.matmul(a[part], b, out=product)
            if keep is not None:
                product *= keep[part]
            out[part] += product


def part_height(rows: int, columns: int) -> int:
    """Return how many rows `add_low_rank` makes at a time."""
    return min(rows, max(1, PART_ELEMENTS // columns))
