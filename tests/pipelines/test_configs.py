"""Every file of configs/ is loaded and executed, with fewer steps."""

import json
import re
import shutil

import dagster as dg
import pytest
import yaml

from pipelines import definitions
from pipelines.ways import WAYS

from .running import REPOSITORY, materialized, merged, pointers, run, write_texts

FILES = sorted((REPOSITORY / "configs").glob("*.yaml"))
TRAINING = {"max_steps": 2, "gradient_accumulation_steps": 1}
EVALUATION = {"baseline": "none", "max_new_tokens": 5}


def job_of(file):
    """Return the job that the file's comment says to run it with."""
    return re.search(rf"^#   dagster job execute -m pipelines -j (\w+) -c \S*{file.name}$", file.read_text(), re.M)[1]


def quick(file):
    """Return the file's configuration with fewer steps."""
    way = next(way for way in WAYS if way.job == job_of(file))
    return merged(yaml.safe_load(file.read_text()), {way.weights: TRAINING, way.perplexity: EVALUATION})


def test_there_are_files():
    assert {file.name for file in FILES} >= {
        "demo.yaml",
        "smoke.yaml",
        "own_text.yaml",
        "checkpoint.yaml",
        "instructions.yaml",
        "wsla.yaml",
        "lora.yaml",
    }
    assert {job_of(file) for file in FILES} == {way.job for way in WAYS}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_case_57_every_shipped_file_is_valid(file):
    dg.validate_run_config(definitions.resolve_job_def(job_of(file)), yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_case_57_every_shipped_file_runs(finished, tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts")
    lines = (json.dumps({"prompt": f"{i}?", "completion": f"{i + 1}."}) + "\n" for i in range(40))
    (tmp_path / "instructions.jsonl").write_text("".join(lines))
    shutil.copytree(pointers(finished.root)["trained_weights"].path, tmp_path / "checkpoint")
    config = quick(file)
    if not config["ops"].get("corpus", {"config": {}})["config"].get("paths"):
        config = merged(config, {"corpus": {"max_documents": 30}})
    result = run(config, job_of(file))
    job = definitions.resolve_job_def(job_of(file))
    assert materialized(result).keys() == {key.to_user_string() for key in job.asset_layer.executable_asset_keys}
