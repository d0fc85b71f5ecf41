"""Four-point central differences: the proof of a gradient.

f'(x) = (f(x - 2h) - 8 f(x - h) + 8 f(x + h) - f(x + 2h)) / 12h + O(h^4), with h = 1e-3 max(1, |x|).
"""

from collections.abc import Callable, Iterable

import numpy as np

STEP = 1e-3
WEIGHTS = ((-2, 1 / 12), (-1, -8 / 12), (1, 8 / 12), (2, -1 / 12))


def element_differences(
    loss: Callable[[], float], array: np.ndarray, elements: Iterable[int] | None = None
) -> np.ndarray:
    """Return dloss/darray at the given flat elements (all for None); `loss` reads `array`, float64, in place."""
    flat = array.reshape(-1)
    if not np.shares_memory(flat, array):
        raise ValueError("array must be contiguous: it is changed in place")
    return np.array([_one(loss, flat, i) for i in (range(flat.size) if elements is None else elements)])


def direction_difference(loss: Callable[[], float], arrays: dict[str, np.ndarray], seed: int) -> tuple[float, dict]:
    """Return the derivative along a random unit direction over all arrays, and that direction by name."""
    rng = np.random.default_rng(seed)
    direction = {name: rng.standard_normal(array.shape) for name, array in arrays.items()}
    length = np.sqrt(sum(np.sum(d * d) for d in direction.values()))
    start = {name: array.copy() for name, array in arrays.items()}
    total = 0.0
    for offset, weight in WEIGHTS:
        for name, array in arrays.items():
            direction_step = offset * STEP / length * direction[name]
            array[...] = start[name] + direction_step
        total += weight * loss()
    for name, array in arrays.items():
        array[...] = start[name]
    return total / STEP, {name: d / length for name, d in direction.items()}


def _one(loss: Callable[[], float], flat: np.ndarray, index: int) -> float:
    value = flat[index]
    h = STEP * max(1.0, abs(value))
    total = 0.0
    for offset, weight in WEIGHTS:
        flat[index] = value + offset * h
        total += weight * loss()
    flat[index] = value
    return total / h
