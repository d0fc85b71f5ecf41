"""The head-and-loss op."""

import numpy as np
import pytest

from mamba_ops import gradcheck
from mamba_ops.cpu import linear_cross_entropy as module
from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import IGNORED, Batch


def rows_of(ops, targets):
    targets = np.array([targets])
    return ops.rows(Batch(np.zeros_like(targets), targets, np.zeros(targets.shape, np.uint32)))


@pytest.mark.parametrize("T", [1, 2, 9, 67])
def test_gradient_of_every_element(T):
    rng = np.random.default_rng(T)
    for result in gradcheck.check(gradcheck.linear_cross_entropy(open_cpu(np.float64), rng, T)):
        assert result.holds, result


@pytest.mark.parametrize("block", [1, 3, 7, 1000])
def test_row_blocks_change_nothing(block, monkeypatch):
    ops = open_cpu(np.float64)
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((11, 3))}
    x, targets = rng.standard_normal((17, 3)), rng.integers(0, 11, 17)
    logits = x @ params["w"].T
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.log(p[np.arange(17), targets])
    p[np.arange(17), targets] -= 1
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 11 * block)
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 22)
    grads, dx = GradientBuffers(params, params), np.empty((17, 3))
    losses = ops.linear_cross_entropy_forward(rows_of(ops, targets), x, params, "w", grads, params, dx)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    np.testing.assert_allclose(dx, p @ params["w"], rtol=1e-11)
    np.testing.assert_allclose(grads.arrays["w"], p.T @ x, rtol=1e-11)


def test_ignored_targets_carry_neither_loss_nor_gradient():
    ops = open_cpu(np.float64)
    rng = np.random.default_rng(0)
    params, x = {"w": rng.standard_normal((5, 3))}, rng.standard_normal((3, 3))
    grads, dx = GradientBuffers(params, params), np.empty((3, 3))
    rows = rows_of(ops, [IGNORED, 2, IGNORED])
    losses = ops.linear_cross_entropy_forward(rows, x, params, "w", grads, params, dx)
    alone, dx_alone = GradientBuffers(params, params), np.empty((1, 3))
    own = ops.linear_cross_entropy_forward(rows_of(ops, [2]), x[1:2], params, "w", alone, params, dx_alone)
    np.testing.assert_allclose(losses, [0, own[0], 0], rtol=1e-14)
    np.testing.assert_allclose(dx, [[0, 0, 0], dx_alone[0], [0, 0, 0]], rtol=1e-14)
    np.testing.assert_allclose(grads.arrays["w"], alone.arrays["w"], rtol=1e-13)


def test_huge_logits_do_not_overflow():
    ops = open_cpu(np.float32)
    params, x = {"w": np.array([[1e4], [-1e4]], np.float32)}, np.ones((2, 1), np.float32)
    losses = ops.linear_cross_entropy_forward(rows_of(ops, [0, 1]), x, params, "w")
    np.testing.assert_array_equal(losses, [0, 2e4])


def test_case_27_values():
    ops = open_cpu(np.float64)
    logits = np.array([[2.0, 0, -1], [0, 1, 0], [5, 5, 5]])
    losses = ops.linear_cross_entropy_forward(rows_of(ops, [0, 2, 1]), logits, {"w": np.eye(3)}, "w")
    np.testing.assert_allclose(losses, [0.1698460196, 1.5514447139, 1.0986122887], rtol=1e-9)
    assert np.exp(ops.total(losses) / 3) == pytest.approx(2.5598986658, rel=1e-10)
