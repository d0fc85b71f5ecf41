"""A tiny corpus, and runs of the jobs in this process and in fresh ones."""

import copy
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import dagster as dg

from pipelines import definitions
from pipelines.demo import QUIET
from pipelines.io import Manifest, newest

REPOSITORY = Path(__file__).parents[2]
UPSTREAM = ["corpus", "tokenizer", "tokenized_corpus", "token_batches", "weights_mirror"]
ASSETS = (*UPSTREAM, "trained_weights", "perplexity", "samples")
"""Of full training."""
ADAPTED = ("wsla_weights", "lora_adapter", "merged_weights", "wsla_perplexity", "lora_perplexity")
"""Of the other ways."""


class Finished(NamedTuple):
    """A run of the whole graph: its result, root, configuration and instance."""

    result: dg.ExecuteInProcessResult
    root: Path
    config: dict[str, Any]
    instance: dg.DagsterInstance


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run configuration with values of stages replaced: {stage: {field: value}}."""
    result = copy.deepcopy(dict(config))
    for stage, fields in changes.items():
        op = result.setdefault("ops", {}).setdefault(stage, {})
        op.setdefault("config", {}).update(fields)
    return result


def in_root(config: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Return the resources of a configuration with another root."""
    return config["resources"] | {"storage": {"config": {"root": str(root)}}}


def write_texts(folder: Path, documents: int = 40, seed: int = 0) -> Path:
    """Write a corpus of made-up sentences, all different."""
    rng = random.Random(seed)
    words = ["the", "state", "moves", "on", "a", "token", "falls", "into", "place", "and", "waits", "for", "more"]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        text = " ".join(rng.choice(words) for _ in range(60))
        (folder / f"{number:03}.txt").write_text(f"{text}. {number}\n")
    return folder


def tiny(texts: Path, root: Path) -> dict[str, Any]:
    """Return a configuration of the whole graph that runs in about a second."""
    return {
        "execution": {"config": {"in_process": {}}},
        "loggers": {"console": {"config": {"log_level": "ERROR"}}},
        "resources": {
            "storage": {"config": {"root": str(root)}},
            "accelerator": {"config": {"adapter": "cpu"}},
        },
        "ops": {
            "corpus": {"config": {"paths": [str(texts)], "validation_fraction": 0.3}},
            "tokenizer": {"config": {"vocab_size": 280}},
            "token_batches": {"config": {"seq_len": 32, "batch_size": 4}},
            "weights_mirror": {"config": {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 4}},
            "trained_weights": {"config": {"learning_rate": "3e-2", "max_steps": 12, "save_steps": 5}},
            "perplexity": {"config": {"baseline": "none", "max_new_tokens": 8}},
            "samples": {"config": {"prompts": ["the state", ""], "max_new_tokens": 8}},
        },
    }


def adapting(config: Mapping[str, Any], job: str) -> dict[str, Any]:
    """Return the configuration of another way of fine-tuning than the full one, on the same base."""
    training = {"learning_rate": "3e-2", "max_steps": 12, "save_steps": 5}
    ops = {
        "wsla": {"wsla_weights": training, "wsla_perplexity": {"baseline": "none", "max_new_tokens": 8}},
        "lora": {
            "lora_adapter": training | {"r": 2, "lora_dropout": 0.1},
            "lora_perplexity": {"baseline": "none", "max_new_tokens": 8},
        },
    }
    upstream = {name: op for name, op in config["ops"].items() if name in UPSTREAM}
    return dict(config) | {"ops": upstream | {name: {"config": dict(values)} for name, values in ops[job].items()}}


def run(
    config: Mapping[str, Any],
    job: str = "train",
    assets: list[str] | None = None,
    instance: dg.DagsterInstance | None = None,
    fails: bool = False,
    loaded: dg.Definitions = definitions,
) -> dg.ExecuteInProcessResult:
    """Run a job, or some of its assets, in this process; the result has to be as said."""
    ops = {name: op for name, op in config.get("ops", {}).items() if assets is None or name in assets}
    rest = {key: value for key, value in config.items() if key not in ("execution", "ops")}
    with TemporaryDirectory() as folder:
        result = loaded.resolve_job_def(job).execute_in_process(
            run_config=rest | {"ops": ops},
            asset_selection=[dg.AssetKey(name) for name in assets] if assets else None,
            instance=instance or dg.DagsterInstance.ephemeral(folder),
            raise_on_error=False,
        )
    assert result.success is not fails, failure(result)
    return result


def failure(result: dg.ExecuteInProcessResult) -> str:
    """Return what the failed steps said."""
    events = [event for event in result.all_events if event.is_step_failure]
    return "; ".join(event.step_failure_data.error.message for event in events)


def materialized(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetMaterialization]:
    """Return the materializations of a run by asset."""
    events = result.get_asset_materialization_events()
    return {event.materialization.asset_key.to_user_string(): event.materialization for event in events}


def versions(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """Return the data versions of a run by asset."""
    return {name: made.tags["dagster/data_version"] for name, made in materialized(result).items()}


def verdicts(result: dg.ExecuteInProcessResult) -> dict[tuple[str, str], bool]:
    """Return the outcome of each check of a run."""
    checks = result.get_asset_check_evaluations()
    return {(check.asset_key.to_user_string(), check.check_name): check.passed for check in checks}


def pointers(root: Path) -> dict[str, Manifest]:
    """Return the assets that are there."""
    names = (*ASSETS, *ADAPTED)
    return {name: newest(root, name) for name in names if (root / "manifests" / f"{name}.json").is_file()}


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a fresh process: imports from the repository, another hash seed, no instance."""
    kept = {
        key: value for key, value in os.environ.items() if key not in ("DAGSTER_HOME", "MAMBA_DATA", "MAMBA_ADAPTER")
    }
    return kept | {"PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": QUIET, "PYTHONHASHSEED": "7", **changes}


def execute(*arguments: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run `dagster` in a fresh process."""
    return subprocess.run(
        [sys.executable, "-m", "dagster", *arguments],
        cwd=cwd,
        env=environment(**changes),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
    )
