"""Folders written here open in transformers, and the other way round."""

import json

import numpy as np
import pytest

from mamba_ops import parameters
from mamba_ops.checkpoint import LOOKALIKES, CheckpointError, load_config, load_model, load_tensors, save_model
from mamba_ops.config import MambaConfig, TokenizerConfig
from mamba_ops.model import logits
from mamba_ops.tokenizer import build_tokenizer, load_tokenizer

torch = pytest.importorskip("torch", reason="torch is missing: pip install -e .[parity]")
transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install -e .[parity]")

pytestmark = pytest.mark.parity

TIED = MambaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2)
UNTIED = MambaConfig(
    vocab_size=300,
    hidden_size=12,
    num_hidden_layers=1,
    state_size=5,
    time_step_rank=3,
    conv_kernel=3,
    expand=3,
    use_bias=True,
    use_conv_bias=False,
    tie_word_embeddings=False,
    layer_norm_epsilon=1e-3,
)
CONFIGS = pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
TEXTS = [
    "",
    "the state of the scan",
    "  two  spaces,\ttabs\r\nand\nlines \n\n",
    "Größe, naïve, 日本語, 🙂 e\u0301 \u00a0\ufeff\0",
    "don't \u2028 it's x=1e-4; def f(): return [1, 2]  # comment",
]


def their_logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy().reshape(ids.size, -1)


def our_logits(ops, params, config, batch):
    return logits(ops, params, config, ops.rows(batch))


def assert_same_logits(found, expected):
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@CONFIGS
def test_saved_here_opens_there(config, tmp_path, ops32, random_parameters, random_batch):
    params = random_parameters(config, 1, np.float32)
    save_model(tmp_path / "model", config, params)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert isinstance(model, transformers.MambaForCausalLM)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert model.config.time_step_rank == config.dt_rank
    assert model.config.intermediate_size == config.d_inner
    assert model.config.architectures == ["MambaForCausalLM"]
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == (0, 0)
    assert (model.lm_head.weight is model.backbone.embeddings.weight) == config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        assert parameter.detach().numpy().tobytes() == params[name].tobytes()
    batch = random_batch(config, 2, 2, 70)
    assert_same_logits(our_logits(ops32, params, config, batch), their_logits(model, batch.ids))


@CONFIGS
def test_there_and_back_is_bit_identical(config, tmp_path, random_parameters):
    params = random_parameters(config, 3, np.float32)
    save_model(tmp_path / "ours", config, params)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    loaded_config, loaded = load_model(tmp_path / "theirs")
    assert list(loaded) == list(params)
    for name, array in params.items():
        assert loaded[name].tobytes() == array.tobytes()
    kept = load_config(tmp_path / "ours").model_dump()
    written = loaded_config.model_dump()
    assert {key: written[key] for key in kept} == kept
    save_model(tmp_path / "again", loaded_config, loaded)
    first, second = (load_tensors(tmp_path / name / "model.safetensors") for name in ("ours", "again"))
    assert {name: array.tobytes() for name, array in first.items()} == {
        name: array.tobytes() for name, array in second.items()
    }


@CONFIGS
def test_saved_there_opens_here(config, tmp_path, ops32, random_batch):
    torch.manual_seed(4)
    settings = config.model_dump() | {"initializer_range": 0.1}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**settings))
    model.save_pretrained(tmp_path / "theirs")
    loaded_config, params = load_model(tmp_path / "theirs")
    assert parameters.table(loaded_config).keys() == dict(model.named_parameters()).keys()
    batch = random_batch(config, 5, 2, 33)
    assert_same_logits(our_logits(ops32, params, loaded_config, batch), their_logits(model, batch.ids))


def test_a_folder_as_published_loads(tmp_path, ops32, random_parameters, random_batch):
    """The keys that the config.json of state-spaces/mamba-130m-hf has, at a tiny shape."""
    published = {
        "architectures": ["MambaForCausalLM"],
        "bos_token_id": 0,
        "conv_kernel": 4,
        "d_inner": 48,
        "d_model": 24,
        "eos_token_id": 0,
        "expand": 2,
        "fused_add_norm": True,
        "hidden_act": "silu",
        "hidden_size": 24,
        "initializer_range": 0.1,
        "intermediate_size": 48,
        "layer_norm_epsilon": 1e-05,
        "model_type": "mamba",
        "n_layer": 2,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "pad_vocab_size_multiple": 8,
        "rescale_prenorm_residual": False,
        "residual_in_fp32": True,
        "rms_norm": True,
        "ssm_cfg": {},
        "state_size": 16,
        "time_step_floor": 0.0001,
        "time_step_init_scheme": "random",
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "time_step_rank": 2,
        "time_step_scale": 1.0,
        "torch_dtype": "float32",
        "transformers_version": "4.39.0.dev0",
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "vocab_size": 304,
    }
    shape = MambaConfig(vocab_size=304, hidden_size=24, num_hidden_layers=2)
    params = random_parameters(shape, 6, np.float32)
    save_model(tmp_path / "model", shape, params)
    (tmp_path / "model" / "config.json").write_text(json.dumps(published, indent=2))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config, loaded = load_model(tmp_path / "model")
    batch = random_batch(config, 7, 1, 50)
    assert_same_logits(our_logits(ops32, loaded, config, batch), their_logits(model, batch.ids))
    save_model(tmp_path / "again", config, loaded)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {key: written.get(key) for key in published if key != "torch_dtype"} == {
        key: value for key, value in published.items() if key != "torch_dtype"
    }
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    np.testing.assert_array_equal(their_logits(again, batch.ids), their_logits(model, batch.ids))


def test_other_dtypes_are_named(tmp_path):
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**TIED.model_dump())).to(torch.float64)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: backbone.*: found dtype F64, expected F32"):
        load_model(tmp_path / "model")


def test_a_pickled_state_is_never_read(tmp_path):
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**TIED.model_dump()))
    model.config.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: found a pickle"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("model_type", list(LOOKALIKES))
def test_lookalikes_are_refused_by_the_name_they_have_there(tmp_path, model_type):
    transformers.AutoConfig.for_model(model_type).save_pretrained(tmp_path / "model")
    message = rf"config\.json: model_type: found '{model_type}', expected 'mamba': .* would be silently lost"
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "model")


@pytest.fixture(params=["trained", "with a template", "not special"])
def tokenizer(request, tmp_path):
    """A tokenizer.json trained here, one that adds tokens of its own, one whose end of text is a plain token."""
    config = TokenizerConfig(vocab_size=300)
    build_tokenizer(config, ["the state of the scan is the state of the model"] * 3, tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    if request.param != "trained":
        (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
        values = json.loads(path.read_text())
        if request.param == "with a template":
            end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
            text = {"Sequence": {"id": "A", "type_id": 0}}
            special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
            values["post_processor"] = {
                "type": "TemplateProcessing",
                "single": [end, text],
                "pair": [end, text, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": special,
            }
        else:
            values["added_tokens"] = []
        path.write_text(json.dumps(values))
    return path


def test_the_tokenizer_opens_with_the_same_ids(tokenizer, tmp_path):
    rows = max(load_tokenizer(tokenizer).get_vocab().values()) + 1
    config = TIED.model_copy(update={"vocab_size": rows})
    save_model(tmp_path / "model", config, parameters.init(config, seed=0), tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = load_tokenizer(tmp_path / "model")
    assert len(theirs) == rows
    for token in ("bos_token", "eos_token", "pad_token"):
        assert getattr(theirs, token) == "<|endoftext|>"
        assert getattr(theirs, token + "_id") == ours.token_to_id("<|endoftext|>") == 0
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == ours.decode(ids, skip_special_tokens=False) == text
    spelled = "a <|endoftext|> b"  # plain text here, the special token there unless it is told to split it
    ids = ours.encode(spelled, add_special_tokens=False).ids
    assert theirs(spelled, add_special_tokens=False, split_special_tokens=True)["input_ids"] == ids


def test_weights_that_began_rescaled_are_not_divided_again(tmp_path):
    config = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, rescale_prenorm_residual=True)
    params = parameters.init(config, 0)
    save_model(tmp_path / "model", config, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, value in params.items():
        np.testing.assert_array_equal(theirs[name].numpy(), value, err_msg=name)
