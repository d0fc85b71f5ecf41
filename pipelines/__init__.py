"""Mamba training as a Dagster pipeline: `dagster job execute -m pipelines -j train -c configs/demo.yaml`."""

from pipelines.definitions import definitions

__all__ = ["definitions"]
