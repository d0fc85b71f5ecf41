"""Checkpoints in other forms: taken in by weights_mirror, left by trained_weights."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from mamba_ops.checkpoint import load_model, load_tensors, save_model
from mamba_ops.tensors import load_header
from pipelines.training import RUNS

from .running import failure, merged, pointers, run, verdicts


@pytest.fixture
def checkpoint(finished, tmp_path):
    """A checkpoint folder with its tokenizer."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(pointers(finished.root)["trained_weights"].path, folder)
    return folder


@pytest.fixture
def larger_tokenizer(checkpoint, tmp_path):
    """The checkpoint's tokenizer with three tokens more."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def from_checkpoint(config, folder, tokenizer=None, **weights):
    changed = merged(config, {"tokenizer": {"path": str(tokenizer or folder)}})
    changed["ops"]["weights_mirror"]["config"] = {"checkpoint": str(folder), **weights}
    return changed


def test_a_sharded_half_precision_checkpoint_is_trained_further(config, checkpoint, root, tmp_path):
    model, weights = load_model(checkpoint)
    sharded = tmp_path / "sharded"
    save_model(sharded, model, weights, checkpoint / "tokenizer.json", max_shard_size="5KB", dtype="bfloat16")
    run(from_checkpoint(config, sharded))
    mirror = load_tensors(pointers(root)["weights_mirror"].path / "model.safetensors")
    expected = load_model(sharded)[1]
    assert {name: array.tobytes() for name, array in mirror.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


def test_a_checkpoint_in_the_original_layout_is_trained_further(config, checkpoint, root):
    arrays = load_tensors(checkpoint / "model.safetensors")
    arrays["backbone.embedding.weight"] = arrays.pop("backbone.embeddings.weight")
    arrays["lm_head.weight"] = arrays["backbone.embedding.weight"].copy()
    save_file(arrays, checkpoint / "model.safetensors")
    original = {
        "d_model": 8,
        "n_layer": 1,
        "vocab_size": 279,
        "ssm_cfg": {"d_state": 4},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
    }
    (checkpoint / "config.json").write_text(json.dumps(original))
    run(from_checkpoint(config, checkpoint))
    model, weights = load_model(pointers(root)["trained_weights"].path)
    assert (model.model_type, model.vocab_size) == ("mamba", 280)
    assert "backbone.embeddings.weight" in weights


def test_saving_options_change_the_files_and_train_nothing_again(trained, root):
    before = pointers(root)["trained_weights"]
    weights = load_model(before.path)[1]
    (folder,) = (root / RUNS).iterdir()
    history = (folder / "metrics.jsonl").read_bytes()
    options = {"save_dtype": "bfloat16", "max_shard_size": "5KB"}
    run(merged(trained, {"trained_weights": options}), assets=["trained_weights", "perplexity"])
    after = pointers(root)["trained_weights"]
    assert after.fingerprint != before.fingerprint
    assert [*(root / RUNS).iterdir()] == [folder]
    assert (folder / "metrics.jsonl").read_bytes() == history
    assert json.loads((after.path / "config.json").read_text())["dtype"] == "bfloat16"
    shards = sorted(after.path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 1
    assert {entry.dtype for shard in shards for entry in load_header(shard).values()} == {"BF16"}
    for name, array in load_model(after.path)[1].items():
        np.testing.assert_allclose(array, weights[name], rtol=2**-8)
    run(merged(trained, {"trained_weights": {"max_shard_size": 10**9}}), assets=["trained_weights"])
    assert (pointers(root)["trained_weights"].path / "model.safetensors").exists()


def test_a_larger_tokenizer_is_refused_unless_asked_for(config, checkpoint, larger_tokenizer, root):
    (checkpoint / "tokenizer.json").unlink()
    result = run(from_checkpoint(config, checkpoint, larger_tokenizer), fails=True)
    assert verdicts(result)["weights_mirror", "ids_have_rows"] is False
    assert (
        failure(result)
        .strip()
        .endswith(
            "found the id 282 ('<three>'), expected 0 to 279, the rows of the embedding; "
            "resize_embeddings of the stage weights_mirror adds rows"
        )
    )
    assert "weights_mirror" not in pointers(root)


def test_a_larger_tokenizer_adds_rows_when_asked_for(config, checkpoint, larger_tokenizer, root):
    run(from_checkpoint(config, checkpoint, larger_tokenizer, resize_embeddings=True, seed=3))
    old = load_model(checkpoint)[1]["backbone.embeddings.weight"]
    model, weights = load_model(pointers(root)["weights_mirror"].path)
    new = weights["backbone.embeddings.weight"]
    assert (model.vocab_size, new.shape) == (283, (283, 8))
    assert new[:280].tobytes() == old.tobytes()
    assert load_model(pointers(root)["trained_weights"].path)[0].vocab_size == 283


def test_resizing_does_not_map_ids(config, checkpoint, tmp_path):
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = (next(token for token, i in vocab.items() if i == wanted) for wanted in (5, 9))
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    changed = from_checkpoint(config, checkpoint, tmp_path / "tokenizer.json", resize_embeddings=True)
    assert f"found {a!r} with the id 5 (2 tokens differ), expected 9 as in the asset tokenizer" in failure(
        run(changed, fails=True)
    )
