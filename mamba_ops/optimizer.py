"""AdamW state, whole or of a shard's rows, and one step over every parameter that trains."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mamba_ops.config import MambaConfig, TrainConfig
from mamba_ops.ops import NO_ADAPTERS, Adapters, Array, Ops, Parameters
from mamba_ops.ownership import Owned
from mamba_ops.parameters import table


@dataclass
class AdamState:
    """First and second moments by parameter name, and the number of steps each pair has seen.

    The count belongs to the moments: a parameter that starts to train later starts at 1. A shard's state holds the
    moments of the rows that it owns, and of no other.
    """

    moments: dict[str, tuple[Array, Array]]
    counts: dict[str, int]


def adam_state(params: Parameters, names: Iterable[str], rows: Owned | None = None) -> AdamState:
    """Return zero moments and counts for the named parameters, or for those of their rows that a shard owns."""
    state = AdamState({}, {})
    for name in names:
        if rows is None or name in rows:
            part = params[name] if rows is None else params[name][slice(*rows[name])]
            state.moments[name] = np.zeros_like(part), np.zeros_like(part)
            state.counts[name] = 0
    return state


def decayed(config: MambaConfig, adapters: Adapters = NO_ADAPTERS) -> frozenset[str]:
    """Return the names that weight decay acts on: neither A_log, D, norms nor biases, nor an adapter of one of them."""
    names = {name for name, entry in table(config).items() if entry.decay}
    tensors = {tensor for name, adapter in adapters.items() if name in names for tensor in (adapter.A, adapter.B)}
    return frozenset(names | tensors)


def step(
    ops: Ops,
    params: Parameters,
    grads: Mapping[str, Array],
    state: AdamState,
    config: TrainConfig,
    learning_rate: float,
    gradient_scale: float,
    decay: Collection[str],
    rows: Owned | None = None,
) -> None:
    """Step each parameter of `grads` with its own gradient, moments and count, in place.

    The gradient is gradient_scale * grads[name]; names outside `decay` are not decayed. With `rows` only these rows of
    the parameters are stepped, each as in a whole step: the steps of all shards make it up, bit for bit. Raises
    ValueError, before anything is stepped, where the moments are not of those rows.
    """
    owned = {name: None if rows is None else rows[name] for name in grads if rows is None or name in rows}
    for name, part in owned.items():
        _ensure(ops, params[name], state, name, part)
    for name, part in owned.items():
        state.counts[name] += 1
        ops.adamw(
            params[name],
            grads[name],
            *state.moments[name],
            state.counts[name],
            learning_rate=learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay if name in decay else 0.0,
            gradient_scale=gradient_scale,
            max_delta=config.max_delta,
            rows=part,
        )


def state_bytes(state: AdamState) -> int:
    """Return the bytes of all moments."""
    return sum(first.nbytes + second.nbytes for first, second in state.moments.values())


def gather(shards: Sequence[Owned], states: Sequence[AdamState]) -> AdamState:
    """Return the whole state of shards, which own every row between them. Moments: NumPy arrays.

    Raises ValueError where a name's rows are missing or there twice, or its counts differ.
    """
    parts: dict[str, list[tuple[tuple[int, int], tuple[Any, Any], int]]] = {}
    for owned, state in zip(shards, states, strict=True):
        for name, rows in owned.items():
            parts.setdefault(name, []).append((rows, state.moments[name], state.counts[name]))
    whole = AdamState({}, {})
    for name, found in parts.items():
        ranges, moments, counts = zip(*sorted(found, key=lambda part: part[0]), strict=True)
        if [first for first, _ in ranges] != [0, *(end for _, end in ranges[:-1])]:
            raise ValueError(f"moments of {name}: expected rows that follow each other from 0, got {list(ranges)}")
        if len(set(counts)) > 1:
            raise ValueError(f"moments of {name}: expected one count of steps, got {list(counts)} for {list(ranges)}")
        first, second = (np.concatenate(pieces) for pieces in zip(*moments, strict=True))
        whole.moments[name], whole.counts[name] = (first, second), counts[0]
    return whole


def _ensure(ops: Ops, parameter: Array, state: AdamState, name: str, rows: tuple[int, int] | None) -> None:
    """Make the moments of a parameter that has none; raise ValueError where they are of another shape than the rows."""
    shape = parameter.shape
    if rows is not None:
        if not 0 <= rows[0] <= rows[1] <= shape[0]:
            raise ValueError(f"{name}: expected rows inside 0 .. {shape[0]}, got {rows}")
        shape = rows[1] - rows[0], *shape[1:]
    if name not in state.moments:
        state.moments[name] = _zeros(ops, parameter, name, shape), _zeros(ops, parameter, name, shape)
        state.counts[name] = 0
    found = state.moments[name][0].shape
    if found != shape:
        raise ValueError(f"moments of {name}: expected {shape} for rows {rows or 'all'}, got {found}")


def _zeros(ops: Ops, parameter: Array, name: str, shape: tuple[int, ...]) -> Array:
    if shape == parameter.shape:
        return ops.zeros_like(parameter)
    return ops.upload_parameter(name, np.zeros(shape, getattr(ops, "dtype", np.float32)))
