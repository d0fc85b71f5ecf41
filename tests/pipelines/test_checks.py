"""Blocking checks: each fails, stops what follows, replaces nothing, and is seen to have failed."""

import numpy as np
import pandas as pd
import pytest
import yaml

from mamba_ops.evaluate import Evaluation
from mamba_ops.tokenized import IDS
from pipelines import data, evaluation, training, weights
from pipelines.checks import Verdict
from pipelines.data import documents_exist, every_target_once, ids_in_range, splits_disjoint
from pipelines.evaluation import better_than_baseline, perplexity_finite
from pipelines.training import optimizer_steps
from pipelines.weights import weights_finite

from .running import ASSETS, execute, failure, materialized, merged, pointers, run, verdicts

CHECKS = [
    (data, "corpus", "documents_exist"),
    (data, "corpus", "splits_disjoint"),
    (data, "tokenized_corpus", "ids_in_range"),
    (data, "token_batches", "every_target_once"),
    (weights, "weights_mirror", "weights_finite"),
    (weights, "weights_mirror", "ids_have_rows"),
    (training, "trained_weights", "optimizer_steps"),
    (training, "trained_weights", "weights_finite"),
    (evaluation, "perplexity", "perplexity_finite"),
    (evaluation, "perplexity", "better_than_baseline"),
]
CHILDREN = {
    "corpus": {"tokenizer", "tokenized_corpus"},
    "tokenized_corpus": {"token_batches", "perplexity"},
    "token_batches": {"trained_weights"},
    "weights_mirror": {"trained_weights"},
    "trained_weights": {"perplexity", "samples"},
    "perplexity": set(),
    "samples": set(),
}


def downstream(asset):
    below = set(CHILDREN.get(asset, ()))
    return below.union(*(downstream(child) for child in below))


def other(config):
    """Return a configuration under which every asset but the tokenizer's is another."""
    return merged(
        config,
        {
            "corpus": {"validation_fraction": 0.4},
            "token_batches": {"seq_len": 16},
            "weights_mirror": {"seed": 1},
            "perplexity": {"seed": 1},
            "samples": {"seed": 1},
        },
    )


@pytest.mark.parametrize(("module", "asset", "check"), CHECKS)
def test_case_59_a_failed_check_stops_what_follows_and_replaces_nothing(
    trained, root, monkeypatch, module, asset, check
):
    before = {name: made.to_json() for name, made in pointers(root).items()}
    monkeypatch.setattr(module, check, lambda *_: Verdict(False, "found 1, expected 0"))
    result = run(other(trained), fails=True)
    assert f"check {check} of {asset} failed: found 1, expected 0" in failure(result)
    assert verdicts(result)[asset, check] is False
    stopped = {asset} | downstream(asset)
    assert not stopped & materialized(result).keys()
    after = {name: made.to_json() for name, made in pointers(root).items()}
    assert {name for name in ASSETS if after[name] == before[name]} >= stopped


@pytest.mark.parametrize(("module", "asset", "check"), CHECKS)
def test_case_59_a_check_that_cannot_be_computed_has_failed(trained, root, monkeypatch, module, asset, check):
    def missing(*_):
        raise FileNotFoundError("no such file: ids.bin")

    before = pointers(root)[asset]
    monkeypatch.setattr(module, check, missing)
    result = run(other(trained), assets=[asset], fails=True)
    assert verdicts(result)[asset, check] is False
    assert f"check {check} of {asset} failed: it cannot be computed: no such file: ids.bin" in failure(result)
    assert pointers(root)[asset] == before


def test_case_59_an_id_out_of_range_writes_no_weights_and_exits_with_1(trained, root, tmp_path):
    """A tokenizer with more ids than the checkpoint's embedding has rows."""
    checkpoint = pointers(root)["weights_mirror"].path
    larger = merged(trained, {"tokenizer": {"vocab_size": 290}})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    larger["ops"]["weights_mirror"]["config"] = {"checkpoint": str(folder)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(larger))
    before = pointers(root)
    done = execute("job", "execute", "-m", "pipelines", "-j", "train", "-c", "run.yaml", cwd=tmp_path)
    assert done.returncode == 1
    message = "check ids_have_rows of weights_mirror failed: found the id 289 ("
    assert f"Failure: {message}" in done.stdout
    assert "expected 0 to 279, the rows of the embedding" in done.stdout
    after = pointers(root)
    assert after["weights_mirror"] == before["weights_mirror"]
    assert after["trained_weights"] == before["trained_weights"]


def test_case_59_a_baseline_that_is_not_beaten_exits_with_1(trained, root, tmp_path):
    before = pointers(root)["perplexity"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(trained, {"perplexity": {"baseline": 1.5, "seed": 8}})))
    done = execute("job", "execute", "-m", "pipelines", "-j", "train", "-c", "run.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "Failure: check better_than_baseline of perplexity failed: found perplexity " in done.stdout
    assert "expected below 1.5" in done.stdout
    assert pointers(root)["perplexity"] == before


def test_case_59_a_damaged_ids_file_fails_the_check_of_who_reads_it(trained, root):
    ids = pointers(root)["tokenized_corpus"].path / IDS
    whole = ids.read_bytes()
    ids.write_bytes(whole[:-4])
    result = run(trained, assets=["token_batches"], fails=True)
    assert "ids.bin: found 26,176 bytes, expected 26,180 bytes" in failure(result)
    ids.write_bytes(whole[:-4] + (100_000).to_bytes(4, "little"))
    result = run(merged(trained, {"trained_weights": {"max_steps": 3}}), assets=["trained_weights"], fails=True)
    assert "ids.bin: expected the SHA-256 " in failure(result)
    assert verdicts(result) == {
        ("trained_weights", "optimizer_steps"): False,
        ("trained_weights", "weights_finite"): False,
    }


def test_checks_say_what_was_found():
    documents = pd.DataFrame({"id": ["a", "b", "a"], "split": ["train", "train", "validation"]})
    assert splits_disjoint(documents) == (False, "found 1 texts more than once, such as a, expected 0")
    assert documents_exist(documents[:2]) == (
        False,
        "found {'train': 2, 'validation': 0} documents, expected at least 1 of each",
    )
    assert ids_in_range(8, 8) == (False, "found ids up to 8, expected 0 to 7")
    assert ids_in_range(7, 8).passed
    rows = pd.DataFrame({"start": [0, 4], "length": [4, 3]})
    assert every_target_once(rows, {"begin": 0, "end": 8}).passed
    assert not every_target_once(rows, {"begin": 0, "end": 9}).passed
    assert not every_target_once(rows.assign(start=[0, 3]), {"begin": 0, "end": 8}).passed
    assert not every_target_once(rows.assign(start=[1, 5]), {"begin": 0, "end": 8}).passed
    masked = np.array([[2, 4], [5, 6]])
    assert every_target_once(rows, {"begin": 0, "end": 8, "masked": 3}, masked).passed
    assert not every_target_once(rows[1:], {"begin": 0, "end": 8, "masked": 3}, masked).passed
    assert weights_finite({"A_log": np.array([1.0, np.nan, np.inf])}).text.startswith("found {'A_log': 2} in 1 tensors")
    assert optimizer_steps([]) == (False, "found 0 optimizer steps and 0 skipped, expected at least 1")


def test_the_perplexity_is_held_against_the_baseline():
    after = Evaluation(np.array([20.0]), np.array([10]), 100)
    counted = {"uniform": 300.0, "unigram": 8.0, "bigram": 7.0}
    assert better_than_baseline(after, "none", counted).passed
    assert better_than_baseline(after, "unigram", counted).passed
    assert better_than_baseline(after, "bigram", counted) == (
        False,
        "found perplexity 7.38906, expected below bigram's 7",
    )
    assert better_than_baseline(after, "7.5", counted).passed
    assert not better_than_baseline(after, "7.3", counted).passed
    assert perplexity_finite(after).passed
    for nll in (np.nan, np.inf, 1e6):
        bad = Evaluation(np.array([nll]), np.array([10]), 100)
        assert not perplexity_finite(bad).passed
        assert not better_than_baseline(bad, "unigram", counted).passed


@pytest.mark.parametrize("asset", ["weights_mirror", "trained_weights", "tokenizer", "corpus"])
def test_a_file_changed_in_place_is_refused_by_whom_it_reaches(trained, root, asset):
    made = pointers(root)[asset]
    name = max(made.files, key=lambda file: made.files[file][0])
    data = bytearray((made.path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (made.path / name).write_bytes(data)
    message = failure(run(trained, fails=True))
    assert f"{name}: found the SHA-256 " in message
    assert f"remove {made.path} and materialize {asset} again" in message
