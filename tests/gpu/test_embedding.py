"""The embedding kernels against the NumPy side in float64."""

import numpy as np
import pytest

from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Adapter, Batch
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
        ops.embedding_backward(upstream, rows_of(ops, ids), params, EMBEDDING, grads, params)
    return ops.read(grads.arrays[EMBEDDING])


def reference(weight, ids, dy, calls=1):
    cpu, params = open_cpu(np.float64, threads=1), {EMBEDDING: weight.astype(np.float64)}
    grads = GradientBuffers(params, params)
    for _ in range(calls):
        cpu.embedding_backward(dy.astype(np.float64), rows_of(cpu, ids), params, EMBEDDING, grads, params)
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
    gpu_once.embedding_backward(gpu_once.empty(2, 2), rows_of(gpu_once, [0, 1]), {}, EMBEDDING, grads, ())
    assert grads.arrays == {}


ADAPTED = [(1, 1, 1, 1), (2, 8, 3, 3), (67, 11, 5, 8), (131, 40, 64, 1), (300, 3, 129, 64), (257, 1031, 33, 8)]


def adapted(T, vocab_size, d_model, rank):
    """Parameters, ids and dy on the host, float32 and int64."""
    rng = np.random.default_rng(T)
    shapes = {EMBEDDING: (vocab_size, d_model), "A": (rank, vocab_size), "B": (d_model, rank), "dy": (T, d_model)}
    host = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return host, rng.integers(0, vocab_size, T), host.pop("dy")


def adapted_reference(host, ids, dy, scale):
    """out, and the gradients of the weight, A and B, in float64."""
    W, A, B = (value.astype(np.float64) for value in host.values())
    onehot = np.eye(len(W))[ids]
    sums = onehot.T @ dy
    return W[ids] + scale * A.T[ids] @ B.T, {EMBEDDING: sums, "A": scale * (sums @ B).T, "B": scale * (A @ sums).T}


def check_adapter(ops, assert_close, case, need="AB", expected=None):
    host, ids, dy = case
    params = {name: ops.upload_parameter(name, value) for name, value in host.items()}
    adapter, rows = Adapter("A", "B", 0.6), rows_of(ops, ids)
    out, gradients = expected or adapted_reference(*case, 0.6)
    found = ops.empty(*dy.shape)
    ops.embedding_forward(rows, params, EMBEDDING, found, adapter)
    assert_close(ops.read(found), out, 1e-4)
    grads, upstream = GradientBuffers(params, need, ops), ops.upload(dy)
    for array in grads.arrays.values():
        ops.write_parameter(array, np.full(array.shape, np.nan, np.float32))
    for calls in (1, 2):
        ops.embedding_backward(upstream, rows, params, EMBEDDING, grads, need, adapter)
        for name in need:
            assert_close(ops.read(grads.arrays[name]), calls * gradients[name], 1e-3, f"d{name}, {calls=}")
    return [ops.read(array).tobytes() for array in (found, *grads.arrays.values())]


@pytest.mark.parametrize("shape", ADAPTED)
def test_adapter(ops, assert_close, shape):
    check_adapter(ops, assert_close, adapted(*shape))


@pytest.mark.parametrize("need", ["", "A", "B", [EMBEDDING], ["A", "B", EMBEDDING]])
def test_an_adapter_computes_what_is_needed(gpu_once, assert_close, need):
    check_adapter(gpu_once, assert_close, adapted(67, 11, 5, 3), need)


def test_case_14_repeated_ids_add_up_in_an_adapter(ops):
    """Columns of ids that do not occur stay 0."""
    host = {EMBEDDING: np.zeros((8, 2), np.float32), "A": np.zeros((1, 8), np.float32)}
    host["A"][0, [1, 5]], host["B"] = [3, 7], np.array([[1], [10]], np.float32)
    dy = np.array([[1, 0], [2, 0], [4, 0], [0, 1]], np.float32)
    params = {name: ops.upload(value) for name, value in host.items()}
    grads = GradientBuffers(params, "AB", ops)
    rows = rows_of(ops, [5, 5, 5, 1])
    ops.embedding_backward(ops.upload(dy), rows, params, EMBEDDING, grads, "AB", Adapter("A", "B", 2.0))
    np.testing.assert_array_equal(ops.read(grads.arrays["A"]), [[0, 20, 0, 0, 0, 14, 0, 0]])
    np.testing.assert_array_equal(ops.read(grads.arrays["B"]), [[98], [6]])


@pytest.mark.parametrize("limit", [512, 160])
def test_case_48_an_adapter_of_a_weight_in_row_parts(ops, assert_close, monkeypatch, limit):
    case = adapted(100, 40, 8, 3)
    need = ["A", "B", EMBEDDING]
    whole = check_adapter(ops, assert_close, case, need)
    monkeypatch.setattr(ops.device, "binding_limit", limit)
    assert len(ops.upload_parameter(EMBEDDING, case[0][EMBEDDING]).parts) > 1
    assert check_adapter(ops, assert_close, case, need) == whole


def test_an_adapter_is_deterministic(ops, assert_close):
    case = adapted(1000, 3, 5, 8)
    assert len({b"".join(check_adapter(ops, assert_close, case)) for _ in range(3)}) == 1


def test_batches_of_one_shape_take_the_same_buffers(gpu_once):
    """However many distinct ids a batch has."""
    rng, held = np.random.default_rng(0), set()
    for vocab_size in (1, 3, 20, 1000):
        with gpu_once.scope():
            rows_of(gpu_once, rng.integers(0, vocab_size, 50))
        held.add(gpu_once.held_bytes())
    assert len(held) == 1
