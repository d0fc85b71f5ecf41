"""The head-and-loss kernels against the NumPy side in float64."""

import numpy as np
import pytest

from mamba_ops.cpu import open_cpu
from mamba_ops.gpu import linear_cross_entropy as module
from mamba_ops.gpu.device import DeviceError
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import IGNORED, Adapter, Batch
from mamba_ops.parameters import EMBEDDING

SHAPES = [(1, 1, 1), (1, 2, 3), (2, 7, 4), (9, 11, 5), (67, 40, 8), (33, 257, 31), (5, 1031, 17), (130, 129, 65)]


def rows_of(ops, targets):
    targets = np.array([targets])
    return ops.rows(Batch(np.zeros_like(targets), targets, np.zeros(targets.shape, np.uint32)))


def inputs(T, vocab_size, d_model, scale=1.0):
    rng = np.random.default_rng(T * 10000 + vocab_size)
    x = (rng.standard_normal((T, d_model)) * scale).astype(np.float32)
    w = rng.standard_normal((vocab_size, d_model)).astype(np.float32)
    targets = rng.integers(0, vocab_size, T)
    if T > 2:
        targets[[1, -1]] = IGNORED
    return x, w, targets


def on_device(ops, x, w, targets, calls=1):
    """losses, dx, and dweight after so many calls on buffers that hold NaN."""
    params = {EMBEDDING: ops.upload_parameter(EMBEDDING, w)}
    grads = GradientBuffers(params, params, ops)
    ops.write_parameter(grads.arrays[EMBEDDING], np.full(w.shape, np.nan, np.float32))
    rows, inputs, dx = rows_of(ops, targets), ops.upload(x), ops.empty(*x.shape)
    for _ in range(calls):
        losses = ops.linear_cross_entropy_forward(rows, inputs, params, EMBEDDING, grads, params, dx)
    return [ops.read(array) for array in (losses, dx, grads.arrays[EMBEDDING])]


def on_cpu(x, w, targets, calls=1):
    cpu = open_cpu(np.float64, threads=1)
    x, params = x.astype(np.float64), {EMBEDDING: w.astype(np.float64)}
    grads, dx = GradientBuffers(params, params), np.empty_like(x)
    for _ in range(calls):
        losses = cpu.linear_cross_entropy_forward(rows_of(cpu, targets), x, params, EMBEDDING, grads, params, dx)
    return losses, dx, grads.arrays[EMBEDDING]


def check(assert_close, found, expected):
    for name, one, other, tolerance in zip(
        ("losses", "dx", "dweight"), found, expected, (1e-4, 1e-3, 1e-3), strict=True
    ):
        assert_close(one, other, tolerance, name)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients(gpu, assert_close, shape, calls):
    case = inputs(*shape)
    check(assert_close, on_device(gpu, *case, calls), on_cpu(*case, calls))


@pytest.mark.parametrize("block", [1, 3, 7, 66])
def test_row_blocks_change_nothing(gpu, assert_close, monkeypatch, block):
    case = inputs(67, 41, 8)
    monkeypatch.setattr(module, "BLOCK_BYTES", block * 44 * 4)
    check(assert_close, on_device(gpu, *case), on_cpu(*case))


def test_more_rows_than_one_dimension_of_workgroups(gpu_once, assert_close):
    case = inputs(70_001, 3, 2)
    check(assert_close, on_device(gpu_once, *case), on_cpu(*case))


def test_only_a_block_of_logits_exists(gpu_once, monkeypatch):
    x, w, targets = inputs(67, 40, 8)
    monkeypatch.setattr(module, "BLOCK_BYTES", 3 * 40 * 4)
    params, rows, inputs_ = {EMBEDDING: gpu_once.upload(w)}, rows_of(gpu_once, targets), gpu_once.upload(x)
    before = gpu_once.held_bytes()
    gpu_once.linear_cross_entropy_forward(rows, inputs_, params, EMBEDDING)
    assert gpu_once.held_bytes() - before <= 3 * 40 * 4 + 68 * 4 + 64


def test_losses_alone(gpu, assert_close):
    x, w, targets = inputs(67, 41, 8)
    params = {EMBEDDING: gpu.upload_parameter(EMBEDDING, w)}
    losses = gpu.linear_cross_entropy_forward(rows_of(gpu, targets), gpu.upload(x), params, EMBEDDING)
    assert_close(gpu.read(losses), on_cpu(x, w, targets)[0], 1e-4)


def test_frozen_head_or_no_dx(gpu_once, assert_close):
    x, w, targets = inputs(9, 11, 5)
    _, dx, dweight = on_cpu(x, w, targets)
    params, rows, inputs_ = {EMBEDDING: gpu_once.upload(w)}, rows_of(gpu_once, targets), gpu_once.upload(x)
    found, none = gpu_once.empty(9, 5), GradientBuffers({}, (), gpu_once)
    gpu_once.linear_cross_entropy_forward(rows, inputs_, params, EMBEDDING, none, (), found)
    assert_close(gpu_once.read(found), dx, 1e-3)
    grads = GradientBuffers(params, params, gpu_once)
    gpu_once.linear_cross_entropy_forward(rows, inputs_, params, EMBEDDING, grads, params)
    assert_close(gpu_once.read(grads.arrays[EMBEDDING]), dweight, 1e-3)


def test_ignored_targets_carry_neither_loss_nor_gradient(gpu):
    x, w, _ = inputs(3, 5, 3)
    losses, dx, dweight = on_device(gpu, x, w, np.array([IGNORED, 2, IGNORED]))
    own, dx_alone, dweight_alone = on_device(gpu, x[1:2], w, np.array([2]))
    np.testing.assert_allclose(losses, [0, own[0], 0], rtol=1e-6)
    np.testing.assert_array_equal(dx[[0, 2]], 0)
    np.testing.assert_allclose(dx[1], dx_alone[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dweight, dweight_alone, rtol=1e-5, atol=1e-6)


def test_huge_logits_do_not_overflow(gpu):
    w, x = np.array([[1e4], [-1e4]], np.float32), np.ones((2, 1), np.float32)
    losses, dx, _ = on_device(gpu, x, w, np.array([0, 1]))
    np.testing.assert_array_equal(losses, [0, 2e4])
    np.testing.assert_array_equal(dx, [[0], [2e4]])


def test_a_sure_prediction_has_a_small_loss(gpu, assert_close):
    """log of a sum near 1."""
    w, x = np.diag(np.full(5, 12.0)).astype(np.float32), np.eye(5, dtype=np.float32)
    losses, expected = on_device(gpu, x, w, np.arange(5))[0], on_cpu(x, w, np.arange(5))[0]
    assert expected.max() < 1e-4
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_case_13_a_non_finite_logit_is_seen(gpu, bad):
    x, w, targets = inputs(9, 300, 5)
    x[3, 2] = bad
    losses, dx, dweight = on_device(gpu, x, w, targets)
    assert np.isnan(losses[3])
    assert np.isfinite(np.delete(losses, 3)).all()
    assert np.isnan(dx[3]).all()
    assert not np.isfinite(dweight).any()
    assert np.isnan(gpu.total(gpu.upload(losses)))


def test_case_27_values(gpu):
    logits = np.array([[2.0, 0, -1], [0, 1, 0], [5, 5, 5]], np.float32)
    params = {"w": gpu.upload(np.eye(3, dtype=np.float32))}
    losses = gpu.linear_cross_entropy_forward(rows_of(gpu, [0, 2, 1]), gpu.upload(logits), params, "w")
    np.testing.assert_allclose(gpu.read(losses), [0.1698460196, 1.5514447139, 1.0986122887], rtol=1e-6)
    assert np.exp(gpu.total(losses) / 3) == pytest.approx(2.5598986658, rel=1e-6)


@pytest.mark.parametrize("size", [1, 255, 257, 4096, 4097, 20011])
def test_total_is_the_sum(gpu, size):
    terms = np.random.default_rng(size).random(size).astype(np.float32)
    assert gpu.total(gpu.upload(terms)) == pytest.approx(terms.sum(dtype=np.float64), rel=1e-6)


@pytest.mark.parametrize("limit", [512, 160])
def test_case_48_row_parts_change_nothing(gpu, assert_close, monkeypatch, limit):
    case = inputs(67, 40, 8)
    expected = on_cpu(*case)
    monkeypatch.setattr(gpu.device, "binding_limit", limit)
    assert len(gpu.upload_parameter(EMBEDDING, case[1]).parts) > 1
    check(assert_close, on_device(gpu, *case, 2), (*expected[:2], 2 * expected[2]))


def test_case_48_a_row_of_logits_above_the_limit_is_an_error(gpu_once, monkeypatch):
    case = inputs(9, 40, 8)
    monkeypatch.setattr(gpu_once.device, "binding_limit", 156)
    with pytest.raises(DeviceError, match=r"a row of 40 logits: 160 bytes, above the binding limit of 156 bytes"):
        on_device(gpu_once, *case)


@pytest.mark.parametrize("targets", [[0, 7, 8], [0, 4_000_000]])
def test_case_43_targets_without_a_row_are_refused(gpu_once, targets):
    params = {EMBEDDING: gpu_once.upload(np.ones((8, 2), np.float32))}
    x = gpu_once.upload(np.ones((len(targets), 2), np.float32))
    with pytest.raises(ValueError, match=rf"has 8 rows, the batch holds the id or target {targets[-1]}"):
        gpu_once.linear_cross_entropy_forward(rows_of(gpu_once, targets), x, params, EMBEDDING)


def test_repeated_runs_give_the_same_bytes(gpu):
    case = inputs(130, 129, 65)
    assert len({b"".join(a.tobytes() for a in on_device(gpu, *case)) for _ in range(3)}) == 1


ADAPTED = [(1, 1, 1, 1), (2, 7, 4, 3), (9, 11, 5, 8), (67, 40, 8, 3), (5, 1031, 17, 8), (130, 129, 65, 64)]


def adapted(T, vocab_size, d_model, rank):
    """x, the targets, and the parameters with an adapter's; logits of size one."""
    x, w, targets = inputs(T, vocab_size, d_model, d_model**-0.5)
    rng = np.random.default_rng(rank)
    A = (rng.standard_normal((rank, vocab_size)) * rank**-0.5).astype(np.float32)
    return x, targets, {EMBEDDING: w, "A": A, "B": rng.standard_normal((d_model, rank)).astype(np.float32)}


def adapted_reference(x, targets, host, scale):
    """losses, dx, and the gradients of the weight, A and B, in float64."""
    x, w, A, B = (array.astype(np.float64) for array in (x, *host.values()))
    counted = targets != IGNORED
    logits = x @ w.T + scale * x @ B @ A
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(axis=1, keepdims=True)
    picked = np.arange(len(x)), np.where(counted, targets, 0)
    losses = np.where(counted, -np.log(p[picked]), 0)
    p[picked] -= 1
    p *= counted[:, None]
    gradients = {EMBEDDING: p.T @ x, "A": scale * (x @ B).T @ p, "B": scale * x.T @ p @ A.T}
    return losses, p @ w + scale * p @ A.T @ B.T, gradients


def check_adapter(ops, assert_close, case, need="AB"):
    x, targets, host = case
    losses, dx, gradients = adapted_reference(*case, 0.6)
    params, adapter = {name: ops.upload_parameter(name, value) for name, value in host.items()}, Adapter("A", "B", 0.6)
    grads, rows = GradientBuffers(params, need, ops), rows_of(ops, targets)
    for array in grads.arrays.values():
        ops.write_parameter(array, np.full(array.shape, np.nan, np.float32))
    inputs, out = ops.upload(x), ops.empty(*x.shape)
    for calls in (1, 2):
        found = ops.linear_cross_entropy_forward(rows, inputs, params, EMBEDDING, grads, need, out, adapter)
        assert_close(ops.read(found), losses, 1e-4, "losses")
        assert_close(ops.read(out), dx, 1e-3, "dx")
        for name in need:
            assert_close(ops.read(grads.arrays[name]), calls * gradients[name], 1e-3, f"d{name}, {calls=}")
    alone = ops.linear_cross_entropy_forward(rows, inputs, params, EMBEDDING, adapter=adapter)
    assert ops.read(alone).tobytes() == ops.read(found).tobytes()
    return [ops.read(array).tobytes() for array in (found, out, *grads.arrays.values())]


@pytest.mark.parametrize("shape", ADAPTED)
def test_adapter(ops, assert_close, shape):
    check_adapter(ops, assert_close, adapted(*shape))


@pytest.mark.parametrize("need", ["", "A", "B", ["A", "B", EMBEDDING]])
def test_an_adapter_computes_what_is_needed(gpu_once, assert_close, need):
    check_adapter(gpu_once, assert_close, adapted(67, 41, 8, 3), need)


def test_an_adapter_without_dx(gpu_once, assert_close):
    x, targets, host = adapted(67, 41, 8, 3)
    params = {name: gpu_once.upload(value) for name, value in host.items()}
    expected = adapted_reference(x, targets, host, 0.6)[2]
    for need in ("A", "AB"):
        grads, rows = GradientBuffers(params, need, gpu_once), rows_of(gpu_once, targets)
        head = gpu_once.upload(x), params, EMBEDDING
        gpu_once.linear_cross_entropy_forward(rows, *head, grads, need, adapter=Adapter("A", "B", 0.6))
        for name in need:
            assert_close(gpu_once.read(grads.arrays[name]), expected[name], 1e-3)


@pytest.mark.parametrize("block", [1, 7, 66])
def test_row_blocks_change_nothing_of_an_adapter(ops, assert_close, monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK_BYTES", block * 44 * 4)
    check_adapter(ops, assert_close, adapted(67, 41, 8, 3))


@pytest.mark.parametrize("limit", [512, 160])
def test_case_48_an_adapter_of_a_weight_in_row_parts(ops, assert_close, monkeypatch, limit):
    case = adapted(67, 40, 8, 3)
    monkeypatch.setattr(ops.device, "binding_limit", limit)
    assert len(ops.upload_parameter(EMBEDDING, case[2][EMBEDDING]).parts) > 1
    check_adapter(ops, assert_close, case, ["A", "B", EMBEDDING])


def test_an_adapter_is_deterministic(ops, assert_close):
    case = adapted(130, 129, 65, 8)
    assert len({b"".join(check_adapter(ops, assert_close, case)) for _ in range(3)}) == 1
