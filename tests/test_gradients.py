"""Gradient buffers, global norm and clip."""

import math

import numpy as np
import pytest

from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers, clip_factor, first_non_finite, total_norm


@pytest.fixture
def ops():
    return open_cpu(np.float32, threads=1)


def test_first_use_overwrites_and_the_next_ones_add():
    buffers = GradientBuffers({"a": np.zeros(2), "b": np.zeros(2)}, ["a"])
    assert list(buffers.arrays) == ["a"]
    buffers.arrays["a"].fill(7)
    assert [buffers.take("a")[1], buffers.take("a")[1]] == [False, True]
    buffers.start_step()
    assert buffers.take("a")[1] is False


def test_what_a_step_has_not_written_is_zero_at_its_end():
    buffers = GradientBuffers({"a": np.zeros(2), "b": np.zeros(2)}, ["a", "b"])
    for array in buffers.arrays.values():
        array.fill(7)
    buffers.start_step()
    buffers.take("a")
    buffers.finish_step()
    assert buffers.arrays["a"].tolist() == [7, 7]
    assert buffers.arrays["b"].tolist() == [0, 0]


def test_case_13_clip_of_3_0_and_4(ops):
    grads = {"a": np.array([3, 0], np.float32), "b": np.array([4], np.float32)}
    norm = total_norm(ops.global_norm(grads))
    assert norm == 5
    factor = clip_factor(norm, 1.0)
    np.testing.assert_allclose(grads["a"] * factor, [0.6, 0], rtol=1e-7)
    np.testing.assert_allclose(grads["b"] * factor, [0.8], rtol=1e-7)


def test_case_13_huge_finite_gradients_have_their_norm_and_clip_to_the_maximum(ops):
    grads = {"a": np.full(100, 1e20, np.float32)}
    norm = total_norm(ops.global_norm(grads))
    assert norm == pytest.approx(1e21, rel=1e-6)
    clipped = grads["a"].astype(np.float64) * clip_factor(norm, 2.0)
    assert np.linalg.norm(clipped) == pytest.approx(2.0, rel=1e-12)


def test_the_norm_of_float64_gradients_near_the_largest_number_does_not_overflow():
    norms = open_cpu(np.float64, threads=1).global_norm({"a": np.full(3, 1e300), "b": np.full(1, 1e300)})
    assert total_norm(norms) == pytest.approx(2e300, rel=1e-12)


def test_case_13_zero_gradients_divide_by_nothing(ops):
    norm = total_norm(ops.global_norm({"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.float32)}))
    assert norm == 0
    assert clip_factor(norm, 1.0) == 1
    assert total_norm({}) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_case_13_the_first_bad_tensor_is_named(ops, bad):
    grads = {name: np.ones(3, np.float32) for name in ("a", "b", "c")}
    grads["b"][1] = grads["c"][0] = bad
    norms = ops.global_norm(grads)
    assert first_non_finite(norms) == "b"
    assert not math.isfinite(total_norm(norms))


@pytest.mark.parametrize(
    ("norm", "maximum", "expected"),
    [(0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (0.5, 1.0, 1.0), (4.0, 1.0, 0.25), (4.0, 0.0, 1.0), (0.0, 0.0, 1.0)],
)
def test_clip_factor(norm, maximum, expected):
    assert clip_factor(norm, maximum) == expected
