"""The embedding kernels against the NumPy side in float64."""

import numpy as np
import pytest

from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Batch
from mamba_ops.parameters import EMBEDDING

SHAPES = [(1, 1, 1), (2, 8, 3), (67, 11, 5), (131, 40, 64), (300, 3, 129), (257, 1000, 33)]


def rows_of(ops, ids):
    ids = np.array([ids])
    return ops.rows(Batch(ids, ids, np.arange(ids.size, dtype=np.uint32).reshape(ids.shape)))


def poisoned(ops, params):
    """Gradient buffers that hold NaN, as from a step before."""
    grads = GradientBuffers(params, params, ops)
    for array in grads.arrays.values():
        ops.write_parameter(array, np.full(array.shape, np.nan, np.float32))
    return grads


def backward(ops, weight, ids, dy, calls=1):
    """The gradient after so many calls on the device; later ones add."""
    params = {EMBEDDING: ops.upload_parameter(EMBEDDING, weight)}
    grads, upstream = poisoned(ops, params), ops.upload(dy)
    for _ in range(calls):
        ops.embedding_backward(upstream, rows_of(ops, ids), EMBEDDING, grads, params)
    return ops.read(grads.arrays[EMBEDDING])


def reference(weight, ids, dy, calls=1):
    cpu, params = open_cpu(np.float64, threads=1), {EMBEDDING: weight.astype(np.float64)}
    grads = GradientBuffers(params, params)
    for _ in range(calls):
        cpu.embedding_backward(dy.astype(np.float64), rows_of(cpu, ids), EMBEDDING, grads, params)
    return grads.arrays[EMBEDDING]


@pytest.mark.parametrize(("T", "vocab_size", "d_model"), SHAPES)
def test_forward_copies_rows(gpu, T, vocab_size, d_model):
    rng = np.random.default_rng(T)
    weight = rng.standard_normal((vocab_size, d_model)).astype(np.float32)
    ids = rng.integers(0, vocab_size, T)
    out = gpu.empty(T, d_model)
    params = {EMBEDDING: gpu.upload_parameter(EMBEDDING, weight)}
    gpu.embedding_forward(rows_of(gpu, ids), params, EMBEDDING, out)
    np.testing.assert_array_equal(gpu.read(out), weight[ids])


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(("T", "vocab_size", "d_model"), SHAPES)
def test_backward(gpu, assert_close, T, vocab_size, d_model, calls):
    rng = np.random.default_rng(T)
    weight, dy = np.zeros((vocab_size, d_model), np.float32), rng.standard_normal((T, d_model)).astype(np.float32)
    ids = rng.integers(0, vocab_size, T)
    assert_close(backward(gpu, weight, ids, dy, calls), reference(weight, ids, dy, calls), 1e-5)


def test_more_rows_than_one_dimension_of_workgroups(gpu_once):
    ids = np.random.default_rng(0).permutation(70_001)
    weight = np.random.default_rng(1).standard_normal((70_001, 2)).astype(np.float32)
    out = gpu_once.empty(70_001, 2)
    rows, params = rows_of(gpu_once, ids), {EMBEDDING: gpu_once.upload_parameter(EMBEDDING, weight)}
    gpu_once.embedding_forward(rows, params, EMBEDDING, out)
    np.testing.assert_array_equal(gpu_once.read(out), weight[ids])
    expected = np.empty_like(weight)
    expected[ids] = weight
    np.testing.assert_array_equal(backward(gpu_once, weight, ids, weight), expected)


def test_case_14_repeated_ids_add_up(gpu):
    dy = np.array([[1, 10], [2, 20], [4, 40], [8, 80]], np.float32)
    expected = np.zeros((8, 2), np.float32)
    expected[5], expected[1] = [7, 70], [8, 80]
    np.testing.assert_array_equal(backward(gpu, np.zeros((8, 2), np.float32), [5, 5, 5, 1], dy), expected)
    ones = np.ones((3, 1), np.float32)
    np.testing.assert_array_equal(backward(gpu, np.zeros((3, 1), np.float32), [0, 0, 2], ones), [[2], [0], [1]])


def test_case_14_is_deterministic(gpu):
    rng = np.random.default_rng(0)
    weight, dy = np.zeros((3, 5), np.float32), rng.standard_normal((1000, 5)).astype(np.float32)
    ids = rng.integers(0, 3, 1000)
    assert len({backward(gpu, weight, ids, dy).tobytes() for _ in range(3)}) == 1


@pytest.mark.parametrize("ids", [[0, 7, 8], [8], [0, 4_000_000_000], [-1, 0]])
def test_case_43_ids_without_a_row_are_refused_before_a_kernel_runs(gpu_once, ids):
    params = {EMBEDDING: gpu_once.upload_parameter(EMBEDDING, np.ones((8, 2), np.float32))}
    with pytest.raises(ValueError, match=r"has 8 rows, the batch holds the id or target 8|expected 0 <= id"):
        gpu_once.embedding_forward(rows_of(gpu_once, ids), params, EMBEDDING, gpu_once.empty(len(ids), 2))


def test_case_43_the_first_and_the_last_row(gpu):
    weight = np.arange(16, dtype=np.float32).reshape(8, 2)
    params = {EMBEDDING: gpu.upload_parameter(EMBEDDING, weight)}
    out = gpu.empty(3, 2)
    gpu.embedding_forward(rows_of(gpu, [0, 7, 0]), params, EMBEDDING, out)
    np.testing.assert_array_equal(gpu.read(out), weight[[0, 7, 0]])


@pytest.mark.parametrize("limit", [512, 160, 32])
def test_case_48_row_parts_change_nothing(gpu, monkeypatch, limit):
    rng = np.random.default_rng(0)
    weight, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 8), (100, 8)))
    ids = rng.integers(0, 40, 100)
    whole = backward(gpu, weight, ids, dy, 2)
    monkeypatch.setattr(gpu.device, "binding_limit", limit)
    parameter = gpu.upload_parameter(EMBEDDING, weight)
    assert len(parameter.parts) > 1
    assert all(part.rows * 32 <= limit for part in parameter.parts)
    out = gpu.empty(100, 8)
    gpu.embedding_forward(rows_of(gpu, ids), {EMBEDDING: parameter}, EMBEDDING, out)
    np.testing.assert_array_equal(gpu.read(out), weight[ids])
    assert backward(gpu, weight, ids, dy, 2).tobytes() == whole.tobytes()


def test_a_frozen_embedding_gets_no_gradient(gpu_once):
    grads = GradientBuffers({}, (), gpu_once)
    gpu_once.embedding_backward(gpu_once.empty(2, 2), rows_of(gpu_once, [0, 1]), EMBEDDING, grads, ())
    assert grads.arrays == {}


def test_batches_of_one_shape_take_the_same_buffers(gpu_once):
    """However many distinct ids a batch has."""
    rng, held = np.random.default_rng(0), set()
    for vocab_size in (1, 3, 20, 1000):
        with gpu_once.scope():
            rows_of(gpu_once, rng.integers(0, vocab_size, 50))
        held.add(gpu_once.held_bytes())
    assert len(held) == 1
