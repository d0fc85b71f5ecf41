"""The linear op."""

import numpy as np
import pytest

from mamba_ops import gradcheck
from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Columns


@pytest.mark.parametrize(("T", "width", "columns"), [(1, 1, 1), (2, 3, 5), (11, 5, 3), (67, 2, 3)])
def test_gradient_of_every_element(T, width, columns):
    rng = np.random.default_rng(T)
    for result in gradcheck.check(gradcheck.linear(open_cpu(np.float64), rng, T, width, columns)):
        assert result.holds, result


def test_writes_and_adds_only_the_named_columns():
    ops = open_cpu(np.float64)
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((3, 4))}
    dy, x = rng.standard_normal((5, 3)), rng.standard_normal((5, 4))
    dx = np.ones((5, 6))
    ops.linear_backward(dy, x, params, "w", None, GradientBuffers({}, ()), (), Columns(dx, 1, 4))
    np.testing.assert_allclose(dx[:, 1:5], dy @ params["w"], rtol=1e-14)
    ops.linear_backward(dy, x, params, "w", None, GradientBuffers({}, ()), (), Columns(dx, 1, 4), add=True)
    np.testing.assert_allclose(dx[:, 1:5], 2 * dy @ params["w"], rtol=1e-14)
    np.testing.assert_array_equal(dx[:, [0, 5]], 1)


def test_out_is_used():
    ops = open_cpu(np.float64)
    out = np.full((2, 3), np.nan)
    y = ops.linear_forward(np.ones((2, 4)), {"w": np.ones((3, 4))}, "w", out=out)
    assert y is out
    np.testing.assert_array_equal(out, 4)
