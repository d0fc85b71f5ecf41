"""The RMSNorm op."""

import numpy as np
import pytest

from mamba_ops import gradcheck
from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers


@pytest.mark.parametrize(("T", "d_model"), [(1, 1), (1, 7), (3, 5), (64, 2), (65, 3), (129, 2)])
def test_gradient_of_every_element(T, d_model):
    rng = np.random.default_rng(T)
    for result in gradcheck.check(gradcheck.rms_norm(open_cpu(np.float64), rng, T, d_model)):
        assert result.holds, result


def test_forward_is_the_definition():
    ops = open_cpu(np.float64)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((70, 6)), rng.standard_normal(6)
    y, _ = ops.rms_norm_forward(x, {"w": w}, "w", 1e-5)
    np.testing.assert_allclose(y, w * x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5), rtol=1e-14)


def test_adds_into_dx_and_into_the_gradient():
    ops = open_cpu(np.float64)
    rng = np.random.default_rng(0)
    x, dy, params = rng.standard_normal((70, 6)), rng.standard_normal((70, 6)), {"w": rng.standard_normal(6)}
    grads = GradientBuffers(params, params)
    _, saved = ops.rms_norm_forward(x, params, "w", 1e-5)
    once, twice = np.empty((70, 6)), np.ones((70, 6))
    ops.rms_norm_backward(dy, saved, grads, params, once, add=False)
    first = grads.arrays["w"].copy()
    ops.rms_norm_backward(dy, saved, grads, params, twice, add=True)
    np.testing.assert_allclose(twice, once + 1, rtol=1e-14)
    np.testing.assert_allclose(grads.arrays["w"], 2 * first, rtol=1e-14)


def test_zero_rows_give_zeros():
    ops = open_cpu(np.float32)
    y, _ = ops.rms_norm_forward(np.zeros((3, 4), np.float32), {"w": np.ones(4, np.float32)}, "w", 1e-5)
    np.testing.assert_array_equal(y, 0)
