"""The folder of a training run: what it belongs to, and checkpoints that are there whole or not at all.

It holds `run.json` (what the run belongs to), `metrics.jsonl` (a line a step) and `checkpoints/step-00000012/` with
`model.safetensors` (the parameters that train), `optimizer.safetensors` and `state.json`.
"""

import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mamba_ops.fingerprint import atomic_directory, digest, file_digest, write_json
from mamba_ops.metrics import HISTORY
from mamba_ops.optimizer import AdamState
from mamba_ops.tensors import CheckpointError, load_tensors, mismatch, save_tensors
from mamba_ops.training_state import TrainingState, check_identity

try:
    import fcntl
except ImportError:  # no such lock on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 2
VERSIONS = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
RUN, LOCK, CHECKPOINTS = "run.json", ".lock", "checkpoints"
WEIGHTS, MOMENTS, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
COUNTERS = ("step", "skipped", "skipped_in_a_row", "tokens_seen", "seconds")


@contextmanager
def open_run_folder(folder: str | Path, identity: Mapping[str, Any]) -> Iterator[Path]:
    """Make or open a run folder, alone: a lock that ends with the process keeps a second one out.

    Raises RuntimeError when another holds the lock, ValueError when the folder belongs to another run or is
    something else. Leftovers of killed processes are removed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a") as lock:
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(f"{folder}: another process trains in this folder") from None
        _claim(folder, identity)
        _clean(folder)
        yield folder


def save_checkpoint(folder: Path, state: TrainingState, history: BinaryIO) -> None:
    """Write the state as `checkpoints/step-...` of a run folder, then remove all but the newest two.

    history: the open metrics file, which reaches the disk first.
    """
    os.fsync(history.fileno())
    path = folder / CHECKPOINTS / f"step-{state.step:08d}"
    with atomic_directory(path) as temporary:
        save_tensors(temporary / WEIGHTS, state.trained, {"format": "pt"})
        save_tensors(temporary / MOMENTS, _moment_tensors(state.adam))
        values = {name: getattr(state, name) for name in COUNTERS} | {
            "counts": state.adam.counts,
            "history_bytes": history.tell(),
            "run": digest(state.identity),
            "versions": VERSIONS | {"ops": state.ops},
            "files": {name: file_digest(temporary / name) for name in (WEIGHTS, MOMENTS)},
        }
        write_json(temporary / STATE, values | {"digest": digest(values)})
    _prune(folder)


def checkpoints(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run folder, oldest first."""
    parent = Path(folder) / CHECKPOINTS
    names = os.listdir(parent) if parent.is_dir() else []
    return [parent / name for name in sorted(names) if re.fullmatch(r"step-\d{8,}", name)]


def ops_before(folder: str | Path) -> str:
    """Return the name of the ops that made the newest checkpoint of a run folder, empty without one."""
    found = checkpoints(folder)
    return str(_read_state(found[-1] / STATE)["versions"].get("ops", "")) if found else ""


def load_newest(folder: str | Path, state: TrainingState) -> int:
    """Read the newest checkpoint of a run folder into `state`, in place, and return its history's bytes.

    Without one nothing changes and 0 is returned. Raises CheckpointError when it is not as it was written. It
    is not passed over: what is wrong with the disk should be known first, and removing the folder continues
    from the one before.
    """
    found = checkpoints(folder)
    if not found:
        return 0
    try:
        return _load(found[-1], state)
    except CheckpointError as error:
        before = f"the checkpoint before it, {found[-2]}" if len(found) > 1 else "the first step"
        raise CheckpointError(f"{error}; remove {found[-1]} to continue from {before}") from error


def _load(path: Path, state: TrainingState) -> int:
    values = _read_state(path / STATE)
    if values["run"] != digest(state.identity):
        raise mismatch(path / STATE, "run", values["run"], digest(state.identity))
    for name, expected in values["files"].items():
        found = file_digest(path / name) if (path / name).is_file() else "no such file"
        if found != expected:
            raise mismatch(path / name, "sha256", found, expected)
    versions = VERSIONS | {"ops": state.ops}
    if values["versions"] != versions:
        log.warning("%s: written by %s, read by %s: not bit for bit from here", path, values["versions"], versions)
    targets = [(WEIGHTS, state.trained), (MOMENTS, _moment_tensors(state.adam))]
    loaded = [(load_tensors(path / name), arrays) for name, arrays in targets]
    for tensors, arrays in loaded:
        for name, array in arrays.items():
            np.copyto(array, tensors[name], casting="no")
    state.adam.counts.update(values["counts"])
    for name in COUNTERS:
        setattr(state, name, values[name])
    return int(values["history_bytes"])


def _read_state(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        expected = values.pop("digest")
        found = digest(values)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise mismatch(path, "", f"no readable state ({error!r})", "the JSON that was written") from None
    if found != expected:
        raise mismatch(path, "digest", found, expected)
    return values


def _moment_tensors(adam: AdamState) -> dict[str, np.ndarray]:
    """Return the moments themselves, not copies, by the names they have on disk."""
    return {
        f"{name}.{moment}": array
        for name, pair in adam.moments.items()
        for moment, array in zip(("moment1", "moment2"), pair, strict=True)
    }


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Write run.json into a new run folder, or compare it with that of an old one."""
    path = folder / RUN
    if path.exists():
        try:
            recorded = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(recorded, dict):
                raise ValueError(f"a {type(recorded).__name__}")
        except ValueError as error:
            raise mismatch(path, "", f"no readable JSON ({error})", "what the run belongs to") from None
        check_identity(str(folder), recorded, identity)
        return
    others = [name for name in (HISTORY, CHECKPOINTS) if (folder / name).exists()]
    if others:
        raise ValueError(f"{folder}: found {others} without {RUN}, expected a new or a complete run folder")
    write_json(path, identity)


def _prune(folder: Path) -> None:
    for old in checkpoints(folder)[:-KEPT_CHECKPOINTS]:
        hidden = old.with_name(f".{old.name}.removed")
        os.rename(old, hidden)  # a half-removed folder is never taken for a checkpoint
        shutil.rmtree(hidden)


def _clean(folder: Path) -> None:
    """Remove what killed processes left: unfinished checkpoints and files, half-removed and surplus ones."""
    parent = folder / CHECKPOINTS
    for leftover in parent.glob(".step-*") if parent.is_dir() else ():
        shutil.rmtree(leftover)
    for leftover in folder.glob(f".{RUN}.*"):
        leftover.unlink()
    _prune(folder)
