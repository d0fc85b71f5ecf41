"""The state of a training run: in memory, what it belongs to, and as checkpoints, whole or not at all.

A run folder holds `run.json` (what the run belongs to), `metrics.jsonl` (a line a step) and
`checkpoints/step-00000012/` with `model.safetensors`, `optimizer.safetensors` and `state.json`.
"""

import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mamba_ops.config import BatchesConfig, LoraConfig, MambaConfig, TrainConfig
from mamba_ops.fingerprint import atomic_directory, digest, file_digest, write_json
from mamba_ops.lora import adapters, initial, tensor_shapes
from mamba_ops.metrics import HISTORY
from mamba_ops.ops import NO_ADAPTERS, Adapters, Dropout
from mamba_ops.optimizer import AdamState, adam_state
from mamba_ops.parameters import init, select, table
from mamba_ops.tensors import CheckpointError, fingerprint, load_tensors, mismatch, save_tensors

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

UNRELATED_TO_RESULT = frozenset(
    {
        "gradient_checkpointing",
        "logging_seconds",
        "max_seconds",
        "max_shard_size",
        "max_skipped_steps",
        "memory_limit",
        "save_dtype",
        "save_steps",
    }
)
"""Fields of TrainConfig that may change when a run is resumed: they do not change what a step computes."""


@dataclass
class TrainingState:
    """A model in training; `train` changes it in place.

    step: windows done, skipped ones included; with the run's configuration it says which epoch, batch and
    rate come next. seconds: wall time, all resumed parts together. identity: what the run belongs to, empty
    until training has begun. ops: the name of the ops that train it. With lora the parameters hold the frozen weights
    and the adapters' tensors, which alone train; seed: of their initial values and of dropout.
    """

    config: MambaConfig
    params: dict[str, np.ndarray]
    names: list[str]
    adam: AdamState
    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    tokens_seen: int = 0
    seconds: float = 0.0
    identity: dict[str, Any] = field(default_factory=dict)
    ops: str = "NumPy"
    lora: LoraConfig | None = None
    adapters: Adapters = field(default_factory=lambda: NO_ADAPTERS)
    seed: int = 0

    @property
    def trained(self) -> dict[str, np.ndarray]:
        """The parameters that train."""
        return {name: self.params[name] for name in self.names}

    @property
    def dropout(self) -> Dropout | None:
        """The dropout of the next step."""
        return Dropout(self.lora.lora_dropout, self.seed, self.step) if self.lora else None

    @property
    def trainable(self) -> int:
        """Number of scalars that train."""
        return sum(self.params[name].size for name in self.names)


def start(
    config: MambaConfig,
    params: Mapping[str, np.ndarray] | None = None,
    *,
    seed: int = 0,
    names: Iterable[str] | None = None,
    lora: LoraConfig | None = None,
    adapter: Mapping[str, np.ndarray] | None = None,
    dtype: Any = np.float32,
) -> TrainingState:
    """Return the state before the first step; it owns a copy of `params`, or fresh parameters from `seed`.

    names: the parameters that train, all for None; the others stay as they are, without gradient or moments.
    lora: adapters train and nothing else, fresh ones from `seed` or those with the tensors of `adapter`.
    Raises ValueError on parameters that do not fit the config, unknown names, no names, and names together with lora.
    """
    if lora and names is not None:
        raise ValueError(f"names: with lora the adapters alone train, expected none, got {sorted(names)[:5]}")
    shapes = {name: entry.shape for name, entry in table(config).items()}
    if params is None:
        own = init(config, seed, dtype)
    else:
        _check_shapes("parameters", params, shapes)
        own = {name: np.array(params[name], dtype=dtype, order="C") for name in shapes}
    if lora:
        tensors = _adapter_tensors(config, lora, seed, adapter, dtype)
        own |= tensors
        found = adapters(config, lora)
        return TrainingState(config, own, list(tensors), adam_state(own, tensors), lora=lora, adapters=found, seed=seed)
    chosen = select(config, names)
    if not chosen:
        raise ValueError(f"names: expected at least one parameter to train, got none of {list(shapes)}")
    return TrainingState(config, own, chosen, adam_state(own, chosen))


def run_identity(
    state: TrainingState, train: TrainConfig, batches: BatchesConfig, data: str, tokenizer: str
) -> dict[str, Any]:
    """Return what a run belongs to, as JSON; data and tokenizer are fingerprints.

    Called before the first step: the base weights are part of it. `fingerprint.digest` of it names the run.
    """
    fields = set(TrainConfig.model_fields) - UNRELATED_TO_RESULT
    adapted = {"lora": state.lora.model_dump(mode="json") | {"seed": state.seed}} if state.lora else {}
    return adapted | {
        "model": state.config.model_dump(mode="json"),
        "train": train.model_dump(mode="json", include=fields),
        "batches": batches.model_dump(mode="json"),
        "data": data,
        "tokenizer": tokenizer,
        "weights": state.identity.get("weights") or fingerprint(state.params),
        "trained": state.names,
    }


def check_identity(where: str, recorded: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError naming each entry in which a run and what was given to continue it differ."""
    a, b = _flat(recorded), _flat(given)
    differing = [name for name in sorted(a | b) if a.get(name) != b.get(name)]
    if differing:
        lines = [f"{name}: found {b.get(name)!s:.200}, expected {a.get(name)!s:.200}" for name in differing]
        raise ValueError(f"{where} belongs to another run and is not continued: {'; '.join(lines)}")


@contextmanager
def run_folder(folder: str | Path, identity: Mapping[str, Any]) -> Iterator[Path]:
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


def _adapter_tensors(
    config: MambaConfig, lora: LoraConfig, seed: int, given: Mapping[str, np.ndarray] | None, dtype: Any
) -> dict[str, np.ndarray]:
    """Return fresh tensors, or a copy of the given ones; raises ValueError where these do not fit."""
    if given is None:
        return initial(config, lora, seed, dtype)
    shapes = tensor_shapes(config, lora)
    _check_shapes("adapter", given, shapes)
    return {name: np.array(given[name], dtype=dtype, order="C") for name in shapes}


def _check_shapes(what: str, given: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    found = {name: tuple(np.shape(value)) for name, value in given.items()}
    wrong = [
        f"{name}: found {found.get(name, 'none')}, expected {shapes.get(name, 'none')}"
        for name in {**shapes, **found}
        if found.get(name) != shapes.get(name)
    ]
    if wrong:
        raise ValueError(f"{what}: tensors do not fit the config: {'; '.join(wrong[:5])}")


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


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested entries under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
