"""The whole model: gradients, activation checkpointing, boundaries, carried state."""

import numpy as np
import pytest

from mamba_ops import gradcheck, model
from mamba_ops.config import MambaConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Batch
from mamba_ops.parameters import init

CONFIGURATIONS = {
    "tied": dict(hidden_size=8, state_size=4),
    "untied": dict(hidden_size=8, state_size=4, tie_word_embeddings=False),
    "biases": dict(hidden_size=6, state_size=3, use_bias=True, time_step_rank=2),
    "no conv bias": dict(hidden_size=5, state_size=2, use_conv_bias=False, conv_kernel=3),
    "smallest": dict(hidden_size=3, state_size=1, conv_kernel=1, expand=1),
}


def configuration(name):
    return MambaConfig(**(dict(vocab_size=11, num_hidden_layers=2) | CONFIGURATIONS[name]))


def batch_of(ids, targets, positions):
    return Batch(np.array([ids]), np.array([targets]), np.array([positions], np.uint32))


def gradients_of(ops, params, config, batches, checkpointing=False):
    grads = GradientBuffers(params, params)
    total = sum(
        model.losses_and_gradients(ops, params, config, ops.rows(batch), grads, params, checkpointing)
        for batch in batches
    )
    return total, grads.arrays


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_gradients_agree_with_central_differences(name, checkpointing):
    ops = open_cpu(np.float64)
    case = gradcheck.model_case(ops, configuration(name), seed=1, checkpointing=checkpointing)
    for result in gradcheck.check(case, elements=50, seed=2):
        assert result.holds, result


@pytest.mark.parametrize("seed", range(8))
def test_the_shown_check_holds_for_any_seed(seed, capsys):
    assert gradcheck.main(["model", "--seed", str(seed)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_activation_checkpointing_is_bit_identical(name, dtype):
    ops, config = open_cpu(dtype), configuration(name)
    params = init(config, 0, dtype)
    batch = gradcheck.random_batch(np.random.default_rng(0), config.vocab_size, 3, 37)
    kept_loss, kept = gradients_of(ops, params, config, [batch])
    again_loss, again = gradients_of(ops, params, config, [batch], checkpointing=True)
    assert kept_loss == again_loss
    assert all(kept[key].tobytes() == again[key].tobytes() for key in kept)


def test_frozen_parameters_get_no_gradient_and_change_none():
    ops, config = open_cpu(np.float64), configuration("biases")
    params = init(config, 0, np.float64)
    batch = gradcheck.random_batch(np.random.default_rng(0), config.vocab_size, 2, 9)
    need = [name for name in params if name.endswith(("x_proj.weight", "A_log"))]
    grads = GradientBuffers(params, need)
    model.losses_and_gradients(ops, params, config, ops.rows(batch), grads, need)
    _, full = gradients_of(ops, params, config, [batch])
    assert sorted(grads.arrays) == sorted(need)
    assert all(grads.arrays[name].tobytes() == full[name].tobytes() for name in need)


PACKED = batch_of([0, 1, 2, 3, 0, 4, 5], [1, 2, 3, 0, 4, 5, 0], [0, 1, 2, 3, 0, 1, 2])
ALONE = [
    batch_of([0, 1, 2, 3], [1, 2, 3, 0], [0, 1, 2, 3]),
    batch_of([0, 4, 5], [4, 5, 0], [0, 1, 2]),
]


def test_case_18_packed_documents_train_as_if_alone():
    ops, config = open_cpu(np.float64), configuration("tied")
    params = init(config, 0, np.float64)
    packed, alone = gradients_of(ops, params, config, [PACKED]), gradients_of(ops, params, config, ALONE)
    assert packed[0] == pytest.approx(alone[0], rel=1e-12)
    for name, value in packed[1].items():
        np.testing.assert_allclose(value, alone[1][name], rtol=1e-9, atol=1e-12)
    logits = model.logits(ops, params, config, ops.rows(PACKED))
    pieces = [model.logits(ops, params, config, ops.rows(batch)) for batch in ALONE]
    np.testing.assert_allclose(logits, np.concatenate(pieces), rtol=1e-11)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 3, 1), (1, 31, 2), (16, 16, 17), (3, 61, 64)])
def test_case_18_short_documents_and_block_edges(lengths):
    ops, config = open_cpu(np.float64), configuration("biases")
    params = init(config, 0, np.float64)
    rng = np.random.default_rng(0)
    documents = [batch_of(rng.integers(0, 11, n), rng.integers(0, 11, n), np.arange(n)) for n in lengths]
    packed = Batch(
        *(np.concatenate([getattr(d, field) for d in documents], axis=1) for field in ("ids", "targets", "positions"))
    )
    one, many = gradients_of(ops, params, config, [packed]), gradients_of(ops, params, config, documents)
    assert one[0] == pytest.approx(many[0], rel=1e-12)
    for name, value in one[1].items():
        np.testing.assert_allclose(value, many[1][name], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("changed", range(7))
def test_case_18_a_token_reaches_only_its_own_document(changed):
    ops, config = open_cpu(np.float64), configuration("tied")
    params = init(config, 0, np.float64)
    before = model.logits(ops, params, config, ops.rows(PACKED))
    ids = PACKED.ids.copy()
    ids[0, changed] = 9
    after = model.logits(ops, params, config, ops.rows(Batch(ids, PACKED.targets, PACKED.positions)))
    document = slice(0, 4) if changed < 4 else slice(4, 7)
    same = np.ones(7, bool)
    same[changed : document.stop] = False
    assert after[same].tobytes() == before[same].tobytes()
    assert np.all(np.any(after[~same] != before[~same], axis=1))


def test_case_14_tied_gradient_of_a_repeated_row_that_is_also_a_target():
    ops, config = open_cpu(np.float64), configuration("tied")
    params = gradcheck.random_parameters(config, np.random.default_rng(0))
    batch = batch_of([5, 5, 5, 1], [5, 5, 1, 5], [0, 1, 2, 3])
    _, exact = gradients_of(ops, params, config, [batch])

    def loss():
        with ops.scope():
            return ops.total(model.losses(ops, params, config, ops.rows(batch)))

    name = "backbone.embeddings.weight"
    numeric = gradcheck.element_differences(loss, params[name])
    assert np.abs(numeric - exact[name].reshape(-1)).max() <= 1e-6 * np.abs(exact[name]).max()


@pytest.mark.parametrize("pieces", [(23,), (1, 22), (5, 1, 1, 16), (1,) * 23])
def test_state_is_carried_over_any_split(pieces):
    ops, config = open_cpu(np.float64), configuration("biases")
    params = init(config, 0, np.float64)
    batch = gradcheck.random_batch(np.random.default_rng(0), config.vocab_size, 2, 23)
    whole = model.logits(ops, params, config, ops.rows(batch)).reshape(2, 23, -1)
    state, at = model.empty_state(ops, config, 2), 0
    for length in pieces:
        part = slice(at, at + length)
        piece = Batch(*(getattr(batch, f)[:, part].copy() for f in ("ids", "targets", "positions")))
        found = model.logits(ops, params, config, ops.rows(piece), state).reshape(2, length, -1)
        np.testing.assert_allclose(found, whole[:, part], rtol=0, atol=1e-10 * np.abs(whole).max())
        at += length


def test_rows_of_a_batch_do_not_mix():
    ops, config = open_cpu(np.float64), configuration("untied")
    params = init(config, 0, np.float64)
    batch = gradcheck.random_batch(np.random.default_rng(0), config.vocab_size, 3, 20)
    rows = [Batch(*(getattr(batch, f)[i : i + 1] for f in ("ids", "targets", "positions"))) for i in range(3)]
    together, apart = gradients_of(ops, params, config, [batch]), gradients_of(ops, params, config, rows)
    assert together[0] == pytest.approx(apart[0], rel=1e-12)
    for name, value in together[1].items():
        np.testing.assert_allclose(value, apart[1][name], rtol=1e-8, atol=1e-12)


def test_repeated_runs_and_thread_counts_give_the_same_bytes():
    config = configuration("tied")
    params = init(config, 0)
    batch = gradcheck.random_batch(np.random.default_rng(0), config.vocab_size, 3, 70)
    found = set()
    for threads in (1, 2, 3, 2):
        loss, grads = gradients_of(open_cpu(threads=threads), params, config, [batch])
        found.add((loss, *(value.tobytes() for value in grads.values())))
    assert len(found) == 1


def test_the_same_buffers_come_back_every_step():
    ops, config = open_cpu(), configuration("tied")
    params = init(config, 0)
    rows = ops.rows(gradcheck.random_batch(np.random.default_rng(0), config.vocab_size, 2, 33))
    grads = GradientBuffers(params, params)
    model.losses_and_gradients(ops, params, config, rows, grads, params)
    held = ops.held_bytes()
    for _ in range(3):
        grads.start_step()
        model.losses_and_gradients(ops, params, config, rows, grads, params)
        assert ops.held_bytes() == held
