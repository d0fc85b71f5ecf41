"""Gradient norms on the CPU, accumulated in float64."""

import math
from collections.abc import Mapping

import numpy as np

from mamba_ops.cpu.workspace import Workspace

SLICE = 1 << 16
SAFE = 1e-200, 1e200


def global_norm(ops: Workspace, gradients: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return ||g|| = sqrt(sum g^2) of each gradient; nan or inf where an element is.

    A slice whose sum of squares leaves float64's range is summed as (max|g|)^2 sum((g / max|g|)^2).
    """
    return {name: _norm(ops, gradient.reshape(-1)) for name, gradient in gradients.items()}


def _norm(ops: Workspace, flat: np.ndarray) -> float:
    count = -(-flat.size // SLICE)
    norms = np.zeros(count)

    def task(index: int) -> None:
        part = flat[index * SLICE : (index + 1) * SLICE]
        wide = ops.scratch("norm_wide", SLICE, part.shape, np.float64)
        wide[...] = part
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(wide @ wide)
        if SAFE[0] < square < SAFE[1]:
            norms[index] = math.sqrt(square)
            return
        top = float(np.abs(wide, out=wide).max())
        norms[index] = top
        if 0 < top < math.inf:
            wide /= top
            norms[index] = top * math.sqrt(wide @ wide)

    ops.run(task, count)
    largest = float(norms.max())
    if not 0 < largest < math.inf:
        return largest
    return largest * math.sqrt(np.sum((norms / largest) ** 2))
