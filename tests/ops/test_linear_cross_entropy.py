"""The head-and-loss op."""

import numpy as np
import pytest

from mamba_ops import gradcheck
from mamba_ops.cpu import linear_cross_entropy as module
from mamba_ops.cpu import open_cpu, products
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import IGNORED, Adapter, Batch

ADAPTER = Adapter("A", "B", 0.7)


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


def random_params(vocab_size=11, d_model=3, r=2, dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"w": (vocab_size, d_model), "A": (r, vocab_size), "B": (d_model, r)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(("T", "r", "block"), [(1, 1, 1), (2, 3, 1), (9, 2, 4), (9, 1, 9), (67, 2, 100)])
def test_gradient_of_every_element_with_an_adapter(T, r, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 7 * block)
    rng = np.random.default_rng(T)
    for result in gradcheck.check(gradcheck.linear_cross_entropy(open_cpu(np.float64), rng, T, r)):
        assert result.holds, result


@pytest.mark.parametrize("need", [(), ("A",), ("B",), ("A", "B"), ("w", "A", "B")])
@pytest.mark.parametrize("block", [1, 5, 1000])
def test_an_adapter_is_the_merged_weight_whatever_trains(block, need, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 11 * block)
    monkeypatch.setattr(products, "PART_ELEMENTS", 11 * 3)
    ops, rng, params = open_cpu(np.float64), np.random.default_rng(1), random_params()
    merged = {"w": params["w"] + 0.7 * (params["B"] @ params["A"]).T}
    rows, x = rows_of(ops, [*rng.integers(0, 11, 16), IGNORED]), rng.standard_normal((17, 3))
    wanted, expected_dx = GradientBuffers(merged, merged), np.empty((17, 3))
    expected = ops.linear_cross_entropy_forward(rows, x, merged, "w", wanted, merged, expected_dx).copy()
    dw = wanted.arrays["w"]
    gradients = {"w": dw, "A": 0.7 * params["B"].T @ dw.T, "B": 0.7 * dw.T @ params["A"].T}
    grads = GradientBuffers(params, need)
    np.testing.assert_allclose(
        ops.linear_cross_entropy_forward(rows, x, params, "w", adapter=ADAPTER), expected, rtol=1e-12
    )
    for uses, dx in ((1, np.empty((17, 3))), (2, None)):
        losses = ops.linear_cross_entropy_forward(rows, x, params, "w", grads, need, dx, ADAPTER)
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        if dx is not None:
            np.testing.assert_allclose(dx, expected_dx, rtol=1e-11, atol=1e-13)
        assert grads.arrays.keys() == set(need)
        for name in need:
            np.testing.assert_allclose(grads.arrays[name], uses * gradients[name], rtol=1e-11, atol=1e-13)


def test_lookup_and_tied_head_add_into_the_same_gradients():
    """As in a step: the head first, which overwrites what a step before has left, and then the lookup."""
    ops, rng, params = open_cpu(np.float64), np.random.default_rng(1), random_params()
    ids, need = np.array([[4, 4, 10]]), ("A", "B")
    rows, x, dy = ops.rows(Batch(ids, ids, np.zeros(ids.shape, np.uint32))), *rng.standard_normal((2, 3, 3))
    head, lookup, both = (GradientBuffers(params, need) for _ in range(3))
    ops.linear_cross_entropy_forward(rows, x, params, "w", head, need, None, ADAPTER)
    ops.embedding_backward(dy, rows, params, "w", lookup, need, ADAPTER)
    for _step in range(2):
        both.start_step()
        ops.linear_cross_entropy_forward(rows, x, params, "w", both, need, None, ADAPTER)
        ops.embedding_backward(dy, rows, params, "w", both, need, ADAPTER)
    for name in need:
        np.testing.assert_allclose(both.arrays[name], head.arrays[name] + lookup.arrays[name], rtol=1e-12)


def test_an_adapter_of_zeros_leaves_losses_and_dx_bit_identical():
    """A = 0, as an adapter of the embedding starts."""
    ops, params = open_cpu(), random_params(501, 30, 4, np.float32)
    params["A"][...] = 0
    rng = np.random.default_rng(1)
    rows, x = rows_of(ops, rng.integers(0, 501, 40)), rng.standard_normal((40, 30)).astype(np.float32)
    found = []
    for adapter in (None, ADAPTER):
        dx = np.empty((40, 30), np.float32)
        losses = ops.linear_cross_entropy_forward(rows, x, params, "w", GradientBuffers({}, ()), (), dx, adapter)
        found.append((losses.tobytes(), dx.tobytes()))
    assert found[0] == found[1]
