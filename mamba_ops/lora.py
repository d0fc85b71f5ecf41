"""LoRA (Hu et al. 2021): which weights are adapted, the adapters' tensors, and merging them into the weights.

A weight W: (out, in) becomes W + s B A with A: (r, in), B: (out, r), s = lora_alpha / r, or lora_alpha / sqrt(r) with
use_rslora (Kalajdzievski 2023). The convolution's weight counts as (d_inner, d_conv). For the embedding, as in PEFT,
A is (r, vocab_size) and B (d_model, r), and s (B A)^T is added, to the lookup and a tied head alike.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from mamba_ops.config import LoraConfig, MambaConfig
from mamba_ops.ops import Adapter, Adapters
from mamba_ops.parameters import EMBEDDING, layer_prefix, stream, table


class Names(NamedTuple):
    """The names of an adapter's tensors: PEFT's keys without `base_model.model.`."""

    A: str
    B: str


def targets(config: MambaConfig, lora: LoraConfig) -> dict[str, int]:
    """Return the weights that are adapted, in table order, and the rank of each: r, or its smaller dimension."""
    chosen = {_weight(layer, target) for target in lora.target_modules for layer in range(config.num_hidden_layers)}
    return {name: min(lora.r, *_matrix(name, entry.shape)) for name, entry in table(config).items() if name in chosen}


def tensor_names(weight: str) -> Names:
    """Return the names of a weight's adapter tensors."""
    if weight == EMBEDDING:
        module = weight.removesuffix(".weight")
        return Names(f"{module}.lora_embedding_A", f"{module}.lora_embedding_B")
    module = weight.removesuffix(".weight")
    return Names(f"{module}.lora_A.weight", f"{module}.lora_B.weight")


def tensor_shapes(config: MambaConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each adapter tensor, A before B, in the order of the weights."""
    entries = table(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for weight, rank in targets(config, lora).items():
        rows, columns = _matrix(weight, entries[weight].shape)
        names = tensor_names(weight)
        shapes |= {names.A: (rank, columns), names.B: (rows, rank)}
    return shapes


def initial(config: MambaConfig, lora: LoraConfig, seed: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return fresh tensors that add nothing, as PEFT makes them.

    A ~ U(+-1/sqrt(in)) and B = 0; for the embedding A = 0 and B ~ N(0, 1). Each tensor has a random stream of its own.
    """
    tensors = {}
    for name, shape in tensor_shapes(config, lora).items():
        rng = stream(seed, name)
        if name.endswith(".lora_A.weight"):
            value = rng.uniform(-(shape[1] ** -0.5), shape[1] ** -0.5, shape)
        elif name.endswith("lora_embedding_B"):
            value = rng.standard_normal(shape)
        else:
            value = np.zeros(shape)
        tensors[name] = value.astype(dtype)
    return tensors


def adapters(config: MambaConfig, lora: LoraConfig) -> dict[str, Adapter]:
    """Return the adapters by weight, without dropout."""
    return {
        weight: Adapter(*tensor_names(weight), lora.lora_alpha / (math.sqrt(rank) if lora.use_rslora else rank))
        for weight, rank in targets(config, lora).items()
    }


def zero_at_start(weight: str, adapter: Adapter) -> str:
    """Return the name of the tensor without which an adapter adds nothing, and that fresh ones have at 0."""
    return adapter.A if weight == EMBEDDING else adapter.B


def merged(config: MambaConfig, params: Mapping[str, np.ndarray], found: Adapters) -> dict[str, np.ndarray]:
    """Return the weights with their adapters added, in float64 and rounded once; adapters' tensors are left out."""
    weights = {name: params[name] for name in table(config)}
    for name, adapter in found.items():
        A, B = (params[tensor].astype(np.float64) for tensor in (adapter.A, adapter.B))
        added = adapter.scale * (B @ A)
        weight = weights[name]
        added = added.T if name == EMBEDDING else added.reshape(weight.shape)
        weights[name] = np.ascontiguousarray((weight + added).astype(weight.dtype))
    return weights


def notes(config: MambaConfig, lora: LoraConfig) -> list[str]:
    """Return what to know about a configuration: ranks that are clamped, and dropout where there is no input."""
    found = []
    ranks = targets(config, lora)
    for target in dict.fromkeys(lora.target_modules):
        rank = ranks[_weight(0, target)]
        if rank < lora.r:
            found.append(f"{target}: r {lora.r} is clamped to {rank}, its smaller dimension")
    without = [target for target in ("conv1d", "A_log", "embeddings") if target in lora.target_modules]
    if lora.lora_dropout and without:
        found.append(f"lora_dropout does not act on {', '.join(without)}: their adapter has no input to drop")
    return found


def _weight(layer: int, target: str) -> str:
    if target == "embeddings":
        return EMBEDDING
    return f"{layer_prefix(layer)}mixer.{target}" + ("" if target == "A_log" else ".weight")


def _matrix(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (out, in) of a weight: of the embedding (d_model, vocab_size), of the convolution (d_inner, d_conv)."""
    return (shape[1], shape[0]) if name == EMBEDDING else (shape[0], math.prod(shape[1:]))
