"""The RMSNorm kernels against the NumPy side in float64."""

import numpy as np
import pytest

from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers

SHAPES = [(1, 1), (1, 7), (3, 5), (64, 2), (65, 33), (67, 127), (5, 128), (131, 129), (2, 769), (600, 3)]
EPSILON = 1e-5


def inputs(T, d_model):
    rng = np.random.default_rng(T * 1000 + d_model)
    shapes = (T, d_model), (d_model,), (T, d_model), (T, d_model)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def on_device(ops, x, w, dy, start, calls=1):
    """y, dweight after so many backward calls, dx written, dx added to `start`."""
    params = {"w": ops.upload(w)}
    grads = GradientBuffers(params, params, ops)
    ops.write_parameter(grads.arrays["w"], np.full(w.shape, np.nan, np.float32))
    upstream, written, added = ops.upload(dy), ops.empty(*x.shape), ops.upload(start)
    y, saved = ops.rms_norm_forward(ops.upload(x), params, "w", EPSILON)
    for _ in range(calls):
        ops.rms_norm_backward(upstream, saved, grads, params, written, add=False)
    ops.rms_norm_backward(upstream, saved, grads, (), added, add=True)
    return [ops.read(array) for array in (y, grads.arrays["w"], written, added)]


def on_cpu(x, w, dy, start, calls=1):
    cpu = open_cpu(np.float64, threads=1)
    x, w, dy, start = (array.astype(np.float64) for array in (x, w, dy, start))
    grads, dx = GradientBuffers({"w": w}, ["w"]), np.empty_like(x)
    y, saved = cpu.rms_norm_forward(x, {"w": w}, "w", EPSILON)
    for _ in range(calls):
        cpu.rms_norm_backward(dy, saved, grads, ["w"], dx, add=False)
    return y, grads.arrays["w"], dx, start + dx


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(("T", "d_model"), SHAPES)
def test_forward_and_backward(gpu, assert_close, T, d_model, calls):
    case = inputs(T, d_model)
    if (T, d_model) == (1, 1):
        case[0][:] = 0.005  # near the root of epsilon: elsewhere dx is a difference of equal numbers
    tolerances = 1e-4, 1e-3, 1e-3, 1e-3
    for found, wanted, tolerance in zip(on_device(gpu, *case, calls), on_cpu(*case, calls), tolerances, strict=True):
        assert_close(found, wanted, tolerance)


def test_more_rows_than_one_dimension_of_workgroups(gpu_once, assert_close):
    case = inputs(70_001, 2)
    for found, wanted in zip(on_device(gpu_once, *case), on_cpu(*case), strict=True):
        assert_close(found, wanted, 1e-4)


def test_repeated_runs_give_the_same_bytes(gpu):
    case = inputs(131, 129)
    assert len({b"".join(a.tobytes() for a in on_device(gpu, *case)) for _ in range(3)}) == 1


def test_a_frozen_weight_takes_no_gradient(gpu_once):
    x, w, dy, _ = inputs(3, 5)
    params, dx = {"w": gpu_once.upload(w)}, gpu_once.empty(3, 5)
    _, saved = gpu_once.rms_norm_forward(gpu_once.upload(x), params, "w", EPSILON)
    gpu_once.rms_norm_backward(gpu_once.upload(dy), saved, GradientBuffers({}, (), gpu_once), (), dx, add=False)
    assert np.isfinite(gpu_once.read(dx)).all()


def test_zero_rows_give_zeros(gpu):
    y, _ = gpu.rms_norm_forward(
        gpu.upload(np.zeros((3, 4), np.float32)), {"w": gpu.upload(np.ones(4, np.float32))}, "w", EPSILON
    )
    np.testing.assert_array_equal(gpu.read(y), 0)


def test_case_13_a_non_finite_input_stays_visible(gpu):
    x = np.ones((2, 130), np.float32)
    x[1, 129] = np.nan
    y, _ = gpu.rms_norm_forward(gpu.upload(x), {"w": gpu.upload(np.ones(130, np.float32))}, "w", EPSILON)
    found = gpu.read(y)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1, 129])
