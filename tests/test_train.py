"""One training step and whole runs in memory."""

import dataclasses
import inspect
import itertools
import logging
import math

import numpy as np
import pytest

import mamba_ops.gradients
from mamba_ops import optimizer
from mamba_ops.config import BatchesConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import GradientBuffers, accumulate
from mamba_ops.metrics import describe, mean_loss
from mamba_ops.ops import IGNORED, Batch
from mamba_ops.parameters import EMBEDDING, init
from mamba_ops.train import TokenRows, start, total_steps, train, train_step
from mamba_ops.training_data import token_rows, windows

CONFIG = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, state_size=4)
IDS = np.random.default_rng(5).integers(0, 11, 40).tolist()


@pytest.fixture
def ops():
    return open_cpu(np.float64, threads=1)


def begin(**options):
    return start(CONFIG, **{"seed": 3, "dtype": np.float64} | options)


def run(state, data=IDS, *, ops=None, seq_len=5, batch_size=2, seed=0, **options):
    settings = {"learning_rate": 1e-2, "max_steps": 5} | options
    batches = BatchesConfig(seq_len=seq_len, batch_size=batch_size, seed=seed)
    ops = ops or open_cpu(state.params[EMBEDDING].dtype.type, threads=1)
    return list(train(state, data, TrainConfig(**settings), batches, ops=ops))


def rows_of(*sequences, width=None):
    """One batch: a row per sequence of target counts; the rest of a row carries no loss."""
    rng = np.random.default_rng(len(sequences))
    width = width or max(sequences)
    ids = rng.integers(0, 11, (len(sequences), width + 1))
    targets = np.where(np.arange(width) < np.array(sequences)[:, None], ids[:, 1:], IGNORED)
    positions = np.broadcast_to(np.arange(width, dtype=np.uint32), targets.shape)
    return Batch(ids[:, :-1], targets, positions)


def split(batch, *sizes):
    edges = np.cumsum([0, *sizes])
    return [Batch(batch.ids[a:b], batch.targets[a:b], batch.positions[a:b]) for a, b in itertools.pairwise(edges)]


def copies(arrays):
    return {name: value.copy() for name, value in arrays.items()}


def same_bytes(one, other):
    return one.keys() == other.keys() and all(one[n].tobytes() == other[n].tobytes() for n in one)


def step(ops, state, batches, **settings):
    config = TrainConfig(**{"learning_rate": 1e-2} | settings)
    buffers = GradientBuffers(state.params, state.names)
    result = train_step(
        ops, state.params, CONFIG, batches, buffers, state.adam, config, config.learning_rate, state.names
    )
    return result, buffers


def one_bad_gradient(monkeypatch, name, value, calls=None):
    """Make the model's gradient of a parameter hold a value, in the given calls only."""
    real, made = mamba_ops.gradients.losses_and_gradients, []

    def poisoned(ops, params, config, rows, grads, *more):
        total = real(ops, params, config, rows, grads, *more)
        made.append(total)
        if calls is None or len(made) in calls:
            grads.arrays[name].flat[1] = value
        return total

    monkeypatch.setattr(mamba_ops.gradients, "losses_and_gradients", poisoned)


@pytest.mark.parametrize("sizes", [(3,), (1, 1, 1), (2, 1), (1, 2)])
def test_case_17_any_split_gives_the_gradients_loss_and_step_of_one_batch(ops, sizes):
    batch = rows_of(2, 5, 0)
    whole, one = begin(), begin()
    expected, buffers = step(ops, whole, [batch], max_grad_norm=0.5)
    found, parts = step(ops, one, split(batch, *sizes), max_grad_norm=0.5)
    assert found.tokens == expected.tokens == 7
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-10)
    for name, gradient in buffers.arrays.items():
        np.testing.assert_allclose(parts.arrays[name], gradient, rtol=1e-5, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(one.params[name], whole.params[name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("lengths", [(10, 100), (7, 2048)])
def test_case_17_seed_fault_2_every_token_of_a_window_weighs_the_same(ops, lengths):
    """Summed over the window and divided once: 1/110 each, not 1/20 and 1/200; a 7-token tail weighs 7 tokens."""
    short, long = rows_of(lengths[0]), rows_of(lengths[1])
    params = init(CONFIG, 0, np.float64)
    buffers = GradientBuffers(params, params)
    sums, gradients = [], []
    for batches in ([short], [long], [short, long]):
        sums.append(accumulate(ops, params, CONFIG, batches, buffers, params))
        gradients.append(copies(buffers.arrays))
    total = sum(lengths)
    assert sums[2][1] == total
    assert sums[2][0] == pytest.approx(sums[0][0] + sums[1][0], rel=1e-12)
    for name in params:
        mean = (gradients[0][name] + gradients[1][name]) / total
        np.testing.assert_allclose(gradients[2][name] / total, mean, rtol=1e-9, atol=1e-12)
    result, _ = step(ops, begin(params=params), [short, long])
    assert result.loss == pytest.approx((sums[0][0] + sums[1][0]) / total, rel=1e-12)


def test_case_17_a_batch_without_targets_adds_nothing(ops):
    params = init(CONFIG, 0, np.float64)
    buffers = GradientBuffers(params, params)
    alone = accumulate(ops, params, CONFIG, [rows_of(4)], buffers, params), copies(buffers.arrays)
    beside = accumulate(ops, params, CONFIG, [rows_of(0, width=4), rows_of(4)], buffers, params)
    assert beside == alone[0]
    assert same_bytes(buffers.arrays, alone[1])
    assert accumulate(ops, params, CONFIG, [rows_of(0, width=4)], buffers, params) == (0.0, 0)
    assert all(not gradient.any() for gradient in buffers.arrays.values())


def test_case_17_no_target_in_the_whole_window_is_an_error(ops):
    state = begin()
    before = copies(state.params)
    with pytest.raises(ValueError, match="expected at least one target token in the batches, got 0"):
        step(ops, state, [rows_of(0, width=4)])
    assert same_bytes(state.params, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_case_13_seed_fault_5_a_bad_gradient_changes_nothing_and_is_named(ops, monkeypatch, bad):
    state = begin()
    step(ops, state, [rows_of(4)])
    params, counts = copies(state.params), dict(state.adam.counts)
    moments = {name: (m.copy(), v.copy()) for name, (m, v) in state.adam.moments.items()}
    name = "backbone.layers.1.mixer.D"
    with monkeypatch.context() as patch:
        one_bad_gradient(patch, name, bad)
        result, _ = step(ops, state, [rows_of(4)])
    assert name in result.skipped
    assert not math.isfinite(result.grad_norm)
    assert same_bytes(state.params, params)
    assert state.adam.counts == counts
    for name, pair in moments.items():
        for found, expected in zip(state.adam.moments[name], pair, strict=True):
            assert found.tobytes() == expected.tobytes()
    recovered, _ = step(ops, state, [rows_of(4)])
    assert recovered.skipped == ""
    assert not same_bytes(state.params, params)


def test_case_13_a_loss_that_is_not_finite_is_skipped_too(ops, monkeypatch):
    state = begin()
    before = copies(state.params)
    real = mamba_ops.gradients.losses_and_gradients
    monkeypatch.setattr(mamba_ops.gradients, "losses_and_gradients", lambda *args: real(*args) * math.inf)
    result, _ = step(ops, state, [rows_of(4)])
    assert result.skipped == "the loss is inf, all gradients are finite"
    assert same_bytes(state.params, before)


def test_case_13_weights_that_overflow_in_the_forward_are_skipped_without_a_warning():
    state = begin(dtype=np.float32)
    state.params["backbone.norm_f.weight"].fill(3e38)
    before = copies(state.params)
    with pytest.raises(FloatingPointError, match="1 steps in a row were not finite"):
        run(state, max_skipped_steps=0)
    assert same_bytes(state.params, before)


def test_case_13_skipped_steps_are_counted_and_logged_and_the_run_goes_on(monkeypatch, caplog):
    name = "backbone.layers.0.mixer.A_log"
    one_bad_gradient(monkeypatch, name, math.nan, calls={2, 3, 5})
    state = begin()
    with caplog.at_level(logging.WARNING):
        metrics = run(state, max_steps=6, max_skipped_steps=2)
    assert [bool(m.skipped) for m in metrics] == [False, True, True, False, True, False]
    assert [m.step for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert (state.skipped, state.skipped_in_a_row) == (3, 0)
    assert set(state.adam.counts.values()) == {3}
    assert sum(name in record.getMessage() for record in caplog.records) == 3
    assert math.isfinite(mean_loss(metrics))


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_case_13_too_many_skipped_steps_in_a_row_end_the_run(monkeypatch, allowed):
    name = "backbone.layers.0.mixer.D"
    one_bad_gradient(monkeypatch, name, math.inf, calls=range(2, 100))
    state = begin()
    found = []
    generator = train(
        state,
        IDS,
        TrainConfig(max_steps=50, max_skipped_steps=allowed),
        BatchesConfig(seq_len=5),
        ops=open_cpu(np.float64, threads=1),
    )
    with pytest.raises(FloatingPointError) as error:
        found.extend(generator)
    assert f"{allowed + 1} steps in a row were not finite, max_skipped_steps allows {allowed}" in str(error.value)
    assert name in str(error.value)
    assert state.skipped_in_a_row == allowed + 1
    assert set(state.adam.counts.values()) == {1}


def test_seed_fault_3_what_does_not_train_gets_no_step_no_moment_and_no_share_of_the_norm(ops):
    names = ["backbone.layers.0.mixer.x_proj.weight", "backbone.layers.1.mixer.x_proj.weight"]
    state, everything = begin(names=names), begin()
    before = copies(state.params)
    batch = rows_of(6, 6)
    result, buffers = step(ops, state, [batch], weight_decay=0.5)
    _, full = step(ops, everything, [batch], weight_decay=0.5)
    assert state.trainable == sum(before[name].size for name in names)
    assert list(state.adam.moments) == list(buffers.arrays) == names
    for name, value in state.params.items():
        assert (value.tobytes() != before[name].tobytes()) == (name in names), name
    chosen = np.concatenate([full.arrays[name].ravel() for name in names]) / 12
    assert result.grad_norm == pytest.approx(float(np.linalg.norm(chosen)), rel=1e-12)


def test_the_norm_counts_a_tied_tensor_once_and_is_that_of_the_mean_gradient(ops):
    state = begin()
    batch = rows_of(6, 3)
    result, buffers = step(ops, state, [batch], max_grad_norm=0.01)
    flat = np.concatenate([gradient.ravel() for gradient in buffers.arrays.values()]) / 9
    assert list(buffers.arrays) == list(state.params)
    assert result.grad_norm == pytest.approx(float(np.linalg.norm(flat)), rel=1e-12)
    assert result.clipped
    assert not step(ops, begin(), [batch], max_grad_norm=0)[0].clipped


def test_the_clipped_gradient_is_what_the_moments_see(ops):
    state = begin()
    result, buffers = step(ops, state, [rows_of(6, 3)], max_grad_norm=0.01, adam_beta1=0.9)
    moments = np.concatenate([state.adam.moments[name][0].ravel() for name in buffers.arrays]) / 0.1
    assert float(np.linalg.norm(moments)) == pytest.approx(0.01, rel=1e-9)
    assert result.grad_norm > 0.01


def test_seed_fault_8_a_step_decays_only_what_the_table_says(ops):
    with_decay, without = begin(), begin()
    batch = rows_of(6, 3)
    step(ops, with_decay, [batch], weight_decay=0.5)
    step(ops, without, [batch], weight_decay=0.0)
    names = optimizer.decayed(CONFIG)
    for name, value in with_decay.params.items():
        assert (value.tobytes() != without.params[name].tobytes()) == (name in names), name


def test_gradient_checkpointing_trains_to_the_same_bytes():
    one, other = begin(), begin()
    plain, recomputed = run(one), run(other, gradient_checkpointing=True)
    assert [m.loss for m in plain] == [m.loss for m in recomputed]
    assert same_bytes(one.params, other.params)


def test_the_same_seeds_give_the_same_bytes_and_other_seeds_others():
    one, two, three = begin(), begin(), begin()
    first, second, third = run(one), run(two), run(three, seed=1)
    assert [(m.loss, m.grad_norm) for m in first] == [(m.loss, m.grad_norm) for m in second]
    assert same_bytes(one.params, two.params)
    assert [m.loss for m in first] != [m.loss for m in third]


def test_the_loss_falls_until_a_small_text_is_known_by_heart():
    state = begin(dtype=np.float32)
    metrics = run(state, IDS[:17], seq_len=16, batch_size=1, max_steps=200, learning_rate=2e-2, warmup_steps=10)
    assert metrics[0].loss == pytest.approx(math.log(11), abs=0.5)
    assert metrics[-1].loss < 0.05
    assert all(np.isfinite(value).all() for value in state.params.values())


def test_max_delta_bounds_what_a_step_changes():
    state = begin()
    before = copies(state.params)
    run(state, max_steps=1, learning_rate=0.5, weight_decay=0.5, max_delta=0.01)
    moved = {name: np.abs(value - before[name]).max() for name, value in state.params.items()}
    assert max(moved.values()) == pytest.approx(0.01, rel=1e-12)


def test_what_the_user_made_is_not_written_to():
    params = init(CONFIG, 0, np.float64)
    before = copies(params)
    ids = np.array(IDS)
    state = begin(params=params)
    run(state, ids)
    assert same_bytes(params, before)
    assert not same_bytes(state.params, before)
    assert ids.tolist() == IDS


def test_train_is_a_generator_of_frozen_records():
    state = begin()
    metrics = train(state, IDS, TrainConfig(max_steps=2), BatchesConfig(seq_len=5))
    assert inspect.isgenerator(metrics)
    first = next(metrics)
    assert state.step == 1
    assert dataclasses.is_dataclass(first)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.loss = 0.0
    assert [m.step for m in metrics] == [2]
    assert list(metrics) == []


def test_metrics_count_steps_epochs_and_tokens():
    # 39 targets in rows of 5: 8 rows, the last of 4; 4 batches, 2 windows of 3 and 1 batches an epoch
    metrics = run(begin(), max_steps=None, num_train_epochs=3, gradient_accumulation_steps=3)
    assert [m.step for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert {m.total_steps for m in metrics} == {6}
    assert [m.epoch for m in metrics] == [1, 1, 2, 2, 3, 3]
    assert [m.tokens_seen for m in metrics][1::2] == [39, 78, 117]
    assert [m.tokens_seen for m in metrics] == np.cumsum([m.tokens for m in metrics]).tolist()
    assert all(0 < m.learning_rate <= 1e-2 and m.grad_norm > 0 and m.seconds > 0 for m in metrics)
    assert "step 6/6, epoch 3: loss" in describe(metrics[-1], metrics[2])
    assert "0 s left" in describe(metrics[-1])


def test_accumulation_over_the_whole_epoch_is_one_step_on_the_mean_of_all_targets(ops):
    state, twin = begin(), begin()
    (metrics,) = run(state, max_steps=1, gradient_accumulation_steps=99)
    assert metrics.tokens == 39
    (big,) = run(twin, max_steps=1, batch_size=99)
    assert metrics.loss == pytest.approx(big.loss, rel=1e-12)
    for name, value in state.params.items():
        np.testing.assert_allclose(value, twin.params[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("count", "seq_len", "batch_size"), [(512 + 1, 512, 1), (512, 512, 2), (37, 5, 3), (2, 9, 4)])
def test_seed_fault_1_every_pair_trains_exactly_once_an_epoch(count, seq_len, batch_size):
    ids = np.arange(count)
    batches = BatchesConfig(seq_len=seq_len, batch_size=batch_size, seed=4)
    rows = token_rows(ids, batches)
    seen, orders = [], []
    coming = windows(rows, batches, 2, 0)
    for epoch in range(2):
        pairs = []
        for _ in range(total_steps(rows, TrainConfig(num_train_epochs=1, gradient_accumulation_steps=2), batches)):
            found, window = next(coming)
            assert found == epoch
            for indices in window:
                batch = mamba_ops.train.load(rows, indices)
                counted = batch.targets != IGNORED
                pairs += zip(batch.ids[counted].tolist(), batch.targets[counted].tolist(), strict=True)
        orders.append(pairs)
        seen.append(sorted(pairs))
    assert seen[0] == seen[1] == [(k, k + 1) for k in range(count - 1)]


def test_seed_fault_8_the_mean_loss_weighs_tokens_not_steps():
    metrics = run(begin(), IDS[:18], seq_len=16, batch_size=1, max_steps=2)
    assert sorted(m.tokens for m in metrics) == [1, 16]
    expected = sum(m.loss * m.tokens for m in metrics) / 17
    assert mean_loss(metrics) == pytest.approx(expected, rel=1e-14)
    assert mean_loss(metrics) != pytest.approx(sum(m.loss for m in metrics) / 2, rel=1e-3)
    with pytest.raises(ValueError, match="at least one step"):
        mean_loss([])


def test_max_steps_cuts_epochs_short_or_repeats_them():
    assert [m.epoch for m in run(begin(), max_steps=3, num_train_epochs=5)] == [1, 1, 1]
    assert [m.epoch for m in run(begin(), max_steps=9, num_train_epochs=1)] == [1] * 4 + [2] * 4 + [3]


def test_the_time_budget_ends_the_run_at_the_first_step_past_it():
    state = begin()
    metrics = run(state, max_steps=10_000, max_seconds=0.2)
    assert 0 < len(metrics) < 10_000
    assert metrics[-1].elapsed_seconds >= 0.2
    assert all(m.elapsed_seconds < 0.2 for m in metrics[:-1])


def test_one_state_is_of_one_run():
    state = begin()
    run(state, max_steps=2)
    assert run(state, max_steps=2) == []
    with pytest.raises(ValueError, match=r"this state belongs to another run.*train.max_steps: found 4, expected 2"):
        run(state, max_steps=4)


def test_a_broken_off_run_goes_on_where_it_was():
    whole, parts = begin(), begin()
    expected = run(whole, max_steps=6)
    batches, config = BatchesConfig(seq_len=5, batch_size=2), TrainConfig(learning_rate=1e-2, max_steps=6)
    found = []
    for metrics in train(parts, IDS, config, batches):
        found.append(metrics)
        if metrics.step == 3:
            break
    found += train(parts, IDS, config, batches)
    assert [(m.step, m.loss, m.learning_rate) for m in found] == [(m.step, m.loss, m.learning_rate) for m in expected]
    assert same_bytes(whole.params, parts.params)


def test_text_is_trained_as_its_tokens():
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: index for index, letter in enumerate(sorted(alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    config = CONFIG.model_copy(update={"vocab_size": 256})
    text = "to be or not to be"
    batches, settings = BatchesConfig(seq_len=5), TrainConfig(max_steps=4)
    one, other = start(config, seed=1), start(config, seed=1)
    by_text = list(train(one, text, settings, batches, tokenizer=tokenizer))
    by_ids = list(train(other, tokenizer.encode(text).ids, settings, batches))
    assert [m.loss for m in by_text] == [m.loss for m in by_ids]
    assert same_bytes(one.params, other.params)
    for short in ("", "x"):
        with pytest.raises(ValueError, match="at least 2 tokens"):
            train(start(config), short, settings, batches, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        train(start(config), text, settings, batches)


@pytest.mark.parametrize("ids", [[], [3]])
def test_fewer_than_2_tokens_is_an_error_before_any_step(ids):
    with pytest.raises(ValueError, match="at least 2 tokens"):
        train(begin(), ids, TrainConfig(), BatchesConfig())


@pytest.mark.parametrize(("ids", "bad"), [([0, 7, 11], 11), ([0, -1, 3], -1), ([2**33, 1], 2**33)])
def test_case_43_ids_outside_the_embedding_are_refused_before_any_step(ids, bad):
    with pytest.raises(ValueError, match=rf"expected 0 to \d+.*|token id {bad} at"):
        train(begin(), ids, TrainConfig(), BatchesConfig())


@pytest.mark.parametrize("ids", [[0.5, 1.0], [True, False], ["a", "b"], [[1, 2], [3, 4]]])
def test_what_is_no_list_of_ids_is_refused(ids):
    with pytest.raises(ValueError, match=r"ids: expected (a flat list|whole numbers)"):
        train(begin(), ids, TrainConfig(), BatchesConfig())


def table(starts, lengths, ids=IDS, seq_len=5):
    as_ints = (np.array(values, np.int64) for values in (starts, lengths))
    return TokenRows(np.array(ids), np.zeros(1, np.int64), *as_ints, seq_len, "fingerprint")


def test_case_22_no_rows_is_an_error_with_the_counts():
    with pytest.raises(ValueError, match="expected at least one row to train on, got 0 of 40 tokens"):
        train(begin(), table([], []), TrainConfig(), BatchesConfig(seq_len=5))


@pytest.mark.parametrize(("seq_len", "rows"), [(16, 1), (9, 1), (4, 3), (1, 9)])
def test_case_22_a_short_corpus_trains_all_its_targets(seq_len, rows):
    metrics = run(begin(), IDS[:10], seq_len=seq_len, batch_size=100, max_steps=None, num_train_epochs=2)
    assert len(token_rows(IDS[:10], BatchesConfig(seq_len=seq_len)).starts) == rows
    assert [m.tokens for m in metrics] == [9, 9]
    assert metrics[-1].step == 2
    assert metrics[-1].tokens_seen == 18


@pytest.mark.parametrize(("starts", "lengths"), [([0, 35], [5, 5]), ([-1], [5]), ([0], [0]), ([0], [6])])
def test_rows_outside_the_ids_or_longer_than_seq_len_are_refused(starts, lengths):
    with pytest.raises(ValueError, match=r"row \d: start .* expected 1 to 5 targets inside 40 ids"):
        train(begin(), table(starts, lengths), TrainConfig(), BatchesConfig(seq_len=5))


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="expected rows of seq_len 6, got 5"):
        train(begin(), table([0], [5]), TrainConfig(), BatchesConfig(seq_len=6))


def test_ids_and_a_row_table_of_the_same_ids_train_alike():
    one, other = begin(), begin()
    by_ids = run(one)
    by_rows = run(other, table(range(0, 39, 5), [5] * 7 + [4]))
    assert [m.loss for m in by_ids] == [m.loss for m in by_rows]
    assert same_bytes(one.params, other.params)


def test_parameters_that_do_not_fit_are_named():
    params = init(CONFIG, 0)
    del params["backbone.layers.0.mixer.D"]
    params["extra"] = np.zeros(1)
    params["backbone.norm_f.weight"] = np.zeros(9)
    with pytest.raises(ValueError, match="do not fit") as error:
        start(CONFIG, params)
    for part in (
        "mixer.D: found none, expected (16,)",
        "extra: found (1,), expected none",
        "found (9,), expected (8,)",
    ):
        assert part in str(error.value)


def test_unknown_names_and_no_names_are_refused():
    with pytest.raises(ValueError, match="unknown parameters"):
        begin(names=["q_proj"])
    with pytest.raises(ValueError, match="expected at least one parameter to train"):
        begin(names=[])


def test_ops_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match="expected the dtype of the parameters, float64, got float32"):
        train(begin(), IDS, TrainConfig(), BatchesConfig(), ops=open_cpu(np.float32, threads=1))


def test_no_copy_of_the_parameters_is_made_in_a_step():
    state = begin()
    arrays = dict(state.params)
    moments = dict(state.adam.moments)
    run(state)
    assert all(state.params[name] is arrays[name] for name in arrays)
    assert all(state.adam.moments[name] is moments[name] for name in moments)
    assert optimizer.state_bytes(state.adam) == 2 * sum(value.nbytes for value in arrays.values())
