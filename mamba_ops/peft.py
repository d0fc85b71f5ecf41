"""Adapter folders under PEFT's file and key names, written and read; what is not plain LoRA is refused by name.

All seven targets are written alike. What PEFT itself can run on Mamba is less: `export.py` makes folders for that.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mamba_ops.config import LoraConfig, MambaConfig
from mamba_ops.fingerprint import atomic_directory, write_json
from mamba_ops.lora import targets as ranks
from mamba_ops.lora import tensor_names, tensor_shapes
from mamba_ops.parameters import EMBEDDING
from mamba_ops.peft_config import adapter_config, check_ranks, lora_config, target_of
from mamba_ops.shards import read_json
from mamba_ops.tensors import (
    check_finite,
    fingerprint,
    load_header,
    load_metadata,
    mismatch,
    read_tensor,
    save_tensors,
)

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
FINGERPRINT = "base_fingerprint"
READ = ("F32", "F16", "BF16")


FREE = frozenset({"lora_dropout"})
"""Fields in which a continued adapter may differ: they change how it is trained, not what its tensors mean."""


class Adapted(NamedTuple):
    """An adapter: its configuration, tensors by name, the fingerprint of its base if recorded, where it was read."""

    lora: LoraConfig
    tensors: Mapping[str, np.ndarray]
    base_fingerprint: str | None = None
    where: str | Path = "adapter"


def save_adapter(
    folder: str | Path,
    config: MambaConfig,
    lora: LoraConfig,
    tensors: Mapping[str, np.ndarray],
    base_fingerprint: str,
    base_path: str | Path | None = None,
) -> None:
    """Write an adapter folder that appears whole or not at all, in float32.

    base_fingerprint: `tensors.fingerprint` of the base's parameters in float32. base_path: where PEFT looks for the
    base. Raises CheckpointError on tensors that are not the configuration's, FileExistsError when the folder exists.
    """
    path = Path(folder) / WEIGHTS
    shapes = tensor_shapes(config, lora)
    _check_names(path, list(tensors), shapes, config)
    for name, shape in shapes.items():
        _check_shape(path, name, np.shape(tensors[name]), shape)
    values = adapter_config(config, lora, base_path)
    write_adapter(folder, values, {name: tensors[name] for name in shapes}, base_fingerprint)


def load_adapter(folder: str | Path, config: MambaConfig) -> Adapted:
    """Return the adapter in a folder written here or by PEFT, for a base with this config.

    Raises CheckpointError on anything but plain LoRA over whole targets, a tensor that is missing, unknown or of
    another shape than the base's config says, another dtype, a value that is not finite, and a missing, truncated or
    corrupt file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        raise mismatch(folder, "", found, f"an adapter folder with {CONFIG} and {WEIGHTS}")
    values = read_json(folder / CONFIG, "the adapter's configuration")
    lora = lora_config(folder / CONFIG, values, config)
    path = _weights(folder)
    shapes = {PREFIX + name: shape for name, shape in tensor_shapes(config, lora).items()}
    header = load_header(path)
    _check_names(path, list(header), shapes, config)
    for key, shape in shapes.items():
        if header[key].dtype not in READ:
            raise mismatch(path, key, f"dtype {header[key].dtype}", ", ".join(READ))
        _check_shape(path, key, header[key].shape, shape)
    check_ranks(folder / CONFIG, values, config, lora)
    tensors = {}
    for key in shapes:
        tensors[key.removeprefix(PREFIX)] = read_tensor(path, header[key], np.dtype(np.float32))
        check_finite(path, key, tensors[key.removeprefix(PREFIX)])
    base_fingerprint = load_metadata(path).get(FINGERPRINT)
    if base_fingerprint is None:
        _check_meaning(path, config, lora, tensors)
    return Adapted(lora, tensors, base_fingerprint, folder)


def check_base(adapted: Adapted, base: str | Mapping[str, np.ndarray]) -> None:
    """Raise CheckpointError when the base is not the one that the adapter was trained on.

    base: the float32 parameters, or their fingerprint. An adapter without a recorded fingerprint, such as PEFT's own,
    fits any base of its shape.
    """
    if adapted.base_fingerprint is None:
        return
    found = base if isinstance(base, str) else fingerprint(base)
    if found != adapted.base_fingerprint:
        expected = f"{adapted.base_fingerprint}, that of the base the adapter was trained on"
        raise mismatch(adapted.where, FINGERPRINT, f"a base with {found}", expected)


def check_continued(adapted: Adapted, lora: LoraConfig) -> None:
    """Raise ValueError naming each field in which an adapter's configuration is not the one it is continued with."""
    a, b = (options.model_dump(exclude=set(FREE)) for options in (adapted.lora, lora))
    different = [f"{name}: found {a[name]}, expected {b[name]}" for name in a if a[name] != b[name]]
    if different:
        raise ValueError(
            f"{adapted.where}: an adapter of another configuration is not continued: {'; '.join(different)}"
        )


def write_adapter(
    folder: str | Path, values: Mapping[str, Any], tensors: Mapping[str, np.ndarray], base_fingerprint: str
) -> None:
    """Write an adapter_config.json and tensors, under PEFT's names for them, to a folder that does not exist yet."""
    with np.errstate(over="ignore"):  # beyond float32 becomes inf, which is refused by name
        stored = {PREFIX + name: np.asarray(array).astype(np.float32, copy=False) for name, array in tensors.items()}
    for key, array in stored.items():
        check_finite(Path(folder) / WEIGHTS, key, array)
    with atomic_directory(folder) as temporary:
        save_tensors(temporary / WEIGHTS, stored, {"format": "pt", FINGERPRINT: base_fingerprint})
        write_json(temporary / CONFIG, values)


def _weights(folder: Path) -> Path:
    """Return the file of tensors; a pickle is refused with the command that converts it."""
    path = folder / WEIGHTS
    if not path.exists() and (folder / PICKLE).exists():
        code = (
            "import torch; from safetensors.torch import save_file; "
            f'tensors = torch.load("{PICKLE}", map_location="cpu", weights_only=True); '
            f'save_file({{k: v.contiguous() for k, v in tensors.items()}}, "{WEIGHTS}", {{"format": "pt"}})'
        )
        expected = f"{WEIGHTS}; where torch is installed, this makes it in that folder: python -c {shlex.quote(code)}"
        raise mismatch(folder, PICKLE, "a pickle, which can run code and is never read", expected)
    return path


def _check_names(
    path: Path, found: Sequence[str], expected: Mapping[str, tuple[int, ...]], config: MambaConfig
) -> None:
    """Raise CheckpointError naming the first tensor that is unknown and the first that is missing."""
    unknown, missing = [sorted(set(a) - set(b)) for a, b in ((found, expected), (expected, found))]
    if unknown:
        wanted = f"{missing[0]} and no other name" if missing else "no other tensors than"
        raise mismatch(path, unknown[0], "an unknown tensor", f"{wanted} {_whose(expected, config)}")
    if missing:
        raise mismatch(path, missing[0], "no such tensor", f"each {_whose(expected, config)}")


def _whose(expected: Mapping[str, Any], config: MambaConfig) -> str:
    return f"of the {len(expected)} that the targets have on this base of {config.num_hidden_layers} layers"


def _check_shape(path: Path, key: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != expected:
        raise mismatch(path, key, f"shape {tuple(found)}", f"{expected}, which this base and the adapter's r give")


def _check_meaning(path: Path, config: MambaConfig, lora: LoraConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """Raise CheckpointError where an adapter that PEFT trained would act here in another way."""
    if "embeddings" in lora.target_modules and config.tie_word_embeddings:
        key = PREFIX + tensor_names(EMBEDDING).A
        expected = (
            f"one that acts on the tied head too, as those written here do ({FINGERPRINT} in the file's metadata)"
        )
        raise mismatch(path, key, "an embeddings adapter by PEFT, which acts on the lookup alone", expected)
    for weight in ranks(config, lora):
        name = tensor_names(weight).B
        if target_of(weight) == "dt_proj" and tensors[name].any():
            expected = f"zeros, or one written here ({FINGERPRINT} in the file's metadata)"
            raise mismatch(path, PREFIX + name, "a dt_proj adapter, which transformers bypasses", expected)
