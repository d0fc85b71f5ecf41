"""Weights in several files: read, split, and one clear error for each broken form."""

import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from mamba_ops import parameters, tensors
from mamba_ops.checkpoint import CheckpointError, load_model, load_tensors, save_model
from mamba_ops.config import MambaConfig
from mamba_ops.shards import INDEX, WEIGHTS, split

TIED = MambaConfig(vocab_size=300, hidden_size=8, num_hidden_layers=2, state_size=4)
UNTIED = MambaConfig(vocab_size=40, hidden_size=6, num_hidden_layers=1, use_bias=True, tie_word_embeddings=False)
EMBEDDING, NORM = "backbone.embeddings.weight", "backbone.norm_f.weight"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path):
    """A saved model in three files: the embedding, a layer and a half, the rest."""
    save_model(tmp_path / "model", TIED, parameters.init(TIED, seed=0), max_shard_size="5000")
    assert sorted(os.listdir(tmp_path / "model"))[2:5] == SHARDS
    return tmp_path / "model"


def index(folder):
    return json.loads((folder / INDEX).read_text())


def edit_index(folder, change):
    values = index(folder)
    change(values["weight_map"])
    (folder / INDEX).write_text(json.dumps(values))


def edit_shard(folder, file, change):
    arrays = load_tensors(folder / file)
    change(arrays)
    save_file(arrays, folder / file)


def refused(folder):
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 400, "2KB", "1MB", None])
def test_any_shard_size_gives_the_same_model(tmp_path, config, dtype, size):
    params = parameters.init(config, seed=1)
    save_model(tmp_path / "model", config, params, max_shard_size=size, dtype=dtype)
    loaded_config, loaded = load_model(tmp_path / "model")
    assert parameters.table(loaded_config).keys() == loaded.keys()
    assert list(loaded) == list(params)
    for name, array in params.items():
        expected = array if dtype == "float32" else array.astype(bfloat16).astype(np.float32)
        assert loaded[name].tobytes() == expected.tobytes()
        assert loaded[name].dtype == np.float32
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == dtype
    stored = {entry.dtype for file in (tmp_path / "model").glob("*.safetensors") for entry in entries(file)}
    assert stored == {{"float32": "F32", "bfloat16": "BF16"}[dtype]}


def entries(file):
    return tensors.load_header(file).values()


def test_the_files_and_the_index(folder):
    values = index(folder)
    assert values["metadata"] == {"total_parameters": parameters.count(TIED), "total_size": 4 * parameters.count(TIED)}
    assert set(values["weight_map"].values()) == set(SHARDS)
    assert not (folder / WEIGHTS).exists()
    for file in SHARDS:
        held = load_tensors(folder / file)
        assert sum(array.nbytes for array in held.values()) <= max(5000, held[next(iter(held))].nbytes)
        assert held.keys() == {name for name, place in values["weight_map"].items() if place == file}
        assert tensors.load_metadata(folder / file) == {"format": "pt"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.one_of(st.none(), st.integers(1, 100)))
def test_split_keeps_order_and_limit(sizes, limit):
    named = {str(i): size for i, size in enumerate(sizes)}
    files = split(named, limit)
    assert [name for names in files.values() for name in names] == list(named)
    for names in files.values():
        assert limit is None or len(names) == 1 or sum(named[name] for name in names) <= limit
    assert all(files.values())
    if len(files) == 1:
        assert list(files) == [WEIGHTS]
    else:
        assert list(files) == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]


def test_one_file_wins_over_an_index(folder):
    whole = {name: array for file in SHARDS for name, array in load_tensors(folder / file).items()}
    save_file({name: array + 1 for name, array in whole.items()}, folder / WEIGHTS)
    assert load_model(folder)[1][NORM][0] == 2


def test_links_to_files_elsewhere_are_followed(folder):
    """The form of Hugging Face's cache."""
    (folder.parent / "blobs").mkdir()
    for file in SHARDS:
        (folder / file).rename(folder.parent / "blobs" / file)
        (folder / file).symlink_to(f"../blobs/{file}")
    assert len(load_model(folder)[1]) == 22
    (folder.parent / "blobs" / SHARDS[1]).unlink()
    assert f"{SHARDS[1]}: backbone.layers.0" in refused(folder)


def test_a_missing_shard(folder):
    (folder / SHARDS[2]).unlink()
    names = [name for name, place in index(folder)["weight_map"].items() if place == SHARDS[2]]
    assert refused(folder) == (
        f"{folder / SHARDS[2]}: {names[0]}: found no such file, expected the shard that {INDEX} names for it "
        f"and {len(names) - 1} more"
    )


def test_an_index_that_names_an_absent_key(folder):
    edit_shard(folder, SHARDS[2], lambda arrays: arrays.pop(NORM))
    expected = f"found no such tensor, expected one, since {INDEX} names this file for it"
    assert refused(folder) == f"{folder / SHARDS[2]}: {NORM}: {expected}"


def test_an_index_that_names_another_file(folder):
    edit_index(folder, lambda places: places.update({NORM: SHARDS[0]}))
    assert f"{folder / SHARDS[0]}: {NORM}: found no such tensor" in refused(folder)


def test_a_shard_with_a_key_that_the_index_does_not_name(folder):
    edit_index(folder, lambda places: places.pop(NORM))
    message = refused(folder)
    assert message.startswith(f"{folder / SHARDS[2]}: {NORM}: found a tensor that {INDEX} does not name, expected the")


def test_a_key_in_two_shards(folder):
    edit_shard(folder, SHARDS[0], lambda arrays: arrays.update({NORM: np.ones(8, np.float32)}))
    message = refused(folder)
    assert f"{folder / SHARDS[0]}: {NORM}: found a tensor that {INDEX} places in {SHARDS[2]}, expected" in message


def test_a_key_that_the_model_lacks_and_one_that_it_has_not(folder):
    def rename(mapping):
        mapping["backbone.norm_g.weight"] = mapping.pop(NORM)

    edit_shard(folder, SHARDS[2], rename)
    edit_index(folder, rename)
    expected = f"found {NORM} missing, backbone.norm_g.weight unknown, expected the 22 tensors of its config"
    assert refused(folder) == f"{folder / INDEX}: {expected}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(9, np.float32), "found shape (9,), expected (8,)"),
        (np.ones((8, 1), np.float32), "found shape (8, 1), expected (8,)"),
        (np.ones(8, np.float64), "found dtype F64, expected F32, F16, BF16 (float32, float16, bfloat16)"),
        (np.ones(8, np.int8), "found dtype I8, expected F32"),
        (np.array([1] * 7 + [np.inf], np.float32), "found inf at (7,), expected finite values"),
        (np.array([np.nan] * 8, np.float16), "found nan at (0,), expected finite values"),
    ],
)
def test_a_wrong_tensor_in_a_shard(folder, value, message):
    edit_shard(folder, SHARDS[2], lambda arrays: arrays.update({NORM: value}))
    assert f"{folder / SHARDS[2]}: {NORM}: {message}" in refused(folder)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I16", "U8", "BOOL", "C64"])
def test_other_dtypes_of_the_format(folder, dtype):
    size = {"I16": 16, "C64": 64}.get(dtype, 8)
    retype(folder / SHARDS[2], NORM, dtype, size)
    assert f"{folder / SHARDS[2]}: {NORM}: found dtype {dtype}, expected F32, F16, BF16" in refused(folder)


def test_a_dtype_that_the_format_lacks(folder):
    retype(folder / SHARDS[2], NORM, "F9_E1M7", 8)
    expected = "one of BF16, F16, F32, F64, I32, I64, U8, U32, U64"
    assert refused(folder) == f"{folder / SHARDS[2]}: {NORM}: found dtype F9_E1M7, expected {expected}"


def retype(path, name, dtype, size):
    """Write a tensor anew as `size` bytes of a dtype."""
    arrays = load_tensors(path)
    arrays.pop(name)
    header = {}
    offset = 0
    for key, array in arrays.items():
        header[key] = {"dtype": "F32", "shape": array.shape, "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    header[name] = {"dtype": dtype, "shape": [8], "data_offsets": [offset, offset + size]}
    text = json.dumps(header).encode()
    values = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + values + bytes(size))


def test_a_truncated_shard_names_the_first_key_that_is_cut(folder):
    path = folder / SHARDS[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert refused(folder) == (
        f"{path}: found {len(whole) - 1:,} bytes that end before {EMBEDDING} does, "
        f"expected a whole safetensors file of {len(whole):,}; it is truncated"
    )
    path.write_bytes(whole[:50])
    assert f"{path}: found 50 bytes that cannot be read (" in refused(folder)
    path.write_bytes(b"")
    assert f"{path}: found 0 bytes that cannot be read (" in refused(folder)


def test_a_file_whose_sizes_contradict_each_other(folder):
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes().replace(b"[300,8]", b"[300,7]"))
    assert f"{path}: {EMBEDDING}: found 9,600 bytes, expected 8,400 for F32 (300, 7)" in refused(folder)


def test_a_file_that_shrinks_while_it_is_read(folder, monkeypatch):
    path = folder / SHARDS[0]
    (entry,) = entries(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"found a file that shrank while it was read"):
        tensors.read_tensor(path, entry)


@pytest.mark.parametrize(
    "place",
    [
        "../x.safetensors",
        "..",
        ".",
        "",
        "/etc/passwd",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "x\0.safetensors",
        "config.json",
        7,
        None,
        ["model-00001-of-00003.safetensors"],
    ],
)
def test_an_index_cannot_leave_its_folder(folder, place):
    save_file({NORM: np.ones(8, np.float32)}, folder.parent / "x.safetensors")
    edit_index(folder, lambda places: places.update({NORM: place}))
    expected = "expected the plain name of a .safetensors file in the same folder"
    assert refused(folder) == f"{folder / INDEX}: {NORM}: found {place!r:.80}, {expected}"


def test_an_index_that_names_a_pickle(folder):
    edit_index(folder, lambda places: places.update({NORM: "pytorch_model-00001-of-00002.bin"}))
    message = refused(folder)
    assert f"{INDEX}: {NORM}: found 'pytorch_model-00001-of-00002.bin', a pickle, which can run code" in message
    assert 'glob.glob("pytorch_model-*-of-*.bin")' in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found no readable JSON"),
        ('{"weight_map": {', "found no readable JSON"),
        ("[]", "found JSON of type list, expected a JSON object"),
        ("{}", "weight_map: found None, expected an object of file names by key"),
        ('{"weight_map": {}}', "weight_map: found {}, expected an object"),
        ('{"weight_map": ["a"]}', "weight_map: found ['a'], expected an object"),
    ],
)
def test_an_index_that_is_none(folder, text, message):
    (folder / INDEX).write_text(text)
    assert f"{folder / INDEX}: {message}" in refused(folder)


def test_shards_without_their_index(folder):
    (folder / INDEX).unlink()
    assert refused(folder) == (
        f"{folder}: {WEIGHTS}: found only {SHARDS[0]}, expected the weights, or {INDEX} that names their files"
    )


def test_a_shard_that_is_a_folder(folder):
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).mkdir()
    assert refused(folder) == f"{folder / SHARDS[0]}: found a folder, expected a safetensors file"


PEAK = """
import sys
import numpy as np
from mamba_ops import parameters
from mamba_ops.checkpoint import load_model, save_model
from mamba_ops.config import MambaConfig


def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024


def added_at_most(function):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    result = function()
    return result, resident("VmHWM") - before


def make():
    return {name: np.ones(entry.shape, np.float32) for name, entry in parameters.table(config).items()}


config = MambaConfig(vocab_size=40_000, hidden_size=512, num_hidden_layers=1, tie_word_embeddings=False)
small = MambaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1)
save_model(f"{sys.argv[1]}/small", small, parameters.init(small, 0), max_shard_size=1000)
load_model(f"{sys.argv[1]}/small")
params = make()
save = lambda: save_model(f"{sys.argv[1]}/model", config, params, max_shard_size="50MB", dtype=sys.argv[2])
_, saving = added_at_most(save)
del params
(_, params), loading = added_at_most(lambda: load_model(f"{sys.argv[1]}/model"))
print(sum(array.nbytes for array in params.values()) / 2**20, saving, loading)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks of memory are read from /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_stays_near_one_model(tmp_path, dtype):
    """Reading holds the model and a block; writing holds one file's values and one tensor that is read back."""
    command = [sys.executable, "-c", PEAK, str(tmp_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    model, saving, loading = map(float, done.stdout.split())
    assert model > 160
    assert loading < 1.15 * model
    assert saving < 0.8 * model
