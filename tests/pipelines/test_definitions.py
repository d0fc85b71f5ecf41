"""What Dagster loads."""

import subprocess
import sys

import dagster as dg
import pytest
import yaml

from pipelines import definitions

from .running import ASSETS, REPOSITORY, UPSTREAM, environment, execute

PARENTS = {
    "corpus": set(),
    "tokenizer": {"corpus"},
    "tokenized_corpus": {"corpus", "tokenizer"},
    "token_batches": {"tokenized_corpus"},
    "weights_mirror": {"tokenizer"},
    "trained_weights": {"token_batches", "weights_mirror"},
    "wsla_weights": {"token_batches", "weights_mirror"},
    "lora_adapter": {"token_batches", "weights_mirror"},
    "merged_weights": {"lora_adapter"},
    "perplexity": {"trained_weights", "tokenized_corpus", "tokenizer"},
    "wsla_perplexity": {"wsla_weights", "tokenized_corpus", "tokenizer"},
    "lora_perplexity": {"lora_adapter", "tokenized_corpus", "tokenizer"},
    "samples": {"trained_weights", "tokenizer"},
}


def test_definitions_load_without_one_warning(tmp_path):
    code = "import dagster, pipelines; dagster.Definitions.validate_loadable(pipelines.definitions)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=environment(PYTHONWARNINGS=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_workspace_validates():
    done = execute("definitions", "validate", "-w", "workspace.yaml", cwd=REPOSITORY, PYTHONPATH="", PYTHONWARNINGS="")
    assert done.returncode == 0, done.stdout
    assert "All code locations passed validation" in done.stdout


def test_the_graph():
    graph = definitions.resolve_asset_graph()
    keys = {dg.AssetKey(name): {dg.AssetKey(parent) for parent in parents} for name, parents in PARENTS.items()}
    assert {key: graph.get(key).parent_keys for key in graph.get_all_asset_keys()} == keys


def test_every_asset_is_described_and_has_a_code_version():
    for asset in definitions.assets:
        for spec in asset.specs:
            assert spec.description
            assert spec.code_version
            assert spec.group_name in ("data", "model")


def test_assets_that_run_the_model_take_turns():
    pools = {key.to_user_string(): pool for asset in definitions.assets for key, pool in pools_of(asset)}
    assert {name for name, pool in pools.items() if pool == "accelerator"} == {
        "weights_mirror",
        "trained_weights",
        "wsla_weights",
        "lora_adapter",
        "perplexity",
        "wsla_perplexity",
        "lora_perplexity",
        "samples",
    }


def pools_of(asset):
    return [(key, asset.op.pool) for key in asset.keys]


def test_every_check_blocks():
    specs = [spec for asset in definitions.assets for spec in asset.check_specs]
    assert {(spec.asset_key.to_user_string(), spec.name) for spec in specs} == {
        ("corpus", "documents_exist"),
        ("corpus", "splits_disjoint"),
        ("tokenized_corpus", "ids_in_range"),
        ("token_batches", "every_target_once"),
        ("weights_mirror", "weights_finite"),
        ("weights_mirror", "ids_have_rows"),
        ("weights_mirror", "mirror_agrees"),
        ("trained_weights", "optimizer_steps"),
        ("trained_weights", "weights_finite"),
        *[
            (asset, check)
            for asset in ("wsla_weights", "lora_adapter")
            for check in ("optimizer_steps", "weights_finite", "frozen_unchanged", "trained_changed")
        ],
        ("merged_weights", "weights_finite"),
        *[
            (asset, check)
            for asset in ("perplexity", "wsla_perplexity", "lora_perplexity")
            for check in ("perplexity_finite", "better_than_baseline")
        ],
    }
    assert all(spec.blocking and spec.description for spec in specs)


@pytest.mark.parametrize(
    ("job", "assets"),
    [
        ("train", ASSETS),
        ("smoke", ASSETS),
        ("wsla", [*UPSTREAM, "wsla_weights", "wsla_perplexity"]),
        ("lora", [*UPSTREAM, "lora_adapter", "lora_perplexity"]),
        ("merge", ["merged_weights"]),
        ("evaluate", ["perplexity"]),
    ],
)
def test_what_each_job_makes(job, assets):
    made = definitions.resolve_job_def(job).asset_layer.executable_asset_keys
    assert {key.to_user_string() for key in made} == set(assets)


def test_the_instance_settings_are_accepted(tmp_path, monkeypatch):
    (tmp_path / "dagster.yaml").write_text((REPOSITORY / "deploy/dagster.yaml").read_text())
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance:
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert instance.get_concurrency_config().pool_config.default_pool_limit == 1


def test_the_smoke_job_is_the_smoke_file():
    from pipelines.automation import SMOKE

    assert yaml.safe_load((REPOSITORY / "configs/smoke.yaml").read_text()) == SMOKE
