"""One table of the model's parameters: shape, initial value, weight decay; keys are Hugging Face's."""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from mamba_ops.config import MambaConfig

EMBEDDING = "backbone.embeddings.weight"
FINAL_NORM = "backbone.norm_f.weight"
LM_HEAD = "lm_head.weight"
RESIZE_NOISE = 0.01

Init = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


class Parameter(NamedTuple):
    """A parameter's shape, initial distribution, and whether weight decay acts on it."""

    shape: tuple[int, ...]
    init: Init
    decay: bool


def head_name(config: MambaConfig) -> str:
    """Return the key of the output head: the embedding's when tied."""
    return EMBEDDING if config.tie_word_embeddings else LM_HEAD


def layer_prefix(layer: int) -> str:
    """Return the key prefix of a layer."""
    return f"backbone.layers.{layer}."


def table(config: MambaConfig) -> dict[str, Parameter]:
    """Return every parameter of the model in checkpoint order."""
    entries = {EMBEDDING: Parameter((config.vocab_size, config.hidden_size), _normal(0.02), True)}
    for layer in range(config.num_hidden_layers):
        prefix = layer_prefix(layer)
        entries |= {prefix + name: entry for name, entry in _layer(config).items()}
    entries[FINAL_NORM] = Parameter((config.hidden_size,), _constant(1.0), False)
    if not config.tie_word_embeddings:
        entries[LM_HEAD] = Parameter((config.vocab_size, config.hidden_size), _normal(0.02), True)
    return entries


def init(config: MambaConfig, seed: int, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Return fresh parameters by the official recipe (Gu & Dao 2023; state-spaces/mamba `mamba_simple.py`).

    Each parameter has a random stream of its own, so its values do not depend on the others.
    """
    return {
        name: np.array(entry.init(stream(seed, name), entry.shape), dtype, order="C")
        for name, entry in table(config).items()
    }


def resize_embeddings(
    config: MambaConfig, params: Mapping[str, np.ndarray], rows: int, seed: int
) -> tuple[MambaConfig, dict[str, np.ndarray]]:
    """Return a model whose embedding, and head when untied, have at least `rows` rows; the others are untouched.

    A new row is the mean of all rows plus N(0, (0.01 std)^2) per column. As a row of the head it then has the mean
    logit, so that k new tokens among n take at most k / (n + k) of the probability (but for the noise), whatever the
    model says, where a row of the initial distribution may take nearly all of it.
    Source: J. Hewitt (2021), "Initializing new word embeddings for pretrained language models".
    """
    if rows <= config.vocab_size:
        return config, dict(params)
    resized = dict(params)
    for name in dict.fromkeys([EMBEDDING, head_name(config)]):
        old = params[name]
        mean, std = old.mean(axis=0, dtype=np.float64), old.std(axis=0, dtype=np.float64)
        noise = stream(seed, f"resize {name}").standard_normal((rows - len(old), old.shape[1]))
        resized[name] = np.concatenate([old, (mean + RESIZE_NOISE * std * noise).astype(old.dtype)])
    return config.model_copy(update={"vocab_size": rows}), resized


def select(config: MambaConfig, names: Iterable[str] | None = None) -> list[str]:
    """Return the named parameters in table order, all of them for None.

    Raises ValueError on a name that the model does not have.
    """
    known = list(table(config))
    if names is None:
        return known
    wanted = set(names)
    unknown = sorted(wanted - set(known))
    if unknown:
        raise ValueError(f"unknown parameters {unknown}; the model has {known}")
    return [name for name in known if name in wanted]


def count(config: MambaConfig) -> int:
    """Return the number of scalars in the model, a tied head counted once."""
    return sum(math.prod(entry.shape) for entry in table(config).values())


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the random stream of one tensor, independent of the others'."""
    return np.random.default_rng([seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")])


def _layer(config: MambaConfig) -> dict[str, Parameter]:
    d_model, d_inner, rank = config.hidden_size, config.d_inner, config.dt_rank
    rescale = math.sqrt(config.num_hidden_layers) if config.rescale_prenorm_residual else 1.0
    entries = {
        "norm.weight": Parameter((d_model,), _constant(1.0), False),
        "mixer.in_proj.weight": Parameter((2 * d_inner, d_model), _uniform(d_model**-0.5), True),
        "mixer.conv1d.weight": Parameter((d_inner, 1, config.conv_kernel), _uniform(config.conv_kernel**-0.5), True),
        "mixer.x_proj.weight": Parameter((rank + 2 * config.state_size, d_inner), _uniform(d_inner**-0.5), True),
        "mixer.dt_proj.weight": Parameter((d_inner, rank), _dt_weight(config), True),
        "mixer.dt_proj.bias": Parameter((d_inner,), _dt_bias(config), False),
        "mixer.A_log": Parameter((d_inner, config.state_size), _A_log, False),
        "mixer.D": Parameter((d_inner,), _constant(1.0), False),
        "mixer.out_proj.weight": Parameter((d_model, d_inner), _uniform(d_inner**-0.5 / rescale), True),
    }
    if config.use_conv_bias:
        entries["mixer.conv1d.bias"] = Parameter((d_inner,), _uniform(config.conv_kernel**-0.5), False)
    if config.use_bias:
        entries["mixer.in_proj.bias"] = Parameter((2 * d_inner,), _constant(0.0), False)
        entries["mixer.out_proj.bias"] = Parameter((d_model,), _constant(0.0), False)
    return entries


def _normal(scale: float) -> Init:
    return lambda rng, shape: rng.normal(0.0, scale, shape)


def _uniform(bound: float) -> Init:
    return lambda rng, shape: rng.uniform(-bound, bound, shape)


def _constant(value: float) -> Init:
    return lambda rng, shape: np.full(shape, value)


def _A_log(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.log(np.arange(1, shape[1] + 1)), shape)


def _dt_weight(config: MambaConfig) -> Init:
    bound = config.dt_rank**-0.5 * config.time_step_scale
    return _constant(bound) if config.time_step_init_scheme == "constant" else _uniform(bound)


def _dt_bias(config: MambaConfig) -> Init:
    low, high = math.log(config.time_step_min), math.log(config.time_step_max)

    def sample(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        dt = np.exp(rng.uniform(low, high, shape)).clip(min=config.time_step_floor)
        return inverse_softplus(dt)

    return sample


def inverse_softplus(x: np.ndarray) -> np.ndarray:
    """Return y with log(1 + exp(y)) = x: y = x + log(1 - exp(-x)), for x > 0."""
    return x + np.log(-np.expm1(-x))
