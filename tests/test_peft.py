"""Adapter folders: what is written is read back, and one clear error for each thing that is not plain LoRA."""

import json
import shlex

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from mamba_ops import parameters, peft
from mamba_ops.checkpoint import CheckpointError, load_metadata, load_tensors
from mamba_ops.config import TARGETS, LoraConfig, MambaConfig
from mamba_ops.lora import initial, tensor_shapes
from mamba_ops.peft import CONFIG, PREFIX, WEIGHTS, check_base, load_adapter, save_adapter
from mamba_ops.tensors import fingerprint

TIED = MambaConfig(vocab_size=19, hidden_size=16, num_hidden_layers=2, state_size=4)
UNTIED = TIED.model_copy(update={"tie_word_embeddings": False})
LORA = LoraConfig(r=4, lora_alpha=10)
BASE = "0123abcd"
FIRST = "backbone.layers.0.mixer.in_proj.lora_A.weight"


def drawn(config, lora, seed=0, dtype=np.float32):
    """Return adapter tensors of which none is zero."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in tensor_shapes(config, lora).items()}


def edit(folder, **values):
    """Change keys of an adapter_config.json; a value of ... removes one."""
    path = folder / CONFIG
    kept = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not ...}))


def restore(folder, tensors, metadata=None):
    """Write the tensors' file again, without checks."""
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"} if metadata is None else metadata)


@pytest.fixture
def folder(tmp_path):
    save_adapter(tmp_path / "adapter", TIED, LORA, drawn(TIED, LORA), BASE)
    return tmp_path / "adapter"


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        LoraConfig(r=3, lora_alpha=0.5, use_rslora=True, lora_dropout=0.25, target_modules=["out_proj", "dt_proj"]),
        LoraConfig(r=8, target_modules=list(reversed(TARGETS))),
        LoraConfig(r=1, target_modules=["A_log", "A_log"]),
    ],
    ids=["defaults", "rslora", "every target", "named twice"],
)
def test_what_is_written_is_read(config, lora, tmp_path):
    tensors = drawn(config, lora)
    save_adapter(tmp_path / "adapter", config, lora, tensors, BASE, tmp_path / "base")
    found = load_adapter(tmp_path / "adapter", config)
    chosen = [target for target in TARGETS if target in lora.target_modules]
    assert found.lora == lora.model_copy(update={"target_modules": chosen})
    assert found.base_fingerprint == BASE
    assert list(found.tensors) == list(tensor_shapes(config, lora))
    for name, array in found.tensors.items():
        assert array.dtype == np.float32
        assert array.tobytes() == tensors[name].tobytes()


def test_the_files_are_as_peft_writes_them(tmp_path):
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["x_proj", "in_proj", "dt_proj", "embeddings"])
    save_adapter(tmp_path / "adapter", TIED, lora, drawn(TIED, lora), BASE, tmp_path / "base")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [CONFIG, WEIGHTS]
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text()) == {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": str(tmp_path / "base"),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 16,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 8,
        "rank_pattern": {"dt_proj": 1},
        "revision": None,
        "target_modules": ["dt_proj", "embeddings", "in_proj", "x_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    shapes = {name: array.shape for name, array in load_tensors(tmp_path / "adapter" / WEIGHTS).items()}
    mixer = f"{PREFIX}backbone.layers.%d.mixer."
    assert shapes == {
        PREFIX + "backbone.embeddings.lora_embedding_A": (8, 19),
        PREFIX + "backbone.embeddings.lora_embedding_B": (16, 8),
    } | {
        (mixer % layer) + name: shape
        for layer in range(2)
        for name, shape in {
            "in_proj.lora_A.weight": (8, 16),
            "in_proj.lora_B.weight": (64, 8),
            "x_proj.lora_A.weight": (8, 32),
            "x_proj.lora_B.weight": (9, 8),
            "dt_proj.lora_A.weight": (1, 1),
            "dt_proj.lora_B.weight": (32, 1),
        }.items()
    }
    assert load_metadata(tmp_path / "adapter" / WEIGHTS) == {"format": "pt", "base_fingerprint": BASE}


def test_clamped_ranks_of_every_target_are_told(tmp_path):
    lora = LoraConfig(r=12, target_modules=list(TARGETS))
    save_adapter(tmp_path / "adapter", TIED, lora, drawn(TIED, lora), BASE)
    found = json.loads((tmp_path / "adapter" / CONFIG).read_text())["rank_pattern"]
    assert found == {"x_proj": 9, "dt_proj": 1, "conv1d": 4, "A_log": 4}
    assert load_adapter(tmp_path / "adapter", TIED).lora.r == 12


def test_an_adapter_is_never_overwritten(folder):
    before = (folder / WEIGHTS).read_bytes()
    with pytest.raises(FileExistsError, match="exists and is not overwritten"):
        save_adapter(folder, TIED, LORA, drawn(TIED, LORA, seed=1), BASE)
    assert (folder / WEIGHTS).read_bytes() == before


def test_an_error_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(peft, "write_json", fail)
    with pytest.raises(OSError, match="no space"):
        save_adapter(tmp_path / "adapter", TIED, LORA, drawn(TIED, LORA), BASE)
    assert list(tmp_path.iterdir()) == []


def test_wrong_tensors_are_not_written(tmp_path):
    tensors = drawn(TIED, LORA)
    name = "backbone.layers.1.mixer.x_proj.lora_B.weight"
    wrong = {
        r"x_proj.lora_B.weight: found no such tensor, expected each of the 8": {
            key: value for key, value in tensors.items() if key != name
        },
        r"norm_f.weight: found an unknown tensor": tensors | {"backbone.norm_f.weight": np.ones(16, np.float32)},
        r"x_proj.lora_B.weight: found shape \(9, 5\), expected \(9, 4\)": tensors | {name: np.ones((9, 5))},
        r"x_proj.lora_B.weight: found nan at \(0, 0\)": tensors | {name: np.full((9, 4), np.nan)},
        r"x_proj.lora_B.weight: found inf at \(0, 0\)": tensors | {name: np.full((9, 4), 1e39)},
    }
    for message, given in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            save_adapter(tmp_path / "adapter", TIED, LORA, given, BASE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_half_precision_is_read_to_float32(dtype, folder):
    tensors = drawn(TIED, LORA, 3, dtype)
    restore(folder, {PREFIX + name: array for name, array in tensors.items()})
    for name, array in load_adapter(folder, TIED).tensors.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, tensors[name].astype(np.float32))


REFUSED = {
    "peft_type": ["LOHA", "ADALORA", None, ..., 3],
    "use_dora": [True],
    "bias": ["all", "lora_only"],
    "modules_to_save": [["lm_head"]],
    "layers_to_transform": [[0], 0],
    "layer_replication": [[[0, 2]]],
    "lora_bias": [True],
    "alpha_pattern": [{"in_proj": 4}],
    "exclude_modules": [["x_proj"], "x_proj"],
    "trainable_token_indices": [[1, 2]],
    "target_parameters": [["A_log"]],
    "fan_in_fan_out": [True],
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new"],
    "task_type": ["SEQ_CLS"],
    "megatron_config": [{"a": 1}],
    "use_qalora": [True],
    "alora_invocation_tokens": [[1]],
    "kasa_config": [{"beta": 1e-4}],
    "use_what_comes": [True],
    "what_comes_config": [{"a": 1}],
    "r": [0, -1, 2.5, "4", True, None],
    "lora_alpha": [0, "16", True, None, [1]],
    "lora_dropout": [1.0, -0.1, "0.1"],
    "use_rslora": ["yes", 1, None],
    "target_modules": [
        ...,
        None,
        [],
        "all-linear",
        r".*\.(in|x)_proj",
        [3],
        ["in_proj", "k_proj"],
        ["mixer"],
        ["norm"],
    ],
    "rank_pattern": [
        {"in_proj": 2},
        {"x_proj": 8},
        {"^backbone.layers.1.mixer.x_proj": 2},
        {"in_proj": None},
        {"(in_proj)+": 4},
        ["in_proj"],
        "in_proj",
    ],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values])
def test_what_is_not_plain_lora_is_refused_by_name(key, value, folder):
    edit(folder, **{key: value})
    with pytest.raises(CheckpointError) as error:
        load_adapter(folder, TIED)
    assert str(error.value).startswith(f"{folder / CONFIG}: {key}: found ")
    assert ", expected " in str(error.value)
    assert "\n" not in str(error.value)


HARMLESS = {
    "peft_version": "0.21.2",
    "auto_mapping": {"base_model_class": "MambaForCausalLM"},
    "base_model_name_or_path": "/somewhere",
    "revision": "main",
    "inference_mode": False,
    "task_type": None,
    "qalora_group_size": 16,
    "megatron_core": "megatron.core",
    "runtime_config": {"ephemeral_gpu_offload": False},
    "exclude_modules": None,
    "modules_to_save": [],
    "what_comes_size": 16,
    "what_comes": "text",
    "init_lora_weights": False,
    "rank_pattern": {"x_proj": 4, "^backbone.layers.0.mixer.in_proj$": 4, "k_proj": 3},
}


@pytest.mark.parametrize("key", list(HARMLESS))
def test_harmless_settings_are_ignored(key, folder):
    expected = load_adapter(folder, TIED)
    edit(folder, **{key: HARMLESS[key]})
    found = load_adapter(folder, TIED)
    assert found.lora == expected.lora
    edit(folder, **{key: ...})
    assert load_adapter(folder, TIED).lora == expected.lora


@pytest.mark.parametrize("name", ["gaussian", "eva", "orthogonal", "mica"])
def test_how_an_adapter_began_does_not_matter(name, folder):
    edit(folder, init_lora_weights=name)
    assert load_adapter(folder, TIED).lora == LORA


def test_absent_keys_mean_what_they_mean_to_peft(tmp_path):
    lora = LoraConfig(r=8, lora_alpha=8)
    save_adapter(tmp_path / "adapter", TIED, lora, drawn(TIED, lora), BASE)
    edit(tmp_path / "adapter", r=..., lora_alpha=..., use_rslora=..., lora_dropout=..., rank_pattern=...)
    assert load_adapter(tmp_path / "adapter", TIED).lora == lora


@pytest.mark.parametrize(
    "names",
    [
        ["mixer.in_proj", "x_proj"],
        [f"backbone.layers.{layer}.mixer.{name}" for layer in (0, 1) for name in ("in_proj", "x_proj")],
        ["0.mixer.in_proj", "layers.1.mixer.in_proj", "x_proj", "in_proj"],
    ],
)
def test_longer_names_of_whole_targets_are_read(names, folder):
    edit(folder, target_modules=names)
    assert load_adapter(folder, TIED).lora == LORA


def test_a_target_in_some_layers_only_is_refused(folder):
    edit(folder, target_modules=["backbone.layers.0.mixer.in_proj", "x_proj"])
    found = "in_proj without backbone.layers.1.mixer.in_proj, expected in_proj of every layer"
    with pytest.raises(CheckpointError, match=f"target_modules: found {found}"):
        load_adapter(folder, TIED)


def test_missing_extra_and_misnamed_tensors_are_refused_by_name(folder):
    stored = load_tensors(folder / WEIGHTS)
    first, path = PREFIX + FIRST, folder / WEIGHTS
    rest = {key: array for key, array in stored.items() if key != first}
    cases = {
        f"{path}: {first}: found no such tensor, expected each of the 8 that the targets have": rest,
        f"{path}: lm_head.weight: found an unknown tensor, expected no other tensors than": stored
        | {"lm_head.weight": stored[first]},
        f"{path}: {FIRST}: found an unknown tensor, expected {first} and no other name": rest | {FIRST: stored[first]},
        f"{path}: {first.replace('A.weight', 'A.default.weight')}: found an unknown tensor": rest
        | {first.replace("A.weight", "A.default.weight"): stored[first]},
        f"{path}: {PREFIX}backbone.layers.2.mixer.in_proj.lora_A.weight: found an unknown tensor": stored
        | {f"{PREFIX}backbone.layers.2.mixer.in_proj.lora_A.weight": stored[first]},
    }
    for message, tensors in cases.items():
        restore(folder, tensors)
        with pytest.raises(CheckpointError) as error:
            load_adapter(folder, TIED)
        assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 24}, r"in_proj.lora_A.weight: found shape \(4, 16\), expected \(4, 24\)"),
        ({"expand": 3}, r"in_proj.lora_B.weight: found shape \(64, 4\), expected \(96, 4\)"),
        ({"state_size": 5}, r"x_proj.lora_B.weight: found shape \(9, 4\), expected \(11, 4\)"),
        ({"num_hidden_layers": 3}, r"layers.2.mixer.in_proj.lora_A.weight: found no such tensor"),
        ({"num_hidden_layers": 1}, r"layers.1.mixer.in_proj.lora_A.weight: found an unknown tensor.* base of 1 layers"),
        ({"state_size": 1}, r"x_proj.lora_A.weight: found shape \(4, 32\), expected \(3, 32\)"),
    ],
)
def test_an_adapter_for_another_base_is_refused_by_name_and_shape(change, message, folder):
    with pytest.raises(CheckpointError, match=message):
        load_adapter(folder, TIED.model_copy(update=change))


def test_a_rank_that_was_not_clamped_is_refused_though_shapes_agree(folder):
    """A and B of in_proj say 4; PEFT would scale by alpha / 2."""
    edit(folder, rank_pattern={"in_proj": 2})
    with pytest.raises(CheckpointError, match=r"rank_pattern: found rank 2 of backbone.layers.0.mixer.in_proj"):
        load_adapter(folder, TIED)


def test_a_value_that_is_not_finite_is_refused(folder):
    stored = load_tensors(folder / WEIGHTS)
    stored[PREFIX + FIRST][1, 2] = np.inf
    restore(folder, stored)
    with pytest.raises(CheckpointError, match=r"in_proj.lora_A.weight: found inf at \(1, 2\)"):
        load_adapter(folder, TIED)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8])
def test_other_dtypes_are_refused(dtype, folder):
    stored = load_tensors(folder / WEIGHTS)
    stored[PREFIX + FIRST] = stored[PREFIX + FIRST].astype(dtype)
    restore(folder, stored)
    with pytest.raises(CheckpointError, match=r"in_proj.lora_A.weight: found dtype \w+, expected F32, F16, BF16"):
        load_adapter(folder, TIED)


def test_missing_and_broken_files_are_named(folder, tmp_path):
    with pytest.raises(CheckpointError, match="none: found nothing there, expected an adapter folder"):
        load_adapter(tmp_path / "none", TIED)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: found a file, expected an adapter folder"):
        load_adapter(folder / CONFIG, TIED)
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        load_adapter(folder, TIED)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: found no such file"):
        load_adapter(folder, TIED)
    (folder / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="no readable JSON"):
        load_adapter(folder, TIED)
    (folder / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=f"{CONFIG}: found no such file, expected the adapter's configuration"):
        load_adapter(folder, TIED)


def test_a_pickle_is_never_read(folder):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin: found a pickle, which can run code") as error:
        load_adapter(folder, TIED)
    program = shlex.split(str(error.value).partition("this makes it in that folder: ")[2])
    assert program[:2] == ["python", "-c"]
    compile(program[2], "command", "exec")


def test_a_base_that_changed_underneath_is_refused_by_fingerprint(tmp_path):
    params = parameters.init(TIED, seed=0)
    save_adapter(tmp_path / "adapter", TIED, LORA, drawn(TIED, LORA), fingerprint(params))
    adapted = load_adapter(tmp_path / "adapter", TIED)
    check_base(adapted, params)
    check_base(adapted, fingerprint(params))
    changed = {name: array.copy() for name, array in params.items()}
    changed["backbone.norm_f.weight"][0] = np.nextafter(np.float32(1), np.float32(2))
    with pytest.raises(CheckpointError) as error:
        check_base(adapted, changed)
    for part in (str(tmp_path / "adapter"), fingerprint(changed), fingerprint(params)):
        assert part in str(error.value)


def test_without_a_recorded_fingerprint_any_base_of_the_shape_will_do(folder):
    restore(folder, load_tensors(folder / WEIGHTS))
    adapted = load_adapter(folder, TIED)
    assert adapted.base_fingerprint is None
    check_base(adapted, parameters.init(TIED, seed=1))


def test_an_embeddings_adapter_by_peft_has_another_meaning_when_tied(tmp_path):
    lora = LoraConfig(r=4, target_modules=["embeddings"])
    for name, config in (("tied", TIED), ("untied", UNTIED)):
        save_adapter(tmp_path / name, config, lora, drawn(config, lora), BASE)
        restore(tmp_path / name, load_tensors(tmp_path / name / WEIGHTS))
    assert load_adapter(tmp_path / "untied", UNTIED).lora == lora
    with pytest.raises(CheckpointError, match="lora_embedding_A: found an embeddings adapter by PEFT, which acts on"):
        load_adapter(tmp_path / "tied", TIED)


def test_a_dt_proj_adapter_by_peft_may_only_be_one_without_effect(tmp_path):
    lora = LoraConfig(r=4, target_modules=["in_proj", "dt_proj"])
    save_adapter(tmp_path / "adapter", TIED, lora, initial(TIED, lora, seed=0), BASE)
    stored = load_tensors(tmp_path / "adapter" / WEIGHTS)
    restore(tmp_path / "adapter", stored)
    assert load_adapter(tmp_path / "adapter", TIED).lora == lora
    stored[PREFIX + "backbone.layers.1.mixer.dt_proj.lora_B.weight"][0] = 1
    restore(tmp_path / "adapter", stored)
    with pytest.raises(CheckpointError, match=r"layers.1.mixer.dt_proj.lora_B.weight: found a dt_proj adapter, which"):
        load_adapter(tmp_path / "adapter", TIED)
    restore(tmp_path / "adapter", stored, {"format": "pt", "base_fingerprint": BASE})
    assert load_adapter(tmp_path / "adapter", TIED).lora == lora


def test_several_adapters_sit_beside_one_base(tmp_path):
    for seed in range(3):
        save_adapter(tmp_path / str(seed), TIED, LORA, drawn(TIED, LORA, seed), BASE)
    found = [load_adapter(tmp_path / str(seed), TIED).tensors[FIRST].tobytes() for seed in range(3)]
    assert len(set(found)) == 3
