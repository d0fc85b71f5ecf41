"""Scalar losses of each op with the gradients of its backward, for `mamba_ops.gradcheck`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mamba_ops.cpu import CpuOps
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Adapter, Batch, Columns, Dropout


class Case(NamedTuple):
    """A scalar loss of float64 arrays, and its gradients by the op's backward.

    loss reads `arrays` in place; gradients() returns one array for each entry of `arrays`.
    """

    arrays: dict[str, np.ndarray]
    loss: Callable[[], float]
    gradients: Callable[[], dict[str, np.ndarray]]


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


def adapter_tensors(
    rng: np.random.Generator, r: int, rows: int, columns: int, rate: float = 0.0
) -> tuple[dict[str, np.ndarray], Adapter | None]:
    """Return A: (r, columns) and B: (rows, r) with the adapter of them; nothing for r 0."""
    if not r:
        return {}, None
    tensors = {"A": rng.standard_normal((r, columns)), "B": rng.standard_normal((rows, r))}
    return tensors, Adapter("A", "B", 0.7, Dropout(rate, seed=1, step=2, first=3) if rate else None)


def embedding(ops: CpuOps, rng: np.random.Generator, T: int = 13, r: int = 0) -> Case:
    """y = weight[ids] + scale B A[:, ids]."""
    rows = ops.rows(random_batch(rng, 5, 1, T))
    arrays = {"weight": rng.standard_normal((7, 3))}
    upstream = rng.standard_normal((T, 3))
    tensors, adapter = adapter_tensors(rng, r, 3, 7)
    arrays |= tensors

    def loss() -> float:
        out = np.empty((T, 3))
        ops.embedding_forward(rows, arrays, "weight", out, adapter)
        return float(np.sum(out * upstream))

    def gradients() -> dict[str, np.ndarray]:
        grads = GradientBuffers(arrays, arrays)
        ops.embedding_backward(upstream, rows, arrays, "weight", grads, arrays, adapter)
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


def linear(
    ops: CpuOps,
    rng: np.random.Generator,
    T: int = 11,
    width: int = 5,
    columns: int = 3,
    r: int = 0,
    rate: float = 0.0,
) -> Case:
    """y = x weight^T + bias + residual + scale drop(x) A^T B^T, x and dy being column ranges."""
    arrays = {
        "x": rng.standard_normal((T, width + 2)),
        "weight": rng.standard_normal((columns, width)),
        "bias": rng.standard_normal(columns),
        "residual": rng.standard_normal((T, columns)),
    }
    wide = rng.standard_normal((T, columns + 1))
    x, dy, upstream = Columns(arrays["x"], 1, width), Columns(wide, 0, columns), wide[:, :columns]
    tensors, adapter = adapter_tensors(rng, r, columns, width, rate)
    arrays |= tensors

    def loss() -> float:
        with ops.scope():
            y = ops.linear_forward(x, arrays, "weight", "bias", arrays["residual"], adapter=adapter)
            return float(np.sum(y * upstream))

    def gradients() -> dict[str, np.ndarray]:
        grads, dx = GradientBuffers(arrays, ["weight", "bias", *tensors]), np.zeros((T, width + 2))
        to = Columns(dx, 1, width)
        ops.linear_backward(dy, x, arrays, "weight", "bias", grads, arrays, to, adapter=adapter)
        return grads.arrays | {"x": dx, "residual": upstream}

    return Case(arrays, loss, gradients)


def low_rank(ops: CpuOps, rng: np.random.Generator, rows: int = 5, columns: int = 4, r: int = 2) -> Case:
    """weight + scale B A, of the convolution's shape."""
    tensors, adapter = adapter_tensors(rng, r, rows, columns)
    assert adapter is not None
    arrays = {"weight": rng.standard_normal((rows, 1, columns))} | tensors
    upstream = rng.standard_normal((rows, 1, columns))

    def loss() -> float:
        with ops.scope():
            return float(np.sum(ops.low_rank_forward(arrays, "weight", adapter) * upstream))

    def gradients() -> dict[str, np.ndarray]:
        grads = GradientBuffers(arrays, tensors)
        ops.low_rank_backward(upstream, arrays, adapter, grads, arrays)
        return grads.arrays | {"weight": upstream}

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


def linear_cross_entropy(ops: CpuOps, rng: np.random.Generator, T: int = 9, r: int = 0) -> Case:
    """The summed negative log-likelihood of x weight^T + scale x B A."""
    d_model, vocab_size = 4, 7
    rows = ops.rows(random_batch(rng, vocab_size, 1, T))
    arrays = {"x": rng.standard_normal((T, d_model)), "weight": rng.standard_normal((vocab_size, d_model))}
    tensors, adapter = adapter_tensors(rng, r, d_model, vocab_size)
    arrays |= tensors

    def loss() -> float:
        with ops.scope():
            return ops.total(ops.linear_cross_entropy_forward(rows, arrays["x"], arrays, "weight", adapter=adapter))

    def gradients() -> dict[str, np.ndarray]:
        grads, dx = GradientBuffers(arrays, ["weight", *tensors]), np.full((T, d_model), np.nan)
        with ops.scope():
            ops.linear_cross_entropy_forward(rows, arrays["x"], arrays, "weight", grads, arrays, dx, adapter)
        return grads.arrays | {"x": dx}

    return Case(arrays, loss, gradients)
