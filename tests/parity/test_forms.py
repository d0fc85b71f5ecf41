"""Every form of a checkpoint gives transformers' logits on the same folder, and what is saved here opens there."""

import json
import math
import os
import shlex
import subprocess
import sys

import numpy as np
import pytest
from ml_dtypes import bfloat16

from mamba_ops import parameters
from mamba_ops.checkpoint import CheckpointError, load_model, save_model
from mamba_ops.config import GenerateConfig, MambaConfig, TokenizerConfig
from mamba_ops.generate import generate
from mamba_ops.model import logits
from mamba_ops.parameters import resize_embeddings
from mamba_ops.tokenizer import build_tokenizer, embedding_rows, load_tokenizer

torch = pytest.importorskip("torch", reason="torch is missing: pip install -e .[parity]")
transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install -e .[parity]")
load_file = pytest.importorskip("safetensors.torch").load_file
save_file = pytest.importorskip("safetensors.torch").save_file

pytestmark = pytest.mark.parity

TIED = MambaConfig(vocab_size=304, hidden_size=16, num_hidden_layers=2)
UNTIED = MambaConfig(
    vocab_size=304,
    hidden_size=12,
    num_hidden_layers=1,
    state_size=5,
    time_step_rank=3,
    use_bias=True,
    tie_word_embeddings=False,
)
CONFIGS = pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
SIZES = pytest.mark.parametrize("size", [None, "9KB"], ids=["one file", "shards"])
PUBLISHED = {
    "d_model": 24,
    "n_layer": 2,
    "vocab_size": 301,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}


def their_model(config, params):
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**config.model_dump()))
    tensors = {name: torch.from_numpy(array.copy()) for name, array in params.items()}
    tensors.setdefault("lm_head.weight", tensors["backbone.embeddings.weight"])
    model.load_state_dict(tensors)
    return model


def assert_same_logits(ops, folder, batch, model=None):
    """Compare the folder as read here with the folder as transformers reads it, in float32."""
    config, params = load_model(folder)
    if model is None:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(info.values()), info
    assert model.dtype == torch.float32
    with torch.no_grad():
        theirs = model.eval()(input_ids=torch.from_numpy(batch.ids), use_cache=False).logits.numpy()
    ours = logits(ops, params, config, ops.rows(batch))
    assert ours.shape == (batch.ids.size, config.vocab_size)
    assert np.abs(ours - theirs.reshape(ours.shape)).max() <= 1e-5 * np.abs(theirs).max()
    return params


@CONFIGS
@DTYPES
@SIZES
def test_saved_there_opens_here(config, dtype, size, tmp_path, ops32, random_parameters, random_batch):
    model = their_model(config, random_parameters(config, 1, np.float32)).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "model", **({"max_shard_size": size} if size else {}))
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == bool(size)
    params = assert_same_logits(ops32, tmp_path / "model", random_batch(config, 2, 2, 70))
    for name, parameter in model.named_parameters():
        assert params[name].tobytes() == parameter.detach().float().numpy().tobytes()


@CONFIGS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@SIZES
def test_saved_here_opens_there(config, dtype, size, tmp_path, ops32, random_parameters, random_batch):
    params = random_parameters(config, 3, np.float32)
    save_model(tmp_path / "model", config, params, max_shard_size=size, dtype=dtype)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == bool(size)
    assert_same_logits(ops32, tmp_path / "model", random_batch(config, 4, 2, 70))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == getattr(torch, dtype)
    for name, parameter in model.named_parameters():
        expected = params[name] if dtype == "float32" else params[name].astype(bfloat16).astype(np.float32)
        assert parameter.detach().float().numpy().tobytes() == expected.tobytes()
    model.save_pretrained(tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@DTYPES
def test_the_original_repositories_layout(tied, dtype, tmp_path, ops32, random_parameters, random_batch):
    """Their reading is transformers' own conversion: its configuration, and load_state_dict, which renames the key."""
    shape = MambaConfig(vocab_size=304, hidden_size=24, num_hidden_layers=2, tie_word_embeddings=tied)
    there = write_original(tmp_path / "model", shape, random_parameters(shape, 5, np.float32), dtype)
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=304,
            hidden_size=there["d_model"],
            num_hidden_layers=there["n_layer"],
            intermediate_size=2 * there["d_model"],
            time_step_rank=math.ceil(there["d_model"] / 16),
            tie_word_embeddings=tied,
        )
    )
    model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    batch = random_batch(shape, 6, 2, 50)
    assert_same_logits(ops32, tmp_path / "model", batch, model)
    save_model(tmp_path / "converted", *load_model(tmp_path / "model"))
    assert_same_logits(ops32, tmp_path / "converted", batch)


def write_original(folder, shape, params, dtype="float32"):
    tensors = {name: torch.from_numpy(array).to(getattr(torch, dtype)) for name, array in params.items()}
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    if shape.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["backbone.embedding.weight"].clone()
    config = PUBLISHED | ({} if shape.tie_word_embeddings else {"tie_embeddings": False})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config


@pytest.fixture
def tokenizer(tmp_path):
    build_tokenizer(TokenizerConfig(vocab_size=270), ["the state of the scan is the state"] * 3, tmp_path / "words")
    return tmp_path / "words" / "tokenizer.json"


@CONFIGS
def test_a_padded_vocabulary(config, tokenizer, tmp_path, ops32, random_parameters, random_batch):
    """Rows beyond the tokenizer count in the softmax, as there, and are never sampled, though the likeliest."""
    used = embedding_rows(load_tokenizer(tokenizer))
    assert used < config.vocab_size
    params = random_parameters(config, 7, np.float32)
    params[parameters.head_name(config)][used:] *= 20
    save_model(tmp_path / "model", config, params, tokenizer)
    assert_same_logits(ops32, tmp_path / "model", random_batch(config, 8, 2, 70))
    settings = GenerateConfig(max_new_tokens=60, temperature=3.0, seed=0)
    assert max(generate(ops32, params, config, [1, 2], settings)) >= used
    assert max(generate(ops32, params, config, [1, 2], settings, vocab_limit=used)) < used


@CONFIGS
def test_resized_embeddings_open_there(config, tmp_path, ops32, random_parameters, random_batch):
    params = random_parameters(config, 9, np.float32)
    larger, resized = resize_embeddings(config, params, 311, seed=0)
    save_model(tmp_path / "model", larger, resized)
    batch = random_batch(larger, 10, 2, 40)
    assert_same_logits(ops32, tmp_path / "model", batch)
    batch = random_batch(config, 11, 2, 40)
    before = logits(ops32, params, config, ops32.rows(batch))
    after = logits(ops32, resized, larger, ops32.rows(batch))
    np.testing.assert_allclose(after[:, :304], before, rtol=0, atol=1e-5 * np.abs(before).max())


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("original", [False, True])
def test_the_command_for_a_pickle_converts_it(files, original, tmp_path, random_parameters):
    shape = MambaConfig(vocab_size=304, hidden_size=24, num_hidden_layers=2)
    params = random_parameters(shape, 12, np.float32)
    if original:
        write_original(tmp_path / "model", shape, params)
        (tmp_path / "model" / "model.safetensors").unlink()
    else:
        their_model(shape, params).config.save_pretrained(tmp_path / "model")
    state = {name: torch.from_numpy(array) for name, array in params.items()}
    if original:
        state["backbone.embedding.weight"] = state.pop("backbone.embeddings.weight")
        state["lm_head.weight"] = state["backbone.embedding.weight"]  # one storage
    state["backbone.layers.0.mixer.A_log"] = state["backbone.layers.0.mixer.A_log"].T.contiguous().T
    names = list(state)
    for i in range(files):
        name = "pytorch_model.bin" if files == 1 else f"pytorch_model-0000{i + 1}-of-00002.bin"
        torch.save({key: state[key] for key in names[i::files]}, tmp_path / "model" / name)
    torch.save({"learning_rate": 1}, tmp_path / "model" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"pytorch_model\S*\.bin: found a pickle") as caught:
        load_model(tmp_path / "model")
    _, command = shlex.split(str(caught.value).partition(": python ")[2])
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path / "model", check=True, env=os.environ)
    loaded = load_model(tmp_path / "model")[1]
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in params.items()
    }
