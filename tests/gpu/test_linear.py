"""The product kernels against the NumPy side in float64: three layouts, edges, column ranges, splits of k."""

import numpy as np
import pytest

from mamba_ops.cpu import open_cpu
from mamba_ops.gpu import products
from mamba_ops.gpu.device import DeviceError
from mamba_ops.gpu.workspace import Range, range_of
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Adapter, Columns, Dropout
from mamba_ops.parameters import EMBEDDING

LAYOUTS = ["nt", "nn", "tn"]
SHAPES = [(1, 1, 1), (1, 7, 3), (3, 1, 5), (31, 37, 41), (64, 16, 33), (65, 68, 20), (128, 4, 67), (300, 12, 8)]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def operands(rng, layout, m, n, k):
    """The operands as they lie, and A and B in float64."""
    a = normal(rng, *((m, k) if layout[0] == "n" else (k, m)))
    b = normal(rng, *((k, n) if layout[1] == "n" else (n, k)))
    wide = a.astype(np.float64), b.astype(np.float64)
    return a, b, wide[0] if layout[0] == "n" else wide[0].T, wide[1] if layout[1] == "n" else wide[1].T


def product(ops, layout, m, n, k, plan=None, **more):
    """What `gemm` writes for seeded operands, and what it should."""
    a, b, A, B = operands(np.random.default_rng(m + n + k), layout, m, n, k)
    c = ops.empty(m, n)
    products.gemm(
        ops, layout, range_of(ops.upload(a)), range_of(ops.upload(b)), range_of(c), m, n, k, plan=plan, **more
    )
    return ops.read(c), A @ B


@pytest.mark.parametrize(("T", "width", "columns"), SHAPES)
def test_forward_and_backward(ops, assert_close, T, width, columns):
    rng = np.random.default_rng(T)
    host = {"w": normal(rng, columns, width), "b": normal(rng, columns)}
    x, dy, residual, start = (
        normal(rng, T, width),
        normal(rng, T, columns),
        normal(rng, T, columns),
        normal(rng, T, width),
    )
    cpu, wide = open_cpu(np.float64), {name: value.astype(np.float64) for name, value in host.items()}
    params = {name: ops.upload(value) for name, value in host.items()}
    both = [("b", residual)]
    for bias, extra in [(None, None), ("b", None), (None, residual), *both] if T in (31, 65) else both:
        y = ops.linear_forward(ops.upload(x), params, "w", bias, None if extra is None else ops.upload(extra))
        wide_extra = None if extra is None else extra.astype(np.float64)
        wanted = cpu.linear_forward(x.astype(np.float64), wide, "w", bias, wide_extra)
        assert_close(ops.read(y), wanted, 1e-4, f"y, {bias=}")

    grads, wanted = GradientBuffers(params, params, ops), GradientBuffers(wide, wide)
    dx, wide_dx = ops.upload(start), start.astype(np.float64)
    for add in (False, True):
        ops.linear_backward(ops.upload(dy), ops.upload(x), params, "w", "b", grads, params, dx, add)
        cpu.linear_backward(dy.astype(np.float64), x.astype(np.float64), wide, "w", "b", wanted, wide, wide_dx, add)
        for name in host:
            assert_close(ops.read(grads.arrays[name]), wanted.arrays[name], 1e-3, f"d{name}, {add=}")
        assert_close(ops.read(dx), wide_dx, 1e-3, f"dx, {add=}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", products.TILES, ids=lambda tile: f"{tile.m}x{tile.n}x{tile.depth}")
def test_every_tile(ops, assert_close, tile, layout):
    for m, n, k in ((132, 68, 36), (4, 132, 4), (256, 128, 64)):
        assert_close(*product(ops, layout, m, n, k, products.Plan(tile, 1)), 1e-5, f"{m, n, k}")


def test_large_tiles_without_alignment(gpu_with, assert_close):
    ops = gpu_with(checks=False)
    for layout in LAYOUTS:
        assert_close(*product(ops, layout, 131, 67, 35, products.Plan(products.TILES[0], 1)), 1e-5, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranges_of_rows_and_columns(gpu_with, assert_close, layout):
    """Each operand lies inside a larger array of NaN; what lies beside C stays as it was."""
    ops = gpu_with(checks=False)
    rng = np.random.default_rng(3)
    for _ in range(25):
        m, n, k = (int(size) for size in rng.choice([1, 2, 4, 5, 8, 12, 31, 33, 36], 3))
        a, b, A, B = operands(rng, layout, m, n, k)
        c = normal(rng, m, n)
        ranges, hosts, places = [], [], []
        for inner in (a, b, c):
            rows, columns = inner.shape
            row, first = int(rng.integers(3)), int(rng.choice([0, 1, 4]))
            outer = np.full((row + rows + int(rng.integers(2)), first + columns + int(rng.choice([0, 3, 4]))), np.nan)
            outer = outer.astype(np.float32)
            place = slice(row, row + rows), slice(first, first + columns)
            outer[place] = inner
            array = ops.upload(outer)
            hosts.append((array, outer))
            places.append(place)
            ranges.append(Range(array.buffer, outer.shape[1], row * outer.shape[1] + first, columns))
        add = bool(rng.integers(2))
        products.gemm(ops, layout, *ranges, m, n, k, add=add)
        array, outer = hosts[2]
        found = ops.read(array)
        assert_close(found[places[2]], A @ B + add * c.astype(np.float64), 1e-5, f"{m, n, k, add}")
        found[places[2]] = outer[places[2]]
        np.testing.assert_array_equal(found, outer)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 67), (36, 40, 128)])
def test_splits_of_k(ops, assert_close, layout, m, n, k):
    rng = np.random.default_rng(0)
    bias, residual = normal(rng, n), normal(rng, m, n)
    more = dict(bias=range_of(ops.upload(bias)), residual=range_of(ops.upload(residual)))
    for splits in (2, 3, 16):
        plan = products.Plan(products.TILES[-1], splits)
        found, wanted = product(ops, layout, m, n, k, plan, **more)
        assert_close(found, wanted + bias.astype(np.float64) + residual.astype(np.float64), 1e-5)


def test_splits_add_to_columns(ops, assert_close):
    rng = np.random.default_rng(0)
    a, b, A, B = operands(rng, "tn", 6, 5, 90)
    start = normal(rng, 6, 9)
    c = ops.upload(start)
    plan = products.Plan(products.TILES[-1], 4)
    place = range_of(Columns(c, 3, 5))
    products.gemm(
        ops, "tn", range_of(ops.upload(a)), range_of(ops.upload(b)), place, 6, 5, 90, None, None, True, plan=plan
    )
    found = ops.read(c)
    assert_close(found[:, 3:8], A @ B + start[:, 3:8].astype(np.float64), 1e-5)
    np.testing.assert_array_equal(found[:, [0, 1, 2, 8]], start[:, [0, 1, 2, 8]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("splits", [1, 3])
def test_a_scale_is_of_the_product_alone(gpu_once, assert_close, layout, splits):
    ops, rng = gpu_once, np.random.default_rng(0)
    for m, n, k in ((36, 40, 200), (5, 7, 201)):
        bias, residual, start = normal(rng, n), normal(rng, m, n), normal(rng, m, n)
        a, b, A, B = operands(rng, layout, m, n, k)
        c, plan = ops.upload(start), products.Plan(products.TILES[-1], splits)
        places = [range_of(ops.upload(array)) for array in (a, b)]
        more = dict(bias=range_of(ops.upload(bias)), residual=range_of(ops.upload(residual)), add=True)
        products.gemm(ops, layout, *places, range_of(c), m, n, k, scale=0.3, plan=plan, **more)
        rest = sum(array.astype(np.float64) for array in (bias, residual, start))
        assert_close(ops.read(c), 0.3 * (A @ B) + rest, 1e-5)


def test_residual_in_place(ops, assert_close):
    rng = np.random.default_rng(0)
    x, w, residual = normal(rng, 9, 6), normal(rng, 4, 6), normal(rng, 9, 4)
    y = ops.upload(residual)
    ops.linear_forward(ops.upload(x), {"w": ops.upload(w)}, "w", residual=y, out=y)
    assert_close(ops.read(y), x.astype(np.float64) @ w.T.astype(np.float64) + residual.astype(np.float64), 1e-5)


@pytest.mark.parametrize("columns", [1, 65, 200])
@pytest.mark.parametrize("T", [1, 31, 33, 1200])
def test_column_sums(ops, assert_close, T, columns):
    rng = np.random.default_rng(T)
    host = np.full((T, columns + 3), np.nan, np.float32)
    host[:, 2 : 2 + columns] = normal(rng, T, columns)
    wanted = host[:, 2 : 2 + columns].astype(np.float64).sum(axis=0)
    source, out = range_of(Columns(ops.upload(host), 2, columns)), ops.upload(np.full(columns, np.nan, np.float32))
    for times in (1, 2):
        products.column_sums(ops, source, T, out, add=times > 1)
        assert_close(ops.read(out), times * wanted, 1e-5)


def test_case_48_weights_in_row_parts(ops, assert_close, monkeypatch):
    monkeypatch.setattr(ops.device, "binding_limit", 512)
    rng = np.random.default_rng(0)
    host = {EMBEDDING: normal(rng, 40, 8)}
    x, dy, residual = normal(rng, 11, 8), normal(rng, 11, 40), normal(rng, 11, 40)
    params = {EMBEDDING: ops.upload_parameter(EMBEDDING, host[EMBEDDING])}
    assert [part.rows for part in params[EMBEDDING].parts] == [16, 16, 8]
    y = ops.linear_forward(ops.upload(x), params, EMBEDDING, residual=ops.upload(residual))
    X, W, dY = (array.astype(np.float64) for array in (x, host[EMBEDDING], dy))
    assert_close(ops.read(y), X @ W.T + residual.astype(np.float64), 1e-5)
    grads, dx = GradientBuffers(params, params, ops), ops.empty(11, 8)
    for _ in range(2):
        ops.linear_backward(ops.upload(dy), ops.upload(x), params, EMBEDDING, None, grads, params, dx)
    assert_close(ops.read(grads.arrays[EMBEDDING]), 2 * dY.T @ X, 1e-5)
    assert_close(ops.read(dx), dY @ W, 1e-5)


ADAPTED = [(1, 7, 3, 1), (31, 37, 41, 8), (67, 131, 257, 3), (300, 64, 72, 64)]
WEIGHT = "backbone.layers.0.mixer.in_proj.weight"


def adapted(T, width, columns, rank):
    """A frozen weight with bias and adapter, and the ops' inputs, on the host; float32."""
    rng = np.random.default_rng(T + width)
    host = {WEIGHT: normal(rng, columns, width), "b": normal(rng, columns)}
    host |= {"A": normal(rng, rank, width), "B": normal(rng, columns, rank)}
    return host, {name: normal(rng, T, width if name in ("x", "dx") else columns) for name in ("x", "dx", "dy", "r")}


def adapted_reference(host, inputs, kept, rate, scale):
    """y, dx, dA and dB in float64. kept: (T, in)."""
    W, b, A, B = (value.astype(np.float64) for value in host.values())
    x, dx, dy, residual = (value.astype(np.float64) for value in inputs.values())
    dropped, e = np.where(kept, x / (1 - rate), 0), scale * dy @ B
    y = x @ W.T + b + residual + scale * dropped @ A.T @ B.T
    return y, dx + dy @ W + np.where(kept, e @ A / (1 - rate), 0), e.T @ dropped, scale * dy.T @ (dropped @ A.T)


def inside(ops, host):
    """The columns of an array on the device that has two columns of NaN before them and one after."""
    outer = np.full((len(host), host.shape[1] + 3), np.nan, np.float32)
    outer[:, 2:-1] = host
    return Columns(ops.upload(outer), 2, host.shape[1])


@pytest.mark.parametrize("dropout", [None, Dropout(0.3, 1, 2, 5)], ids=["whole", "dropout"])
@pytest.mark.parametrize(("T", "width", "columns", "rank"), ADAPTED)
def test_adapter(ops, assert_close, kept_of, T, width, columns, rank, dropout):
    """x, dy and dx are ranges of columns; the second backward adds to the gradients."""
    host, inputs = adapted(T, width, columns, rank)
    rate, kept = 0, np.ones((T, width), bool)
    if dropout is not None:
        rate, kept = dropout.rate, kept_of(dropout, WEIGHT, T, width)
    y, dx, dA, dB = adapted_reference(host, inputs, kept, rate, 0.6)
    params, adapter = {name: ops.upload(value) for name, value in host.items()}, Adapter("A", "B", 0.6, dropout)
    x, dy = inside(ops, inputs["x"]), inside(ops, inputs["dy"])
    found = ops.linear_forward(x, params, WEIGHT, "b", ops.upload(inputs["r"]), adapter=adapter)
    assert_close(ops.read(found), y, 1e-4, "y")
    grads = GradientBuffers(params, "AB", ops)
    for array in grads.arrays.values():
        ops.write_parameter(array, np.full(array.shape, np.nan, np.float32))
    for calls in (1, 2):
        out = inside(ops, inputs["dx"])
        ops.linear_backward(dy, x, params, WEIGHT, "b", grads, "AB", out, True, adapter)
        found = ops.read(out.array)
        assert_close(found[:, 2:-1], dx, 1e-3, "dx")
        assert np.isnan(found[:, [0, 1, -1]]).all()
        assert_close(ops.read(grads.arrays["A"]), calls * dA, 1e-3, f"dA, {calls=}")
        assert_close(ops.read(grads.arrays["B"]), calls * dB, 1e-3, f"dB, {calls=}")
    assert all(ops.read(params[name]).tobytes() == host[name].tobytes() for name in host)


@pytest.mark.parametrize("dropout", [None, Dropout(0.3, 1, 2)], ids=["whole", "dropout"])
def test_an_adapter_computes_what_is_needed(gpu_once, kept_of, dropout):
    """Its tensors alone, one of them or none; dx is the same, written or added; the weight's gradient as without."""
    host, inputs = adapted(31, 37, 41, 8)
    ops, params = gpu_once, {name: gpu_once.upload(value) for name, value in host.items()}
    x, dy, found = ops.upload(inputs["x"]), ops.upload(inputs["dy"]), {}
    for need in ("", "A", "B", "AB", ("A", "B", WEIGHT)):
        grads, dx = GradientBuffers(params, need, ops), ops.empty(31, 37)
        ops.linear_backward(dy, x, params, WEIGHT, None, grads, need, dx, adapter=Adapter("A", "B", 0.6, dropout))
        arrays = [("dx", dx), *grads.arrays.items()]
        for name, array in arrays:
            found.setdefault(name, set()).add(ops.read(array).tobytes())
    assert {name: len(values) for name, values in found.items()} == {"dx": 1, "A": 1, "B": 1, WEIGHT: 1}
    grads = GradientBuffers(params, [WEIGHT], ops)
    ops.linear_backward(dy, x, params, WEIGHT, None, grads, [WEIGHT], ops.empty(31, 37))
    assert found[WEIGHT] == {ops.read(grads.arrays[WEIGHT]).tobytes()}


def test_an_adapter_holds_nothing_of_the_inputs_size_without_dropout(gpu_once):
    host, inputs = adapted(300, 64, 72, 8)
    ops, params = gpu_once, {name: gpu_once.upload(value) for name, value in host.items()}
    x, dy, y, dx = (ops.upload(inputs[name]) for name in ("x", "dy", "r", "dx"))
    grads, adapter = GradientBuffers(params, "AB", ops), Adapter("A", "B", 0.6)
    made, empty = [], ops.empty
    ops.empty = lambda rows, columns: made.append(rows * columns) or empty(rows, columns)
    ops.linear_forward(x, params, WEIGHT, out=y, adapter=adapter)
    ops.linear_backward(dy, x, params, WEIGHT, None, grads, "AB", dx, adapter=adapter)
    # what the splits of k make is of the tensors' size
    assert max(made) < 300 * 64
    assert 300 * 8 in made


def test_an_adapter_in_place_of_the_residual(gpu_once, assert_close):
    host, inputs = adapted(31, 37, 41, 3)
    params, y = {name: gpu_once.upload(value) for name, value in host.items()}, gpu_once.upload(inputs["r"])
    x = gpu_once.upload(inputs["x"])
    gpu_once.linear_forward(x, params, WEIGHT, "b", residual=y, out=y, adapter=Adapter("A", "B", 0.6))
    assert_close(gpu_once.read(y), adapted_reference(host, inputs, np.ones((31, 37), bool), 0, 0.6)[0], 1e-4)


def test_repeated_runs_give_the_same_bytes(ops):
    for splits in (1, 4):
        plan = products.Plan(products.TILES[-1], splits)
        runs = [product(ops, "tn", 33, 65, 200, plan)[0].tobytes() for _ in range(3)]
        assert len(set(runs)) == 1
    source = ops.upload(normal(np.random.default_rng(0), 1000, 5))
    sums = []
    for _ in range(3):
        out = ops.empty(5, 1)
        products.column_sums(ops, range_of(source), 1000, out, add=False)
        sums.append(ops.read(out).tobytes())
    assert len(set(sums)) == 1


def test_refuses_to_write_what_it_reads(ops):
    a = ops.upload(np.ones((4, 8), np.float32))
    with pytest.raises(DeviceError, match="would write to a buffer that it reads"):
        products.gemm(ops, "nt", Range(a.buffer, 8, 0, 4), Range(a.buffer, 8, 0, 4), Range(a.buffer, 8, 4, 4), 4, 4, 4)


def test_plans_keep_within_the_limits():
    for shape in ((1, 1, 1), (4096, 50280, 768), (80, 1536, 4096)):
        tile, splits = products._plan(*shape, 16384, 256, 1 << 27)
        assert tile.nbytes <= 16384
        assert tile.threads <= 256
        assert splits == 1 or splits * shape[0] * shape[1] * 4 <= 1 << 27
    with pytest.raises(DeviceError, match="fits in 1,024 bytes"):
        products._plan(4, 4, 4, 1024, 256, 1 << 27)
