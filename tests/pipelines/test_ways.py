"""The ways of fine-tuning, end to end: what trains, what does not, and how each is held against its base."""

import json
import math
import shutil
import signal

import dagster as dg
import numpy as np
import pytest

from mamba_ops.checkpoint import fingerprint, load_model, load_tensors
from mamba_ops.config import LoraConfig, MambaConfig
from mamba_ops.fingerprint import file_digest
from mamba_ops.lora import tensor_shapes
from mamba_ops.metrics import read_history
from mamba_ops.run_folder import checkpoints
from mamba_ops.training_state import start
from mamba_ops.wsla import wsla_names
from pipelines import definitions, training
from pipelines.adapters import adapted_model
from pipelines.configuration import LoraRun
from pipelines.io import newest
from pipelines.ways import FULL, LORA, WAYS, WSLA

from .running import adapting, failure, in_root, materialized, merged, pointers, run, verdicts, versions
from .test_interruption import interrupted_after

OTHERS = (WSLA, LORA)


@pytest.fixture(params=OTHERS, ids=lambda way: way.job)
def way(request):
    return request.param


@pytest.fixture
def own(finished, way, root, config):
    """The configuration of a way, in a root of one's own with a base but without anything of the way."""
    shutil.copytree(finished.root, root)
    return adapting(config, way.job)


def assets(way):
    return [way.weights, way.perplexity]


def contents(made):
    """Return the digest of each file, of tensors without the file's header."""
    return {
        name: fingerprint(load_tensors(made.path / name)) if name.endswith("tensors") else file_digest(made.path / name)
        for name in made.files
    }


def made_by(way, finished, adapted):
    return finished if way is FULL else adapted[way.job]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.job)
def test_each_way_is_held_against_its_base_on_the_same_tokens(finished, adapted, way):
    result, root, _, _ = made_by(way, finished, adapted)
    assert all(verdicts(result).values())
    full, facts = (newest(finished.root, "perplexity").facts, newest(root, way.perplexity).facts)
    assert json.loads((newest(root, way.perplexity).path / "perplexity.json").read_text()) == facts
    for name in ("before", "nats_per_token_before", "tokens", "documents", "bytes", "uniform", "bigram"):
        assert facts[name] == full[name]
    assert facts["after"] < facts["before"]
    assert facts["difference"] == pytest.approx(math.log(facts["after"]) - math.log(facts["before"]))
    assert facts["difference_low"] < facts["difference"] < facts["difference_high"] < 0
    shown = materialized(result)[way.perplexity].metadata
    assert shown["perplexity"].value == facts["after"]
    for name in ("nats_per_token_before", "nats_per_token_after", "difference", "difference_low", "difference_high"):
        assert shown[name].value == facts[name]
    assert shown["change"].value.startswith(f"{facts['difference']:+.4f} nats per token (95 % interval ")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.job)
def test_accounts_of_each_way(finished, adapted, way):
    result, root, _, _ = made_by(way, finished, adapted)
    model, weights = load_model(newest(root, "weights_mirror").path)
    lora = LoraRun(**adapted["lora"].config["ops"]["lora_adapter"]["config"])
    expected = {
        "train": sum(value.size for value in weights.values()),
        "wsla": sum(weights[name].size for name in wsla_names(model)),
        "lora": sum(math.prod(shape) for shape in tensor_shapes(model, lora).values()),
    }
    shown = materialized(result)[way.weights].metadata
    assert shown["trainable_parameters"].value == expected[way.job]
    assert shown["optimizer_bytes"].value == 2 * 4 * expected[way.job]
    assert shown["peak_memory_bytes"].value > 2**20
    assert 0 < shown["seconds_per_step"].value < shown["seconds"].value
    assert shown["estimated/bytes"].value > 0


def test_wsla_trains_the_selective_projections_and_nothing_else(adapted):
    root = adapted["wsla"].root
    made = newest(root, "wsla_weights")
    (model, base), (_, weights) = load_model(newest(root, "weights_mirror").path), load_model(made.path)
    trained = set(wsla_names(model))
    assert {name for name in base if base[name].tobytes() != weights[name].tobytes()} == trained
    assert made.config["max_delta"] == 0.05
    assert made.facts["steps"] == 12
    for name in trained:
        assert np.abs(weights[name] - base[name]).max() <= 12 * 0.05


@pytest.mark.parametrize(("key", "value"), [("r", 8), ("lora_alpha", 16), ("target_modules", ["in_proj"])])
def test_wsla_together_with_lora_is_refused(key, value):
    values = {"ops": {"wsla_weights": {"config": {"learning_rate": "1e-3", key: value}}}}
    expected = f'Received unexpected config entry "{key}" at path root:ops:wsla_weights:config'
    with pytest.raises(dg.DagsterInvalidConfigError, match=expected):
        dg.validate_run_config(definitions.resolve_job_def("wsla"), values)


def test_an_adapter_is_a_folder_of_its_own(adapted):
    root = adapted["lora"].root
    made, base = newest(root, "lora_adapter"), newest(root, "weights_mirror")
    assert set(made.files) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "metrics.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    values = json.loads((made.path / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["target_modules"]) == (2, 16, ["in_proj", "x_proj"])
    assert values["base_model_name_or_path"] is None
    assert (made.facts["base"], made.facts["base_folder"]) == (base.facts["weights"], base.folder)
    assert len(json.loads((made.path / "metrics.json").read_text())["loss"]) == 12


def test_an_adapter_merges_into_its_base(adapted):
    root = adapted["merge"].root
    merged_in, adapter = newest(root, "merged_weights"), newest(root, "lora_adapter")
    assert merged_in.inputs == {"lora_adapter": adapter.fingerprint}
    (_, weights), (_, base) = load_model(merged_in.path), load_model(newest(root, "weights_mirror").path)
    expected = adapted_model(adapter)[1]
    assert {name: value.tobytes() for name, value in weights.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }
    changed = {name for name in base if base[name].tobytes() != weights[name].tobytes()}
    assert changed == {f"backbone.layers.0.mixer.{target}.weight" for target in ("in_proj", "x_proj")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= merged_in.files.keys()
    assert materialized(adapted["merge"].result)["merged_weights"].metadata["parameters"].value == sum(
        value.size for value in base.values()
    )


def test_merged_weights_are_written_as_asked(lora, root):
    changed = lora | {"ops": {"merged_weights": {"config": {"save_dtype": "bfloat16", "max_shard_size": "5KB"}}}}
    run(changed, "merge")
    folder = pointers(root)["merged_weights"].path
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def test_each_way_gives_the_same_digits_in_another_root(adapted, way, tmp_path):
    result, root, config, _ = adapted[way.job]
    other = tmp_path / "elsewhere"
    again = run(config | {"resources": in_root(config, other)}, way.job)
    for name in assets(way):
        mine, theirs = newest(root, name), newest(other, name)
        assert versions(again)[name] == versions(result)[name]
        assert mine.facts == theirs.facts
        assert contents(mine) == contents(theirs)


def test_an_unchanged_way_is_skipped_on_request(adapted, way, capfd):
    _, _, config, _ = adapted[way.job]
    resources = config["resources"]["storage"]["config"] | {"skip_unchanged": True}
    asked = config | {"resources": config["resources"] | {"storage": {"config": resources}}}
    again = materialized(run(asked, way.job, assets(way)))
    assert all("not_computed_again" in made.metadata for made in again.values())


def changing(change):
    """Return `train` that changes the state after the last step, as a fault would."""
    real = training.train

    def train(state, *arguments, **options):
        before = {name: value.copy() for name, value in state.params.items()}
        yield from real(state, *arguments, **options)
        change(state.params, before, state.names)

    return train


def touch_frozen(params, before, names):
    params["backbone.norm_f.weight"][0] = np.nextafter(params["backbone.norm_f.weight"][0], np.float32(9))


def undo_training(params, before, names):
    for name in names:
        params[name][...] = before[name]


def spoil(params, before, names):
    params[names[0]].flat[0] = np.nan


@pytest.mark.parametrize(
    ("check", "change", "message"),
    [
        ("frozen_unchanged", touch_frozen, "found 1 changed in float32, such as backbone.norm_f.weight, of "),
        ("trained_changed", undo_training, " without a change, such as backbone.layers.0.mixer."),
        ("weights_finite", spoil, "found {'backbone.layers.0.mixer."),
    ],
)
def test_a_failed_check_replaces_nothing(adapted, root, config, way, monkeypatch, check, change, message):
    shutil.copytree(adapted[way.job].root, root)
    before = {name: made.to_json() for name, made in pointers(root).items()}
    monkeypatch.setattr(training, "train", changing(change))
    changed = merged(adapting(config, way.job), {way.weights: {"learning_rate": 1e-2}})
    failed = run(changed, way.job, assets(way), fails=True)
    assert f"check {check} of {way.weights} failed: " in failure(failed)
    assert message in failure(failed)
    assert verdicts(failed)[way.weights, check] is False
    assert not materialized(failed)
    assert {name: made.to_json() for name, made in pointers(root).items()} == before


def test_an_error_half_way_leaves_nothing_behind(adapted, own, root, way, monkeypatch):
    real = training.train

    def breaking(*arguments, **options):
        for metrics in real(*arguments, **options):
            yield metrics
            if metrics.step == 8:
                raise OSError("disk full")

    before = {name: made.to_json() for name, made in pointers(root).items()}
    base = {file: file_digest(file) for file in pointers(root)["weights_mirror"].path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", breaking)
        failed = run(own, way.job, assets(way), fails=True)
    assert "disk full" in failure(failed)
    assert {name: made.to_json() for name, made in pointers(root).items()} == before
    assert {file: file_digest(file) for file in base} == base
    assert not (root / way.weights).exists()
    again = run(own, way.job, assets(way))
    assert versions(again) == versions(adapted[way.job].result)
    assert {file: file_digest(file) for file in base} == base


def test_a_killed_run_continues_bit_for_bit(adapted, own, root, way, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", interrupted_after(7, signal.SIGTERM))
        stopped = run(own, way.job, assets(way), fails=True)
    assert "training stopped by SIGTERM at step 7 of 12; the next run continues there" in failure(stopped)
    (folder,) = (path for path in (root / training.RUNS).iterdir() if checkpoints(path)[-1].name == "step-00000007")
    again = run(own, way.job, assets(way))
    assert versions(again) == versions(adapted[way.job].result)
    assert [step.step for step in read_history(folder)] == list(range(1, 13))


def test_frozen_weights_that_saving_would_round_are_a_change():
    config = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1)
    state = start(config, names=wsla_names(config))
    before = {name: training.tensor_digest(value) for name, value in state.params.items()}
    assert training.frozen_unchanged(state, before, "float32").passed
    rounded = training.frozen_unchanged(state, before, "bfloat16")
    assert not rounded.passed
    assert "changed in bfloat16" in rounded.text


def test_an_adapter_that_adds_nothing_has_not_changed():
    config = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1)
    state = start(config, lora=LoraConfig())
    before = {name: training.tensor_digest(value) for name, value in state.params.items()}
    for name in state.names:
        if ".lora_A" in name:
            state.params[name] *= 0.99
    verdict = training.trained_changed(state, before)
    assert not verdict.passed
    assert "2 without a change" in verdict.text
