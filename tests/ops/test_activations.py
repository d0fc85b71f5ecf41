"""Sigmoid, SiLU and softplus against exact values, over the whole range."""

import math

import numpy as np
import pytest

from mamba_ops.cpu.activations import sigmoid, silu, silu_derivative, softplus, softplus_derivative

X = (-1e4, -750.0, -104.0, -80.0, -20.0, -1.0, -1e-3, 0.0, 1e-3, 0.5, 20.0, 104.0, 750.0, 1e4)


def exact_softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def exact_sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 5e-7), (np.float64, 1e-15)])
def test_values(dtype, rtol):
    x = np.array(X, dtype)
    tiny = float(np.exp(dtype(-79)))
    expected = np.array([exact_sigmoid(v) for v in x.tolist()])
    np.testing.assert_allclose(sigmoid(x), expected, rtol=rtol, atol=tiny)
    np.testing.assert_allclose(silu(x), x * expected, rtol=rtol, atol=1e4 * tiny)
    np.testing.assert_allclose(softplus(x), [exact_softplus(v) for v in x.tolist()], rtol=rtol, atol=1e-44)
    slope = expected * (1 + x * (1 - expected))
    np.testing.assert_allclose(silu_derivative(x, sigmoid(x)), slope, rtol=rtol, atol=1e-6 if rtol > 1e-9 else 1e-15)
    np.testing.assert_allclose(softplus_derivative(softplus(x)), expected, rtol=rtol, atol=tiny)


@pytest.mark.parametrize(("x", "y"), [(-6.907255, 1e-3), (-2.252168, 0.1), (-11.512920, 1e-5)])
def test_softplus_of_small_steps_is_exact_in_float32(x, y):
    np.testing.assert_allclose(softplus(np.float32([x])), [y], rtol=2e-6)


def test_out_is_used():
    x = np.linspace(-3, 3, 7)
    for function in (sigmoid, silu, softplus, softplus_derivative):
        out = np.empty_like(x)
        assert function(x, out) is out
        np.testing.assert_array_equal(out, function(x))
    spare = x.copy()
    np.testing.assert_array_equal(softplus(spare, np.empty_like(x), spare), softplus(x))
    np.testing.assert_array_equal(sigmoid(spare, spare), sigmoid(np.maximum(x, 0)))
