"""Adapters on a base: begun or continued, saved, opened with their base; the asset merged_weights."""

import shutil
from math import prod
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np

from mamba_ops.checkpoint import fingerprint, load_model, save_model
from mamba_ops.config import LoraConfig, MambaConfig
from mamba_ops.export import add_to_base, open_adapted
from mamba_ops.lora import notes, targets, tensor_names, tensor_shapes
from mamba_ops.parameters import count
from mamba_ops.peft import load_adapter, save_adapter
from mamba_ops.peft_config import target_of
from mamba_ops.tokenizer import BESIDE, TOKENIZER
from mamba_ops.training_state import TrainingState, start
from pipelines.checks import Events, blocking, passed, reported
from pipelines.configuration import LoraRun, MergeRun, identity
from pipelines.io import Manifest, draft, output, publish
from pipelines.pictures import table
from pipelines.resources import Storage
from pipelines.weights import weights_finite, weights_metadata


@dg.asset(
    code_version="1",
    group_name="model",
    kinds={"numpy", "safetensors"},
    check_specs=blocking("merged_weights", weights_finite="Every weight is a finite number."),
)
@reported
def merged_weights(
    context: dg.AssetExecutionContext, config: MergeRun, storage: Storage, lora_adapter: Manifest
) -> Events:
    """The adapter added to its base, as a plain Hugging Face folder."""
    model, weights = adapted_model(lora_adapter)
    dtype, size = config.save_dtype, config.max_shard_size
    with draft(storage.path, "merged_weights") as folder:
        yield from passed("merged_weights", weights_finite=lambda: weights_finite(weights))
        words = lora_adapter.root / lora_adapter.facts["base_folder"] / TOKENIZER
        save_model(folder, model, weights, words, max_shard_size=size, dtype=dtype)
        content = {
            "weights": fingerprint(weights),
            "model": model.model_dump(mode="json"),
            "saved_as": [dtype, size],
            "tokenizer": lora_adapter.facts["tokenizer"],
            "base_folder": lora_adapter.facts["base_folder"],
        }
        manifest = publish(storage.path, "merged_weights", folder, content, identity(config), [lora_adapter], content)
    yield output(manifest, weights_metadata(model, weights))


def begin_adapter(context: dg.AssetExecutionContext, config: LoraRun, base: Manifest) -> TrainingState:
    """Return the state in which adapters train, fresh ones or those of the folder that is continued."""
    model, weights = load_model(base.path)
    lora = LoraConfig(**config.model_dump(include=set(LoraConfig.model_fields)))
    for note in notes(model, lora):
        context.log.info(note)
    adapter = load_adapter(Path(config.adapter).expanduser(), model) if config.adapter else None
    return start(model, weights, seed=config.seed, lora=lora, adapter=adapter, copy=False)


def save_adapter_folder(folder: Path, state: TrainingState, config: LoraRun, base: Manifest) -> dict[str, Any]:
    """Write an adapter folder under PEFT's names, with the base's tokenizer."""
    assert state.lora
    save_adapter(folder, state.config, state.lora, state.trained, base.facts["weights"])
    for name in (TOKENIZER, *BESIDE):
        if (base.path / name).is_file():
            shutil.copyfile(base.path / name, folder / name)
    return {
        "adapter": fingerprint(state.trained),
        "lora": state.lora.model_dump(mode="json"),
        "base": base.facts["weights"],
        "model": state.config.model_dump(mode="json"),
    }


def adapted_model(made: Manifest) -> tuple[MambaConfig, dict[str, np.ndarray]]:
    """Return the model and the weights of a base with its adapter added.

    Raises CheckpointError when the base is not the one that the adapter was trained on.
    """
    found = open_adapted(made.root / made.facts["base_folder"], made.path)
    return found.config, add_to_base(found)


def adapter_metadata(state: TrainingState) -> dict[str, Any]:
    """Return how many weights are adapted, and by target their rank and parameters."""
    assert state.lora
    return {
        "lora": dg.MetadataValue.json(state.lora.model_dump(mode="json")),
        "frozen_parameters": count(state.config),
        "adapted_weights": len(state.adapters),
        "adapters": table(adapted_targets(state.config, state.lora)),
    }


def adapted_targets(model: MambaConfig, lora: LoraConfig) -> list[dict[str, Any]]:
    """Return a row for each target: the weights that it matches, the rank, and the parameters r (in + out)."""
    shapes = tensor_shapes(model, lora)
    rows: dict[str, dict[str, Any]] = {}
    for weight, rank in targets(model, lora).items():
        each = sum(prod(shapes[name]) for name in tensor_names(weight))
        target = target_of(weight)
        row = rows.setdefault(
            target, {"target": target, "weights": 0, "r": rank, "parameters_each": each, "parameters": 0}
        )
        row["weights"] += 1
        row["parameters"] += each
    return list(rows.values())
