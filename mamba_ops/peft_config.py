"""PEFT's adapter_config.json, written and read; what is more than plain LoRA on every layer is refused by name."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mamba_ops.config import TARGETS, LoraConfig, MambaConfig
from mamba_ops.lora import targets as ranks
from mamba_ops.tensors import mismatch

VALUES = {
    "bias": ("none",),
    "task_type": ("CAUSAL_LM",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
"""Settings that may have these values besides being off."""

CHANGES_BASE = "; others change the base, which save_pretrained(path_initial_model_for_weight_conversion=...) undoes"

HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
}
"""Settings that change nothing unless another one is on."""

OWN = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "rank_pattern"}

KNOWN = {
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "exclude_modules",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
}
"""Settings that have to be off."""


def adapter_config(
    config: MambaConfig,
    lora: LoraConfig,
    base_path: str | Path | None = None,
    modules_to_save: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the values of an adapter_config.json, as PEFT writes it after training."""
    alpha = lora.lora_alpha
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": None if base_path is None else str(base_path),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_bias": False,
        "lora_dropout": lora.lora_dropout,
        "modules_to_save": list(modules_to_save) or None,
        "peft_type": "LORA",
        "r": lora.r,
        "rank_pattern": {target_of(weight): r for weight, r in ranks(config, lora).items() if r < lora.r},
        "revision": None,
        "target_modules": sorted(lora.target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }


def lora_config(path: Path, values: Mapping[str, Any], config: MambaConfig) -> LoraConfig:
    """Return the configuration in an adapter_config.json; PEFT's defaults hold where a key is absent."""
    if values.get("peft_type") != "LORA":
        raise mismatch(path, "peft_type", f"{values.get('peft_type')!r:.80}", "'LORA'")
    for key, value in values.items():
        _check_plain(path, key, value)
    chosen = {
        "r": values.get("r", 8),
        "lora_alpha": values.get("lora_alpha", 8),
        "lora_dropout": values.get("lora_dropout", 0.0),
        "use_rslora": values.get("use_rslora", False),
    }
    for key in ("lora_alpha", "lora_dropout"):
        if isinstance(chosen[key], str):
            raise mismatch(path, key, f"{chosen[key]!r:.80}", "a number")
    try:
        return LoraConfig.model_validate(chosen | {"target_modules": _targets(path, values, config)}, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
        raise mismatch(path, str(first["loc"][0]), f"{first['input']!r:.80}", message) from None


def check_ranks(path: Path, values: Mapping[str, Any], config: MambaConfig, lora: LoraConfig) -> None:
    """Raise CheckpointError unless rank_pattern, read as PEFT reads it, clamps r to each target's smaller dimension."""
    pattern = values.get("rank_pattern") or {}
    if not isinstance(pattern, dict):
        raise mismatch(path, "rank_pattern", f"{pattern!r:.80}", "an object of ranks by module")
    for key in pattern:
        if not re.fullmatch(r"\^?[\w.]+\$?", key):
            raise mismatch(path, "rank_pattern", f"{key!r:.80}", "names of modules, which may begin with ^")
    for weight, expected in ranks(config, lora).items():
        module = weight.removesuffix(".weight")
        key = next((key for key in pattern if re.match(rf"(.*\.)?({key})$", module)), None)
        found = lora.r if key is None else pattern[key]
        if found != expected:
            bound = f"{expected} there: r, at most the target's smaller dimension on this base"
            raise mismatch(path, "rank_pattern", f"rank {found!r:.80} of {module}", bound)


def target_of(weight: str) -> str:
    """Return the target that a weight belongs to, such as in_proj."""
    return weight.removesuffix(".weight").rpartition(".")[2]


def _check_plain(path: Path, key: str, value: Any) -> None:
    """Raise CheckpointError when a setting makes the adapter more than plain LoRA on every layer."""
    if key in HARMLESS | OWN or value is False or value in (None, "", [], {}) or value in VALUES.get(key, ()):
        return
    if key in VALUES:
        allowed = " or ".join(map(repr, VALUES[key]))
        raise mismatch(path, key, f"{value!r:.80}", allowed + CHANGES_BASE * (key == "init_lora_weights"))
    feature = value is True or isinstance(value, list | dict)
    if key in KNOWN or feature:  # numbers and text that PEFT may add are details of a feature that is on elsewhere
        raise mismatch(path, key, f"{value!r:.80}", "it to be off: only plain LoRA on every layer is read")


def _targets(path: Path, values: Mapping[str, Any], config: MambaConfig) -> list[str]:
    """Return the targets that PEFT's target_modules choose: each names a module or the end of its name."""
    names = values.get("target_modules")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise mismatch(path, "target_modules", f"{names!r:.80}", f"a list of some of {', '.join(TARGETS)}")
    everything = ranks(config, LoraConfig(target_modules=list(TARGETS)))
    modules = {weight.removesuffix(".weight"): target_of(weight) for weight in everything}
    chosen: set[str] = set()
    for name in names:
        hits = {module for module in modules if module == name or module.endswith(f".{name}")}
        if not hits:
            raise mismatch(path, "target_modules", repr(name), f"some of {', '.join(TARGETS)}")
        chosen |= hits
    for module, target in modules.items():
        if module not in chosen and target in {modules[other] for other in chosen}:
            raise mismatch(path, "target_modules", f"{target} without {module}", f"{target} of every layer")
    return [target for target in TARGETS if target in {modules[module] for module in chosen}]
