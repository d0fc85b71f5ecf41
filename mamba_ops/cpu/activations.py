"""Sigmoid, SiLU and softplus that neither overflow nor allocate when given `out`."""

import numpy as np

_LARGEST_EXPONENT = {np.dtype(np.float32): 80.0, np.dtype(np.float64): 700.0}


def sigmoid(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return 1 / (1 + exp(-x)). x, out: any one shape; out may be x."""
    out = np.negative(x, out=out)
    np.minimum(out, _LARGEST_EXPONENT[out.dtype], out=out)
    np.exp(out, out=out)
    out += 1.0
    return np.reciprocal(out, out=out)


def silu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return x sigmoid(x). x, out: any one shape; out must not be x."""
    out = sigmoid(x, out)
    out *= x
    return out


def silu_derivative(x: np.ndarray, sigmoid_x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return s (1 + x (1 - s)), s being sigmoid(x). x, sigmoid_x, out: any one shape; out must not be x or s."""
    out = np.subtract(1.0, sigmoid_x, out=out)
    out *= x
    out += 1.0
    out *= sigmoid_x
    return out


def softplus(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)). x, out: any one shape; out must not be x."""
    out = np.abs(x, out=out)
    np.negative(out, out=out)
    np.exp(out, out=out)
    np.log1p(out, out=out)
    out += np.maximum(x, 0.0)
    return out


def softplus_derivative(softplus_x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return sigmoid(x) = 1 - exp(-softplus(x)) from softplus(x). softplus_x, out: any one shape."""
    out = np.negative(softplus_x, out=out)
    np.expm1(out, out=out)
    return np.negative(out, out=out)
