"""Checkpoints: the gate to disk, Hugging Face folders, and one clear error for each broken form."""

import json
import os
import resource
import shlex
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from ml_dtypes import bfloat16
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mamba_ops import checkpoint, fingerprint, parameters, tensors
from mamba_ops.checkpoint import (
    CheckpointError,
    load_config,
    load_metadata,
    load_model,
    load_tensors,
    save_model,
    save_tensors,
)
from mamba_ops.config import MambaConfig

TIED = MambaConfig(vocab_size=300, hidden_size=8, num_hidden_layers=2, state_size=4)
UNTIED = MambaConfig(
    vocab_size=300,
    hidden_size=6,
    num_hidden_layers=1,
    state_size=3,
    time_step_rank=5,
    use_bias=True,
    use_conv_bias=False,
    tie_word_embeddings=False,
)


@pytest.fixture
def folder(tmp_path):
    """A saved tied model."""
    save_model(tmp_path / "model", TIED, parameters.init(TIED, seed=0))
    return tmp_path / "model"


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the state of the scan is the state of the model"] * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def edit_config(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_weights(folder, change):
    arrays = load_tensors(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def layouts():
    base = np.arange(6, dtype=np.float32).reshape(2, 3)
    rng = np.random.default_rng(0)
    A, B = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    return {
        "C order": base,
        "Fortran order": np.asfortranarray(base),
        "transposed": base.T,
        "strided": np.arange(10, dtype=np.float64)[::2],
        "strided columns": base[:, ::2],
        "reversed": base[::-1],
        "reversed in both": base[::-1, ::-1],
        "broadcast": np.broadcast_to(np.float32(3), (4, 5)),
        "broadcast row": np.broadcast_to(base[0], (4, 3)),
        "0-d": np.array(7, dtype=np.float32),
        "scalar": np.float64(2.5),
        "empty": np.zeros((0, 3), dtype=np.float32),
        "swapped axes": np.arange(24, dtype=np.int64).reshape(2, 3, 4).swapaxes(0, 2),
        "big-endian": np.arange(3, dtype=">f4"),
        "merged adapter": np.ones((6, 8), np.float32).T + 2.0 * (B @ A),
        "merged adapter, transposed": (np.ones((6, 8), np.float32).T + 2.0 * (B @ A)).T,
        "product in Fortran order": (A.T @ B.T).T,
        "unsigned": np.array([0, 2**32 - 1], dtype=np.uint32),
        "bfloat16": base.astype(bfloat16),
        "bfloat16, transposed": base.astype(bfloat16).T,
        "bfloat16, 0-d": np.array(7).astype(bfloat16),
        "bfloat16, empty": np.zeros((0, 3)).astype(bfloat16),
    }


def test_case_37_every_memory_layout_is_saved_by_value(tmp_path):
    arrays = layouts()
    save_tensors(tmp_path / "x.safetensors", arrays)
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].shape == array.shape, name
        assert loaded[name].dtype == array.dtype.newbyteorder("="), name
        np.testing.assert_array_equal(loaded[name], array, err_msg=name)
        assert loaded[name].flags.c_contiguous
        assert loaded[name].flags.writeable


def test_case_37_smallest_input(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"x": np.arange(6, dtype="f4").reshape(2, 3).T})
    np.testing.assert_array_equal(load_tensors(tmp_path / "x.safetensors")["x"], [[0, 3], [1, 4], [2, 5]])


def test_case_37_a_model_of_transposed_views_round_trips(tmp_path):
    params = parameters.init(UNTIED, seed=1)
    views = {name: np.asfortranarray(array) for name, array in params.items()}
    save_model(tmp_path / "model", UNTIED, views)
    assert_same(load_model(tmp_path / "model")[1], params)


def test_case_37_read_back_finds_other_values(tmp_path, monkeypatch):
    def scrambles(arrays, path, metadata):
        save_file({name: array[::-1].copy() for name, array in arrays.items()}, path, metadata)

    monkeypatch.setattr(tensors, "save_file", scrambles)
    path = tmp_path / "x.safetensors"
    with pytest.raises(CheckpointError, match=r"x\.safetensors: a: found other values on disk"):
        save_tensors(path, {"a": np.arange(3.0)})
    assert list(tmp_path.iterdir()) == []
    save_tensors(path, {"a": np.arange(3.0)}, read_back=False)
    assert path.exists()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_view_round_trips(tmp_path, data):
    written = [dtype for dtype in tensors.WRITTEN.values() if dtype != bfloat16]
    dtype = data.draw(st.sampled_from(written))
    shape = data.draw(npst.array_shapes(min_dims=0, min_side=0, max_side=5))
    elements = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else None
    base = data.draw(npst.arrays(dtype, shape, elements=npst.from_dtype(dtype, **(elements or {}))))
    view = base.transpose(data.draw(st.permutations(range(base.ndim))))
    if view.ndim:
        view = view[data.draw(npst.basic_indices(view.shape, allow_newaxis=True))]
    save_tensors(tmp_path / "x.safetensors", {"x": view})
    loaded = load_tensors(tmp_path / "x.safetensors")["x"]
    assert loaded.dtype == dtype
    assert loaded.shape == np.shape(view)
    assert loaded.tobytes() == np.asarray(view, order="C").tobytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array(["a"]), "w: found dtype <U1, expected one of bfloat16, float32, float64"),
        (np.array([None]), "w: found dtype object"),
        (np.zeros(2, np.float16), "w: found dtype float16"),
        (np.zeros(2, np.complex64), "w: found dtype complex64"),
        (np.zeros(2, np.longdouble), f"w: found dtype {np.dtype(np.longdouble)}"),
        (np.zeros(2, bool), "w: found dtype bool"),
        ([1.0, 2.0], "w: found list, expected a NumPy array"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "w: found MaskedArray"),
        (np.array([[0.0, 1.0], [2.0, np.nan]]), r"w: found nan at \(1, 1\), expected finite"),
        (np.array([0, 1, np.inf, np.nan], np.float32), r"w: found inf at \(2,\)"),
        (np.array(-np.inf), r"w: found -inf at \(\)"),
        (np.array([1, np.nan]).astype(bfloat16), r"w: found nan at \(1,\)"),
        (np.array([0x7F81], np.uint16).view(bfloat16), r"w: found nan at \(0,\)"),
    ],
)
def test_what_the_gate_refuses(tmp_path, value, message):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"w": np.ones(3)})
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"x\.safetensors: " + message):
        save_tensors(path, {"good": np.ones(2), "w": value})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_metadata_round_trips(tmp_path):
    save_tensors(tmp_path / "x.safetensors", {"w": np.ones(1)}, metadata={"step": "3", "text": "ä"})
    assert load_metadata(tmp_path / "x.safetensors") == {"step": "3", "text": "ä"}
    save_tensors(tmp_path / "x.safetensors", {"w": np.ones(1)})
    assert load_metadata(tmp_path / "x.safetensors") == {}


def test_the_same_tensors_and_metadata_are_the_same_bytes(tmp_path):
    metadata = {"format": "pt", "base_fingerprint": "é1", "third": '"'}
    for number in range(12):
        save_tensors(tmp_path / f"{number}.safetensors", {"x": np.arange(3.0)}, metadata)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    assert load_metadata(tmp_path / "0.safetensors") == metadata


def test_a_write_that_fails_leaves_the_former_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"w": np.ones(3)})
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"x\.safetensors: cannot be written"):
            save_tensors(path, {"w": np.ones(1 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(fingerprint, "sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "model", TIED, parameters.init(TIED, seed=0))
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from mamba_ops import parameters
from mamba_ops.checkpoint import save_model, save_tensors
from mamba_ops.config import MambaConfig

config = MambaConfig(vocab_size=4000, hidden_size=32, num_hidden_layers=1)
params = parameters.init(config, seed=0)
print("ready", flush=True)
for index in range(10**6):
    save_model(f"{sys.argv[1]}/model-{index}", config, params)
    save_tensors(f"{sys.argv[1]}/latest.safetensors", params)
"""


def test_a_kill_at_any_moment_leaves_whole_checkpoints_only(tmp_path):
    rng = np.random.default_rng(0)
    finished = 0
    for attempt in range(10):
        root = tmp_path / str(attempt)
        root.mkdir()
        command = [sys.executable, "-c", KILLED, str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.01, 0.3))
            process.kill()
        assert process.returncode == -signal.SIGKILL
        visible = [path for path in root.iterdir() if not path.name.startswith(".")]
        for path in visible:
            assert len(load_tensors(path) if path.is_file() else load_model(path)[1]) == 12
        finished += len(visible)
    assert finished > 0


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_folder_round_trips(tmp_path, config, dtype):
    params = parameters.init(config, seed=3)
    given = {name: params[name].astype(dtype) for name in reversed(params)}
    save_model(tmp_path / "deep" / "model", config, given)
    loaded_config, loaded = load_model(tmp_path / "deep" / "model", dtype)
    assert_same(loaded, {name: params[name].astype(dtype) for name in params})
    assert parameters.table(loaded_config).keys() == parameters.table(config).keys()
    assert loaded_config.dt_rank == config.dt_rank
    save_model(tmp_path / "again", loaded_config, loaded)
    for file in (tmp_path / "again").iterdir():
        assert file.read_bytes() == (tmp_path / "deep" / "model" / file.name).read_bytes()


def test_the_files_of_a_folder(tmp_path, tokenizer_file):
    config = TIED.model_copy(update={"initializer_range": 0.05})
    save_model(tmp_path / "model", config, parameters.init(config, seed=0), tokenizer_file)
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(os.listdir(tmp_path / "model")) == [*names, "tokenizer.json", "tokenizer_config.json"]
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["architectures"] == ["MambaForCausalLM"]
    assert values["model_type"] == "mamba"
    assert values["dtype"] == "float32"
    assert (values["hidden_size"], values["intermediate_size"], values["time_step_rank"]) == (8, 16, 1)
    assert values["initializer_range"] == 0.05
    assert load_metadata(tmp_path / "model" / "model.safetensors") == {"format": "pt"}
    assert "lm_head.weight" not in load_tensors(tmp_path / "model" / "model.safetensors")
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (0, 0, 0)
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert {settings[f"{name}_token"] for name in ("bos", "eos", "pad")} == {"<|endoftext|>"}
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o644}


def test_what_lies_beside_the_tokenizer_is_kept(tmp_path, tokenizer_file):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "chat_template": "x"}')
    save_model(tmp_path / "model", TIED, parameters.init(TIED, seed=0), tmp_path / "tokenizer.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_unknown_config_keys_are_kept_and_the_dtype_is_what_is_written(folder, tmp_path):
    edit_config(folder, ssm_cfg={"layer": 1}, rms_norm=True, torch_dtype="bfloat16", architectures=["X"])
    config, params = load_model(folder)
    save_model(tmp_path / "again", config, params)
    values = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (values["ssm_cfg"], values["rms_norm"]) == ({"layer": 1}, True)
    assert (values["dtype"], values["architectures"]) == ("float32", ["MambaForCausalLM"])
    assert "torch_dtype" not in values


def test_nothing_is_overwritten(folder):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(FileExistsError, match=r"model exists and is not overwritten"):
        save_model(folder, TIED, parameters.init(TIED, seed=9))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert os.listdir(folder.parent) == ["model"]


def test_save_model_refuses_what_does_not_fit(tmp_path):
    params = parameters.init(TIED, seed=0)
    cases = [
        (params | {"extra": np.ones(1)}, "extra unknown, expected the 22 tensors"),
        ({name: params[name] for name in list(params)[1:]}, r"backbone\.embeddings\.weight missing"),
        (
            params | {"backbone.norm_f.weight": np.ones(9)},
            r"norm_f\.weight: found shape \(9,\), expected \(8,\)",
        ),
        (params | {"backbone.norm_f.weight": np.full(8, 1e39)}, r"norm_f\.weight: found inf at \(0,\)"),
        (
            params | {"backbone.layers.1.mixer.D": np.full(16, np.nan)},
            r"layers\.1\.mixer\.D: found nan at \(0,\)",
        ),
    ]
    for wrong, message in cases:
        with pytest.raises(CheckpointError, match=rf"model/model\.safetensors.*{message}"):
            save_model(tmp_path / "model", TIED, wrong)
    assert list(tmp_path.iterdir()) == []


def test_save_model_refuses_a_tokenizer_that_does_not_fit(tmp_path, tokenizer_file):
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": "1.0", "model": ')
    small = TIED.model_copy(update={"vocab_size": 20})
    far = TIED.model_copy(update={"eos_token_id": 299})
    negative = TIED.model_copy(update={"pad_token_id": -1})
    size = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
    cases = [
        (TIED, broken, ValueError, r"broken\.json .* tokenizer\.json"),
        (TIED, tmp_path / "none.json", FileNotFoundError, r"none\.json does not exist"),
        (small, tokenizer_file, CheckpointError, rf"vocabulary: found {size} embedding rows needed, .* = 20"),
        (far, tokenizer_file, CheckpointError, r"eos_token_id: found no token with id 299"),
        (negative, tokenizer_file, CheckpointError, r"pad_token_id: found no token with id -1"),
    ]
    for config, source, error, message in cases:
        with pytest.raises(error, match=message):
            save_model(tmp_path / "model", config, parameters.init(config, seed=0), source)
        assert [path.name for path in tmp_path.iterdir()] == ["broken.json"]
    without = TIED.model_copy(update={"bos_token_id": None})
    save_model(tmp_path / "model", without, parameters.init(without, seed=0), tokenizer_file)
    assert "bos_token" not in json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("model_type", [*checkpoint.LOOKALIKES, "mamba3", "gpt_neox", "Mamba", None, 7, ["mamba"]])
def test_other_model_types_are_refused_by_name(folder, model_type):
    edit_config(folder, model_type=model_type)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert f"config.json: model_type: found {model_type!r}, expected 'mamba'" in message
    assert "\n" not in message
    lookalike = isinstance(model_type, str) and model_type in checkpoint.LOOKALIKES
    assert ("would be silently lost" in message) == lookalike


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ...}, r"config\.json: model_type: found none, expected 'mamba'"),
        ({"vocab_size": ...}, r"config\.json: vocab_size: found nothing, expected a value"),
        ({"hidden_act": "gelu"}, r"hidden_act: found 'gelu', expected 'silu'"),
        ({"hidden_size": 0}, r"hidden_size: found 0, expected greater than or equal to 1"),
        ({"num_hidden_layers": "many"}, r"num_hidden_layers: found 'many', expected a valid integer"),
        ({"expand": 1.5}, r"expand: found 1\.5, expected a valid integer"),
        ({"time_step_rank": "big"}, r"time_step_rank: found 'big', expected a valid integer.* or 'auto'"),
        ({"time_step_init_scheme": "zeros"}, r"found 'zeros', expected 'random' or 'constant'"),
        ({"intermediate_size": 17}, r"config\.json: found .*intermediate_size: expected .* = 16, got 17"),
        ({"time_step_min": 1.0}, r"config\.json: found .*time_step_min 1\.0 is above time_step_max"),
        ({"vocab_size": ["x"] * 999}, r"vocab_size: found \['x', .*, expected a valid integer"),
    ],
)
def test_a_wrong_config_key_is_one_line(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_config(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no readable JSON"),
        (b'{"model_type": "mamba",', "no readable JSON"),
        (b"\xff\xfe\x00", "no readable JSON"),
        (b'{"layer_norm_epsilon": NaN}', "NaN is not JSON"),
        (b"[1, 2]", "JSON of type list, expected a JSON object"),
        (b"[" * 200_000, "no readable JSON"),
    ],
)
def test_a_config_that_is_not_json(folder, text, message):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: found .*{message}"):
        load_model(folder)


def test_folders_that_are_none(tmp_path, folder):
    with pytest.raises(CheckpointError, match=r"absent: found nothing there, expected a local Hugging Face folder"):
        load_model(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: found a file, expected a local"):
        load_model(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"found nothing there"):
        load_model("someone/mamba-130m-hf")
    (tmp_path / "hollow").mkdir()
    with pytest.raises(CheckpointError, match=r"hollow/config\.json: found no such file"):
        load_model(tmp_path / "hollow")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model: model\.safetensors: found no such file"):
        load_model(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "last.ckpt", "weights.pth", "state.pkl"])
def test_pickles_are_refused_by_name(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(
        CheckpointError, match=rf"{name}: found a pickle, .*, expected model\.safetensors; .* python -c"
    ):
        load_model(folder)


def test_a_pickle_s_name_cannot_run_in_the_shell(folder):
    (folder / "model.safetensors").rename(folder / "x';$(touch hacked)\";.bin")
    with pytest.raises(CheckpointError, match="found a pickle") as caught:
        load_model(folder)
    command = shlex.split(str(caught.value).partition("python -c")[2])
    assert len(command) == 1
    compile(command[0], "command", "exec")


def test_a_pickle_beside_the_weights_is_ignored(folder):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert len(load_model(folder)[1]) == 22


def test_every_truncation_and_a_corrupt_header_is_one_error(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    unreadable = [whole[:size] for size in (0, 1, 7, 8, 9, header - 1)]
    unreadable += [whole + b"\0", b"\x80\x04" + whole, whole[:8] + b"x" + whole[9:], b"\xff" * len(whole)]
    unreadable += [b"version https://git-lfs.github.com/spec/v1\n", struct.pack("<Q", 4) + b"[{}]"]
    cases = [(data, rf"found {len(data):,} bytes that cannot be read .*truncated or corrupt") for data in unreadable]
    for size in (header, header + 1, len(whole) - 1):
        expected = rf"bytes that end before \S+ does, expected a whole safetensors file of {len(whole):,}"
        cases.append((whole[:size], rf"found {size:,} {expected}"))
    cases.append((whole.replace(b'"F32"', b'"X32"', 1), r"\S+: found dtype X32, expected one of BF16, F16, F32"))
    for data, message in cases:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: {message}") as caught:
            load_model(folder)
        assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_byte_is_refused_or_leaves_finite_numbers(folder, data):
    """Any byte may change: the result is a CheckpointError or a whole finite model, never something else."""
    path = folder / "model.safetensors"
    if not (original := folder / "whole").exists():
        original.write_bytes(path.read_bytes())
    damaged = bytearray(original.read_bytes())
    index = data.draw(st.integers(0, 2500))
    damaged[index] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    try:
        _, params = load_model(folder)
    except CheckpointError as error:
        message = str(error)
        params = {}
    if params:
        assert all(np.isfinite(array).all() for array in params.values())
        assert list(params) == list(parameters.table(TIED))
    else:
        assert str(folder) in message


D0 = "backbone.layers.0.mixer.D"


def remove(name):
    return lambda arrays: arrays.pop(name)


def put(name, value):
    return lambda arrays: arrays.__setitem__(name, value)


def rename(old, new):
    return lambda arrays: arrays.__setitem__(new, arrays.pop(old))


def rename_all(arrays):
    for name in list(arrays):
        arrays["model." + name] = arrays.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(D0), r": found backbone\.layers\.0\.mixer\.D missing, expected the 22 tensors"),
        (
            put("backbone.layers.0.mixer.dt_layernorm.weight", np.ones(1, np.float32)),
            r"dt_layernorm\.weight unknown",
        ),
        (rename(D0, "backbone.layers.0.mixer.E"), r"mixer\.D missing, backbone\.layers\.0\.mixer\.E unknown"),
        (rename_all, r"and 17 more missing, .* and 17 more unknown"),
        (
            rename("backbone.embeddings.weight", "embeddings.weight"),
            r"embeddings\.weight missing, embeddings\.weight unk",
        ),
        (put(D0, np.ones(15, np.float32)), r"mixer\.D: found shape \(15,\), expected \(16,\)"),
        (put(D0, np.ones((16, 1), np.float32)), r"mixer\.D: found shape \(16, 1\), expected \(16,\)"),
        (put(D0, np.ones(16, np.float64)), r"mixer\.D: found dtype F64, expected F32, F16, BF16 \(float32, float16"),
        (put(D0, np.ones(16, np.int32)), r"mixer\.D: found dtype I32, expected F32, F16, BF16"),
        (
            put(D0, np.array([1] * 15 + [np.nan], np.float32)),
            r"mixer\.D: found nan at \(15,\), expected finite",
        ),
        (put(D0, np.full(16, np.inf, np.float16)), r"mixer\.D: found inf at \(0,\), expected finite"),
        (put(D0, np.full(16, -np.nan).astype(bfloat16)), r"mixer\.D: found nan at \(0,\), expected finite"),
        (put(D0, np.full(16, 0x7F81, np.uint16).view(bfloat16)), r"mixer\.D: found nan at \(0,\), expected finite"),
        (put(D0, np.full(16, 0x7C01, np.uint16).view(np.float16)), r"mixer\.D: found nan at \(0,\), expected finite"),
        (
            put("lm_head.weight", np.full((300, 8), 0x7F81, np.uint16).view(bfloat16)),
            r"lm_head\.weight: found a head that differs",
        ),
    ],
)
def test_wrong_tensors_are_named(folder, change, message):
    edit_weights(folder, change)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*" + message.removeprefix(": ")) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(bfloat16)])
@pytest.mark.parametrize("target", [np.float32, np.float64])
def test_every_finite_half_is_read_exactly(tmp_path, dtype, target):
    """All 65,536 bit patterns that are finite, subnormal numbers and both zeros included, read a block at a time."""
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        values = values[np.isfinite(values)]
    save_file({"w": values}, tmp_path / "x.safetensors")
    entry = tensors.load_header(tmp_path / "x.safetensors")["w"]
    read = tensors.read_tensor(tmp_path / "x.safetensors", entry, np.dtype(target))
    bits = values.view(np.uint16).astype(np.uint32)
    if dtype == bfloat16:
        expected = (bits << 16).view(np.float32)
    else:
        sign, exponent, fraction = bits >> 15, bits >> 10 & 31, bits & 1023
        size = np.where(exponent == 0, fraction / 1024 * 2.0**-14, (1 + fraction / 1024) * 2.0 ** (exponent - 15.0))
        expected = np.where(sign == 1, -size, size)
    assert read.dtype == target
    assert read.tobytes() == expected.astype(target).tobytes()


@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_do_not_change_what_is_read(folder, monkeypatch, block):
    expected = load_model(folder)[1]
    edit_weights(folder, put("lm_head.weight", expected["backbone.embeddings.weight"]))
    monkeypatch.setattr(tensors, "BLOCK", block)
    assert_same(load_model(folder)[1], expected)
    edit_weights(folder, lambda arrays: arrays["lm_head.weight"].__setitem__((299, 7), 9.0))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: found a head that differs"):
        load_model(folder)


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_a_half_precision_folder_loads_as_float32(tmp_path, config, dtype):
    params = parameters.init(config, seed=2)
    save_model(tmp_path / "model", config, params)
    halves = {name: array.astype(dtype) for name, array in params.items()}
    save_file(halves, tmp_path / "model" / "model.safetensors")
    assert_same(load_model(tmp_path / "model")[1], {name: half.astype(np.float32) for name, half in halves.items()})
    wide = load_model(tmp_path / "model", np.float64)[1]
    assert_same(wide, {name: half.astype(np.float64) for name, half in halves.items()})


def test_dtypes_may_be_mixed(folder):
    expected = load_model(folder)[1]
    edit_weights(folder, put(D0, expected[D0].astype(np.float16)))
    edit_weights(folder, put("backbone.norm_f.weight", expected["backbone.norm_f.weight"].astype(bfloat16)))
    assert_same(load_model(folder)[1], expected)


def test_bfloat16_is_saved_rounded_to_even(tmp_path):
    params = parameters.init(TIED, seed=4)
    params["backbone.norm_f.weight"][:4] = [1 + 2**-8, 1 + 3 * 2**-8, -(2.0**-140), 3.3895313892515355e38]
    save_model(tmp_path / "model", TIED, params, dtype="bfloat16")
    stored = load_tensors(tmp_path / "model" / "model.safetensors")
    assert {array.dtype for array in stored.values()} == {np.dtype(bfloat16)}
    read = load_model(tmp_path / "model")[1]
    assert read["backbone.norm_f.weight"][:2].tolist() == [1, 1 + 2**-6]
    for name, array in params.items():
        bits = array.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
        assert stored[name].tobytes() == rounded.tobytes()
    save_model(tmp_path / "again", *load_model(tmp_path / "model"), dtype="bfloat16")
    for file in (tmp_path / "again").iterdir():
        assert file.read_bytes() == (tmp_path / "model" / file.name).read_bytes()


def test_what_bfloat16_cannot_hold_is_refused(tmp_path):
    params = parameters.init(TIED, seed=0) | {"backbone.norm_f.weight": np.full(8, 3.4e38, np.float32)}
    save_model(tmp_path / "wide", TIED, params)
    with pytest.raises(
        CheckpointError, match=r"model/model\.safetensors: backbone\.norm_f\.weight: found inf at \(0,\)"
    ):
        save_model(tmp_path / "model", TIED, params, dtype="bfloat16")
    with pytest.raises(
        CheckpointError, match=r"model/model-00003-of-00003\.safetensors: backbone\.norm_f\.weight: fou"
    ):
        save_model(tmp_path / "model", TIED, params, max_shard_size=2000, dtype="bfloat16")
    assert os.listdir(tmp_path) == ["wide"]


@pytest.mark.parametrize("dtype", ["float16", "float64", "F32", None, np.float32])
def test_other_dtypes_are_not_saved(tmp_path, dtype):
    with pytest.raises(ValueError, match=r"dtype: expected one of float32, bfloat16, got "):
        save_model(tmp_path / "model", TIED, parameters.init(TIED, seed=0), dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_the_config_decides_the_shapes(folder):
    edit_config(folder, vocab_size=304)
    with pytest.raises(CheckpointError, match=r"embeddings\.weight: found shape \(300, 8\), expected \(304, 8\)"):
        load_model(folder)
    edit_config(folder, vocab_size=300, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mixer\.A_log, .* and 5 more unknown"):
        load_model(folder)


def test_an_explicit_head_in_a_tied_folder(folder):
    edit_weights(folder, lambda arrays: arrays.update({"lm_head.weight": arrays["backbone.embeddings.weight"]}))
    config, params = load_model(folder)
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in params
    edit_weights(folder, lambda arrays: arrays["lm_head.weight"].__setitem__((3, 4), 9.0))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: .*differs.*tie_word_embeddings false"):
        load_model(folder)
    edit_config(folder, tie_word_embeddings=False)
    assert load_model(folder)[1]["lm_head.weight"][3, 4] == 9.0


def test_a_tied_folder_may_hold_the_head_alone(folder):
    expected = load_model(folder)[1]
    edit_weights(folder, rename("backbone.embeddings.weight", "lm_head.weight"))
    assert_same(load_model(folder)[1], expected)
    edit_config(folder, vocab_size=301)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: found shape \(300, 8\), expected \(301, 8\)"):
        load_model(folder)


def test_an_explicit_head_of_another_shape(folder):
    edit_weights(folder, put("lm_head.weight", np.ones((8, 300), np.float32)))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: found shape \(8, 300\), expected \(300, 8\)"):
        load_model(folder)


def test_an_untied_folder_needs_its_head(folder):
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"found lm_head\.weight missing"):
        load_model(folder)


def test_fingerprint_depends_on_names_dtypes_shapes_and_values():
    base = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(()), "c": np.zeros((0, 2))}
    same = dict(reversed([(name, np.asarray(array, order="F")) for name, array in base.items()]))
    assert checkpoint.fingerprint(same) == checkpoint.fingerprint(base)
    others = [
        {**base, "a": base["a"].reshape(3, 2)},
        {**base, "a": base["a"].astype(np.float64)},
        {**base, "a": base["a"].view(np.int32)},
        {**base, "a": base["a"][::-1]},
        {**base, "b": np.array(-0.0)},
        {**base, "c": np.zeros((2, 0))},
        {"A": base["a"], "b": base["b"], "c": base["c"]},
        {"a": base["a"], "b": base["b"]},
    ]
    digests = {checkpoint.fingerprint(params) for params in [base, *others]}
    assert len(digests) == 9
    assert all(len(digest) == 64 for digest in digests)


def test_fingerprint_survives_the_disk(folder):
    assert checkpoint.fingerprint(load_model(folder)[1]) == checkpoint.fingerprint(parameters.init(TIED, seed=0))


def test_no_module_of_the_library_imports_pickle():
    root = Path(checkpoint.__file__).parent
    for path in root.rglob("*.py"):
        assert "pickle" not in [
            word for line in path.read_text().splitlines() if "import" in line for word in line.split()
        ]
