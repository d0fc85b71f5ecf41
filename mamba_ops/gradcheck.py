"""Show that every gradient agrees with four-point central differences in float64.

`python -m mamba_ops.gradcheck` checks every op and the whole model; `... gradcheck OP` one of them.
"""

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mamba_ops import model
from mamba_ops.config import MambaConfig
from mamba_ops.cpu import CpuOps, open_cpu
from mamba_ops.differences import direction_difference, element_differences
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Batch, Columns
from mamba_ops.parameters import EMBEDDING, table

TOLERANCE = 1e-6
MODEL_ELEMENTS = 50


class Case(NamedTuple):
    """A scalar loss of float64 arrays, and its gradients by the op's backward.

    loss reads `arrays` in place; gradients() returns one array for each entry of `arrays`.
    """

    arrays: dict[str, np.ndarray]
    loss: Callable[[], float]
    gradients: Callable[[], dict[str, np.ndarray]]


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


def random_batch(rng: np.random.Generator, vocab_size: int, batch: int, seq_len: int) -> Batch:
    """Return random tokens with document boundaries inside the rows, repeated ids and one ignored target."""
    ids = rng.integers(0, vocab_size, (batch, seq_len))
    targets = rng.integers(0, vocab_size, (batch, seq_len))
    if targets.size > 2:
        targets[-1, -1] = -1
    starts = rng.random((batch, seq_len)) < 0.2
    starts[:, 0] = True
    index = np.arange(seq_len)
    last = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return Batch(ids, targets, (index - last).astype(np.uint32))


def embedding(ops: CpuOps, rng: np.random.Generator, T: int = 13) -> Case:
    """y = weight[ids]."""
    rows = ops.rows(random_batch(rng, 5, 1, T))
    arrays = {"weight": rng.standard_normal((7, 3))}
    upstream = rng.standard_normal((T, 3))

    def loss() -> float:
        out = np.empty((T, 3))
        ops.embedding_forward(rows, arrays, "weight", out)
        return float(np.sum(out * upstream))

    def gradients() -> dict[str, np.ndarray]:
        grads = GradientBuffers(arrays, arrays)
        ops.embedding_backward(upstream, rows, "weight", grads, arrays)
        return grads.arrays

    return Case(arrays, loss, gradients)


def rms_norm(ops: CpuOps, rng: np.random.Generator, T: int = 67, d_model: int = 5) -> Case:
    """y = weight x / rms(x)."""
    arrays = {"x": rng.standard_normal((T, d_model)), "weight": rng.standard_normal(d_model)}
    upstream = rng.standard_normal((T, d_model))

    def loss() -> float:
        with ops.scope():
            return float(np.sum(ops.rms_norm_forward(arrays["x"], arrays, "weight", 1e-5)[0] * upstream))

    def gradients() -> dict[str, np.ndarray]:
        grads, dx = GradientBuffers(arrays, ["weight"]), np.full((T, d_model), np.nan)
        with ops.scope():
            _, saved = ops.rms_norm_forward(arrays["x"], arrays, "weight", 1e-5)
            ops.rms_norm_backward(upstream, saved, grads, arrays, dx, add=False)
        return grads.arrays | {"x": dx}

    return Case(arrays, loss, gradients)


def linear(ops: CpuOps, rng: np.random.Generator, T: int = 11, width: int = 5, columns: int = 3) -> Case:
    """y = x weight^T + bias + residual, x being a column range."""
    arrays = {
        "x": rng.standard_normal((T, width + 2)),
        "weight": rng.standard_normal((columns, width)),
        "bias": rng.standard_normal(columns),
        "residual": rng.standard_normal((T, columns)),
    }
    upstream = rng.standard_normal((T, columns))
    x = Columns(arrays["x"], 1, width)

    def loss() -> float:
        with ops.scope():
            y = ops.linear_forward(x, arrays, "weight", "bias", arrays["residual"])
            return float(np.sum(y * upstream))

    def gradients() -> dict[str, np.ndarray]:
        grads, dx = GradientBuffers(arrays, ["weight", "bias"]), np.zeros((T, width + 2))
        ops.linear_backward(upstream, x, arrays, "weight", "bias", grads, arrays, Columns(dx, 1, width))
        return grads.arrays | {"x": dx, "residual": upstream}

    return Case(arrays, loss, gradients)


def causal_conv1d(ops: CpuOps, rng: np.random.Generator, seq_len: int = 11, d_conv: int = 4) -> Case:
    """y_t = SiLU(bias + sum_k weight_k x_{t-k}) within documents."""
    d_inner, T = 3, 2 * seq_len
    rows = ops.rows(random_batch(rng, 5, 2, seq_len))
    arrays = {
        "x": rng.standard_normal((T, d_inner + 2)),
        "weight": rng.standard_normal((d_inner, 1, d_conv)),
        "bias": rng.standard_normal(d_inner),
    }
    upstream = rng.standard_normal((T, d_inner))
    x = Columns(arrays["x"], 1, d_inner)

    def loss() -> float:
        with ops.scope():
            return float(np.sum(ops.causal_conv1d_forward(rows, x, arrays, "weight", "bias")[0] * upstream))

    def gradients() -> dict[str, np.ndarray]:
        grads, dx = GradientBuffers(arrays, ["weight", "bias"]), np.zeros((T, d_inner + 2))
        with ops.scope():
            _, saved = ops.causal_conv1d_forward(rows, x, arrays, "weight", "bias")
            ops.causal_conv1d_backward(upstream, saved, grads, arrays, Columns(dx, 1, d_inner))
        return grads.arrays | {"x": dx}

    return Case(arrays, loss, gradients)


def selective_scan(ops: CpuOps, rng: np.random.Generator, seq_len: int = 37, d_inner: int = 3) -> Case:
    """y_t = (C_t . h_t + D u_t) SiLU(z_t) with the state reset between documents."""
    d_state, T = 4, 2 * seq_len
    rows = ops.rows(random_batch(rng, 5, 2, seq_len))
    arrays = {name: rng.standard_normal((T, d_inner)) for name in ("u", "delta", "z")}
    arrays |= {name: rng.standard_normal((T, d_state)) for name in ("B", "C")}
    arrays["A_log"] = rng.uniform(-1, 1, (d_inner, d_state))
    arrays |= {name: rng.standard_normal(d_inner) for name in ("D", "delta_bias")}
    upstream = rng.standard_normal((T, d_inner))
    names = "A_log", "D", "delta_bias"

    def ranges(of: dict[str, np.ndarray]) -> tuple[Columns, Columns, Columns]:
        return Columns(of["B"], 0, d_state), Columns(of["C"], 0, d_state), Columns(of["z"], 0, d_inner)

    def forward() -> tuple[np.ndarray, Any]:
        B, C, z = ranges(arrays)
        return ops.selective_scan_forward(rows, arrays["u"], arrays["delta"], B, C, z, arrays, *names)

    def loss() -> float:
        with ops.scope():
            return float(np.sum(forward()[0] * upstream))

    def gradients() -> dict[str, np.ndarray]:
        grads = GradientBuffers(arrays, names)
        d = {name: np.full_like(arrays[name], np.nan) for name in ("u", "delta", "B", "C", "z")}
        with ops.scope():
            ops.selective_scan_backward(upstream, forward()[1], grads, names, d["u"], d["delta"], *ranges(d))
        return grads.arrays | d

    return Case(arrays, loss, gradients)


def linear_cross_entropy(ops: CpuOps, rng: np.random.Generator, T: int = 9) -> Case:
    """The summed negative log-likelihood of x weight^T."""
    d_model, vocab_size = 4, 7
    rows = ops.rows(random_batch(rng, vocab_size, 1, T))
    arrays = {"x": rng.standard_normal((T, d_model)), "weight": rng.standard_normal((vocab_size, d_model))}

    def loss() -> float:
        with ops.scope():
            return ops.total(ops.linear_cross_entropy_forward(rows, arrays["x"], arrays, "weight"))

    def gradients() -> dict[str, np.ndarray]:
        grads, dx = GradientBuffers(arrays, ["weight"]), np.full((T, d_model), np.nan)
        with ops.scope():
            ops.linear_cross_entropy_forward(rows, arrays["x"], arrays, "weight", grads, arrays, dx)
        return grads.arrays | {"x": dx}

    return Case(arrays, loss, gradients)


OPS = {
    case.__name__: case for case in (embedding, rms_norm, linear, causal_conv1d, selective_scan, linear_cross_entropy)
}


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
) -> Case:
    """The summed loss of the whole model on packed rows with boundaries."""
    rng = np.random.default_rng(seed)
    params = random_parameters(config, rng)
    rows = ops.rows(random_batch(rng, config.vocab_size, batch, seq_len))

    def loss() -> float:
        with ops.scope():
            return ops.total(model.losses(ops, params, config, rows))

    def gradients() -> dict[str, np.ndarray]:
        grads = GradientBuffers(params, params)
        model.losses_and_gradients(ops, params, config, rows, grads, params, checkpointing)
        return grads.arrays

    return Case(params, loss, gradients)


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
    parser.add_argument("op", nargs="?", choices=[*OPS, "model"], help="one op, or the whole model; all without")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    ops = open_cpu(np.float64)
    failed = 0
    print(f"{'':22}{'tensor':46}{'elements':>9}{'difference':>12}{'max|g|':>11}")
    for name in [options.op] if options.op else [*OPS, "model"]:
        if name == "model":
            config = MambaConfig(vocab_size=23, hidden_size=8, num_hidden_layers=2, state_size=4, use_bias=True)
            results = check(model_case(ops, config, options.seed), MODEL_ELEMENTS, options.seed)
        else:
            results = check(OPS[name](ops, np.random.default_rng(options.seed)))
        for result in results:
            failed += not result.holds
            verdict = "" if result.holds else "  FAILS"
            print(f"{name:22}{result.name:46}{result.elements:9}{result.difference:12.1e}{result.scale:11.1e}{verdict}")
    print(f"tolerance {TOLERANCE:g} of max|g|: " + ("all hold" if not failed else f"{failed} fail"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
