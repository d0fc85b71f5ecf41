"""AdamW state, and one step over every parameter that trains."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mamba_ops.config import MambaConfig, TrainConfig
from mamba_ops.ops import Array, Ops, Parameters
from mamba_ops.parameters import table


@dataclass
class AdamState:
    """First and second moments by parameter name, and the number of steps each pair has seen.

    The count belongs to the moments: a parameter that starts to train later starts at 1.
    """

    moments: dict[str, tuple[Array, Array]]
    counts: dict[str, int]


def adam_state(params: Parameters, names: Iterable[str]) -> AdamState:
    """Return zero moments and counts for the named parameters."""
    state = AdamState({}, {})
    for name in names:
        _ensure(state, params, name, np.zeros_like)
    return state


def decayed(config: MambaConfig) -> frozenset[str]:
    """Return the names that weight decay acts on: neither A_log, D, norms nor biases."""
    return frozenset(name for name, entry in table(config).items() if entry.decay)


def step(
    ops: Ops,
    params: Parameters,
    grads: Mapping[str, Array],
    state: AdamState,
    config: TrainConfig,
    learning_rate: float,
    gradient_scale: float,
    decay: Collection[str],
) -> None:
    """Step each parameter of `grads` with its own gradient, moments and count, in place.

    The gradient is gradient_scale * grads[name]; names outside `decay` are not decayed.
    """
    for name, gradient in grads.items():
        _ensure(state, params, name, ops.zeros_like)
        state.counts[name] += 1
        ops.adamw(
            params[name],
            gradient,
            *state.moments[name],
            state.counts[name],
            learning_rate=learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            epsilon=config.adam_epsilon,
            weight_decay=config.weight_decay if name in decay else 0.0,
            gradient_scale=gradient_scale,
            max_delta=config.max_delta,
        )


def state_bytes(state: AdamState) -> int:
    """Return the bytes of all moments."""
    return sum(first.nbytes + second.nbytes for first, second in state.moments.values())


def _ensure(state: AdamState, params: Parameters, name: str, zeros_like: Callable[[Array], Array]) -> None:
    if name not in state.moments:
        state.moments[name] = zeros_like(params[name]), zeros_like(params[name])
        state.counts[name] = 0
