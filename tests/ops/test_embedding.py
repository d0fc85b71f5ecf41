"""The embedding op."""

import numpy as np
import pytest

from mamba_ops import gradcheck
from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Batch


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
    ops.embedding_backward(dy, rows_of(ops, [5, 5, 5, 1]), "w", grads, params)
    expected = np.zeros((8, 2))
    expected[5], expected[1] = [7, 70], [8, 80]
    np.testing.assert_array_equal(grads.arrays["w"], expected)
    ops.embedding_backward(dy, rows_of(ops, [5, 5, 5, 1]), "w", grads, params)
    np.testing.assert_array_equal(grads.arrays["w"], 2 * expected)
    grads.start_step()
    ops.embedding_backward(dy, rows_of(ops, [0, 0, 2, 7]), "w", grads, params)
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
        ops.embedding_backward(dy, rows, "w", grads, params)
        found.append(grads.arrays["w"].tobytes())
    assert len(set(found)) == 1


def test_a_frozen_embedding_gets_no_gradient():
    ops = open_cpu(np.float64)
    grads = GradientBuffers({}, ())
    ops.embedding_backward(np.ones((2, 2)), rows_of(ops, [0, 1]), "w", grads, ())
    assert grads.arrays == {}
