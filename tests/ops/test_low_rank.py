"""The sum of a small weight and its adapter; and the memory of adapters, counted by shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ops import gradcheck
from mamba_ops.cpu import low_rank as module
from mamba_ops.cpu import open_cpu, products
from mamba_ops.cpu.tally import Shape, Tally
from mamba_ops.cpu.workspace import Rows
from mamba_ops.gradients import GradientBuffers
from mamba_ops.memory import Shapes
from mamba_ops.ops import Adapter, Batch, Columns, Dropout

ADAPTER = Adapter("A", "B", 0.7)


def random_params(dtype, shape=(5, 1, 4), r=2):
    rng = np.random.default_rng(0)
    shapes = {"w": shape, "A": (r, shape[-1]), "B": (shape[0], r)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(("rows", "columns", "r"), [(1, 1, 1), (1, 4, 1), (5, 4, 2), (13, 7, 5), (67, 3, 3)])
def test_gradient_of_every_element(rows, columns, r):
    ops, rng = open_cpu(np.float64), np.random.default_rng(rows)
    for result in gradcheck.check(gradcheck.low_rank(ops, rng, rows, columns, r)):
        assert result.holds, result


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(5, 1, 4), (6, 16)])
def test_forward_is_the_definition_bit_for_bit(shape, dtype):
    ops, params = open_cpu(dtype), random_params(dtype, shape)
    kept = params["w"].copy()
    with ops.scope():
        total = ops.low_rank_forward(params, "w", ADAPTER)
        assert total.shape == shape
        assert total.dtype == dtype
        assert ops.held_bytes() == total.nbytes
        product = (params["B"] @ params["A"]).reshape(shape)
        np.testing.assert_array_equal(total, params["w"] + dtype(0.7) * product)
    np.testing.assert_array_equal(params["w"], kept)


def test_an_adapter_of_zeros_leaves_the_weight_bit_identical():
    ops, params = open_cpu(), random_params(np.float32)
    params["B"][...] = 0
    assert ops.low_rank_forward(params, "w", ADAPTER).tobytes() == params["w"].tobytes()


@pytest.mark.parametrize("need", [(), ("A",), ("B",), ("A", "B"), ("w", "A")])
def test_only_what_trains_gets_a_gradient_and_a_second_use_adds(need):
    ops, params = open_cpu(np.float64), random_params(np.float64)
    dw = np.random.default_rng(1).standard_normal((5, 1, 4))
    names = [name for name in need if name != "w"]
    grads, flat = GradientBuffers(params, names), dw[:, 0]
    expected = {"A": 0.7 * params["B"].T @ flat, "B": 0.7 * flat @ params["A"].T}
    for uses in (1, 2):
        ops.low_rank_backward(dw, params, ADAPTER, grads, need)
        assert grads.arrays.keys() == set(names)
        for name in names:
            np.testing.assert_allclose(grads.arrays[name], uses * expected[name], rtol=1e-13)


def run_every_op(ops, rows, params, grads, need, dropout, activation):
    """Make each call that takes an adapter, twice, so that gradients are added to. activation: makes (T, columns)."""
    T, linear, table = rows.batch * rows.seq_len, Adapter("A", "B", 0.5, dropout), Adapter("EA", "EB", 0.5)
    out, width = params["w"].shape if hasattr(params["w"], "shape") else params["w"]
    wide, x, dy, dx = activation(T, width + 3), activation(T, width), activation(T, out), activation(T, width)
    for _ in range(2):
        with ops.scope():
            ops.embedding_forward(rows, params, "E", x, table)
            ops.linear_forward(Columns(wide, 2, width), params, "w", out=dy, adapter=linear)
            ops.linear_forward(x, params, "w", adapter=linear)
            ops.low_rank_forward(params, "conv", Adapter("CA", "CB", 0.5))
            ops.linear_cross_entropy_forward(rows, x, params, "E", grads, need, dx, table)
            ops.linear_cross_entropy_forward(rows, x, params, "E", grads, need, None, table)
            ops.linear_cross_entropy_forward(rows, x, params, "E", adapter=table)
            ops.linear_backward(dy, x, params, "w", None, grads, need, dx, True, linear)
            ops.linear_backward(dy, x, params, "w", None, grads, need, Columns(wide, 0, width), adapter=linear)
            ops.low_rank_backward(params["conv"], params, Adapter("CA", "CB", 0.5), grads, need)
            ops.embedding_backward(dx, rows, params, "E", grads, need, table)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    seq_len=st.integers(1, 9),
    sizes=st.tuples(*4 * [st.integers(1, 9)]),
    need=st.sets(st.sampled_from(["w", "A", "B", "E", "EA", "EB", "CA", "CB"])),
    rate=st.sampled_from([None, 0.0, 0.25]),
    part=st.integers(1, 60),
    block=st.integers(1, 60),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_the_tally_counts_what_adapters_take(batch, seq_len, sizes, need, rate, part, block, dtype):
    out, width, vocab_size, r = sizes
    shapes = {"w": (out, width), "A": (r, width), "B": (out, r), "E": (vocab_size, width), "EA": (r, vocab_size)}
    shapes |= {"EB": (width, r), "conv": (out, 1, 4), "CA": (r, 4), "CB": (out, r)}
    params = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
    dropout = None if rate is None else Dropout(rate, 0, 0)
    ids = np.arange(batch * seq_len).reshape(batch, seq_len) % vocab_size
    ops, tally = open_cpu(dtype, threads=1), Tally(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "PART_ELEMENTS", part)
        patch.setattr(module, "MASK_ELEMENTS", 7)
        patch.setattr("mamba_ops.cpu.linear_cross_entropy.BLOCK_ELEMENTS", block)
        rows = ops.rows(Batch(ids, ids, np.zeros(ids.shape, np.uint32)))
        made = GradientBuffers(params, need)
        run_every_op(ops, rows, params, made, need, dropout, lambda *shape: np.ones(shape, dtype))
        counted = Rows(batch, seq_len, *3 * [np.empty(0)])
        run_every_op(tally, counted, shapes, Shapes(shapes), need, dropout, Shape)
    assert tally.pooled == ops.held_bytes()
    assert tally.scratch_bytes == sum(array.nbytes for array in ops._local.__dict__.get("arrays", {}).values())
