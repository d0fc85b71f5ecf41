"""The original repositories' layout: their config.json and keys, and what is not Mamba-1 in them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mamba_ops import parameters
from mamba_ops.checkpoint import CheckpointError, load_config, load_model, load_tensors, save_model
from mamba_ops.config import MambaConfig

PUBLISHED = {
    "d_model": 24,
    "n_layer": 2,
    "vocab_size": 53,
    "ssm_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 8,
}
"""The keys of state-spaces/mamba-130m's config.json."""

SHAPE = MambaConfig(vocab_size=56, hidden_size=24, num_hidden_layers=2)
EMBEDDING, THERE, HEAD = "backbone.embeddings.weight", "backbone.embedding.weight", "lm_head.weight"


def write(folder, values=PUBLISHED, shape=SHAPE, head=True, dtype=np.float32, seed=0):
    """Write a folder in the original layout and return its parameters under our keys."""
    params = parameters.init(shape, seed)
    arrays = {name: array.astype(dtype) for name, array in params.items()}
    arrays[THERE] = arrays.pop(EMBEDDING)
    if head and HEAD not in arrays:
        arrays[HEAD] = arrays[THERE].copy()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    save_file(arrays, folder / "model.safetensors")
    return params


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("head", [True, False])
def test_a_folder_as_published(tmp_path, head):
    params = write(tmp_path / "model", head=head)
    config, loaded = load_model(tmp_path / "model")
    assert_same(loaded, params)
    assert (config.model_type, config.vocab_size, config.hidden_size, config.num_hidden_layers) == ("mamba", 56, 24, 2)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)


def test_it_is_written_back_as_hugging_face_s(tmp_path):
    params = write(tmp_path / "model")
    save_model(tmp_path / "ours", *load_model(tmp_path / "model"))
    values = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (values["model_type"], values["hidden_size"], values["vocab_size"]) == ("mamba", 24, 56)
    assert not {"d_model", "n_layer", "ssm_cfg", "pad_vocab_size_multiple"} & values.keys()
    assert load_tensors(tmp_path / "ours" / "model.safetensors").keys() == params.keys()
    assert_same(load_model(tmp_path / "ours")[1], params)


def test_untied(tmp_path):
    shape = SHAPE.model_copy(update={"tie_word_embeddings": False})
    params = write(tmp_path / "model", PUBLISHED | {"tie_embeddings": False}, shape)
    config, loaded = load_model(tmp_path / "model")
    assert not config.tie_word_embeddings
    assert_same(loaded, params)


def test_a_tied_head_that_differs(tmp_path):
    shape = SHAPE.model_copy(update={"tie_word_embeddings": False})
    write(tmp_path / "model", PUBLISHED, shape)
    with pytest.raises(CheckpointError, match=rf"{HEAD}: found a head that differs .*layout: tie_embeddings"):
        load_model(tmp_path / "model")


def test_every_setting_of_a_layer_is_mapped(tmp_path):
    layer = {
        "layer": "Mamba1",
        "d_state": 5,
        "d_conv": 3,
        "expand": 3,
        "dt_rank": 7,
        "dt_min": 0.01,
        "dt_max": 0.2,
        "dt_init": "constant",
        "dt_scale": 2.0,
        "dt_init_floor": 0.001,
        "conv_bias": False,
        "bias": True,
        "use_fast_path": False,
    }
    values = PUBLISHED | {"ssm_cfg": layer, "attn_layer_idx": [], "attn_cfg": {}, "d_intermediate": 0}
    shape = MambaConfig(
        vocab_size=56,
        hidden_size=24,
        num_hidden_layers=2,
        state_size=5,
        conv_kernel=3,
        expand=3,
        time_step_rank=7,
        time_step_min=0.01,
        time_step_max=0.2,
        time_step_init_scheme="constant",
        time_step_scale=2.0,
        time_step_floor=0.001,
        use_conv_bias=False,
        use_bias=True,
        residual_in_fp32=True,
    )
    params = write(tmp_path / "model", values, shape)
    config, loaded = load_model(tmp_path / "model")
    assert config == shape
    assert_same(loaded, params)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 56),
        ({"vocab_size": 56}, 56),
        ({"pad_vocab_size_multiple": 1}, 53),
        ({"pad_vocab_size_multiple": 16}, 64),
        ({"pad_vocab_size_multiple": ...}, 56),
        ({"vocab_size": 1}, 8),
    ],
)
def test_the_vocabulary_is_padded_to_the_multiple(tmp_path, changes, rows):
    values = {key: value for key, value in (PUBLISHED | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_config(tmp_path).vocab_size == rows


def test_an_embedding_that_is_not_padded_is_refused(tmp_path):
    write(tmp_path / "model", shape=SHAPE.model_copy(update={"vocab_size": 53}))
    with pytest.raises(CheckpointError, match=rf"{THERE}: found shape \(53, 24\), expected \(56, 24\)"):
        load_model(tmp_path / "model")


def test_the_original_name_in_a_hugging_face_folder(tmp_path):
    params = write(tmp_path / "model", SHAPE.model_dump())
    assert_same(load_model(tmp_path / "model")[1], params)


def test_both_names_at_once_are_refused(tmp_path):
    write(tmp_path / "model")
    arrays = load_tensors(tmp_path / "model" / "model.safetensors")
    save_file(arrays | {EMBEDDING: arrays[THERE]}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"found {THERE} unknown, expected the 22 tensors"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm_cfg": {"layer": "Mamba2"}}, r"ssm_cfg\.layer: found 'Mamba2', expected 'Mamba1': only .* silently lost"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, r"ssm_cfg\.layer: found 'Mamba3', expected 'Mamba1'"),
        ({"ssm_cfg": {"headdim": 64}}, r"ssm_cfg\.headdim: found 64, expected a key of Mamba-1"),
        ({"ssm_cfg": ["Mamba1"]}, r"ssm_cfg: found \['Mamba1'\], expected an object"),
        ({"ssm_cfg": {"d_state": "x"}}, r"ssm_cfg\.d_state: found 'x', expected a valid integer"),
        ({"ssm_cfg": {"dt_init": "zeros"}}, r"ssm_cfg\.dt_init: found 'zeros', expected 'random' or 'constant'"),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx: found \[1\], expected \[\]: .*attention layers would be silently"),
        (
            {"d_intermediate": 48},
            r"d_intermediate: found 48, expected 0: .*an MLP in each layer would be silently lost",
        ),
        ({"rms_norm": False}, r"rms_norm: found False, expected True: .*LayerNorm's mean and bias"),
        ({"bidirectional": True}, r"bidirectional: found True, expected a key of Mamba-1 in the original layout"),
        ({"pad_vocab_size_multiple": 0}, r"pad_vocab_size_multiple: found 0, expected an integer from 1 on"),
        ({"pad_vocab_size_multiple": True}, r"pad_vocab_size_multiple: found True"),
        ({"vocab_size": 0}, r"vocab_size: found 0, expected greater than or equal to 1"),
        ({"vocab_size": "many"}, r"vocab_size: found 'many', expected a valid integer"),
        ({"d_model": 24.5}, r"d_model: found 24\.5, expected a valid integer"),
        ({"n_layer": ...}, r"n_layer: found nothing, expected a value"),
        ({"tie_embeddings": "yes"}, r"tie_embeddings: found 'yes', expected a valid boolean"),
    ],
)
def test_what_is_not_mamba_1_is_refused_by_its_own_name(tmp_path, changes, message):
    values = {key: value for key, value in (PUBLISHED | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"config\.json: " + message) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_keys_that_tools_add_do_not_matter(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(PUBLISHED | {"torch_dtype": "bfloat16", "architectures": ["x"], "ssm_cfg": None})
    )
    assert load_config(tmp_path).hidden_size == 24
