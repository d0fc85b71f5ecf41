"""Adapters in PEFT and here: the same logits either way, merged ones in transformers, and what PEFT refuses."""

import json

import numpy as np
import pytest

from mamba_ops.checkpoint import CheckpointError, load_tensors, save_model
from mamba_ops.config import TARGETS, LoraConfig, MambaConfig
from mamba_ops.export import export_peft, merge
from mamba_ops.lora import adapters, initial, merged
from mamba_ops.model import logits, losses
from mamba_ops.parameters import EMBEDDING, LM_HEAD
from mamba_ops.peft import CONFIG, WEIGHTS, load_adapter, save_adapter
from mamba_ops.tensors import fingerprint

torch = pytest.importorskip("torch", reason="torch is missing: pip install -e .[parity]")
transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install -e .[parity]")
peft = pytest.importorskip("peft", reason="peft is missing: pip install -e .[parity]")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]

TIED = MambaConfig(vocab_size=61, hidden_size=24, num_hidden_layers=2)
UNTIED = MambaConfig(
    vocab_size=47,
    hidden_size=16,
    num_hidden_layers=3,
    state_size=5,
    time_step_rank=3,
    use_bias=True,
    tie_word_embeddings=False,
)
CONFIGS = {"tied": TIED, "untied": UNTIED}


def written(folder, config, lora, random_parameters, size=0.05):
    """Write a base and an adapter that changes the logits; return both folders, and parameters with adapters."""
    params = random_parameters(config, 1, np.float32)
    rng = np.random.default_rng(2)
    tensors = {
        name: array + np.float32(size) * rng.standard_normal(array.shape, np.float32)
        for name, array in initial(config, lora, seed=3).items()
    }
    save_model(folder / "base", config, params)
    save_adapter(folder / "adapter", config, lora, tensors, fingerprint(params), folder / "base")
    return folder / "base", folder / "adapter", params | tensors


def ours(ops, params, config, batch, lora=None):
    """Return the logits of the weights with the adapters merged, having shown that adapters beside them give these."""
    found, rows = adapters(config, lora) if lora else {}, ops.rows(batch)
    expected = logits(ops, merged(config, params, found), config, rows)
    with ops.scope():
        nll = ops.read(losses(ops, params, config, rows, adapters=found)).ravel()
    exact = expected.astype(np.float64)
    of_targets = np.take_along_axis(exact, batch.targets.reshape(-1, 1), axis=1)[:, 0]
    worst = np.abs(nll - (np.log(np.exp(exact).sum(axis=1)) - of_targets)).max()
    assert worst <= 1e-5 * np.abs(exact).max()
    return expected


def theirs(model, batch):
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(batch.ids), use_cache=False).logits
    return out.numpy().reshape(batch.ids.size, -1)


def opened(base):
    return transformers.AutoModelForCausalLM.from_pretrained(base)


def randomised(model, seed):
    """Give every adapter of a PEFT model values other than zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


def assert_same(found, expected, name=""):
    assert found.dtype == expected.dtype == np.float32
    worst = np.abs(found - expected).max() / np.abs(expected).max()
    assert worst <= 1e-5, f"{name}: {worst:.2e}"


def assert_apart(found, expected):
    assert np.abs(found - expected).max() > 1e-3 * np.abs(expected).max()


EXPORTED = {
    "defaults": (["in_proj", "x_proj"], {}),
    "in_proj, rank-stabilised": (["in_proj"], dict(use_rslora=True, r=3, lora_alpha=2.5)),
    "x_proj, clamped": (["x_proj"], dict(r=20, lora_alpha=40)),
    "both, clamped and rank-stabilised": (["in_proj", "x_proj"], dict(r=30, use_rslora=True, lora_alpha=10)),
    "full weights": (["in_proj", "x_proj", "dt_proj", "out_proj"], dict(r=30)),
    "full dt_proj": (["x_proj", "dt_proj"], dict(r=2, use_rslora=True)),
    "embeddings": (["in_proj", "embeddings"], dict(r=5)),
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in CONFIGS for case in EXPORTED if (name, case) != ("tied", "embeddings")]
)
def test_an_exported_adapter_gives_the_same_logits_in_peft(
    name, case, tmp_path, ops32, random_parameters, random_batch
):
    config, (chosen, settings) = CONFIGS[name], EXPORTED[case]
    lora = LoraConfig(target_modules=chosen, lora_dropout=0.2, **settings)
    base, adapter, params = written(tmp_path, config, lora, random_parameters)
    whole = {"dt_proj", "out_proj"} & set(chosen)
    export_peft(base, adapter, tmp_path / "exported", full_weights=bool(whole))
    model = peft.PeftModel.from_pretrained(opened(base), tmp_path / "exported")
    assert set(model.peft_config["default"].modules_to_save or ()) == whole
    held = peft.get_peft_model_state_dict(model)
    stored = load_tensors(tmp_path / "exported" / WEIGHTS)
    assert held.keys() == stored.keys()
    assert all(tensor.numpy().tobytes() == stored[key].tobytes() for key, tensor in held.items())
    batch = random_batch(config, 3, 2, 40)
    expected = ours(ops32, params, config, batch, lora)
    assert_same(theirs(model, batch), expected)
    assert_apart(theirs(opened(base), batch), expected)


def test_peft_finds_the_base_of_an_adapter_itself(tmp_path, ops32, random_parameters, random_batch):
    lora = LoraConfig()
    base, adapter, params = written(tmp_path, TIED, lora, random_parameters)
    export_peft(base, adapter, tmp_path / "exported")
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "exported")
    batch = random_batch(TIED, 3, 2, 40)
    assert_same(theirs(model, batch), ours(ops32, params, TIED, batch, lora))


@pytest.mark.parametrize("chosen", [*([target] for target in TARGETS), list(TARGETS)], ids=[*TARGETS, "all"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_merged_folder_gives_the_same_logits_in_transformers(
    name, chosen, tmp_path, ops32, random_parameters, random_batch
):
    config = CONFIGS[name]
    lora = LoraConfig(r=6, lora_alpha=4, use_rslora=name == "untied", target_modules=chosen)
    size = 0.5 if chosen in (["dt_proj"], ["A_log"]) else 0.05  # less would not be seen in the logits
    base, adapter, params = written(tmp_path, config, lora, random_parameters, size)
    merge(base, adapter, tmp_path / "merged")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()), info
    batch = random_batch(config, 4, 2, 40)
    expected = ours(ops32, params, config, batch, lora)
    assert_same(theirs(model, batch), expected)
    assert_apart(theirs(opened(base), batch), expected)


TRAINED = {
    "defaults": (dict(target_modules=["in_proj", "x_proj"]), "tied"),
    "rank-stabilised, with dropout": (
        dict(target_modules=["mixer.in_proj"], use_rslora=True, lora_alpha=3, lora_dropout=0.1),
        "untied",
    ),
    "a clamped rank": (dict(target_modules=["x_proj", "in_proj"], r=16, rank_pattern={"x_proj": 13}), "untied"),
    "an embedding that is not tied": (dict(target_modules=["embeddings", "x_proj"]), "untied"),
    "dt_proj, which stays at zero": (dict(target_modules=["dt_proj", "in_proj"], rank_pattern={"dt_proj": 2}), "tied"),
    "orthogonal": (dict(target_modules=["in_proj"], init_lora_weights="orthogonal"), "tied"),
    "every layer by its name": (
        dict(target_modules=[f"backbone.layers.{layer}.mixer.in_proj" for layer in range(2)]),
        "tied",
    ),
}


@pytest.mark.parametrize("case", list(TRAINED))
def test_an_adapter_trained_and_saved_by_peft_loads_here(case, tmp_path, ops32, random_parameters, random_batch):
    settings, name = TRAINED[case]
    config = CONFIGS[name]
    params = random_parameters(config, 1, np.float32)
    save_model(tmp_path / "base", config, params)
    torch.manual_seed(0)
    chosen = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **settings})
    model = peft.get_peft_model(opened(tmp_path / "base"), chosen).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for step in range(4):
        batch = random_batch(config, 10 + step, 2, 12)
        optimizer.zero_grad()
        ids = torch.from_numpy(batch.ids)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "adapter")
    adapted = load_adapter(tmp_path / "adapter", config)
    assert adapted.base_fingerprint is None
    batch = random_batch(config, 3, 2, 40)
    expected = theirs(model.eval(), batch)
    assert_same(ours(ops32, params | adapted.tensors, config, batch, adapted.lora), expected)
    assert_apart(ours(ops32, params, config, batch), expected)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert_same(theirs(opened(tmp_path / "merged"), batch), expected)


def test_there_and_back_is_bit_identical(tmp_path, random_parameters):
    """Written here, opened and saved by PEFT, read here: the same values and configuration."""
    lora = LoraConfig(r=30, lora_alpha=7.5, use_rslora=True, lora_dropout=0.1)
    base, adapter, _ = written(tmp_path, UNTIED, lora, random_parameters)
    peft.PeftModel.from_pretrained(opened(base), adapter).save_pretrained(tmp_path / "theirs")
    first, second = load_adapter(adapter, UNTIED), load_adapter(tmp_path / "theirs", UNTIED)
    assert second.lora == first.lora
    assert second.tensors.keys() == first.tensors.keys()
    assert all(array.tobytes() == second.tensors[name].tobytes() for name, array in first.tensors.items())
    ours, theirs = (json.loads((folder / CONFIG).read_text()) for folder in (adapter, tmp_path / "theirs"))
    theirs["target_modules"].sort()
    assert {key: theirs[key] for key in ours} == ours


def test_every_setting_of_peft_is_known_here():
    """A setting that a new PEFT adds has to be judged: does it change what an adapter means?"""
    import dataclasses

    from mamba_ops.peft_config import HARMLESS, KNOWN, OWN, VALUES

    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= HARMLESS | KNOWN | OWN | VALUES.keys()


BEYOND = {
    "DoRA": dict(use_dora=True),
    "biases": dict(bias="lora_only"),
    "bias of B": dict(lora_bias=True),
    "whole modules": dict(modules_to_save=["norm_f"]),
    "one layer": dict(layers_to_transform=[0]),
    "alphas": dict(alpha_pattern={"x_proj": 2}),
    "ranks": dict(rank_pattern={"x_proj": 2}),
    "a rank above the smaller dimension": dict(target_modules=["x_proj"], r=40),
    "PiSSA": dict(init_lora_weights="pissa"),
    "OLoRA": dict(init_lora_weights="olora"),
    "a pattern": dict(target_modules=r".*\.in_proj"),
    "some layers": dict(target_modules=["0.mixer.in_proj", "x_proj"]),
    "excluded": dict(exclude_modules=["0.mixer.in_proj"]),
    "the tied embedding": dict(target_modules=["embeddings", "in_proj"]),
    "a parameter": dict(target_modules=["in_proj"], target_parameters=["A_log"]),
    "tokens": dict(trainable_token_indices={"embeddings": [1, 2]}),
}


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed", "ignore:Adapter 'default'. 4 LoRA tensor.s. have")
@pytest.mark.parametrize("case", list(BEYOND))
def test_what_peft_saves_beyond_plain_lora_is_refused(case, tmp_path, random_parameters):
    save_model(tmp_path / "base", TIED, random_parameters(TIED, 1, np.float32))
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["in_proj", "x_proj"], "r": 4, **BEYOND[case]}
    peft.get_peft_model(opened(tmp_path / "base"), peft.LoraConfig(**settings)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r": found .*, expected ") as error:
        load_adapter(tmp_path / "adapter", TIED)
    named = {*BEYOND[case], "lora_embedding_A", "lora_A"}
    assert any(key in str(error.value) for key in named)


@pytest.mark.parametrize("target", ["out_proj", "conv1d"])
def test_peft_refuses_out_proj_and_conv1d(target):
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**TIED.model_dump()))
    with pytest.raises(ValueError, match=f"Module '{target}' is incompatible with Mamba-based models"):
        peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["in_proj", target]))


def test_peft_finds_no_module_a_log():
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**TIED.model_dump()))
    with pytest.raises(ValueError, match=r"A_log.* not found"):
        peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["A_log"]))


@pytest.mark.parametrize("training", [False, True])
def test_transformers_bypasses_an_adapter_of_dt_proj(training, random_parameters, random_batch, reference):
    params, batch = random_parameters(TIED, 1, np.float32), random_batch(TIED, 2, 2, 20)
    before = theirs(reference(TIED, params).train(training), batch)
    chosen = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["dt_proj"])
    model = randomised(peft.get_peft_model(reference(TIED, params), chosen), 3).train(training)
    np.testing.assert_array_equal(theirs(model, batch), before)


@pytest.mark.parametrize("target", ["in_proj", "x_proj"])
def test_what_transformers_hands_to_its_cuda_kernel_lacks_the_adapter_of_x_proj(
    target, monkeypatch, random_parameters, random_batch, reference
):
    """In training the fused kernel takes in_proj's product, with its adapter, and x_proj's weight, without."""
    from transformers.models.mamba import modeling_mamba

    params, batch = random_parameters(TIED, 1, np.float32), random_batch(TIED, 2, 2, 20)
    chosen = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=[target])
    model = randomised(peft.get_peft_model(reference(TIED, params), chosen), 3)
    handed = []
    monkeypatch.setattr(modeling_mamba, "mamba_inner_fn", lambda *args, **_: handed.append(args[:4]))
    adapted = theirs(model.train(), batch)
    with model.disable_adapter():
        plain = theirs(model.train(), batch)
    assert_apart(adapted, plain)  # without the kernel
    with_adapter, without = handed[0], handed[TIED.num_hidden_layers]
    assert torch.equal(with_adapter[3], torch.from_numpy(params["backbone.layers.0.mixer.x_proj.weight"]))
    assert torch.equal(with_adapter[0], without[0]) == (target == "x_proj")


def test_an_embeddings_adapter_of_peft_acts_on_the_lookup_alone(ops32, random_parameters, random_batch, reference):
    params, batch = random_parameters(TIED, 1, np.float32), random_batch(TIED, 2, 2, 20)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["embeddings"])
    chosen = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["embeddings"], r=4, lora_alpha=8)
    model = randomised(peft.get_peft_model(reference(TIED, params), chosen), 3).eval()
    tensors = {
        key.removeprefix("base_model.model."): tensor.numpy()
        for key, tensor in peft.get_peft_model_state_dict(model).items()
    }
    found = theirs(model, batch)
    apart = TIED.model_copy(update={"tie_word_embeddings": False})
    lookup = params | tensors | {LM_HEAD: params[EMBEDDING]}
    assert_same(ours(ops32, lookup, apart, batch, lora), found)
    assert_apart(ours(ops32, params | tensors, TIED, batch, lora), found)
