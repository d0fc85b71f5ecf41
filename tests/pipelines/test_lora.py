"""Adapters in the graph: configuration, continuing, and what is refused."""

import json
import shutil

import numpy as np
import pytest

from mamba_ops.checkpoint import load_model, save_model
from mamba_ops.config import TARGETS, LoraConfig, MambaConfig
from mamba_ops.lora import initial
from mamba_ops.peft import load_adapter
from pipelines import definitions
from pipelines.adapters import adapted_targets
from pipelines.configuration import ConfigurationError, LoraRun, check_stages
from pipelines.io import newest

from .running import adapting, failure, in_root, materialized, merged, pointers, run, versions


def train_adapter(config, fails=False, **changes):
    """Run the stage lora_adapter with changed fields."""
    return run(merged(config, {"lora_adapter": changes}), "lora", ["lora_adapter"], fails=fails)


def tensors(manifest):
    """Return an adapter's tensors by name."""
    model, _ = load_model(manifest.root / manifest.facts["base_folder"])
    return load_adapter(manifest.path, model).tensors


@pytest.mark.parametrize(
    ("names", "came"), [(["q_proj"], "['q_proj']"), (["in_proj", "typo_proj"], "['typo_proj']"), ([], "[]")]
)
def test_case_32_targets_that_match_nothing_are_errors_listing_the_valid_names(lora, names, came):
    failed = run(merged(lora, {"lora_adapter": {"target_modules": names}}), "lora", fails=True)
    assert f"lora_adapter: target_modules: expected some of {', '.join(TARGETS)}, got {came}" in failure(failed)
    assert not materialized(failed)


def test_case_32_no_target_matches_by_a_part_of_its_name():
    with pytest.raises(ConfigurationError, match=r"got \['proj'\]"):
        LoraRun(target_modules=["proj"])


def test_case_32_the_trainable_count_is_r_in_plus_out_a_layer():
    model = MambaConfig(vocab_size=50_280, hidden_size=768, num_hidden_layers=24)
    lora = LoraConfig(r=8, target_modules=["in_proj"])
    (row,) = adapted_targets(model, lora)
    assert row == {
        "target": "in_proj",
        "weights": 24,
        "r": 8,
        "parameters_each": 8 * (768 + 3072),
        "parameters": 737_280,
    }


def test_case_32_metadata_names_what_is_adapted(adapted):
    shown = materialized(adapted["lora"].result)["lora_adapter"].metadata
    rows = {row.data["target"]: row.data for row in shown["adapters"].records}
    assert shown["adapted_weights"].value == 2
    assert rows["in_proj"] == {"target": "in_proj", "weights": 1, "r": 2, "parameters_each": 80, "parameters": 80}
    assert rows["x_proj"]["parameters"] == 2 * (16 + 9)
    assert shown["trainable_parameters"].value == sum(row["parameters"] for row in rows.values())


def test_case_32_adapter_tensors_differ_from_their_start_and_the_base_is_bit_identical(adapted, lora, root):
    base = pointers(root)["weights_mirror"]
    model, weights = load_model(base.path)
    before = {name: value.tobytes() for name, value in weights.items()}
    files = {file: file.read_bytes() for file in base.path.iterdir()}
    result = train_adapter(lora, learning_rate=1e-2, lora_dropout=0.0, target_modules=list(TARGETS))
    made = pointers(root)["lora_adapter"]
    started = initial(model, LoraConfig(**made.facts["lora"]), seed=0)
    trained = tensors(made)
    assert trained.keys() == started.keys()
    assert len(trained) == 14
    for name, value in trained.items():
        assert not np.array_equal(value, started[name]), name
    assert {name: value.tobytes() for name, value in load_model(base.path)[1].items()} == before
    assert {file: file.read_bytes() for file in files} == files
    assert materialized(result)["lora_adapter"].metadata["adapted_weights"].value == 7


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("r", 0, "r: input should be greater than or equal to 1, got 0 (>= 1 and <= 131072)"),
        ("lora_alpha", 0, "lora_alpha: input should be greater than 0, got 0 (> 0 and <= 1e+06)"),
        ("lora_dropout", 1, "lora_dropout: input should be less than 1, got 1 (>= 0 and < 1)"),
        ("target_modules", ["lm_head"], f"target_modules: expected some of {', '.join(TARGETS)}, got ['lm_head']"),
        ("save_dtype", "bfloat16", "save_dtype: an adapter is one float32 file; set it for merged_weights"),
        ("max_shard_size", "1MB", "max_shard_size: an adapter is one float32 file; set it for merged_weights"),
    ],
)
def test_a_configuration_that_makes_no_adapter_is_refused_before_the_first_stage(field, value, message):
    with pytest.raises(ConfigurationError) as refused:
        check_stages({"ops": {"lora_adapter": {"config": {field: value}}}})
    assert str(refused.value) == f"lora_adapter: {message}"


def test_clamped_ranks_are_in_the_log(lora, capfd):
    loud = lora | {"loggers": {"console": {"config": {"log_level": "INFO"}}}}
    train_adapter(loud, r=64, target_modules=["in_proj", "conv1d"], max_steps=2)
    said = capfd.readouterr().err
    assert "in_proj: r 64 is clamped to 8, its smaller dimension" in said
    assert "conv1d: r 64 is clamped to 4, its smaller dimension" in said
    assert "lora_dropout does not act on conv1d" in said


def test_the_seed_changes_the_adapter_and_adapters_lie_beside_each_other(lora, root):
    first = pointers(root)["lora_adapter"]
    train_adapter(lora, seed=1)
    second = pointers(root)["lora_adapter"]
    assert first.path.parent == second.path.parent
    assert first.path != second.path
    assert first.facts["base_folder"] == second.facts["base_folder"]
    a, b = tensors(first), tensors(second)
    for name in a:
        assert not np.array_equal(a[name], b[name]), name
    run(lora | {"ops": {}}, "merge")
    assert pointers(root)["merged_weights"].inputs == {"lora_adapter": second.fingerprint}


def test_an_adapter_is_continued_from_its_tensors(lora, root):
    first = pointers(root)["lora_adapter"]
    options = {"adapter": str(first.path), "learning_rate": 1e-9, "max_steps": 1, "lora_dropout": 0.2}
    train_adapter(lora, **options)
    second = pointers(root)["lora_adapter"]
    assert second.fingerprint != first.fingerprint
    a, b = tensors(first), tensors(second)
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=0, atol=1e-8)
    train_adapter(lora, adapter=str(second.path), seed=5)
    third = pointers(root)["lora_adapter"]
    assert all(not np.array_equal(tensors(third)[name], a[name]) for name in a)
    assert third.facts["steps"] == 12


def test_what_is_continued_is_content_not_a_place(lora, root, tmp_path):
    shutil.copytree(pointers(root)["lora_adapter"].path, tmp_path / "adapter")
    here = train_adapter(lora, adapter=str(pointers(root)["lora_adapter"].path), max_steps=2)
    there = train_adapter(lora, adapter=str(tmp_path / "adapter"), max_steps=2)
    assert versions(here) == versions(there)


def test_a_changed_adapter_is_not_skipped(lora, root, tmp_path):
    asked = lora | {"resources": in_root(lora, root)}
    asked["resources"]["storage"]["config"]["skip_unchanged"] = True
    first = pointers(root)["lora_adapter"]
    shutil.copytree(first.path, tmp_path / "adapter")
    options = {"adapter": str(tmp_path / "adapter"), "max_steps": 2}
    skipped = []
    for change in (False, False, True):
        if change:
            train_adapter(lora, seed=1)
            shutil.rmtree(tmp_path / "adapter")
            shutil.copytree(pointers(root)["lora_adapter"].path, tmp_path / "adapter")
        made = materialized(train_adapter(asked, **options))["lora_adapter"]
        skipped.append("not_computed_again" in made.metadata)
    assert skipped == [False, True, False]


def test_a_changed_configuration_is_refused_naming_each_field(lora, root):
    before = pointers(root)["lora_adapter"]
    changes = {"r": 3, "lora_alpha": 8, "use_rslora": True, "target_modules": ["x_proj"]}
    failed = train_adapter(lora, fails=True, adapter=str(before.path), **changes)
    assert (
        f"{before.path}: an adapter of another configuration is not continued: "
        "r: found 2, expected 3; lora_alpha: found 16.0, expected 8.0; use_rslora: found False, expected True; "
        "target_modules: found ['in_proj', 'x_proj'], expected ['x_proj']"
    ) in failure(failed)
    assert pointers(root)["lora_adapter"] == before


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"hidden_size": 16}, "in_proj.lora_A.weight: found shape (2, 8), expected (2, 16)"),
        ({"num_hidden_layers": 2}, "backbone.layers.1.mixer.in_proj.lora_A.weight: found no such tensor"),
    ],
)
def test_an_adapter_for_another_base_is_refused_by_name_and_shape(lora, root, shape, message):
    adapter = pointers(root)["lora_adapter"]
    other = merged(lora, {"weights_mirror": shape, "lora_adapter": {"adapter": str(adapter.path)}})
    failed = run(other, "lora", ["weights_mirror", "lora_adapter"], fails=True)
    assert message in failure(failed)
    assert pointers(root)["lora_adapter"] == adapter


def test_an_adapter_for_other_weights_of_the_same_shape_is_refused_by_fingerprint(lora, root):
    adapter = pointers(root)["lora_adapter"]
    other = merged(lora, {"weights_mirror": {"seed": 1}, "lora_adapter": {"adapter": str(adapter.path)}})
    failed = run(other, "lora", ["weights_mirror", "lora_adapter"], fails=True)
    base = pointers(root)["weights_mirror"].facts["weights"]
    assert f"found a base with {base}, expected {adapter.facts['base']}, that of the base" in failure(failed)
    assert pointers(root)["lora_adapter"] == adapter


@pytest.mark.parametrize(("job", "asset"), [("lora", "lora_perplexity"), ("merge", "merged_weights")])
def test_a_base_that_changed_underneath_is_refused_by_fingerprint(lora, root, tmp_path, job, asset):
    base = pointers(root)["weights_mirror"].path
    before = newest(root, asset)
    model, weights = load_model(base)
    weights["backbone.norm_f.weight"][0] = 2
    save_model(tmp_path / "other", model, weights)
    shutil.copy(tmp_path / "other/model.safetensors", base / "model.safetensors")
    failed = run(lora, job, [asset], fails=True)
    assert "base_fingerprint: found a base with " in failure(failed)
    assert "that of the base the adapter was trained on" in failure(failed)
    assert newest(root, asset) == before


def test_a_base_that_changes_after_its_adapter_moves_neither(lora, root):
    """What is made of an adapter goes with the base that it was trained on, though a newer one exists."""
    run(merged(lora, {"weights_mirror": {"seed": 1}}), "lora", ["weights_mirror"])
    before = pointers(root)["merged_weights"]
    run(lora | {"ops": {}}, "merge")
    assert pointers(root)["merged_weights"] == before


def test_the_whole_job_makes_an_adapter_from_documents(config, root):
    result = run(adapting(config, "lora"), "lora")
    names = {key.to_user_string() for key in definitions.resolve_job_def("lora").asset_layer.executable_asset_keys}
    assert materialized(result).keys() == pointers(root).keys() == names
    values = json.loads((pointers(root)["lora_perplexity"].path / "perplexity.json").read_text())
    assert values["after"] < values["before"]
