"""The state of a training run: what trains, how far it is, and what the run belongs to."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mamba_ops.config import BatchesConfig, LoraConfig, MambaConfig, TrainConfig
from mamba_ops.lora import adapters, initial, notes, tensor_shapes
from mamba_ops.ops import NO_ADAPTERS, Adapters, Dropout
from mamba_ops.optimizer import AdamState, adam_state
from mamba_ops.parameters import init, select, table
from mamba_ops.peft import Adapted, check_base, check_continued
from mamba_ops.tensors import fingerprint

log = logging.getLogger(__name__)

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
    def selection(self) -> dict[str, Any]:
        """What trains, as `memory.estimate_memory` takes it."""
        return {"lora": self.lora} if self.lora else {"names": self.names}

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
    adapter: Adapted | None = None,
    dtype: Any = np.float32,
    copy: bool = True,
) -> TrainingState:
    """Return the state before the first step; it owns a copy of `params`, or fresh parameters from `seed`.

    names: the parameters that train, all for None; the others stay as they are, without gradient or moments.
    lora: adapters train and nothing else, fresh ones from `seed` or those of `adapter`, which are copied. copy: False
    where the caller gives `params` away.
    Raises ValueError on parameters that do not fit the config, unknown names, no names, names together with lora, and
    an adapter without lora, of another configuration or for another base.
    """
    if lora and names is not None:
        raise ValueError(f"names: with lora the adapters alone train, expected none, got {sorted(names)[:5]}")
    if adapter and not lora:
        raise ValueError("adapter: expected lora, the configuration that it is continued with, got none")
    shapes = {name: entry.shape for name, entry in table(config).items()}
    if params is None:
        own = init(config, seed, dtype)
    else:
        _check_shapes("parameters", params, shapes)
        own = {name: np.array(params[name], dtype=dtype, order="C", copy=copy or None) for name in shapes}
    if lora:
        return _adapted_start(config, own, lora, seed, adapter, dtype)
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


def _adapted_start(
    config: MambaConfig, own: dict[str, np.ndarray], lora: LoraConfig, seed: int, adapter: Adapted | None, dtype: Any
) -> TrainingState:
    """Return the state of adapters on parameters that it owns."""
    for note in notes(config, lora):
        log.info(note)
    if adapter is None:
        tensors = initial(config, lora, seed, dtype)
    else:
        check_continued(adapter, lora)
        check_base(adapter, own)
        shapes = tensor_shapes(config, lora)
        _check_shapes("adapter", adapter.tensors, shapes)
        tensors = {name: np.array(adapter.tensors[name], dtype=dtype, order="C") for name in shapes}
    own |= tensors
    found = adapters(config, lora)
    return TrainingState(config, own, list(tensors), adam_state(own, tensors), lora=lora, adapters=found, seed=seed)


def _check_shapes(what: str, given: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    found = {name: tuple(np.shape(value)) for name, value in given.items()}
    wrong = [
        f"{name}: found {found.get(name, 'none')}, expected {shapes.get(name, 'none')}"
        for name in {**shapes, **found}
        if found.get(name) != shapes.get(name)
    ]
    if wrong:
        raise ValueError(f"{what}: tensors do not fit the config: {'; '.join(wrong[:5])}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested entries under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
