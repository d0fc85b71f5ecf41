"""The jobs, end to end: what they write, what they show, that they repeat."""

import json
import subprocess
import sys

import dagster as dg
import numpy as np
import pandas as pd
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from mamba_ops.checkpoint import load_model
from mamba_ops.fingerprint import file_digest
from mamba_ops.metrics import read_history
from pipelines import definitions, training
from pipelines.io import contents

from .running import (
    ASSETS,
    environment,
    execute,
    materialized,
    merged,
    pointers,
    run,
    verdicts,
    versions,
)

LARGEST_INLINE = 1000


def tree(folder):
    """Return digest and modification time of every file."""
    return {
        str(file.relative_to(folder)): (file_digest(file), file.stat().st_mtime_ns)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_every_asset_has_a_manifest_of_paths_and_fingerprints(finished):
    result, root, _, _ = finished
    found = pointers(root)
    assert found.keys() == set(ASSETS)
    for name, manifest in found.items():
        assert manifest.fingerprint == versions(result)[name]
        assert manifest.folder == f"{name}/{manifest.fingerprint}"
        assert manifest.files == contents(manifest.path)
        assert manifest.inputs == {parent: found[parent].fingerprint for parent in manifest.inputs}
    assert found["perplexity"].inputs.keys() == {"trained_weights", "tokenized_corpus", "tokenizer"}


def test_nothing_is_pickled(finished):
    _, root, _, _ = finished
    kinds = {file.suffix for file in root.rglob("*") if file.is_file() and file.name != ".lock"}
    assert kinds == {".json", ".jsonl", ".parquet", ".safetensors", ".bin", ".txt"}


def test_no_draft_is_left(finished):
    _, root, _, _ = finished
    assert list((root / ".drafts").iterdir()) == []


def test_every_check_passes(finished):
    result, _, _, _ = finished
    assert len(verdicts(result)) == 11
    assert all(verdicts(result).values())


def test_what_the_ui_shows(finished):
    result, root, _, _ = finished
    shown = {name: made.metadata for name, made in materialized(result).items()}
    for name, metadata in shown.items():
        assert metadata["path"] == dg.MetadataValue.path(str(pointers(root)[name].path))
        assert metadata["fingerprint"].value == versions(result)[name]
    assert shown["corpus"]["dagster/row_count"].value == 40
    for name, key in (("corpus", "splits"), ("tokenizer", "tokens"), ("tokenized_corpus", "splits"),
                      ("token_batches", "some_rows"), ("weights_mirror", "tensors"), ("trained_weights", "history"),
                      ("perplexity", "perplexities"), ("perplexity", "hardest_documents")):  # fmt: skip
        assert 0 < len(shown[name][key].records) <= 40, (name, key)
    for name, key in (("corpus", "sizes"), ("trained_weights", "loss")):
        assert shown[name][key].value.startswith("![")
        assert len(shown[name][key].value) < LARGEST_INLINE
    assert "data:image/png;base64," in shown["trained_weights"]["loss_curve"].value
    assert shown["trained_weights"]["steps"].value == 12
    assert shown["trained_weights"]["tokens_seen"].value == 12 * 4 * 32
    assert shown["trained_weights"]["tokens_per_second"].value > 0
    rows = [record.data for record in shown["perplexity"]["perplexities"].records]
    assert [row["model"] for row in rows] == ["uniform", "unigram", "bigram", "before", "after"]
    assert shown["perplexity"]["bits_per_byte"].value > 0
    assert shown["perplexity"]["sample"].value.startswith("```")


def test_training_is_observed_while_it_runs(finished):
    _, _, _, instance = finished
    events = instance.fetch_observations(dg.AssetKey("trained_weights"), limit=10).records
    assert events
    metadata = events[0].asset_observation.metadata
    assert metadata["train/step"].value == 12
    assert metadata["train/loss"].value > 0
    assert metadata["train/tokens_per_second"].value > 0


def test_metrics_hold_no_wall_clock_and_match_the_run(finished):
    _, root, _, _ = finished
    manifest = pointers(root)["trained_weights"]
    columns = json.loads((manifest.path / training.METRICS).read_text())
    history = read_history(next((root / training.RUNS).iterdir()))
    assert columns["loss"] == [step.loss for step in history]
    assert columns["step"] == list(range(1, 13))
    assert not {"seconds", "elapsed_seconds"} & columns.keys()


def test_trained_weights_differ_from_the_base_and_load(finished):
    _, root, _, _ = finished
    (model, base), (same, trained) = (
        load_model(pointers(root)[name].path) for name in ("weights_mirror", "trained_weights")
    )
    assert model.d_inner == same.d_inner
    assert all(not np.array_equal(base[name], trained[name]) for name in base)


def test_perplexity_is_of_the_validation_targets(finished):
    _, root, _, _ = finished
    found = pointers(root)
    facts, stream = found["perplexity"].facts, found["tokenized_corpus"].facts["streams"]["validation"]
    assert facts["tokens"] == stream["end"] - stream["begin"] - 1
    assert facts["bytes"] == stream["bytes"]
    assert facts["after"] == pytest.approx(np.exp(facts["nll"] / facts["tokens"]))
    assert facts["after"] < facts["before"] < facts["uniform"] * 1.2
    assert json.loads((found["perplexity"].path / "perplexity.json").read_text()) == facts


def test_the_same_again_changes_no_file_but_pointers(finished):
    result, root, config, _ = finished
    before = tree(root)
    again = run(config)
    assert versions(again) == versions(result)
    after = tree(root)
    assert all(name.startswith(("manifests/runs/", "manifests/recipes/")) for name in after.keys() - before.keys())
    changed = {name for name in before if after[name] != before[name]}
    assert all(name.startswith("manifests/") or name.endswith(".lock") for name in changed), changed
    assert all(after[name][0] == before[name][0] for name in before)


def test_another_root_gives_the_same_digits(finished, tmp_path):
    result, root, config, _ = finished
    other = tmp_path / "elsewhere"
    again = run(config | {"resources": {"storage": {"config": {"root": str(other)}}}})
    assert versions(again) == versions(result)
    for name, manifest in pointers(other).items():
        mine = pointers(root)[name]
        assert manifest.facts == mine.facts
        assert {f: file_digest(manifest.path / f) for f in manifest.files} == {
            f: file_digest(mine.path / f) for f in mine.files
        }


ALONE = """
import json, sys
from tempfile import TemporaryDirectory
import dagster as dg, pipelines

config, found = json.loads(sys.argv[1]), {}
rest = {key: value for key, value in config.items() if key not in ("ops", "execution")}
for asset in sys.argv[2:]:
    with TemporaryDirectory() as folder:
        result = pipelines.definitions.resolve_job_def("train").execute_in_process(
            run_config=rest | {"ops": {name: op for name, op in config["ops"].items() if name == asset}},
            asset_selection=[dg.AssetKey(asset)],
            instance=dg.DagsterInstance.ephemeral(folder),
        )
    (made,) = result.get_asset_materialization_events()
    found[asset] = made.materialization.tags["dagster/data_version"]
print(json.dumps(found))
"""


def test_each_asset_alone_in_a_fresh_process_has_the_same_data_version(finished, tmp_path):
    result, _, config, _ = finished
    done = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(config), *ASSETS],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == versions(result)


def test_configuration_moves_the_data_versions_downstream_only(finished, trained):
    first = versions(finished.result)
    second = versions(run(merged(trained, {"token_batches": {"seed": 1}})))
    changed = {name for name in ASSETS if first[name] != second[name]}
    assert changed == {"token_batches", "trained_weights", "perplexity", "samples"}


def test_pace_and_place_do_not_move_a_data_version(finished, trained, texts, tmp_path):
    moved = texts.rename(tmp_path / "moved")
    changes = {"corpus": {"paths": [str(moved)]}, "trained_weights": {"save_steps": 7, "logging_seconds": 60}}
    assert versions(run(merged(trained, changes))) == versions(finished.result)


def test_new_documents_move_everything_but_the_tokenizer_and_what_stands_on_it_alone(finished, trained, texts):
    first = versions(finished.result)
    (texts / "new.txt").write_text("something that was not there before")
    second = versions(run(trained))
    assert {name for name in ASSETS if first[name] == second[name]} == {"tokenizer", "weights_mirror"}


def test_the_tokenizer_is_trained_again_only_when_asked(config, texts, root):
    first = run(config, assets=["corpus", "tokenizer"])
    assert not materialized(first)["tokenizer"].metadata["kept_from_before"].value
    for number in range(10):
        (texts / f"new{number}.txt").write_text(f"entirely different words {number} " * 20)
    kept = run(config, assets=["corpus", "tokenizer"])
    assert materialized(kept)["tokenizer"].metadata["kept_from_before"].value
    assert versions(kept)["tokenizer"] == versions(first)["tokenizer"]
    asked = merged(config, {"tokenizer": {"retrain": True}})
    assert versions(run(asked, assets=["tokenizer"]))["tokenizer"] != versions(first)["tokenizer"]
    other = merged(config, {"tokenizer": {"vocab_size": 270}})
    assert pointers(root)["tokenizer"].facts["vocab_size"] == 280
    run(other, assets=["tokenizer"])
    assert pointers(root)["tokenizer"].facts["vocab_size"] == 270


def stale(instance, loaded):
    """Return the assets of full training that Dagster calls stale."""
    graph = loaded.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    return {name for name in ASSETS if resolver.get_status(dg.AssetKey(name)).value != "FRESH"}


def with_new_code(name):
    """Return the definitions with another code version of one asset."""
    assets = [
        asset.map_asset_specs(lambda spec: spec.replace_attributes(code_version="next"))
        if asset.key == dg.AssetKey(name)
        else asset
        for asset in definitions.assets
    ]
    return dg.Definitions(assets, resources=definitions.resources, jobs=definitions.jobs)


def test_a_new_code_version_marks_only_what_lies_downstream(config, instance):
    run(config, instance=instance)
    assert stale(instance, definitions) == set()
    newer = with_new_code("token_batches")
    assert stale(instance, newer) == {"token_batches"}
    run(config, assets=["token_batches"], instance=instance, loaded=newer)
    assert stale(instance, newer) == set()  # new code that makes the same content
    changed = merged(config, {"token_batches": {"seed": 5}})  # as if the new code made other content
    run(changed, assets=["token_batches"], instance=instance, loaded=newer)
    assert stale(instance, newer) == {"trained_weights"}
    run(changed, assets=["trained_weights"], instance=instance, loaded=newer)
    assert stale(instance, newer) == {"perplexity", "samples"}


def test_new_training_code_does_not_continue_old_runs(trained, root, monkeypatch):
    monkeypatch.setattr(training, "CODE", "next")
    run(trained, assets=["trained_weights"])
    assert len(list((root / training.RUNS).iterdir())) == 2


def test_evaluate_uses_what_is_there(finished):
    result, root, config, _ = finished
    before = tree(root)
    only = config | {"ops": {"perplexity": config["ops"]["perplexity"]}}
    again = run(only, job="evaluate")
    assert versions(again) == {"perplexity": versions(result)["perplexity"]}
    assert all(name.startswith(("manifests/runs/", "manifests/recipes/")) for name in tree(root).keys() - before.keys())


def test_the_root_may_come_from_the_environment(config, tmp_path, monkeypatch):
    monkeypatch.setenv("MAMBA_DATA", str(tmp_path / "variable"))
    rest = {key: value for key, value in config.items() if key != "resources"}
    run(rest, assets=["corpus"])
    assert (tmp_path / "variable/manifests/corpus.json").is_file()
    run(config, assets=["corpus"])
    assert pointers(tmp_path / "data").keys() == {"corpus"}  # the run's configuration comes first


def test_the_root_is_data_here_by_default(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run({key: value for key, value in config.items() if key != "resources"}, assets=["corpus"])
    assert (tmp_path / "data/manifests/corpus.json").is_file()


def test_a_moved_root_still_works(finished, trained, root, tmp_path):
    moved = root.rename(tmp_path / "moved")
    trained["resources"]["storage"]["config"]["root"] = str(moved)
    again = run(trained, job="evaluate", assets=["perplexity"])
    assert versions(again)["perplexity"] == versions(finished.result)["perplexity"]


def test_runs_side_by_side_do_not_mix(finished, trained, root, monkeypatch):
    """Another run moves the pointers while this one trains; what this one evaluates is its own."""
    theirs = {path.name: path.read_bytes() for path in (root / "manifests").glob("*.json")}
    real = training.read_history

    def meanwhile(folder):
        for name, content in theirs.items():
            (root / "manifests" / name).write_bytes(content)
        return real(folder)

    monkeypatch.setattr(training, "read_history", meanwhile)
    changed = merged(trained, {"corpus": {"validation_fraction": 0.5}, "trained_weights": {"max_steps": 6}})
    mine = versions(run(changed))
    assert pointers(root)["perplexity"].inputs == {
        name: mine[name] for name in ("trained_weights", "tokenized_corpus", "tokenizer")
    }
    assert pointers(root)["tokenized_corpus"].fingerprint == versions(finished.result)["tokenized_corpus"]


def test_rows_cover_every_target_once(finished):
    _, root, _, _ = finished
    found = pointers(root)
    rows = pd.read_parquet(found["token_batches"].path / "rows.parquet")
    stream = found["tokenized_corpus"].facts["streams"]["train"]
    assert rows["length"].sum() == stream["end"] - stream["begin"] - 1


def test_the_smoke_job_from_the_command_line(tmp_path):
    done = execute("job", "execute", "-m", "pipelines", "-j", "smoke", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "Warning" not in done.stdout
    assert "tokens/s" in done.stdout
    assert pointers(tmp_path / "build/smoke").keys() == set(ASSETS)


@pytest.mark.parametrize("change", [{"end_of_text": "<end>"}, {"retrain": True}])
def test_another_tokenizer_of_the_same_size_goes_through_the_whole_graph(config, texts, change):
    before = run(config)
    if "retrain" in change:
        (texts / "more.txt").write_text("other words: zebra quartz vexing jumps, every one of them " * 40)
    after = run(merged(config, {"tokenizer": change}))
    for asset in ("tokenizer", "weights_mirror", "trained_weights"):
        assert versions(after)[asset] != versions(before)[asset], asset
