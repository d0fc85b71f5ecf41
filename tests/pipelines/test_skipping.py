"""On request a stage that was made from the same inputs, configuration and code is not computed again."""

import copy
import os

import pytest

from pipelines import data, evaluation, generation, training, weights

from .running import ASSETS, failure, materialized, merged, pointers, run, verdicts, versions
from .test_jobs import with_new_code

WORK = (
    (data, "build_corpus"),
    (data, "build_tokenizer"),
    (data, "encode_corpus"),
    (data, "build_batches"),
    (weights, "base_weights"),
    (training, "train"),
    (evaluation, "measured"),
    (generation, "continued"),
)


def skipping(config):
    """Return the configuration with the request, and a log that says what happens."""
    changed = copy.deepcopy(dict(config))
    changed["resources"]["storage"]["config"]["skip_unchanged"] = True
    changed["loggers"] = {"console": {"config": {"log_level": "INFO"}}}
    return changed


@pytest.fixture
def same(finished, trained):
    """The request in a root of one's own in which the whole graph has run, with the very files of that run."""
    return merged(skipping(trained), {"corpus": finished.config["ops"]["corpus"]["config"]})


def computed(result):
    """Return the assets that were not skipped."""
    return {name for name, made in materialized(result).items() if "not_computed_again" not in made.metadata}


def test_nothing_is_computed_twice(finished, same, capfd, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("computed again")

    for module, name in WORK:
        monkeypatch.setattr(module, name, refuse)
    again = run(same)
    assert computed(again) == set()
    assert versions(again) == versions(finished.result)
    assert verdicts(again) == verdicts(finished.result)
    said = capfd.readouterr().err
    for name, version in versions(again).items():
        assert f"not computed again: {name} {version} was made from the same inputs, configuration and code" in said


def test_without_the_request_everything_is_computed_again(trained):
    assert computed(run(trained, assets=["weights_mirror", "samples"])) == {"weights_mirror", "samples"}


@pytest.mark.parametrize(
    ("stage", "changes", "selected", "expected"),
    [
        ("corpus", {"max_documents": 39}, ["corpus"], {"corpus"}),
        ("tokenizer", {"vocab_size": 279}, ["corpus", "tokenizer", "weights_mirror"], {"tokenizer", "weights_mirror"}),
        ("token_batches", {"seed": 1}, ["token_batches", "trained_weights"], {"token_batches", "trained_weights"}),
        ("trained_weights", {"max_seconds": 1000}, ["trained_weights", "samples"], {"trained_weights"}),
        ("trained_weights", {"learning_rate": 1e-3}, ["trained_weights", "samples"], {"trained_weights", "samples"}),
        ("perplexity", {"seed": 1}, ["perplexity", "samples"], {"perplexity"}),
        ("samples", {"prompts": ["another"]}, ["perplexity", "samples"], {"samples"}),
    ],
)
def test_a_changed_configuration_is_computed_with_what_becomes_another(same, stage, changes, selected, expected):
    assert computed(run(merged(same, {stage: changes}), assets=selected)) == expected


def test_the_tokenizer_is_trained_again_when_asked(same):
    asked = merged(same, {"tokenizer": {"retrain": True}})
    assert computed(run(asked, assets=["tokenizer"])) == {"tokenizer"}
    assert computed(run(asked, assets=["tokenizer"])) == {"tokenizer"}


def test_documents_are_looked_at(trained, texts):
    stages = ["corpus", "tokenizer", "tokenized_corpus"]
    run(skipping(trained), assets=stages)
    assert computed(run(skipping(trained), assets=stages)) == set()
    os.utime(texts / "000.txt", ns=(1, 1))
    assert computed(run(skipping(trained), assets=stages)) == {"corpus"}  # the same content again
    for number in range(9):
        (texts / f"{number:03}.txt").write_text(f"other words than before {number}")
    assert computed(run(skipping(trained), assets=stages)) == set(stages)


def test_new_code_is_run(same):
    result = run(same, loaded=with_new_code("token_batches"), assets=["tokenized_corpus", "token_batches"])
    assert computed(result) == {"token_batches"}


def test_a_checkpoint_from_outside_is_looked_at(trained, root, tmp_path):
    folder, stages = tmp_path / "base", ["tokenizer", "weights_mirror"]
    os.symlink(pointers(root)["trained_weights"].path, folder)
    config = skipping(trained)
    config["ops"] |= {
        "tokenizer": {"config": {"path": str(folder)}},
        "weights_mirror": {"config": {"checkpoint": str(folder)}},
    }
    assert computed(run(config, assets=stages)) == set(stages)
    assert computed(run(config, assets=stages)) == set()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert "weights_mirror" in computed(run(config, assets=stages))


def test_a_damaged_output_is_not_kept(same, root, capfd):
    made = pointers(root)["samples"]
    (made.path / "samples.json").unlink()
    result = run(same, assets=["samples"], fails=True)
    assert "computed again: " in capfd.readouterr().err
    assert f"remove {made.path} and materialize samples again" in failure(result)


def test_a_failed_check_is_computed_again(same):
    failing = merged(same, {"perplexity": {"baseline": 1.5}})
    for _ in range(2):
        result = run(failing, assets=["perplexity"], fails=True)
        assert verdicts(result)["perplexity", "better_than_baseline"] is False


def test_the_default_corpus_belongs_to_its_python(same, monkeypatch):
    config = merged(same, {"corpus": {"paths": [], "max_documents": 30}})
    assert computed(run(config, assets=["corpus"])) == {"corpus"}
    assert computed(run(config, assets=["corpus"])) == set()
    monkeypatch.setattr("pipelines.recipes.sys.version", "4.0")
    assert computed(run(config, assets=["corpus"])) == {"corpus"}


def test_the_whole_graph_is_covered(finished):
    recipes = finished.root / "manifests" / "recipes"
    assert {folder.name for folder in recipes.iterdir()} == set(ASSETS)
