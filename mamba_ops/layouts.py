"""Checkpoints in the layout of the original repositories (`state-spaces/mamba-*`): their config.json and keys.

The configuration is mapped as transformers' conversion of these repositories does, and as `mamba_ssm` reads it
(`MambaConfig` in config_mamba.py, `Mamba` in mamba_simple.py).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mamba_ops.config import UNSUPPORTED_HINT
from mamba_ops.parameters import EMBEDDING
from mamba_ops.tensors import mismatch

EMBEDDING_THERE = "backbone.embedding.weight"

KEYS = {
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
    "residual_in_fp32": "residual_in_fp32",
}
LAYER_KEYS = {
    "d_state": "state_size",
    "d_conv": "conv_kernel",
    "expand": "expand",
    "dt_rank": "time_step_rank",
    "dt_min": "time_step_min",
    "dt_max": "time_step_max",
    "dt_init": "time_step_init_scheme",
    "dt_scale": "time_step_scale",
    "dt_init_floor": "time_step_floor",
    "conv_bias": "use_conv_bias",
    "bias": "use_bias",
}
WITHOUT_EFFECT = frozenset({"fused_add_norm", "attn_cfg", "initializer_cfg"})
"""How it is computed or was initialised, and the heads of attention layers that there are none of."""

WITHOUT_EFFECT_IN_A_LAYER = frozenset({"use_fast_path"})
ADDED_BY_TOOLS = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"})
CHECKED = frozenset({"ssm_cfg", "pad_vocab_size_multiple", "attn_layer_idx", "d_intermediate", "rms_norm"})

PAD_MULTIPLE = 8
"""`mamba_ssm`'s default of pad_vocab_size_multiple."""

Value = TypeVar("Value")


def is_original(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is in the original layout."""
    return "model_type" not in values and not {"d_model", "n_layer"}.isdisjoint(values)


def original_config(path: Path, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of Hugging Face's config.json, and each one's name in the file.

    The vocabulary is padded up to a multiple of pad_vocab_size_multiple, as the embedding is.
    Raises CheckpointError on another layer type, attention, MLPs, LayerNorm, or an unknown key.
    """
    layer = values.get("ssm_cfg") or {}
    if not isinstance(layer, dict):
        raise mismatch(path, "ssm_cfg", _short(layer), "an object, {} for Mamba-1 as published")
    for key, found, expected, why in _choices(values, layer):
        if found != expected:
            raise mismatch(path, key, _short(found), f"{expected!r}: {UNSUPPORTED_HINT}; {why} would be silently lost")
    _refuse_unknown(path, "", values, KEYS.keys() | WITHOUT_EFFECT | ADDED_BY_TOOLS | CHECKED)
    _refuse_unknown(path, "ssm_cfg.", layer, LAYER_KEYS.keys() | WITHOUT_EFFECT_IN_A_LAYER | {"layer"})
    mapped = {here: values[there] for there, here in KEYS.items() if there in values}
    mapped |= {here: layer[there] for there, here in LAYER_KEYS.items() if there in layer}
    names = {here: there for there, here in KEYS.items()}
    names |= {here: f"ssm_cfg.{there}" for there, here in LAYER_KEYS.items()}
    multiple = values.get("pad_vocab_size_multiple", PAD_MULTIPLE)
    if not _is_size(multiple):
        raise mismatch(path, "pad_vocab_size_multiple", _short(multiple), "an integer from 1 on")
    if _is_size(values.get("vocab_size")):
        mapped["vocab_size"] = math.ceil(values["vocab_size"] / multiple) * multiple
    return {"model_type": "mamba", **mapped}, names


def renamed(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Return the tensors with the original name of the embedding, the only one that differs, replaced."""
    if EMBEDDING in tensors:
        return dict(tensors)
    return {EMBEDDING if name == EMBEDDING_THERE else name: value for name, value in tensors.items()}


def _choices(values: Mapping[str, Any], layer: Mapping[str, Any]) -> list[tuple[str, Any, Any, str]]:
    """Return key, value, the one value that is supported, and what the others have besides."""
    return [
        ("ssm_cfg.layer", layer.get("layer", "Mamba1"), "Mamba1", "another kind of layer, such as Mamba-2's,"),
        ("attn_layer_idx", values.get("attn_layer_idx") or [], [], "attention layers"),
        ("d_intermediate", values.get("d_intermediate", 0), 0, "an MLP in each layer"),
        ("rms_norm", values.get("rms_norm", True), True, "LayerNorm's mean and bias"),
    ]


def _refuse_unknown(path: Path, prefix: str, values: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
    unknown = sorted(values.keys() - known)
    if unknown:
        what = "a key of Mamba-1 in the original layout, or model_type 'mamba' for one in Hugging Face's"
        raise mismatch(path, prefix + unknown[0], _short(values[unknown[0]]), what)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _short(value: Any) -> str:
    return repr(value)[:80]
