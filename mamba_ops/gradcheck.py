"""Show that every gradient agrees with four-point central differences in float64.

`python -m mamba_ops.gradcheck` checks every op and the whole model; `... gradcheck OP` one of them.
"""

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from mamba_ops import model
from mamba_ops.config import TARGETS, LoraConfig, MambaConfig
from mamba_ops.cpu import CpuOps, open_cpu
from mamba_ops.differences import direction_difference, element_differences
from mamba_ops.gradcheck_cases import (
    Case,
    causal_conv1d,
    embedding,
    linear,
    linear_cross_entropy,
    low_rank,
    random_batch,
    rms_norm,
    selective_scan,
)
from mamba_ops.gradients import GradientBuffers
from mamba_ops.lora import adapters, tensor_shapes
from mamba_ops.low_rank import with_dropout
from mamba_ops.ops import NO_ADAPTERS, Dropout
from mamba_ops.parameters import EMBEDDING, table

TOLERANCE = 1e-6
MODEL_ELEMENTS = 50


class Agreement(NamedTuple):
    """The worst element of one tensor: |difference| and max|gradient| of the tensor."""

    name: str
    elements: int
    difference: float
    scale: float

    @property
    def holds(self) -> bool:
        """Whether |difference| <= 1e-6 max|gradient|."""
        return self.difference <= TOLERANCE * self.scale


OPS: dict[str, Callable[..., Case]] = {
    "embedding": embedding,
    "embedding_adapter": partial(embedding, r=2),
    "rms_norm": rms_norm,
    "linear": linear,
    "linear_adapter": partial(linear, r=2),
    "linear_dropout": partial(linear, r=2, rate=0.3),
    "low_rank": low_rank,
    "causal_conv1d": causal_conv1d,
    "selective_scan": selective_scan,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_cross_entropy_adapter": partial(linear_cross_entropy, r=2),
}
MODELS = {"model": None, "lora": LoraConfig(r=3, lora_alpha=5, lora_dropout=0.2, target_modules=list(TARGETS))}
"""The whole model, and the adapters of all its targets."""


def random_parameters(config: MambaConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return float64 parameters at which every gradient stands well above the rounding of the loss.

    Norms, skips and the embedding are of size one, so that RMSNorm is nowhere steep; the rest is gentle enough
    for differences of fourth order.
    """
    params = {}
    for name, entry in table(config).items():
        value = rng.standard_normal(entry.shape)
        if name == EMBEDDING:
            params[name] = np.sign(value) * (0.5 + 0.5 * np.abs(value).clip(max=2))
        elif "norm" in name or name.endswith(".D"):
            params[name] = 1 + 0.3 * value
        elif len(entry.shape) == 2 and not name.endswith("A_log"):
            params[name] = 0.7 * value / math.sqrt(entry.shape[1])
        else:
            params[name] = 0.4 * value
    return params


def model_case(
    ops: CpuOps,
    config: MambaConfig,
    seed: int,
    batch: int = 2,
    seq_len: int = 19,
    checkpointing: bool = False,
    lora: LoraConfig | None = None,
) -> Case:
    """The summed loss of the whole model on packed rows with boundaries; with lora of the adapters' tensors alone."""
    rng = np.random.default_rng(seed)
    params = random_parameters(config, rng)
    trained, used = params, NO_ADAPTERS
    if lora:
        trained = {
            name: 0.4 * rng.standard_normal(shape) / math.sqrt(shape[1])
            for name, shape in tensor_shapes(config, lora).items()
        }
        used = with_dropout(adapters(config, lora), Dropout(lora.lora_dropout, seed, 0))
        params = params | trained
    rows = ops.rows(random_batch(rng, config.vocab_size, batch, seq_len))

    def loss() -> float:
        with ops.scope():
            return ops.total(model.losses(ops, params, config, rows, adapters=used))

    def gradients() -> dict[str, np.ndarray]:
        grads = GradientBuffers(params, trained)
        model.losses_and_gradients(ops, params, config, rows, grads, trained, checkpointing, used)
        return grads.arrays

    return Case(trained, loss, gradients)


def check(case: Case, elements: int | None = None, seed: int = 0) -> list[Agreement]:
    """Compare gradients and differences: every element of each tensor, or `elements` seeded ones and a direction."""
    gradients = case.gradients()
    rng = np.random.default_rng(seed)
    results = []
    for name, array in case.arrays.items():
        chosen = None
        if elements is not None and array.size > elements:
            chosen = np.sort(rng.choice(array.size, elements, replace=False))
        numeric = element_differences(case.loss, array, chosen)
        exact = gradients[name].reshape(-1)
        found = exact if chosen is None else exact[chosen]
        results.append(Agreement(name, found.size, float(np.abs(found - numeric).max()), float(np.abs(exact).max())))
    if elements is not None:
        numeric_slope, direction = direction_difference(case.loss, case.arrays, seed)
        slope = sum(float(np.sum(gradients[name] * d)) for name, d in direction.items())
        results.append(Agreement("(random direction)", 1, abs(slope - numeric_slope), abs(slope)))
    return results


def main(arguments: list[str] | None = None) -> int:
    """Print the agreement of each op and of the model; return 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m mamba_ops.gradcheck", description=__doc__)
    parser.add_argument("op", nargs="?", choices=[*OPS, *MODELS], help="one op, or the whole model; all without")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    ops = open_cpu(np.float64)
    failed = 0
    print(f"{'':30}{'tensor':46}{'elements':>9}{'difference':>12}{'max|g|':>11}")
    for name in [options.op] if options.op else [*OPS, *MODELS]:
        if name in MODELS:
            config = MambaConfig(vocab_size=23, hidden_size=8, num_hidden_layers=2, state_size=4, use_bias=True)
            results = check(model_case(ops, config, options.seed, lora=MODELS[name]), MODEL_ELEMENTS, options.seed)
        else:
            results = check(OPS[name](ops, np.random.default_rng(options.seed)))
        for result in results:
            failed += not result.holds
            verdict = "" if result.holds else "  FAILS"
            print(f"{name:30}{result.name:46}{result.elements:9}{result.difference:12.1e}{result.scale:11.1e}{verdict}")
    print(f"tolerance {TOLERANCE:g} of max|g|: " + ("all hold" if not failed else f"{failed} fail"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
