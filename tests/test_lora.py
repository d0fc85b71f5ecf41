"""LoRA: targets and tensors, gradients of the adapted model, dropout, and runs that leave the weights alone."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from mamba_ops import gradients, lora, model
from mamba_ops.config import TARGETS, BatchesConfig, LoraConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.differences import direction_difference, element_differences
from mamba_ops.gradcheck import random_batch, random_parameters
from mamba_ops.gradients import GradientBuffers, accumulate
from mamba_ops.low_rank import with_dropout
from mamba_ops.ops import Batch, Dropout
from mamba_ops.parameters import EMBEDDING, count, init, resize_embeddings
from mamba_ops.peft import Adapted
from mamba_ops.tensors import fingerprint
from mamba_ops.train import start, train
from mamba_ops.training_data import load, token_rows, windows

CONFIG = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, state_size=4)
BIASES = CONFIG.model_copy(update={"use_bias": True, "tie_word_embeddings": False, "time_step_rank": 3})
BASE_130M = MambaConfig(vocab_size=50280, hidden_size=768, num_hidden_layers=24)
ALL = LoraConfig(r=3, lora_alpha=5, target_modules=list(TARGETS))
IDS = np.random.default_rng(5).integers(0, 11, 90).tolist()


def adapted(config=CONFIG, options=ALL, seed=1, dtype=np.float64):
    """Weights whose gradients stand well above rounding, and adapters that add something."""
    rng = np.random.default_rng(seed)
    weights = {name: value.astype(dtype) for name, value in random_parameters(config, rng).items()}
    shapes = lora.tensor_shapes(config, options)
    tensors = {name: (0.3 * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
    return weights | tensors, list(tensors), lora.adapters(config, options)


def gradients_of(params, names, adapters, batches, config=CONFIG, checkpointing=False, dropout=None):
    ops = open_cpu(params[EMBEDDING].dtype.type)
    buffers = GradientBuffers(params, names)
    nll, _ = accumulate(ops, params, config, batches, buffers, names, checkpointing, adapters, dropout)
    return nll, buffers.arrays


def batch_of(seed=0, rows=2, seq_len=9):
    return random_batch(np.random.default_rng(seed), CONFIG.vocab_size, rows, seq_len)


def run(state, folder=None, steps=5, **options):
    settings = {"learning_rate": 1e-2, "max_steps": steps} | options
    return list(train(state, IDS, TrainConfig(**settings), BatchesConfig(seq_len=7, batch_size=2), folder=folder))


def copies(arrays):
    return {name: value.copy() for name, value in arrays.items()}


def same_bytes(one, other):
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.parametrize("targets", [["q_proj"], ["in_proj", "typo_proj"], ["proj"], [], ["in_proj.weight"]])
def test_case_32_a_target_that_matches_nothing_is_an_error_that_lists_what_there_is(targets):
    with pytest.raises(ValidationError, match="expected some of in_proj, x_proj, dt_proj, out_proj"):
        LoraConfig(target_modules=targets)


def test_case_32_the_trainable_count():
    """r (in + out) a layer: 8 (768 + 3072) 24."""
    shapes = lora.tensor_shapes(BASE_130M, LoraConfig(r=8, target_modules=["in_proj"]))
    assert sum(np.prod(shape) for shape in shapes.values()) == 737_280
    assert len(lora.targets(BASE_130M, LoraConfig(r=8, target_modules=["in_proj"]))) == 24


@pytest.mark.parametrize(("field", "value"), [("r", 0), ("lora_alpha", 0), ("lora_alpha", -1), ("lora_dropout", 1)])
def test_a_rank_or_scale_of_nothing_is_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        LoraConfig(**{field: value})


def test_names_are_those_of_peft_and_ranks_are_clamped():
    options = LoraConfig(r=8, target_modules=["embeddings", "in_proj", "conv1d", "A_log"])
    assert lora.targets(CONFIG.model_copy(update={"num_hidden_layers": 1}), options) == {
        "backbone.embeddings.weight": 8,
        "backbone.layers.0.mixer.in_proj.weight": 8,
        "backbone.layers.0.mixer.conv1d.weight": 4,
        "backbone.layers.0.mixer.A_log": 4,
    }
    assert lora.tensor_shapes(CONFIG.model_copy(update={"num_hidden_layers": 1}), options) == {
        "backbone.embeddings.lora_embedding_A": (8, 11),
        "backbone.embeddings.lora_embedding_B": (8, 8),
        "backbone.layers.0.mixer.in_proj.lora_A.weight": (8, 8),
        "backbone.layers.0.mixer.in_proj.lora_B.weight": (32, 8),
        "backbone.layers.0.mixer.conv1d.lora_A.weight": (4, 4),
        "backbone.layers.0.mixer.conv1d.lora_B.weight": (16, 4),
        "backbone.layers.0.mixer.A_log.lora_A.weight": (4, 4),
        "backbone.layers.0.mixer.A_log.lora_B.weight": (16, 4),
    }
    assert lora.notes(CONFIG, options) == [
        "conv1d: r 8 is clamped to 4, its smaller dimension",
        "A_log: r 8 is clamped to 4, its smaller dimension",
    ]
    dropped = LoraConfig(lora_dropout=0.1, target_modules=["in_proj", "A_log"], r=2)
    assert lora.notes(CONFIG, dropped) == ["lora_dropout does not act on A_log: their adapter has no input to drop"]


def test_the_scale_is_that_of_the_rank_in_use():
    options = LoraConfig(r=8, lora_alpha=12, target_modules=["in_proj", "conv1d"])
    scales = {name: adapter.scale for name, adapter in lora.adapters(CONFIG, options).items()}
    assert {round(value, 12) for name, value in scales.items() if "in_proj" in name} == {1.5}
    assert {round(value, 12) for name, value in scales.items() if "conv1d" in name} == {3.0}
    stabilised = lora.adapters(CONFIG, options.model_copy(update={"use_rslora": True}))
    assert stabilised["backbone.layers.0.mixer.in_proj.weight"].scale == pytest.approx(12 / np.sqrt(8))


def test_fresh_adapters_add_nothing_and_depend_on_the_seed():
    state = start(CONFIG, seed=1, lora=ALL)
    base = {name: state.params[name] for name in init(CONFIG, 1)}
    assert same_bytes(lora.merged(CONFIG, state.params, state.adapters), base)
    one, other = (lora.initial(CONFIG, ALL, seed) for seed in (1, 2))
    assert not np.array_equal(
        one["backbone.layers.0.mixer.in_proj.lora_A.weight"], other["backbone.layers.0.mixer.in_proj.lora_A.weight"]
    )
    A = lora.initial(BASE_130M, LoraConfig(), 0)["backbone.layers.3.mixer.x_proj.lora_A.weight"]
    assert abs(A).max() <= 1536**-0.5
    assert A.std() == pytest.approx(1536**-0.5 / np.sqrt(3), rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", [CONFIG, BIASES], ids=["tied", "untied, biases"])
@pytest.mark.parametrize("dropout", [None, Dropout(0.3, 4, 7)], ids=["", "dropout"])
def test_gradients_of_all_seven_targets_agree_with_central_differences(config, dropout, checkpointing):
    params, names, adapters = adapted(config)
    batch = batch_of()
    _, found = gradients_of(params, names, adapters, [batch], config, checkpointing, dropout)
    ops = open_cpu(np.float64)
    used = with_dropout(adapters, dropout) if dropout else adapters

    def loss():
        with ops.scope():
            return ops.total(model.losses(ops, params, config, ops.rows(batch), adapters=used))

    rng = np.random.default_rng(0)
    for name in names:
        elements = rng.choice(params[name].size, min(12, params[name].size), replace=False)
        expected = element_differences(loss, params[name], elements)
        scale = np.abs(found[name]).max()
        assert scale > 0, name
        assert np.abs(found[name].flat[elements] - expected).max() <= 1e-6 * scale, name
    slope, direction = direction_difference(loss, {name: params[name] for name in names}, seed=3)
    total = sum(np.sum(direction[name] * found[name]) for name in names)
    assert slope == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", [CONFIG, BIASES], ids=["tied", "untied, biases"])
def test_merged_weights_give_the_same_losses(config, target):
    options = LoraConfig(r=2, lora_alpha=5, target_modules=[target])
    params, _, adapters = adapted(config, options)
    ops, batch = open_cpu(np.float64), batch_of()
    weights = lora.merged(config, params, adapters)
    with ops.scope():
        rows = ops.rows(batch)
        beside = model.losses(ops, params, config, rows, adapters=adapters).copy()
        merged = model.losses(ops, weights, config, rows).copy()
        alone = model.losses(ops, params, config, rows).copy()
    assert np.abs(beside - merged).max() <= 1e-12 * np.abs(beside).max()
    assert np.abs(beside - alone).max() > 1e-4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_activation_checkpointing_is_bit_identical_with_dropout(dtype):
    params, names, adapters = adapted(dtype=dtype)
    both = [
        gradients_of(params, names, adapters, [batch_of(rows=3, seq_len=37)], CONFIG, kept, Dropout(0.2, 1, 2))
        for kept in (False, True)
    ]
    assert both[0][0] == both[1][0]
    assert same_bytes(both[0][1], both[1][1])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1)])
def test_dropout_does_not_depend_on_the_split_into_batches(sizes):
    params, names, adapters = adapted()
    whole = batch_of(rows=3)
    edges = np.cumsum([0, *sizes])
    parts = [Batch(whole.ids[a:b], whole.targets[a:b], whole.positions[a:b]) for a, b in itertools.pairwise(edges)]
    (one, expected), (other, found) = (
        gradients_of(params, names, adapters, batches, dropout=Dropout(0.3, 1, 2)) for batches in ([whole], parts)
    )
    assert other == pytest.approx(one, rel=1e-12)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-9, atol=1e-12 * np.abs(gradient).max(), err_msg=name)


def test_masks_change_with_step_and_seed():
    params, names, adapters = adapted()
    losses = {
        gradients_of(params, names, adapters, [batch_of()], dropout=dropout)[0]
        for dropout in (None, Dropout(0.3, 1, 2), Dropout(0.3, 1, 3), Dropout(0.3, 2, 2))
    }
    assert len(losses) == 4


def test_the_weights_stay_and_the_adapters_train():
    state = start(CONFIG, seed=1, lora=ALL)
    before = copies(state.params)
    run(state)
    base = init(CONFIG, 1)
    assert all(state.params[name].tobytes() == value.tobytes() for name, value in base.items())
    assert all(not np.array_equal(state.params[name], before[name]) for name in state.names)
    assert set(state.adam.moments) == set(state.names) == set(lora.tensor_shapes(CONFIG, ALL))
    assert state.trainable == sum(value.size for value in state.trained.values())


def test_the_norm_and_the_clip_cover_the_adapters_only():
    rows, batches = token_rows(IDS, BatchesConfig(seq_len=7, batch_size=2)), BatchesConfig(seq_len=7, batch_size=2)
    _, [first] = next(windows(rows, batches, 1, 0))
    state = start(CONFIG, seed=1, lora=ALL)
    _, found = gradients_of(state.params, state.names, state.adapters, [load(rows, first)])
    tokens = load(rows, first).target_count
    norm = np.sqrt(sum(np.sum(np.square(value, dtype=np.float64)) for value in found.values())) / tokens
    metrics = run(state, steps=1, max_grad_norm=norm / 2)[0]
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-5)
    assert metrics.clipped
    for name, (moment, _) in state.adam.moments.items():
        # the first moment after one step: (1 - beta1) times the gradient that was used
        np.testing.assert_allclose(moment, 0.1 * found[name] / tokens / 2, rtol=1e-4, atol=1e-9, err_msg=name)


def test_max_delta_clamps_the_adapters_tensors():
    state = start(CONFIG, seed=1, lora=ALL)
    before = copies(state.trained)
    run(state, steps=1, learning_rate=1.0, weight_decay=1.0, max_delta=0.01)
    for name, value in state.trained.items():
        assert np.abs(value - before[name]).max() <= 0.01 * (1 + 1e-5), name


def test_an_error_half_way_leaves_nothing_installed(monkeypatch):
    weights = init(CONFIG, 1)
    before, real, calls = fingerprint(weights), gradients.losses_and_gradients, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("half-way")
        return real(*arguments)

    monkeypatch.setattr(gradients, "losses_and_gradients", failing)
    state = start(CONFIG, weights, lora=ALL)
    with pytest.raises(RuntimeError, match="half-way"):
        run(state)
    assert fingerprint(weights) == before
    assert fingerprint({name: state.params[name] for name in weights}) == before
    monkeypatch.undo()
    afresh, plain = start(CONFIG, weights), start(CONFIG, init(CONFIG, 1))
    assert run(afresh)[-1].loss == run(plain)[-1].loss


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_run_that_was_stopped_continues_bit_for_bit(tmp_path, dropout):
    options = ALL.model_copy(update={"lora_dropout": dropout})
    whole = start(CONFIG, seed=1, lora=options)
    expected = run(whole, steps=6)
    first = start(CONFIG, seed=1, lora=options)
    steps = train(first, IDS, *configs(6), folder=tmp_path)
    for metrics in steps:
        if metrics.step == 3:
            break
    steps.close()
    again = start(CONFIG, seed=1, lora=options)
    found = list(train(again, IDS, *configs(6), folder=tmp_path))
    assert [m.step for m in found] == [4, 5, 6]
    assert found[-1].loss == expected[-1].loss
    assert same_bytes(again.params, whole.params)
    saved = (tmp_path / "checkpoints" / "step-00000006" / "model.safetensors").stat().st_size
    assert saved < 4 * again.trainable + 8000


def configs(steps):
    return (
        TrainConfig(learning_rate=1e-2, max_steps=steps, save_steps=1),
        BatchesConfig(seq_len=7, batch_size=2),
    )


@pytest.mark.parametrize("change", [{"r": 2}, {"lora_alpha": 7}, {"lora_dropout": 0.1}, {"use_rslora": True}])
def test_a_changed_configuration_is_refused_not_ignored(tmp_path, change):
    state = start(CONFIG, seed=1, lora=LoraConfig(r=3))
    list(train(state, IDS, *configs(2), folder=tmp_path))
    other = start(CONFIG, seed=1, lora=LoraConfig(r=3).model_copy(update=change))
    name = next(iter(change))
    with pytest.raises(ValueError, match=rf"belongs to another run and is not continued: .*lora\.{name}"):
        list(train(other, IDS, *configs(2), folder=tmp_path))


def test_an_adapter_is_continued_from_its_tensors():
    first = start(CONFIG, seed=1, lora=ALL)
    run(first)
    weights = init(CONFIG, 1)
    second = start(CONFIG, weights, lora=ALL, adapter=Adapted(ALL, first.trained, fingerprint(weights)), seed=9)
    assert same_bytes(second.trained, first.trained)
    assert same_bytes(second.params, dataclasses.replace(first).params)
    run(second)
    assert not same_bytes(second.trained, first.trained)


def test_an_adapter_for_another_base_is_refused_by_name_and_shape():
    other, lora_config = CONFIG.model_copy(update={"hidden_size": 6}), LoraConfig(r=3)
    tensors = lora.initial(other, lora_config, 0)
    with pytest.raises(ValueError, match=r"adapter: .*in_proj\.lora_A\.weight: found \(3, 6\), expected \(3, 8\)"):
        start(CONFIG, lora=lora_config, adapter=Adapted(lora_config, tensors))
    tensors = lora.initial(CONFIG, lora_config, 0)
    first = {name: value for name, value in tensors.items() if ".1." not in name}
    with pytest.raises(ValueError, match=r"layers\.1\.mixer\.x_proj\.lora_A\.weight: found none, expected"):
        start(CONFIG, lora=lora_config, adapter=Adapted(lora_config, first))


def test_a_base_that_was_changed_is_refused_by_fingerprint():
    weights = init(CONFIG, 1)
    adapter = Adapted(ALL, lora.initial(CONFIG, ALL, 0), fingerprint(weights))
    weights["backbone.layers.0.mixer.D"][0] += 1
    with pytest.raises(ValueError, match=r"adapter: base_fingerprint: found a base with .*, expected .* trained on"):
        start(CONFIG, weights, lora=ALL, adapter=adapter)


@pytest.mark.parametrize("change", [{"r": 2}, {"lora_alpha": 7}, {"use_rslora": True}, {"target_modules": ["x_proj"]}])
def test_an_adapter_of_another_configuration_is_refused(change):
    found = Adapted(ALL, lora.initial(CONFIG, ALL, 0))
    with pytest.raises(ValueError, match=f"not continued: {next(iter(change))}: found"):
        start(CONFIG, lora=LoraConfig(**ALL.model_dump() | change), adapter=found)
    start(CONFIG, lora=ALL.model_copy(update={"lora_dropout": 0.1}), adapter=found)


def test_an_adapter_without_its_configuration_is_refused():
    with pytest.raises(ValueError, match="adapter: expected lora, the configuration that it is continued with"):
        start(CONFIG, adapter=Adapted(ALL, lora.initial(CONFIG, ALL, 0)))


def test_targets_are_a_set():
    options = [LoraConfig(target_modules=names) for names in (["x_proj", "in_proj"], ["in_proj", "x_proj", "x_proj"])]
    assert options[0] == options[1]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_run_stopped_among_accumulated_batches_continues_bit_for_bit(tmp_path, dropout):
    options = ALL.model_copy(update={"lora_dropout": dropout})
    settings = {"learning_rate": 1e-2, "max_steps": 6, "save_steps": 1, "gradient_accumulation_steps": 3}
    batches = BatchesConfig(seq_len=7, batch_size=2)
    whole, first, again = (start(CONFIG, seed=1, lora=options) for _ in range(3))
    list(train(whole, IDS, TrainConfig(**settings), batches))
    steps = train(first, IDS, TrainConfig(**settings), batches, folder=tmp_path)
    next(steps)
    steps.close()
    kept = TrainConfig(**settings, gradient_checkpointing=True)
    list(train(again, IDS, kept, batches, folder=tmp_path))
    assert same_bytes(again.params, whole.params)


def test_adapters_after_the_embedding_was_resized():
    config, weights = resize_embeddings(CONFIG, init(CONFIG, 1), 14, seed=0)
    state = start(config, weights, lora=ALL)
    run(state)
    assert state.params["backbone.embeddings.lora_embedding_A"].shape == (3, 14)
    assert all(state.params[name].tobytes() == value.tobytes() for name, value in weights.items())


def test_arrays_that_are_given_away_are_not_copied():
    weights = init(CONFIG, 1)
    given = start(CONFIG, weights, lora=ALL, copy=False)
    assert all(given.params[name] is value for name, value in weights.items())
    owned = start(CONFIG, weights, lora=ALL)
    assert not any(np.shares_memory(owned.params[name], value) for name, value in weights.items())


@pytest.mark.large
@pytest.mark.parametrize("way", ["full", "lora"])
def test_checkpointing_leaves_a_third_of_the_activations_of_24_layers(way):
    """mamba-130m's shape, one row of 256 tokens, by tracemalloc; the gradients are the same bits."""
    script = Path(__file__).parents[1] / "benchmarks" / "ways.py"
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}

    def measured(*more):
        call = [sys.executable, str(script), "--activations", way, *more]
        return json.loads(subprocess.run(call, check=True, capture_output=True, text=True, env=environment).stdout)

    kept, again = measured(), measured("--again")
    assert again["gradients"] == kept["gradients"]
    assert again["bytes"] <= kept["bytes"] / 3


def test_the_optimizer_state_of_the_default_targets_is_below_2_percent():
    config = BASE_130M.model_copy(update={"num_hidden_layers": 4})
    adapters = sum(np.prod(shape) for shape in lora.tensor_shapes(config, LoraConfig()).values())
    assert adapters <= 0.02 * count(config)
