"""The weights of a folder in one safetensors file or in several with an index: where each tensor lies."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from mamba_ops.fingerprint import write_json
from mamba_ops.tensors import CheckpointError, Entry, load_header, mismatch

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Stored(NamedTuple):
    """Where a tensor lies: the file, its name there, and what the file's header says about it."""

    path: Path
    name: str
    entry: Entry


def locate(folder: Path) -> tuple[Path, dict[str, Stored]]:
    """Return the file that lists a folder's weights, and where each tensor lies; no value is read.

    Raises CheckpointError on a pickle, a faulty index, a missing, truncated or corrupt file, and when the index
    and the files differ in what they hold.
    """
    if (folder / WEIGHTS).exists():
        path = folder / WEIGHTS
        return path, {name: Stored(path, name, entry) for name, entry in load_header(path).items()}
    if not (folder / INDEX).exists():
        raise _no_weights(folder)
    index = folder / INDEX
    places = load_index(index)
    files: dict[str, list[str]] = {}
    for name, file in places.items():
        files.setdefault(file, []).append(name)
    for file, names in files.items():
        if not (folder / file).exists():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise mismatch(folder / file, names[0], "no such file", f"the shard that {INDEX} names for it{more}")
    headers = {file: load_header(folder / file) for file in files}
    for file, names in files.items():
        absent, extra = [key for key in names if key not in headers[file]], headers[file].keys() - set(names)
        if absent:
            raise mismatch(folder / file, absent[0], "no such tensor", f"one, since {INDEX} names this file for it")
        if extra:
            key = min(extra)
            said = f"places in {places[key]}" if key in places else "does not name"
            raise mismatch(folder / file, key, f"a tensor that {INDEX} {said}", f"the {len(names)} that it names")
    return index, {name: Stored(folder / file, name, headers[file][name]) for name, file in places.items()}


def load_index(path: Path) -> dict[str, str]:
    """Return the file name of each key in a model.safetensors.index.json.

    Raises CheckpointError unless each is the plain name of a safetensors file beside it.
    """
    places = read_json(path, "the index of the shards").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise mismatch(path, "weight_map", f"{places!r:.80}", "an object of file names by key")
    for key, file in places.items():
        if isinstance(file, str) and Path(file).suffix in PICKLES:
            raise mismatch(path, key, f"{file!r:.80}, a pickle, which can run code and is never read", _converted(file))
        if not isinstance(file, str) or not _is_plain(file) or not file.endswith(SUFFIX):
            raise mismatch(path, key, f"{file!r:.80}", f"the plain name of a {SUFFIX} file in the same folder")
    return places


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file; raises CheckpointError saying `what` is expected there."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        values = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except FileNotFoundError:
        raise mismatch(path, "", "no such file", what) from None
    except (OSError, ValueError, RecursionError) as error:
        raise mismatch(path, "", f"no readable JSON ({error})", "a JSON object") from None
    if not isinstance(values, dict):
        raise mismatch(path, "", f"JSON of type {type(values).__name__}", "a JSON object")
    return values


def split(sizes: Mapping[str, int], limit: int | None) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, filled in order up to `limit` bytes of values (None: no limit).

    A tensor above the limit gets a file of its own. Files are named as Hugging Face's are.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and limit is not None and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    stem = WEIGHTS.removesuffix(SUFFIX)
    return {f"{stem}-{i:05d}-of-{len(shards):05d}{SUFFIX}": names for i, names in enumerate(shards, 1)}


def write_index(folder: Path, files: Mapping[str, list[str]], sizes: Mapping[str, int], parameters: int) -> None:
    """Write the index of shards as transformers does; sizes: bytes by tensor."""
    places = {name: file for file, names in files.items() for name in names}
    total = {"total_parameters": parameters, "total_size": sum(sizes.values())}
    write_json(folder / INDEX, {"metadata": total, "weight_map": places})


def _is_plain(file: str) -> bool:
    """Whether a name stays in its folder on any system."""
    return PureWindowsPath(file).name == file and "\0" not in file


def _no_weights(folder: Path) -> CheckpointError:
    names = sorted(file.name for file in folder.iterdir())
    pickles = [name for name in names if Path(name).suffix in PICKLES]
    if pickles:
        first = min(pickles, key=lambda name: (not name.startswith(("pytorch_model", "model")), name))
        return mismatch(folder, first, "a pickle, which can run code and is never read", _converted(first))
    others = [name for name in names if name.endswith(SUFFIX)]
    if others:
        return mismatch(folder, WEIGHTS, f"only {others[0]}", f"the weights, or {INDEX} that names their files")
    return mismatch(folder, WEIGHTS, "no such file", "the weights")


def _converted(pickle: str) -> str:
    """Return what is expected instead of a pickle, and the command that makes it where torch is installed."""
    files = re.sub(r"-\d{5}-of-\d{5}", "-*-of-*", pickle)
    code = (
        "import glob, torch; from safetensors.torch import save_file; "
        f'parts = [torch.load(f, map_location="cpu", weights_only=True) for f in glob.glob({json.dumps(files)})]; '
        "save_file({k: v.clone(memory_format=torch.contiguous_format) for part in parts for k, v in part.items()}, "
        f'"{WEIGHTS}", {{"format": "pt"}})'
    )
    return f"{WEIGHTS}; where torch is installed, this makes it in that folder: python -c {shlex.quote(code)}"
