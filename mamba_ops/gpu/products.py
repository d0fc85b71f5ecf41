"""Products on the GPU (`kernels/linear.wgsl`): three layouts, any shape, ranges of rows and columns."""

import math
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

from mamba_ops.gpu.device import GROUPS_PER_DIMENSION, Device, DeviceError, grid
from mamba_ops.gpu.workspace import DeviceArray, GpuWorkspace, Range

Layout = Literal["nt", "nn", "tn"]


class Tile(NamedTuple):
    """How a product is cut. speed: share of the largest tile's rate, when there are workgroups enough.

    m, n: rows and columns of C a workgroup makes. depth: of k in its memory. rows4, cols4: vec4 of rows and of
    columns a thread makes. unroll: steps in k written out. lanes_n: of 32 neighbouring threads, those that lie
    beside each other in n.
    """

    m: int
    n: int
    depth: int
    rows4: int
    cols4: int
    unroll: int
    lanes_n: int
    speed: float

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        return self.m * self.n // (16 * self.rows4 * self.cols4)

    @property
    def nbytes(self) -> int:
        """Bytes of a workgroup's memory."""
        return 2 * self.depth * (self.m + self.n) * 4


TILES = (
    Tile(128, 128, 16, 2, 2, 16, 8, 1.0),
    Tile(128, 128, 8, 2, 2, 8, 8, 0.95),
    Tile(128, 64, 16, 2, 2, 16, 8, 0.9),
    Tile(64, 64, 16, 2, 2, 16, 8, 0.75),
    Tile(32, 32, 16, 1, 1, 16, 8, 0.4),
)
MAX_SPLITS = 16
FLAGS = ("A_ALONG", "B_ALONG", "A_VEC", "B_VEC", "C_VEC", "SCALE", "BIAS", "RESIDUAL", "ADD")
ENTRIES = {"nt": "forward", "nn": "backward_x", "tn": "backward_weight"}

# of the card the plans are made for (NVIDIA H200): cores, float32 operations a microsecond and core at the
# largest tile's rate, bytes a microsecond, microseconds that one more dispatch costs
CORES = 132
RATE = 265e3
BANDWIDTH = 2.5e6
DISPATCH = 5.0


class Plan(NamedTuple):
    """The tile of a product, and into how many parts k is split."""

    tile: Tile
    splits: int


class Product(NamedTuple):
    """A product to be made, as `gemm` takes it."""

    layout: Layout
    a: Range
    b: Range
    c: Range
    m: int
    n: int
    k: int
    bias: Range | None
    residual: Range | None
    add: bool
    scale: float
    label: str | None


def gemm(
    ops: GpuWorkspace,
    layout: Layout,
    a: Range,
    b: Range,
    c: Range,
    m: int,
    n: int,
    k: int,
    bias: Range | None = None,
    residual: Range | None = None,
    add: bool = False,
    *,
    scale: float = 1.0,
    plan: Plan | None = None,
    label: str | None = None,
) -> None:
    """C = scale A B + bias + residual, written or added. C, residual: (m, n); bias: (n,), element j at first + j.

    layout, as the operands lie: `nt` A: (m, k), B: (n, k); `nn` A: (m, k), B: (k, n); `tn` A: (k, m), B: (k, n).
    A `Range` says where rows lie, so a range of rows is one too: first = row * stride + column. Sums are taken in
    a fixed order. scale costs no pass of its own: it is a factor of what is stored, in pipelines that have one only.
    label: the kernel's name in a profile. Raises DeviceError when C lies in a buffer that is read.
    """
    if residual is not None and residual[:3] == c[:3] and not add:
        residual, add = None, True
    if any(operand is not None and operand.buffer is c.buffer for operand in (a, b, bias, residual)):
        raise DeviceError(f"a product of ({m}, {n}, {k}) would write to a buffer that it reads")
    tile, splits = plan or choose_plan(ops.device, m, n, k)
    split_k = -(-k // (splits * tile.depth)) * tile.depth
    splits = -(-k // split_k)
    if splits == 1:
        _multiply(ops, Product(layout, a, b, c, m, n, k, bias, residual, add, scale, label), tile, split_k, 1)
        return
    with ops.scope():
        partials = Range(ops.empty(splits * m, n).buffer, n, 0, n)
        _multiply(ops, Product(layout, a, b, partials, m, n, k, None, None, False, 1.0, label), tile, split_k, splits)
        _sum_splits(ops, Product(layout, partials, partials, c, m, n, k, bias, residual, add, scale, label), splits)


def column_sums(ops: GpuWorkspace, source: Range, rows: int, out: DeviceArray, add: bool) -> None:
    """out_j = sum over t of source[t, j], written or added, in a fixed order. out: source's width, any shape."""
    device, columns = ops.device, source.width
    per_group = max(32, math.isqrt(rows), -(-rows // GROUPS_PER_DIMENSION))
    groups = -(-rows // per_group)
    x = -(-columns // 64)
    last = device.pipeline("linear", "column_sums", **_constants(ADD=add))
    if groups == 1:
        uniform = device.uniform("IIIII", rows, columns, source.stride, source.first, rows)
        device.dispatch(last, uniform, (source.buffer, out.buffer), (x, 1, 1))
        return
    with ops.scope():
        partials = ops.empty(groups, columns)
        first = device.pipeline("linear", "column_sums", **_constants())
        uniform = device.uniform("IIIII", rows, columns, source.stride, source.first, per_group)
        device.dispatch(first, uniform, (source.buffer, partials.buffer), (x, groups, 1))
        uniform = device.uniform("IIIII", groups, columns, columns, 0, groups)
        device.dispatch(last, uniform, (partials.buffer, out.buffer), (x, 1, 1))


def choose_plan(device: Device, m: int, n: int, k: int) -> Plan:
    """Return the tile and the splits of k that should be fastest, for the same shape always the same."""
    limits = device.limits
    return _plan(
        m,
        n,
        k,
        limits["max-compute-workgroup-storage-size"],
        limits["max-compute-invocations-per-workgroup"],
        limits["max-storage-buffer-binding-size"],
    )


@lru_cache(maxsize=4096)
def _plan(m: int, n: int, k: int, memory: int, threads: int, binding: int) -> Plan:
    plans = []
    for tile in TILES:
        if tile.nbytes > memory or tile.threads > threads:
            continue
        most = max(1, min(MAX_SPLITS, k // (4 * tile.depth), binding // (m * n * 4)))
        plans += [(microseconds(tile, splits, m, n, k), Plan(tile, splits)) for splits in range(1, most + 1)]
    if not plans:
        raise DeviceError(f"no tile of the products fits in {memory:,} bytes and {threads} threads a workgroup")
    return min(plans, key=lambda plan: plan[0])[1]


def microseconds(tile: Tile, splits: int, m: int, n: int, k: int) -> float:
    """Estimate a product's time: that of the core with the most workgroups, which is slower below 256 threads."""
    groups = -(-m // tile.m) * -(-n // tile.n) * splits
    most = -(-groups // CORES)
    busy = min(1.0, math.sqrt(most * tile.threads / 256))
    work = 2 * tile.m * tile.n * (-(-k // splits) + 2 * tile.depth)
    time = most * work / (RATE * tile.speed * busy)
    if splits > 1:
        time += DISPATCH + (2 * splits + 1) * m * n * 4 / BANDWIDTH
    return time


def _multiply(ops: GpuWorkspace, product: Product, tile: Tile, split_k: int, splits: int) -> None:
    """Record a product in tiles, for each split of k on its own."""
    device = ops.device
    layout, a, b, c, m, n, k, bias, residual, add, scale, label = product
    a_along, b_along = layout[0] == "n", layout[1] == "t"
    constants = _constants(
        tile,
        A_ALONG=a_along,
        B_ALONG=b_along,
        A_VEC=_aligned(a) and not (a_along and k % 4),
        B_VEC=_aligned(b) and not (b_along and k % 4),
        C_VEC=n % 4 == 0 and _aligned(c) and _aligned(residual),
        SCALE=scale != 1,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ADD=add,
    )
    tiles_m, tiles_n = -(-m // tile.m), -(-n // tile.n)
    uniform = _uniform(device, product, split_k, splits, tiles_m <= tiles_n)
    buffers = [a.buffer, b.buffer, c.buffer, *(r.buffer for r in (residual, bias) if r is not None)]
    pipeline = device.pipeline("linear", ENTRIES[layout], **constants)
    x, y, _ = grid(tiles_m * tiles_n)
    device.dispatch(pipeline, uniform, buffers, (x, y, splits), label=label)


def _sum_splits(ops: GpuWorkspace, product: Product, splits: int) -> None:
    """Record the sum over the splits' products, which are the operand a of `product`."""
    device = ops.device
    bias, residual = product.bias, product.residual
    constants = _constants(
        SCALE=product.scale != 1, BIAS=bias is not None, RESIDUAL=residual is not None, ADD=product.add
    )
    buffers = [product.a.buffer, product.c.buffer, *(r.buffer for r in (residual, bias) if r is not None)]
    uniform = _uniform(device, product, 0, splits, False)
    pipeline = device.pipeline("linear", "sum_splits", **constants)
    device.dispatch(pipeline, uniform, buffers, grid(-(-product.m * product.n // 256)))


def _uniform(device: Device, product: Product, split_k: int, splits: int, m_first: bool) -> Any:
    """Return the uniform block of the kernels' `Uniforms`."""
    _, a, b, c, m, n, k, bias, residual, _, scale, _ = product
    residual_at = (0, 0) if residual is None else (residual.stride, residual.first)
    places = (a.stride, a.first, b.stride, b.first, c.stride, c.first, *residual_at)
    split_c = m * n if splits > 1 else 0
    bias_at = 0 if bias is None else bias.first
    return device.uniform("16If", m, n, k, split_k, split_c, m_first, *places, bias_at, splits, scale)


@cache
def _constants(tile: Tile = TILES[-1], **flags: bool) -> dict[str, int]:
    """Return the constants of `kernels/linear.wgsl`: a tile's, and flags that are off unless given."""
    blocks = tile.depth * (tile.m + tile.n) // 16
    return {
        "TILE_M": tile.m,
        "TILE_N": tile.n,
        "DEPTH": tile.depth,
        "ROWS4": tile.rows4,
        "COLS4": tile.cols4,
        "UNROLL": tile.unroll,
        "LANES_N": tile.lanes_n,
        "UNITS": -(-blocks // tile.threads),
        **{flag: int(flags.get(flag, False)) for flag in FLAGS},
    }


def _aligned(operand: Range | None) -> bool:
    return operand is None or (operand.stride % 4 == 0 and operand.first % 4 == 0)
