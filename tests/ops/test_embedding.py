"""The embedding op."""

import numpy as np
import pytest

from mamba_ops import gradcheck
from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Adapter, Batch

ADAPTER = Adapter("A", "B", 0.7)


def rows_of(ops, ids):
    ids = np.array([ids])
    return ops.rows(Batch(ids, ids, np.arange(ids.size, dtype=np.uint32).reshape(ids.shape)))


@pytest.mark.parametrize("T", [1, 2, 13, 67])
def test_gradient_of_every_element(T):
    for result in gradcheck.check(gradcheck.embedding(open_cpu(np.float64), np.random.default_rng(T), T)):
        assert result.holds, result


def test_case_14_repeated_ids_add_up():
    ops = open_cpu(np.float64)
    params = {"w": np.zeros((8, 2))}
    grads = GradientBuffers(params, params)
    dy = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]])
    ops.embedding_backward(dy, rows_of(ops, [5, 5, 5, 1]), params, "w", grads, params)
    expected = np.zeros((8, 2))
    expected[5], expected[1] = [7, 70], [8, 80]
    np.testing.assert_array_equal(grads.arrays["w"], expected)
    ops.embedding_backward(dy, rows_of(ops, [5, 5, 5, 1]), params, "w", grads, params)
    np.testing.assert_array_equal(grads.arrays["w"], 2 * expected)
    grads.start_step()
    ops.embedding_backward(dy, rows_of(ops, [0, 0, 2, 7]), params, "w", grads, params)
    np.testing.assert_array_equal(grads.arrays["w"][[0, 2, 7, 5]], [[3, 30], [4, 40], [8, 80], [0, 0]])


def test_case_14_is_deterministic():
    ops = open_cpu(np.float32)
    rng = np.random.default_rng(0)
    params = {"w": np.zeros((3, 5), np.float32)}
    dy = rng.standard_normal((1000, 5)).astype(np.float32)
    rows = rows_of(ops, rng.integers(0, 3, 1000))
    found = []
    for _ in range(3):
        grads = GradientBuffers(params, params)
        ops.embedding_backward(dy, rows, params, "w", grads, params)
        found.append(grads.arrays["w"].tobytes())
    assert len(set(found)) == 1


def test_a_frozen_embedding_gets_no_gradient():
    ops = open_cpu(np.float64)
    grads = GradientBuffers({}, ())
    ops.embedding_backward(np.ones((2, 2)), rows_of(ops, [0, 1]), {}, "w", grads, ())
    assert grads.arrays == {}


def random_params(vocab_size=7, d_model=3, r=2, dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"w": (vocab_size, d_model), "A": (r, vocab_size), "B": (d_model, r)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("T", [1, 2, 13, 67])
def test_gradient_of_every_element_with_an_adapter(T, r):
    for result in gradcheck.check(gradcheck.embedding(open_cpu(np.float64), np.random.default_rng(T), T, r)):
        assert result.holds, result


def test_an_adapter_is_the_merged_weight():
    ops, params = open_cpu(np.float64), random_params()
    merged = {"w": params["w"] + 0.7 * (params["B"] @ params["A"]).T}
    rows, out, expected = rows_of(ops, [5, 0, 5, 6, 1]), np.empty((5, 3)), np.empty((5, 3))
    ops.embedding_forward(rows, params, "w", out, ADAPTER)
    ops.embedding_forward(rows, merged, "w", expected)
    np.testing.assert_allclose(out, expected, rtol=1e-13)


@pytest.mark.parametrize("need", [(), ("A",), ("B",), ("A", "B"), ("w", "A", "B")])
def test_only_what_trains_gets_a_gradient_and_repeated_ids_add_up(need):
    ops, params = open_cpu(np.float64), random_params()
    ids, dy = [5, 5, 0, 5, 1, 0], np.random.default_rng(1).standard_normal((6, 3))
    grads, dw = GradientBuffers(params, need), np.zeros((7, 3))
    np.add.at(dw, ids, dy)
    expected = {"w": dw, "A": 0.7 * params["B"].T @ dw.T, "B": 0.7 * dw.T @ params["A"].T}
    for uses in (1, 2):
        ops.embedding_backward(dy, rows_of(ops, ids), params, "w", grads, need, ADAPTER)
        assert grads.arrays.keys() == set(need)
        for name in need:
            np.testing.assert_allclose(grads.arrays[name], uses * expected[name], rtol=1e-12, atol=1e-13)
    grads.start_step()
    ops.embedding_backward(dy[:1], rows_of(ops, [3]), params, "w", grads, need, ADAPTER)
    if "A" in need:
        np.testing.assert_array_equal(np.flatnonzero(grads.arrays["A"].any(axis=0)), [3])


def test_gradients_of_an_adapter_are_deterministic():
    ops, rng, params = open_cpu(), np.random.default_rng(0), random_params(dtype=np.float32)
    dy, rows = rng.standard_normal((1000, 3)).astype(np.float32), rows_of(ops, rng.integers(0, 3, 1000))
    found = set()
    for threads in (1, 1, 2):
        grads = GradientBuffers(params, ["A", "B"])
        open_cpu(threads=threads).embedding_backward(dy, rows, params, "w", grads, ("A", "B"), ADAPTER)
        found.add((grads.arrays["A"].tobytes(), grads.arrays["B"].tobytes()))
    assert len(found) == 1


def test_an_adapter_of_zeros_leaves_the_output_bit_identical():
    """A = 0, as an adapter of the embedding starts."""
    ops, params = open_cpu(), random_params(dtype=np.float32)
    params["A"][...] = 0
    rows, out = rows_of(ops, [5, 0, 6]), np.empty((3, 3), np.float32)
    ops.embedding_forward(rows, params, "w", out, ADAPTER)
    assert out.tobytes() == params["w"][[5, 0, 6]].tobytes()
