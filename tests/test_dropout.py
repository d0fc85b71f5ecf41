"""Dropout's masks: the hash, and what it must not depend on."""

import hashlib
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mamba_ops.cpu import open_cpu, workspace
from mamba_ops.cpu.low_rank import keep_mask
from mamba_ops.dropout import key_words, threshold
from mamba_ops.ops import Adapter, Dropout

NAME = "backbone.layers.0.mixer.in_proj.weight"
LIMIT = 1 << 32


opened = cache(open_cpu)


def mask(shape, dropout, name=NAME, dtype=np.float32, threads=1):
    ops = opened(dtype, threads)
    with ops.scope():
        return keep_mask(ops, shape, name, dropout).copy()


def mixed(x):
    """lowbias32, in Python's integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D % LIMIT
    x ^= x >> 15
    x = x * 0x846CA68B % LIMIT
    return x ^ (x >> 16)


def hashed(dropout, name, token, column):
    """The 32 bits of an element, in Python's integers."""
    digest = hashlib.sha256(f"{dropout.seed} {dropout.step} {name}".encode()).digest()
    k0, k1 = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))
    token = (dropout.first + token) % LIMIT
    return mixed((mixed(k0 ^ token) + k1) % LIMIT ^ column * 0x9E3779B9 % LIMIT)


def test_known_answers():
    """These may never change: a run that is resumed, or another device, would drop other elements."""
    assert [mixed(x) for x in (0, 1, 2)] == [0, 0x688990C0, 0xD1132181]
    dropout = Dropout(0.5, seed=7, step=11, first=5)
    assert key_words(dropout, NAME) == (1523257022, 521732715)
    elements = [hashed(dropout, NAME, token, column) for token, column in ((0, 0), (0, 1), (1, 0), (2, 63))]
    assert elements == [1570899945, 1743247546, 2641841706, 858639596]
    rows = ["".join("01"[int(kept)] for kept in row) for row in mask((3, 24), dropout)]
    assert rows == ["000010000001000011000101", "111001011010100001100111", "100111001111000001100000"]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    dropout=st.builds(
        Dropout, st.floats(1e-3, 0.999), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40)
    ),
    name=st.sampled_from([NAME, "w", "é"]),
)
@example((7, 3), Dropout(0.5, 0, 0, 2**32 - 3), "w")
@example((2, 2), Dropout(1 - 1e-12, 0, 0), "w")
def test_the_mask_is_the_hash(shape, dropout, name):
    T, width = shape
    expected = [[hashed(dropout, name, t, c) >= threshold(dropout.rate) for c in range(width)] for t in range(T)]
    np.testing.assert_array_equal(mask(shape, dropout, name), expected)


def test_thresholds():
    assert [threshold(rate) for rate in (0, 0.25, 0.5, 1 - 1e-12)] == [0, 1 << 30, 1 << 31, LIMIT - 1]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(1, 1000), st.integers(0, 2**32))
def test_the_mask_does_not_depend_on_the_split_into_batches(sizes, width, first):
    dropout, T = Dropout(0.3, 1, 2, first), sum(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [
        mask((size, width), dropout._replace(first=first + start)) for size, start in zip(sizes, starts, strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), mask((T, width), dropout))


@pytest.mark.parametrize("shape", [(1, 1), (300, 257), (3, 40_000)])
def test_neither_threads_nor_the_dtype_change_the_mask(shape, monkeypatch):
    dropout = Dropout(0.1, 3, 4)
    wanted = mask(shape, dropout)
    np.testing.assert_array_equal(mask(shape, dropout, dtype=np.float64), wanted)
    monkeypatch.setattr(workspace, "INTERPRETER_IS_LOCKED", False)
    np.testing.assert_array_equal(mask(shape, dropout, threads=3), wanted)


def test_a_product_in_two_batches_is_the_product_in_one():
    ops, rng = open_cpu(np.float64), np.random.default_rng(0)
    shapes = {NAME: (4, 6), "A": (2, 6), "B": (4, 2)}
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    x = rng.standard_normal((10, 6))

    def forward(part):
        adapter = Adapter("A", "B", 2.0, Dropout(0.4, 5, 6, part.start))
        return ops.linear_forward(x[part], params, NAME, adapter=adapter)

    split = np.concatenate([forward(slice(0, 3)), forward(slice(3, 10))])
    np.testing.assert_allclose(split, forward(slice(0, 10)), rtol=1e-12)


SHAPE = 1024, 768
SIGMAS = 4.5
RATES = [0.01, 0.05, 0.1, 0.5, 0.9]


@pytest.mark.parametrize("rate", RATES)
def test_the_share_that_is_dropped_is_the_rate(rate):
    """Of all elements, and of each row and each column (chi-square, by its mean and deviation)."""
    for seed in range(5):
        dropped = ~mask(SHAPE, Dropout(rate, seed, 0))
        deviation = math.sqrt(rate * (1 - rate) / dropped.size)
        assert abs(dropped.mean() - rate) <= SIGMAS * deviation
        for axis in (0, 1):
            counts, n = dropped.sum(axis=axis), SHAPE[axis]
            square = np.sum((counts - n * rate) ** 2) / (n * rate * (1 - rate))
            assert abs(square - counts.size) <= SIGMAS * math.sqrt(2 * counts.size)


@pytest.mark.parametrize("rate", RATES)
def test_elements_rows_columns_steps_seeds_and_weights_are_independent(rate):
    base = Dropout(rate, 0, 0)
    kept = mask(SHAPE, base)
    others = {
        "step": mask(SHAPE, base._replace(step=1)),
        "seed": mask(SHAPE, base._replace(seed=1)),
        "weight": mask(SHAPE, base, NAME.replace("0", "1")),
    }
    pairs = {name: (kept, other) for name, other in others.items()}
    for lag in (1, 2, 3, 16, 64):
        pairs[f"rows {lag}"] = kept[lag:], kept[:-lag]
        pairs[f"columns {lag}"] = kept[:, lag:], kept[:, :-lag]
        pairs[f"diagonal {lag}"] = kept[lag:, lag:], kept[:-lag, :-lag]
    for name, (one, other) in pairs.items():
        product = (one - (1 - rate)) * (other - (1 - rate)) / (rate * (1 - rate))
        assert abs(product.mean()) <= SIGMAS / math.sqrt(product.size), name


def test_nothing_is_dropped_at_rate_0():
    ops = open_cpu()
    assert keep_mask(ops, (3, 4), NAME, Dropout(0.0, 1, 2)) is None
    assert keep_mask(ops, (3, 4), NAME, None) is None
