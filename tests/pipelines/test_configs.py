"""Every file of configs/ is loaded and executed, with fewer steps."""

import json
import shutil

import dagster as dg
import pytest
import yaml

from pipelines import definitions

from .running import ASSETS, REPOSITORY, merged, pointers, run, write_texts

FILES = sorted((REPOSITORY / "configs").glob("*.yaml"))
QUICK = {
    "trained_weights": {"max_steps": 2, "gradient_accumulation_steps": 1},
    "perplexity": {"baseline": "none", "max_new_tokens": 5},
}


def test_there_are_files():
    assert {file.name for file in FILES} >= {
        "demo.yaml",
        "smoke.yaml",
        "own_text.yaml",
        "checkpoint.yaml",
        "instructions.yaml",
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_case_57_every_shipped_file_is_valid(file):
    dg.validate_run_config(definitions.resolve_job_def("train"), yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_case_57_every_shipped_file_runs(finished, tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts")
    lines = (json.dumps({"prompt": f"{i}?", "completion": f"{i + 1}."}) + "\n" for i in range(40))
    (tmp_path / "instructions.jsonl").write_text("".join(lines))
    shutil.copytree(pointers(finished.root)["trained_weights"].path, tmp_path / "checkpoint")
    config = merged(yaml.safe_load(file.read_text()), QUICK)
    if not config["ops"].get("corpus"):
        config = merged(config, {"corpus": {"max_documents": 30}})
    run(config)
    assert pointers(tmp_path / "data").keys() == set(ASSETS)
