"""Gradient norms: partial sums on the GPU, all in one buffer, put together in float64 on the host."""

from collections.abc import Mapping

import numpy as np

from mamba_ops.gpu.device import grid
from mamba_ops.gpu.workspace import DeviceArray, GpuWorkspace

BLOCK = 1 << 14
INFINITY_BITS = 0x7F800000
"""Of float32; larger bits are a NaN's."""


def global_norm(ops: GpuWorkspace, gradients: Mapping[str, DeviceArray]) -> dict[str, float]:
    """Return ||g|| = sqrt(sum g^2) of each gradient; nan or inf where an element is.

    A block's sum of squares is taken after a power of two has brought its largest element near 1. Only the blocks'
    sums come back, in one read.
    """
    if not gradients:
        return {}
    firsts, count = [], 0
    for gradient in gradients.values():
        firsts.append(count)
        count += sum(-(-part.rows * gradient.width // BLOCK) for part in gradient.parts)
    with ops.scope():
        partials = ops.empty(count, 2)
        for first, gradient in zip(firsts, gradients.values(), strict=True):
            _dispatch(ops, gradient, partials, first)
        pairs = ops.device.read(partials.buffer, np.uint32, 2 * count).reshape(count, 2)
    return dict(zip(gradients, _norms(pairs, np.array(firsts, np.int64)).tolist(), strict=True))


def _dispatch(ops: GpuWorkspace, gradient: DeviceArray, partials: DeviceArray, first: int) -> None:
    device = ops.device
    for part in gradient.parts:
        elements = part.rows * gradient.width
        blocks = -(-elements // BLOCK)
        device.dispatch(
            device.pipeline("global_norm", "forward", BLOCK=BLOCK),
            device.uniform("II", elements, first),
            (part.buffer, partials.buffer),
            grid(blocks),
        )
        first += blocks


def _norms(pairs: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Return the norm of each tensor. pairs: (blocks, 2), the bits of max|g| and of sum (g 2^n)^2."""
    tops, sums = pairs[:, 0], np.ascontiguousarray(pairs[:, 1]).view(np.float32)
    exponents = 127 - np.clip(254 - np.minimum(tops >> 23, 254).astype(np.int64), 1, 253)
    norms = np.ldexp(np.sqrt(np.where(tops < INFINITY_BITS, sums, 0), dtype=np.float64), exponents)
    found = np.sqrt(np.add.reduceat(norms * norms, firsts))
    largest = np.maximum.reduceat(tops, firsts)
    found[largest == INFINITY_BITS] = np.inf
    found[largest > INFINITY_BITS] = np.nan
    return found
