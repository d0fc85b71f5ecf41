"""Adapters taken elsewhere: merged folders are exact sums, exported ones hold what PEFT can run and nothing else."""

import json
import math

import numpy as np
import pytest
from ml_dtypes import bfloat16
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mamba_ops.checkpoint import CheckpointError, load_metadata, load_model, load_tensors, save_model
from mamba_ops.config import TARGETS, LoraConfig, MambaConfig
from mamba_ops.export import export_peft, main, merge
from mamba_ops.lora import targets, tensor_names, tensor_shapes
from mamba_ops.parameters import EMBEDDING, table
from mamba_ops.peft import CONFIG, PREFIX, WEIGHTS, load_adapter, save_adapter
from mamba_ops.tensors import fingerprint

TIED = MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2, state_size=4)
UNTIED = TIED.model_copy(update={"tie_word_embeddings": False, "use_bias": True})
CONFIGS = {"tied": TIED, "untied": UNTIED}


def written(folder, config, lora, seed=0, tokenizer_file=None):
    """Write a base and an adapter of random values; return both folders, the parameters and the tensors."""
    rng = np.random.default_rng(seed)
    params = {name: rng.standard_normal(entry.shape, np.float32) for name, entry in table(config).items()}
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in tensor_shapes(config, lora).items()}
    save_model(folder / "base", config, params, tokenizer_file)
    save_adapter(folder / "adapter", config, lora, tensors, fingerprint(params), folder / "base")
    return folder / "base", folder / "adapter", params, tensors


def summed(config, lora, params, tensors):
    """Return float32(W + s B A) of each weight, worked out on its own."""
    expected = {name: array.astype(np.float64) for name, array in params.items()}
    for weight, rank in targets(config, lora).items():
        A, B = (tensors[name].astype(np.float64) for name in tensor_names(weight))
        scale = lora.lora_alpha / (math.sqrt(rank) if lora.use_rslora else rank)
        product = sum(np.outer(B[:, k], A[k]) for k in range(rank))
        expected[weight] += scale * (product.T if weight == EMBEDDING else product).reshape(expected[weight].shape)
    return expected


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the state of the scan and the state of the text"] * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("chosen", [*([target] for target in TARGETS), list(TARGETS)], ids=[*TARGETS, "all"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_merged_weight_is_the_sum_rounded_once(name, chosen, use_rslora, tmp_path):
    config = CONFIGS[name]
    lora = LoraConfig(r=6, lora_alpha=5, use_rslora=use_rslora, target_modules=chosen)
    base, adapter, params, tensors = written(tmp_path, config, lora)
    merge(base, adapter, tmp_path / "merged")
    found_config, found = load_model(tmp_path / "merged")
    assert found_config.model_dump() == load_model(base)[0].model_dump()
    adapted = targets(config, lora)
    for weight, exact in summed(config, lora, params, tensors).items():
        if weight not in adapted:
            assert found[weight].tobytes() == params[weight].tobytes()
            continue
        assert np.any(found[weight] != params[weight])
        half = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64) / 2
        assert np.all(np.abs(found[weight] - exact) <= half * (1 + 1e-6))
    assert load_model(base)[1].keys() == params.keys()


def test_merging_leaves_base_and_adapter_alone_and_takes_the_tokenizer(tmp_path, tokenizer_file):
    base, adapter, _, _ = written(tmp_path, TIED, LoraConfig(), tokenizer_file=tokenizer_file)
    before = {path: path.read_bytes() for folder in (base, adapter) for path in folder.iterdir()}
    merge(base, adapter, tmp_path / "merged")
    assert {path: path.read_bytes() for folder in (base, adapter) for path in folder.iterdir()} == before
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert (tmp_path / "merged" / file).read_bytes() == (base / file).read_bytes()
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == sorted(p.name for p in base.iterdir())


def test_merged_weights_can_be_bfloat16_and_in_shards(tmp_path):
    base, adapter, _, _ = written(tmp_path, TIED, LoraConfig())
    merge(base, adapter, tmp_path / "whole")
    merge(base, adapter, tmp_path / "parts", dtype="bfloat16", max_shard_size="8KB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    whole, parts = load_model(tmp_path / "whole")[1], load_model(tmp_path / "parts")[1]
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array.astype(bfloat16).astype(np.float32))


def test_nothing_is_overwritten(tmp_path):
    base, adapter, _, _ = written(tmp_path, TIED, LoraConfig())
    (tmp_path / "there").mkdir()
    for take in (merge, export_peft):
        with pytest.raises(FileExistsError, match="exists and is not overwritten"):
            take(base, adapter, tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_another_base_is_refused(tmp_path):
    _, adapter, params, _ = written(tmp_path, TIED, LoraConfig())
    changed = params | {EMBEDDING: params[EMBEDDING] * 2}
    save_model(tmp_path / "changed", TIED, changed)
    larger = TIED.model_copy(update={"hidden_size": 24})
    written(tmp_path / "other", larger, LoraConfig())
    for take in (merge, export_peft):
        with pytest.raises(CheckpointError, match=f"found a base with {fingerprint(changed)}"):
            take(tmp_path / "changed", adapter, tmp_path / "out")
        with pytest.raises(CheckpointError, match=r"in_proj.lora_A.weight: found shape \(8, 16\), expected \(8, 24\)"):
            take(tmp_path / "other" / "base", adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sum_beyond_float32_is_refused_by_name(tmp_path):
    lora = LoraConfig(r=1, lora_alpha=1e6, target_modules=["x_proj", "out_proj"])
    base, _, params, tensors = written(tmp_path, TIED, lora)
    name = "backbone.layers.1.mixer.out_proj.lora_B.weight"
    tensors |= {name: np.full(tensors[name].shape, 1e38, np.float32)}
    save_adapter(tmp_path / "large", TIED, lora, tensors, fingerprint(params))
    with pytest.raises(CheckpointError, match=r"layers.1.mixer.out_proj.weight: found -?inf at"):
        merge(base, tmp_path / "large", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"layers.1.mixer.out_proj.weight: found -?inf at"):
        export_peft(base, tmp_path / "large", tmp_path / "out", full_weights=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_peft_runs_is_exported_as_it_is(name, tmp_path):
    config = CONFIGS[name]
    chosen = ["in_proj", "x_proj", *(["embeddings"] if name == "untied" else [])]
    lora = LoraConfig(r=12, lora_alpha=3, use_rslora=True, lora_dropout=0.1, target_modules=chosen)
    base, adapter, params, tensors = written(tmp_path, config, lora)
    export_peft(base, adapter, tmp_path / "exported")
    stored = load_tensors(tmp_path / "exported" / WEIGHTS)
    assert {key: array.tobytes() for key, array in stored.items()} == {
        PREFIX + name: array.tobytes() for name, array in tensors.items()
    }
    metadata = {"format": "pt", "base_fingerprint": fingerprint(params)}
    assert load_metadata(tmp_path / "exported" / WEIGHTS) == metadata
    values = json.loads((tmp_path / "exported" / CONFIG).read_text())
    assert values["base_model_name_or_path"] == str(base)
    assert values["rank_pattern"] == {"x_proj": 9}
    assert values["modules_to_save"] is None
    assert load_adapter(tmp_path / "exported", config).lora == lora.model_copy(update={"target_modules": chosen})


@pytest.mark.parametrize("name", list(CONFIGS))
def test_full_weights_go_along_as_whole_merged_modules(name, tmp_path):
    config = CONFIGS[name]
    lora = LoraConfig(r=4, target_modules=["in_proj", "dt_proj", "out_proj"])
    base, adapter, params, tensors = written(tmp_path, config, lora)
    export_peft(base, adapter, tmp_path / "exported", full_weights=True)
    stored = load_tensors(tmp_path / "exported" / WEIGHTS)
    values = json.loads((tmp_path / "exported" / CONFIG).read_text())
    assert values["target_modules"] == ["in_proj"]
    assert values["modules_to_save"] == ["dt_proj", "out_proj"]
    assert values["rank_pattern"] == {}
    expected = {key: array for key, array in tensors.items() if ".in_proj." in key}
    for layer in range(2):
        for key in ("dt_proj.weight", "dt_proj.bias", "out_proj.weight", *(["out_proj.bias"] * config.use_bias)):
            key = f"backbone.layers.{layer}.mixer.{key}"
            expected[key] = summed(config, lora, params, tensors)[key].astype(np.float32)
    assert stored.keys() == {PREFIX + key for key in expected}
    for key, array in expected.items():
        np.testing.assert_array_max_ulp(stored[PREFIX + key], array, maxulp=1)
    with pytest.raises(
        CheckpointError, match=r"modules_to_save: found \['dt_proj', 'out_proj'\], expected it to be off"
    ):
        load_adapter(tmp_path / "exported", config)


REFUSED = {
    "dt_proj": "transformers reads dt_proj.weight itself",
    "out_proj": "out_proj: PEFT refuses it for Mamba",
    "conv1d": "conv1d: PEFT refuses it for Mamba",
    "A_log": "A_log: PEFT's target_modules are modules",
    "embeddings": "act on the lookup alone, not on the tied head",
}


@pytest.mark.parametrize("target", list(REFUSED))
def test_the_rest_is_refused_with_the_reason_and_the_offer_to_merge(target, tmp_path):
    lora = LoraConfig(target_modules=["in_proj", target])
    base, adapter, _, _ = written(tmp_path, TIED, lora)
    movable = target in ("dt_proj", "out_proj")
    for full_weights in (False, True):
        if full_weights and movable:
            export_peft(base, adapter, tmp_path / "out", full_weights=True)
            continue
        with pytest.raises(CheckpointError) as error:
            export_peft(base, adapter, tmp_path / "out", full_weights=full_weights)
        message = str(error.value)
        assert message.startswith(f"{adapter}: target_modules: found {target}, expected in_proj and x_proj, which PEFT")
        assert REFUSED[target] in message
        assert "the merge command makes a plain folder" in message
        assert ("--modules-to-save takes" in message) == movable
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("full_weights", [False, True])
def test_full_weights_alone_are_no_adapter(full_weights, tmp_path):
    base, adapter, _, _ = written(tmp_path, TIED, LoraConfig(target_modules=["out_proj", "dt_proj"]))
    with pytest.raises(
        CheckpointError, match=r"found dt_proj, out_proj, expected in_proj .* the merge command"
    ) as error:
        export_peft(base, adapter, tmp_path / "out", full_weights=full_weights)
    assert "--modules-to-save" not in str(error.value)


def test_the_command_line(tmp_path, capsys):
    lora = LoraConfig(target_modules=["in_proj", "out_proj"])
    base, adapter, _, _ = map(str, written(tmp_path, TIED, lora))
    out = [str(tmp_path / name) for name in ("merged", "exported")]
    assert main(["merge", base, adapter, out[0], "--dtype", "bfloat16", "--max-shard-size", "1MB"]) == 0
    assert main(["peft", base, adapter, out[1], "--modules-to-save"]) == 0
    assert capsys.readouterr().out.split() == out
    merge(base, adapter, tmp_path / "again", dtype="bfloat16")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "merged" / "model.safetensors"
    ).read_bytes()
    assert json.loads((tmp_path / "exported" / CONFIG).read_text())["modules_to_save"] == ["out_proj"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge", "{base}", "{adapter}", "{base}"], "exists and is not overwritten"),
        (["merge", "{base}", "{base}", "{out}"], "adapter_config.json: found no such file"),
        (["merge", "{adapter}", "{base}", "{out}"], "config.json: found no such file"),
        (["merge", "{base}", "{adapter}", "{out}", "--max-shard-size", "much"], "expected bytes"),
        (["peft", "{base}", "{adapter}", "{out}"], "out_proj: PEFT refuses it for Mamba"),
    ],
)
def test_an_error_is_one_line_and_code_1(arguments, message, tmp_path, capsys):
    base, adapter, _, _ = written(tmp_path, TIED, LoraConfig(target_modules=["in_proj", "out_proj"]))
    places = {"base": base, "adapter": adapter, "out": tmp_path / "out"}
    assert main([argument.format(**places) for argument in arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("mamba_ops.export: ")
    assert message in printed.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments", [[], ["merge"], ["move", "a", "b", "c"], ["merge", "a", "b", "c", "--dtype", "x"]]
)
def test_wrong_arguments_are_one_line_and_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
