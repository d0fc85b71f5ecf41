"""Fixtures: a tiny corpus, an empty root, a configuration of the whole graph."""

import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from .running import Finished, adapting, in_root, run, tiny, write_texts


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """No instance, no root and no adapter from outside."""
    for name in ("DAGSTER_HOME", "MAMBA_DATA", "MAMBA_ADAPTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Finished:
    """One run of the whole graph, not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny(write_texts(folder / "texts"), folder / "data")
    instance = dg.DagsterInstance.ephemeral(str(folder / "instance"))
    return Finished(run(config, instance=instance), folder / "data", config, instance)


@pytest.fixture(scope="session")
def adapted(finished: Finished, tmp_path_factory) -> dict[str, Finished]:
    """A run of each other way on the base of that run, and a merge, in one root; not to be changed."""
    folder = tmp_path_factory.mktemp("adapted")
    shutil.copytree(finished.root, folder / "data")
    own = finished.config | {"resources": in_root(finished.config, folder / "data")}
    runs = {}
    for job, assets in (("wsla", ["wsla_weights", "wsla_perplexity"]), ("lora", ["lora_adapter", "lora_perplexity"])):
        config = adapting(own, job)
        instance = dg.DagsterInstance.ephemeral(str(folder / job))
        runs[job] = Finished(run(config, job, assets, instance), folder / "data", config, instance)
    config = own | {"ops": {}}
    instance = dg.DagsterInstance.ephemeral(str(folder / "merge"))
    runs["merge"] = Finished(run(config, "merge", instance=instance), folder / "data", config, instance)
    return runs


@pytest.fixture
def lora(adapted: dict[str, Finished], root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of an adapter's training in a root of one's own in which all ways have run."""
    shutil.copytree(adapted["lora"].root, root)
    return adapting(config, "lora")


@pytest.fixture
def trained(finished: Finished, root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a root of one's own in which the whole graph has run."""
    shutil.copytree(finished.root, root)
    return config


@pytest.fixture
def instance(tmp_path: Path) -> dg.DagsterInstance:
    return dg.DagsterInstance.ephemeral(str(tmp_path / "instance"))


@pytest.fixture
def config(texts: Path, root: Path) -> dict[str, Any]:
    return tiny(texts, root)
