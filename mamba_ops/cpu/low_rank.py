"""Low-rank adapters on the CPU (Hu et al. 2021): the sum of a small weight and its adapter, and dropout's masks."""

import numpy as np

from mamba_ops.cpu.products import add_product
from mamba_ops.cpu.workspace import Workspace
from mamba_ops.dropout import FACTORS, GOLDEN, key_words, threshold
from mamba_ops.ops import Adapter, Dropout, Gradients, Need, Parameters

MASK_ELEMENTS = 1 << 15


def low_rank_forward(ops: Workspace, params: Parameters, weight: str, adapter: Adapter) -> np.ndarray:
    """Return weight + scale B A in the weight's shape, (out, ...), in the open scope. A: (r, in), B: (out, r)."""
    w = params[weight]
    total = ops.empty_like(w)
    flat = total.reshape(len(w), -1)
    np.matmul(params[adapter.B], params[adapter.A], out=flat)
    flat *= adapter.scale
    total += w
    return total


def low_rank_backward(
    ops: Workspace, dweight: np.ndarray, params: Parameters, adapter: Adapter, grads: Gradients, need: Need
) -> None:
    """dA += scale B^T dweight; dB += scale dweight A^T. dweight: (out, ...), taken as (out, in)."""
    flat = dweight.reshape(len(dweight), -1)
    if adapter.A in need:
        add_product(ops, params[adapter.B].T, flat, *grads.take(adapter.A), adapter.scale)
    if adapter.B in need:
        add_product(ops, flat, params[adapter.A].T, *grads.take(adapter.B), adapter.scale)


def kept_scale(adapter: Adapter) -> float:
    """Return scale / (1 - rate): what dropout divides by is a factor of the small products."""
    return adapter.scale if adapter.dropout is None else adapter.scale / (1 - adapter.dropout.rate)


def keep_mask(ops: Workspace, shape: tuple[int, ...], weight: str, dropout: Dropout | None) -> np.ndarray | None:
    """Return which elements are not dropped, as `mamba_ops.dropout` says, in the open scope; None if none can be.

    shape: (T, in) of the input and of the bool mask. weight: the name of the weight that is adapted.
    """
    if dropout is None or dropout.rate == 0:
        return None
    T, width = shape
    k0, k1 = key_words(dropout, weight)
    tokens = np.arange(T, dtype=np.uint32) + np.uint32(dropout.first % 2**32)
    tokens ^= k0
    tokens ^= tokens >> 16
    _finish_mix(tokens, np.empty_like(tokens))
    tokens += k1
    columns = np.arange(width, dtype=np.uint32) * GOLDEN
    # the first step of mix is linear over xor, so that tokens and columns take it apart
    tokens ^= tokens >> 16
    columns ^= columns >> 16
    dropped_below = threshold(dropout.rate)
    keep = ops.empty(T, mask_columns(width, ops.dtype)).view(np.bool_)[:, :width]
    height, capacity = max(1, MASK_ELEMENTS // width), max(MASK_ELEMENTS, width)

    def task(index: int) -> None:
        part = slice(index * height, (index + 1) * height)
        h = ops.scratch("mask_h", capacity, keep[part].shape, np.uint32)
        np.bitwise_xor(tokens[part, None], columns, out=h)
        _finish_mix(h, ops.scratch("mask_shifted", capacity, h.shape, np.uint32))
        np.greater_equal(h, dropped_below, out=keep[part])

    ops.run(task, -(-T // height))
    return keep


def mask_columns(width: int, dtype: np.dtype) -> int:
    """Return the elements of an activation that a row of a mask, one byte a column, takes."""
    return -(-width // dtype.itemsize)


def _finish_mix(x: np.ndarray, shifted: np.ndarray) -> None:
    """The steps of mix after the first, in place; arithmetic of uint32 arrays is modulo 2^32."""
    x *= FACTORS[0]
    np.right_shift(x, 15, out=shifted)
    x ^= shifted
    x *= FACTORS[1]
    np.right_shift(x, 16, out=shifted)
    x ^= shifted
