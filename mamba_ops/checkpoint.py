"""Hugging Face folders, read and written; `save_tensors` and `load_tensors` are the one gate to disk."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from mamba_ops.config import UNSUPPORTED_HINT, MambaConfig
from mamba_ops.fingerprint import atomic_directory, write_json
from mamba_ops.parameters import EMBEDDING, LM_HEAD, table
from mamba_ops.tensors import (
    CheckpointError,
    check_finite,
    fingerprint,
    load_header,
    load_metadata,
    load_tensors,
    mismatch,
    save_tensors,
)
from mamba_ops.tokenizer import BESIDE, TOKENIZER, embedding_rows, load_tokenizer

__all__ = [
    "CheckpointError",
    "fingerprint",
    "load_config",
    "load_metadata",
    "load_model",
    "load_tensors",
    "save_model",
    "save_tensors",
]

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

LOOKALIKES = {
    "mamba2": "a scalar A per head and a norm inside the mixer",
    "falcon_mamba": "norms on dt, B and C",
    "jamba": "attention and expert layers, and norms on dt, B and C",
    "zamba": "shared attention layers and several heads in the mixer",
    "zamba2": "shared attention and Mamba-2 layers",
    "bamba": "attention and Mamba-2 layers",
    "falcon_h1": "attention beside Mamba-2 in each layer",
    "granitemoehybrid": "attention, expert and Mamba-2 layers",
    "nemotron_h": "attention, MLP and Mamba-2 layers",
}
"""What a model that resembles Mamba-1 has besides, and would silently lose."""


def save_model(
    folder: str | Path,
    config: MambaConfig,
    params: Mapping[str, np.ndarray],
    tokenizer_file: str | Path | None = None,
) -> None:
    """Write a Hugging Face folder that appears whole or not at all; weights become float32.

    A tied folder holds no lm_head.weight. `tokenizer_file` is a tokenizer.json, copied as it is.
    Raises CheckpointError on parameters or a tokenizer that do not fit the config, FileExistsError when the
    folder exists, and what `load_tokenizer` raises.
    """
    folder = Path(folder)
    _check_shapes(folder / WEIGHTS, config, {name: value.shape for name, value in params.items()})
    with np.errstate(over="ignore"):  # beyond float32 becomes inf, which is refused by name
        weights = {name: np.asarray(params[name], dtype=np.float32) for name in table(config)}
    for name, array in weights.items():
        check_finite(folder / WEIGHTS, name, array)
    with atomic_directory(folder) as temporary:
        if tokenizer_file is not None:
            _copy_tokenizer(temporary, config, Path(tokenizer_file))
        save_tensors(temporary / WEIGHTS, weights, metadata={"format": "pt"})
        write_json(temporary / CONFIG, _config_json(config))
        write_json(temporary / GENERATION, {"_from_model_config": True, **_special_ids(config)})


def load_model(
    folder: str | Path, dtype: type[np.floating[Any]] = np.float32
) -> tuple[MambaConfig, dict[str, np.ndarray]]:
    """Return the config and the parameters of a Hugging Face folder, as `dtype`, in table order.

    Raises CheckpointError on a key that is missing or unknown, a shape that does not follow from the config,
    a dtype other than float32, or a value that is not finite.
    """
    folder = Path(folder)
    config = load_config(folder)
    path = _weights_file(folder)
    header = load_header(path)
    for name, entry in header.items():
        if entry.dtype != "F32":
            raise mismatch(path, name, f"dtype {entry.dtype}", "F32 (float32); convert the folder first")
    explicit_head = config.tie_word_embeddings and LM_HEAD in header
    shapes = {name: entry.shape for name, entry in header.items() if not (explicit_head and name == LM_HEAD)}
    _check_shapes(path, config, shapes)
    tensors = load_tensors(path)
    for name, array in tensors.items():
        check_finite(path, name, array)
    if explicit_head and not np.array_equal(tensors[LM_HEAD], tensors[EMBEDDING]):
        expected = f"{EMBEDDING} again, or tie_word_embeddings false in {CONFIG}"
        raise mismatch(path, LM_HEAD, "a head that differs from the embedding it is tied to", expected)
    return config, {name: tensors[name].astype(dtype, copy=False) for name in table(config)}


def load_config(folder: str | Path) -> MambaConfig:
    """Return the config of a Hugging Face folder; raises CheckpointError on anything but a valid Mamba-1."""
    path = _existing_folder(Path(folder)) / CONFIG
    values = _read_json(path)
    if "model_type" not in values:
        hint = "a folder in the original layout has to be converted to Hugging Face's first"
        raise mismatch(path, "model_type", "none", f"'mamba': {UNSUPPORTED_HINT}; {hint}")
    model_type = values["model_type"]
    if model_type != "mamba":
        lost = LOOKALIKES.get(model_type) if isinstance(model_type, str) else None
        hint = f"{UNSUPPORTED_HINT}; {lost} would be silently lost" if lost else UNSUPPORTED_HINT
        raise mismatch(path, "model_type", repr(model_type), f"'mamba': {hint}")
    try:
        return MambaConfig.model_validate(values)
    except ValidationError as error:
        raise _config_error(path, error) from None


def _config_json(config: MambaConfig) -> dict[str, Any]:
    values = config.model_dump()
    values.pop("torch_dtype", None)  # the older name of dtype
    return values | {
        "architectures": ["MambaForCausalLM"],
        "dtype": "float32",
        "intermediate_size": config.d_inner,
        "time_step_rank": config.dt_rank,
    }


def _special_ids(config: MambaConfig) -> dict[str, int | None]:
    ids = {"bos": config.bos_token_id, "eos": config.eos_token_id, "pad": config.pad_token_id}
    return {f"{name}_token_id": value for name, value in ids.items()}


def _copy_tokenizer(folder: Path, config: MambaConfig, source: Path) -> None:
    """Copy a tokenizer.json, and copy or write what transformers' AutoTokenizer reads beside it."""
    tokenizer = load_tokenizer(source)
    rows = embedding_rows(tokenizer)
    if rows > config.vocab_size:
        found = f"{rows} embedding rows needed"
        raise mismatch(source, "vocabulary", found, f"at most vocab_size = {config.vocab_size}")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for key, value in _special_ids(config).items():
        token = tokenizer.id_to_token(value) if value is not None and value >= 0 else None
        if token is not None:
            settings[key.removesuffix("_id")] = token
        elif value is not None:
            raise mismatch(source, key, f"no token with id {value}", "a token of the tokenizer")
    shutil.copyfile(source, folder / TOKENIZER)
    for name in BESIDE:
        if (source.parent / name).is_file():
            shutil.copyfile(source.parent / name, folder / name)
    if not (folder / BESIDE[0]).exists():
        write_json(folder / BESIDE[0], settings)


def _check_shapes(path: Path, config: MambaConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless names and shapes are exactly the config's."""
    expected = {name: entry.shape for name, entry in table(config).items()}
    missing, unknown = [sorted(set(a) - set(b)) for a, b in ((expected, found), (found, expected))]
    if EMBEDDING in missing and "backbone.embedding.weight" in unknown:
        raise mismatch(path, "backbone.embedding.weight", "a name of the original layout", EMBEDDING)
    if missing or unknown:
        parts = [f"{_some(missing)} missing"] * bool(missing) + [f"{_some(unknown)} unknown"] * bool(unknown)
        raise mismatch(path, "", ", ".join(parts), f"the {len(expected)} tensors of its config")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise mismatch(path, name, f"shape {tuple(found[name])}", shape)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _existing_folder(folder: Path) -> Path:
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        raise mismatch(folder, "", found, f"a local Hugging Face folder with {CONFIG} and {WEIGHTS}")
    return folder


def _weights_file(folder: Path) -> Path:
    """Return the folder's safetensors file; refuse shards and pickles by name."""
    path = folder / WEIGHTS
    if path.exists():
        return path
    if (folder / INDEX).exists():
        raise mismatch(folder, INDEX, "weights in several files", f"one {WEIGHTS}")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        convert = f"{WEIGHTS}; transformers' from_pretrained and save_pretrained write one"
        raise mismatch(folder, pickles[0], "a pickle, which can run code and is never read", convert)
    raise mismatch(folder, WEIGHTS, "no such file", "the weights")


def _read_json(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except FileNotFoundError:
        raise mismatch(path, "", "no such file", "the model's configuration") from None
    except (OSError, ValueError, RecursionError) as error:
        raise mismatch(path, "", f"no readable JSON ({error})", "a JSON object") from None
    if not isinstance(values, dict):
        raise mismatch(path, "", f"JSON of type {type(values).__name__}", "a JSON object")
    return values


def _config_error(path: Path, error: ValidationError) -> CheckpointError:
    """Turn the first wrong key of a pydantic error into one line; a union's alternatives are joined."""
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    if not key:
        expected = first["msg"].removeprefix("Value error, ").removeprefix("expected ")
        return mismatch(path, "", "keys that contradict each other", expected)
    messages = [e["msg"] for e in error.errors(include_url=False) if e["loc"][:1] == first["loc"][:1]]
    expected = " or ".join(message.removeprefix("Input should be ") for message in messages)
    found = "nothing" if first["type"] == "missing" else repr(first["input"])[:80]
    return mismatch(path, key, found, "a value" if first["type"] == "missing" else expected)
