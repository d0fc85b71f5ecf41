"""The ways of fine-tuning, one record each: what trains and what is kept of it. Assets and jobs are made from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np

from mamba_ops.checkpoint import fingerprint, load_model, save_model
from mamba_ops.config import MambaConfig
from mamba_ops.tokenizer import TOKENIZER
from mamba_ops.training_state import TrainingState, start
from mamba_ops.wsla import wsla_names
from pipelines.adapters import adapted_model, adapter_metadata, begin_adapter, save_adapter_folder
from pipelines.configuration import Launchable, LoraRun, TrainRun, WslaRun
from pipelines.io import Manifest

ALWAYS = {
    "optimizer_steps": "At least one optimizer step changed the weights.",
    "weights_finite": "Every weight is a finite number.",
}
"""Checks of every way."""

PARTLY = ALWAYS | {
    "frozen_unchanged": "Every weight that does not train is bit for bit the base's.",
    "trained_changed": "Every weight that trains, or its adapter, differs from its start.",
}
"""Checks of a way in which not all of the model trains."""


@dataclass(frozen=True)
class Way:
    """One way of fine-tuning.

    weights, perplexity: its assets. job: that makes them. results: the assets that the job ends with. stage: of the
    configuration. checks: descriptions by name. begin: the state before the first step. save: writes the folder and
    returns what it is, as JSON. load: the model and its weights, from what was saved. shown: more metadata.
    """

    weights: str
    perplexity: str
    job: str
    results: tuple[str, ...]
    description: str
    stage: type[Launchable]
    checks: Mapping[str, str]
    begin: Callable[[dg.AssetExecutionContext, Any, Manifest], TrainingState]
    save: Callable[[Path, TrainingState, Any, Manifest], dict[str, Any]]
    load: Callable[[Manifest], tuple[MambaConfig, dict[str, np.ndarray]]]
    shown: Callable[[TrainingState], dict[str, Any]] = lambda state: {}


def begin_full(context: dg.AssetExecutionContext, config: TrainRun, base: Manifest) -> TrainingState:
    """Return the state in which every weight trains."""
    return start(*load_model(base.path), copy=False)


def begin_wsla(context: dg.AssetExecutionContext, config: WslaRun, base: Manifest) -> TrainingState:
    """Return the state in which the selective projections train."""
    model, weights = load_model(base.path)
    return start(model, weights, names=wsla_names(model), copy=False)


def save_weights(folder: Path, state: TrainingState, config: TrainRun | WslaRun, base: Manifest) -> dict[str, Any]:
    """Write a Hugging Face folder with the base's tokenizer."""
    dtype, size = config.save_dtype, config.max_shard_size
    save_model(folder, state.config, state.params, base.path / TOKENIZER, max_shard_size=size, dtype=dtype)
    model = state.config.model_dump(mode="json")
    return {"weights": fingerprint(state.params), "model": model, "saved_as": [dtype, size]}


def load_weights(made: Manifest) -> tuple[MambaConfig, dict[str, np.ndarray]]:
    """Return the model and the weights of a Hugging Face folder."""
    return load_model(made.path)


FULL = Way(
    weights="trained_weights",
    perplexity="perplexity",
    job="train",
    results=("perplexity", "samples"),
    description="Weights after training, as a Hugging Face folder with metrics.json; an interrupted run continues.",
    stage=TrainRun,
    checks=ALWAYS,
    begin=begin_full,
    save=save_weights,
    load=load_weights,
)

WSLA = Way(
    weights="wsla_weights",
    perplexity="wsla_perplexity",
    job="wsla",
    results=("wsla_perplexity",),
    description="Weights after training x_proj alone in bounded steps, as a Hugging Face folder with metrics.json; "
    "everything else is bit for bit the base's.",
    stage=WslaRun,
    checks=PARTLY,
    begin=begin_wsla,
    save=save_weights,
    load=load_weights,
)

LORA = Way(
    weights="lora_adapter",
    perplexity="lora_perplexity",
    job="lora",
    results=("lora_perplexity",),
    description="A low-rank adapter trained on frozen base weights, as a folder under PEFT's names with metrics.json.",
    stage=LoraRun,
    checks=PARTLY,
    begin=begin_adapter,
    save=save_adapter_folder,
    load=adapted_model,
    shown=adapter_metadata,
)

WAYS = (FULL, WSLA, LORA)
