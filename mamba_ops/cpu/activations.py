"""Sigmoid, SiLU and softplus with their derivatives: no overflow, and no allocation when `out` is given."""

import numpy as np

_LARGEST_EXPONENT = {np.dtype(np.float32): 80.0, np.dtype(np.float64): 700.0}


def sigmoid(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return s = 1 / (1 + exp(-x)). x, out: one shape, float32 or float64; out may be x."""
    out = np.negative(x, out=out)
    np.minimum(out, _LARGEST_EXPONENT[out.dtype], out=out)
    np.exp(out, out=out)
    np.add(out, 1.0, out=out)
    return np.reciprocal(out, out=out)


def silu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return x sigmoid(x). x, out: one shape; out must not be x."""
    out = sigmoid(x, out)
    return np.multiply(out, x, out=out)


def silu_derivative(x: np.ndarray, sigmoid_x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return s (1 + x (1 - s)), s = sigmoid(x). x, sigmoid_x, out: one shape; out must be neither."""
    out = np.subtract(1.0, sigmoid_x, out=out)
    np.multiply(out, x, out=out)
    np.add(out, 1.0, out=out)
    return np.multiply(out, sigmoid_x, out=out)


def softplus(x: np.ndarray, out: np.ndarray | None = None, spare: np.ndarray | None = None) -> np.ndarray:
    """Return log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)).

    x, out, spare: one shape; spare is overwritten and may be x, out must be neither.
    """
    out = np.abs(x, out=out)
    np.negative(out, out=out)
    np.exp(out, out=out)
    np.log1p(out, out=out)
    spare = np.maximum(x, 0.0, out=spare)
    return np.add(out, spare, out=out)


def softplus_derivative(softplus_x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return sigmoid(x) = 1 - exp(-softplus(x)). softplus_x, out: one shape; out may be softplus_x."""
    out = np.negative(softplus_x, out=out)
    np.expm1(out, out=out)
    return np.negative(out, out=out)
