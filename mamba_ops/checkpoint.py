"""Hugging Face folders, read and written; `save_tensors` and `load_tensors` are the one gate to disk."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from mamba_ops.config import UNSUPPORTED_HINT, MambaConfig, byte_size
from mamba_ops.fingerprint import atomic_directory, write_json
from mamba_ops.layouts import is_original, original_config, renamed
from mamba_ops.parameters import EMBEDDING, LM_HEAD, count, table
from mamba_ops.shards import WEIGHTS, Stored, locate, read_json, split, write_index
from mamba_ops.tensors import (
    DTYPES,
    CheckpointError,
    check_finite,
    fingerprint,
    load_metadata,
    load_tensors,
    mismatch,
    read_blocks,
    read_tensor,
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
READ = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SAVED = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"]}

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
    *,
    max_shard_size: int | str | None = None,
    dtype: str = "float32",
) -> None:
    """Write a Hugging Face folder that appears whole or not at all; weights become float32 or bfloat16.

    A tied folder holds no lm_head.weight. `tokenizer_file` is a tokenizer.json, copied as it is. Above
    `max_shard_size` (bytes, or text such as "2GB") weights go to several files with an index.
    Raises CheckpointError on parameters or a tokenizer that do not fit the config, FileExistsError when the
    folder exists, ValueError on another dtype or size, and what `load_tokenizer` raises.
    """
    folder = Path(folder)
    if dtype not in SAVED:
        raise ValueError(f"dtype: expected one of {', '.join(SAVED)}, got {dtype!r}")
    limit = None if max_shard_size is None else byte_size(max_shard_size)
    _check_names(folder / WEIGHTS, config, params)
    for name, entry in table(config).items():
        _check_shape(folder / WEIGHTS, name, np.shape(params[name]), entry.shape)
    with atomic_directory(folder) as temporary:
        if tokenizer_file is not None:
            _copy_tokenizer(temporary, config, Path(tokenizer_file))
        _save_weights(temporary, folder, config, params, limit, SAVED[dtype])
        write_json(temporary / CONFIG, _config_json(config, dtype))
        write_json(temporary / GENERATION, {"_from_model_config": True, **_special_ids(config)})


def load_model(
    folder: str | Path, dtype: type[np.floating[Any]] = np.float32
) -> tuple[MambaConfig, dict[str, np.ndarray]]:
    """Return the config and the parameters of a folder, as `dtype`, in table order.

    The folder is Hugging Face's or in the original layout, its weights float32, float16 or bfloat16 in one
    safetensors file or several. They are read one tensor at a time into what is returned.
    Raises CheckpointError on a key that is missing or unknown, a shape that does not follow from the config,
    another dtype, a value that is not finite, and a missing, truncated or corrupt file.
    """
    folder = Path(folder)
    config = load_config(folder)
    listing, stored = locate(folder)
    stored = renamed(stored)
    head = stored.pop(LM_HEAD, None) if config.tie_word_embeddings else None
    if head is not None and EMBEDDING not in stored:
        stored[EMBEDDING], head = head, None
    _check_names(listing, config, stored)
    shapes = {name: entry.shape for name, entry in table(config).items()}
    for name, place in (stored if head is None else stored | {LM_HEAD: head}).items():
        if place.entry.dtype not in READ:
            found = f"dtype {place.entry.dtype}"
            raise mismatch(place.path, place.name, found, f"{', '.join(READ)} ({', '.join(READ.values())})")
        _check_shape(place.path, place.name, place.entry.shape, shapes[EMBEDDING if name == LM_HEAD else name])
    params = {}
    for name, place in sorted(stored.items(), key=lambda item: (item[1].path, item[1].entry.offset)):
        params[name] = read_tensor(place.path, place.entry, np.dtype(dtype))
        check_finite(place.path, place.name, params[name])
    if head is not None:
        _check_head(head, params[EMBEDDING])
    return config, {name: params[name] for name in shapes}


def load_config(folder: str | Path) -> MambaConfig:
    """Return the config of a folder, in Hugging Face's form when it is in the original layout.

    Raises CheckpointError on anything but a valid Mamba-1.
    """
    path = _existing_folder(Path(folder)) / CONFIG
    values = read_json(path, "the model's configuration")
    names: dict[str, str] = {}
    if is_original(values):
        values, names = original_config(path, values)
    if "model_type" not in values:
        original = "or d_model and n_layer of the original layout"
        raise mismatch(path, "model_type", "none", f"'mamba', {original}: {UNSUPPORTED_HINT}")
    model_type = values["model_type"]
    if model_type != "mamba":
        lost = LOOKALIKES.get(model_type) if isinstance(model_type, str) else None
        hint = f"{UNSUPPORTED_HINT}; {lost} would be silently lost" if lost else UNSUPPORTED_HINT
        raise mismatch(path, "model_type", repr(model_type), f"'mamba': {hint}")
    try:
        return MambaConfig.model_validate(values)
    except ValidationError as error:
        raise _config_error(path, error, names) from None


def _save_weights(
    temporary: Path,
    folder: Path,
    config: MambaConfig,
    params: Mapping[str, np.ndarray],
    limit: int | None,
    dtype: np.dtype[Any],
) -> None:
    """Write the weights, a file at a time; errors name them where they will be."""
    sizes = {name: math.prod(entry.shape) * dtype.itemsize for name, entry in table(config).items()}
    files = split(sizes, limit)
    for file, names in files.items():
        with np.errstate(over="ignore"):  # beyond the dtype becomes inf, which is refused by name
            weights = {name: np.asarray(params[name]).astype(dtype, copy=False) for name in names}
        for name, array in weights.items():
            check_finite(folder / file, name, array)
        save_tensors(temporary / file, weights, metadata={"format": "pt"})
    if len(files) > 1:
        write_index(temporary, files, sizes, count(config))


def _config_json(config: MambaConfig, dtype: str) -> dict[str, Any]:
    values = config.model_dump()
    values.pop("torch_dtype", None)  # the older name of dtype
    return values | {
        "architectures": ["MambaForCausalLM"],
        "dtype": dtype,
        "intermediate_size": config.d_inner,
        "rescale_prenorm_residual": False,  # says how weights begin; transformers would divide loaded ones again
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


def _check_names(path: Path, config: MambaConfig, found: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the names are exactly the config's."""
    expected = table(config)
    missing, unknown = [sorted(set(a) - set(b)) for a, b in ((expected, found), (found, expected))]
    if missing or unknown:
        parts = [f"{_some(missing)} missing"] * bool(missing) + [f"{_some(unknown)} unknown"] * bool(unknown)
        raise mismatch(path, "", ", ".join(parts), f"the {len(expected)} tensors of its config")


def _check_shape(path: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != expected:
        raise mismatch(path, name, f"shape {tuple(found)}", expected)


def _check_head(head: Stored, embedding: np.ndarray) -> None:
    """Raise CheckpointError unless an explicit head of a tied model is the embedding."""
    flat = embedding.reshape(-1)
    with np.errstate(invalid="ignore"):  # what is not a number is not equal
        blocks = read_blocks(head.path, head.entry)
        same = all(np.array_equal(part, flat[start : start + part.size]) for start, part in blocks)
    if not same:
        expected = f"{EMBEDDING} again, or tie_word_embeddings false in {CONFIG} (the original layout: tie_embeddings)"
        raise mismatch(head.path, head.name, "a head that differs from the embedding it is tied to", expected)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _existing_folder(folder: Path) -> Path:
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        raise mismatch(folder, "", found, f"a local Hugging Face folder with {CONFIG} and {WEIGHTS}")
    return folder


def _config_error(path: Path, error: ValidationError, names: Mapping[str, str]) -> CheckpointError:
    """Turn the first wrong key of a pydantic error into one line; a union's alternatives are joined.

    names: of keys in the file, where they are others.
    """
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    if not key:
        expected = first["msg"].removeprefix("Value error, ").removeprefix("expected ")
        return mismatch(path, "", "keys that contradict each other", expected)
    messages = [e["msg"] for e in error.errors(include_url=False) if e["loc"][:1] == first["loc"][:1]]
    expected = " or ".join(message.removeprefix("Input should be ") for message in messages)
    found = "nothing" if first["type"] == "missing" else repr(first["input"])[:80]
    key = names.get(key, key)
    return mismatch(path, key, found, "a value" if first["type"] == "missing" else expected)
