"""What the CPU ops hold in memory, by shapes alone: the model runs on arrays that are only shapes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from mamba_ops.cpu import adamw, causal_conv1d, global_norm, linear_cross_entropy, low_rank, rms_norm
from mamba_ops.cpu.products import part_height
from mamba_ops.cpu.scan_block import open_block
from mamba_ops.cpu.scan_plan import CHUNK, Plan, make_plan, small
from mamba_ops.cpu.selective_scan import Chunk
from mamba_ops.cpu.workspace import Rows, Workspace
from mamba_ops.ops import Adapter, Columns, Dropout, Gradients, Need

Shapes = dict[str, tuple[int, ...]]


class Shape(NamedTuple):
    """An activation without memory."""

    rows: int
    columns: int


class Tally:
    """`ops.Ops` that computes nothing and counts what `CpuOps` takes for the same calls, in bytes.

    Parameters and gradients are shapes too. pooled: what `empty` makes, never given back. passing: the most that
    an op makes besides and drops again. Shapes of activations: T = batch * seq_len tokens.
    """

    def __init__(self, dtype: type):
        self.dtype = np.dtype(dtype)
        self.pooled = self.passing = 0
        self._free: Counter[int] = Counter()
        self._scopes: list[list[int]] = [[]]
        self._scratch: dict[tuple[str, int], int] = {}

    @property
    def scratch_bytes(self) -> int:
        """What `scratch` makes in a thread."""
        return sum(self._scratch.values())

    @contextmanager
    def scope(self) -> Iterator[None]:
        """As `Workspace.scope`."""
        self._scopes.append([])
        try:
            yield
        finally:
            self._free.update(self._scopes.pop())

    def empty(self, rows: int, columns: int) -> Shape:
        """As `Workspace.empty`."""
        size = rows * columns
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.pooled += size * self.dtype.itemsize
        self._scopes[-1].append(size)
        return Shape(rows, columns)

    def scratch(self, name: str, capacity: int, shape: tuple[int, ...], dtype: type | None = None) -> np.ndarray:
        """As `Workspace.scratch`, except that the array is dropped after use."""
        array = np.empty(capacity, dtype or self.dtype)
        self._scratch[name, capacity] = array.nbytes
        return array[: prod(shape)].reshape(shape)

    def total(self, losses: Shape) -> float:
        """Return 0."""
        return 0.0

    def empty_like(self, parameter: tuple[int, ...]) -> tuple[int, ...]:
        """As `Workspace.empty_like`."""
        self.empty(parameter[0], prod(parameter[1:]))
        return parameter

    def embedding_forward(
        self, rows: Rows, params: Shapes, weight: str, out: Shape, adapter: Adapter | None = None
    ) -> None:
        """What the adapter adds."""
        if adapter is not None:
            with self.scope():
                self.empty(params[adapter.A][0], out.rows)
                self._add_low_rank(out)

    def embedding_backward(
        self,
        dy: Shape,
        rows: Rows,
        params: Shapes,
        weight: str,
        grads: Gradients,
        need: Need,
        adapter: Adapter | None = None,
    ) -> None:
        """Gradients in the order of ids, their sums by id, and the rows they are added to."""
        if weight in need:
            grads.take(weight)
            self._pass(3 * prod(dy))
        if adapter is None:
            return
        rank = params[adapter.A][0]
        with self.scope():
            if adapter.A in need:
                grads.take(adapter.A)
                self.empty(dy.rows, rank)
                self._pass(3 * dy.rows * rank)
            if adapter.B in need:
                self.empty(rank, dy.rows)
                self._add_product(*grads.take(adapter.B))

    def rms_norm_forward(self, x: Shape, *_: Any) -> tuple[Shape, Shape]:
        """y and the scales."""
        return self.empty(*x), self.empty(x.rows, 1)

    def rms_norm_backward(self, dy: Shape, saved: Any, grads: Gradients, need: Need, dx: Shape, add: bool) -> None:
        """Partial sums of dweight."""
        self.empty(-(-dy.rows // rms_norm.TILE), dy.columns)
        for name in ("norm_xhat", "norm_t"):
            self.scratch(name, rms_norm.TILE * dy.columns, ())

    def linear_forward(
        self,
        x: Shape | Columns,
        params: Shapes,
        weight: str,
        bias: str | None = None,
        residual: Shape | None = None,
        out: Shape | None = None,
        adapter: Adapter | None = None,
    ) -> Shape:
        """y, unless it is given, and what the adapter makes on the way."""
        x = _whole(x)
        y = self.empty(x.rows, params[weight][0]) if out is None else out
        if adapter is not None:
            with self.scope():
                if self._mask(x, adapter.dropout):
                    self.empty(*x)
                self.empty(x.rows, params[adapter.A][0])
                self._add_low_rank(y)
        return y

    def linear_backward(
        self,
        dy: Shape | Columns,
        x: Shape | Columns,
        params: Shapes,
        weight: str,
        bias: str | None,
        grads: Gradients,
        need: Need,
        dx: Shape | Columns,
        add: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        """The products that are added to something, and what the adapter makes on the way."""
        x, dx = _whole(x), _whole(dx)
        if weight in need:
            self._add_product(*grads.take(weight))
        self._add_product(dx, add)
        if adapter is None:
            return
        rank = params[adapter.A][0]
        with self.scope():
            masked = self._mask(x, adapter.dropout)
            self.empty(x.rows, rank)
            self._add_low_rank(dx)
            if masked and (adapter.A in need or adapter.B in need):
                self.empty(*x)
            if adapter.A in need:
                self._add_product(*grads.take(adapter.A))
            if adapter.B in need:
                self.empty(x.rows, rank)
                self._add_product(*grads.take(adapter.B))

    def low_rank_forward(self, params: Shapes, weight: str, adapter: Adapter) -> tuple[int, ...]:
        """The sum."""
        return self.empty_like(params[weight])

    def low_rank_backward(
        self, dweight: tuple[int, ...], params: Shapes, adapter: Adapter, grads: Gradients, need: Need
    ) -> None:
        """The products that are added to something."""
        for name in (adapter.A, adapter.B):
            if name in need:
                self._add_product(*grads.take(name))

    def causal_conv1d_forward(self, rows: Rows, x: Columns, params: Shapes, weight: str, *_: Any) -> tuple[Shape, Any]:
        """y."""
        d_inner, _one, d_conv = params[weight]
        whole, last = min(causal_conv1d._WIDTH, d_inner), d_inner % causal_conv1d._WIDTH
        for width in {whole, last or whole}:
            none = np.empty(0)
            tile = causal_conv1d.Saved(none, None, none, np.empty((d_conv, width)), None, (weight, None))
            self.scratch("conv", 5 * (tile.block + 2 * (d_conv - 1)) * width, ())
        return self.empty(rows.batch * rows.seq_len, d_inner), (rows.batch, d_inner, d_conv)

    def causal_conv1d_backward(self, dy: Shape, saved: Any, *_: Any) -> None:
        """Partial sums of the gradients."""
        batch, d_inner, d_conv = saved
        with self.scope():
            self.empty(batch * d_conv, d_inner)
            self.empty(batch, d_inner)

    def selective_scan_forward(self, rows: Rows, u: Shape, delta: Shape, B: Columns, *_: Any) -> tuple[Shape, Any]:
        """y, softplus(delta + bias), and the states that are saved."""
        plan = make_plan(rows.batch, rows.seq_len, u.columns, B.width)
        y, _soft = self.empty(*u), self.empty(*u)
        self.empty(plan.batch * plan.blocks * plan.d_state, plan.d_inner)
        self._scan_scratch(plan, 4, backward=False)
        return y, plan

    def selective_scan_backward(self, dy: Shape, plan: Plan, *_: Any) -> None:
        """Partial sums of the gradients."""
        with self.scope():
            for _part in range(2):
                self.empty(plan.tiles * dy.rows, plan.d_state)
            self.empty(plan.batch * plan.d_state, plan.d_inner)
            for _part in range(2):
                self.empty(plan.batch, plan.d_inner)
        self._scan_scratch(plan, len(Chunk._fields), backward=True)

    def linear_cross_entropy_forward(
        self,
        rows: Rows,
        x: Shape,
        params: Shapes,
        weight: str,
        grads: Gradients | None = None,
        need: Need = (),
        dx: Shape | None = None,
        adapter: Adapter | None = None,
    ) -> Shape:
        """Losses, and the logits of a block of rows."""
        losses = self.empty(x.rows, 1)
        vocab_size = params[weight][0]
        block = max(1, linear_cross_entropy.BLOCK_ELEMENTS // vocab_size)
        with self.scope():
            self.empty(min(block, x.rows), vocab_size)
            for first in range(0, x.rows, block):
                part = Shape(min(block, x.rows - first), x.columns)
                if adapter is not None:
                    with self.scope():
                        self.empty(part.rows, params[adapter.A][0])
                        self._add_low_rank(Shape(part.rows, vocab_size))
                if grads is None:
                    continue
                if weight in need:
                    self._add_product(*grads.take(weight))
                if adapter is not None:
                    self._head_adapter(part, params, adapter, grads, need, dx)
        return losses

    def _head_adapter(
        self, x: Shape, params: Shapes, adapter: Adapter, grads: Gradients, need: Need, dx: Shape | None
    ) -> None:
        """What the adapter of a tied head makes on the way back."""
        rank = params[adapter.A][0]
        with self.scope():
            if adapter.A in need:
                self.empty(x.rows, rank)
                self._add_product(*grads.take(adapter.A))
            if adapter.B in need or dx is not None:
                self.empty(x.rows, rank)
            if adapter.B in need:
                self._add_product(*grads.take(adapter.B))
            if dx is not None:
                self._add_low_rank(x)

    def step(self) -> None:
        """The scratch of `global_norm` and `adamw`."""
        self.scratch("norm_wide", global_norm.SLICE, (), np.float64)
        for name in ("adamw_t", "adamw_d"):
            self.scratch(name, adamw.SLICE, ())

    def _add_product(self, shape: tuple[int, ...], add: bool) -> None:
        if add:
            with self.scope():
                self.empty(*shape)

    def _add_low_rank(self, out: Shape) -> None:
        with self.scope():
            self.empty(part_height(*out), out.columns)

    def _mask(self, x: Shape, dropout: Dropout | None) -> bool:
        """Count the mask of x and return whether there is one."""
        if dropout is None or dropout.rate == 0:
            return False
        self.empty(x.rows, low_rank.mask_columns(x.columns, self.dtype))
        for name in ("mask_h", "mask_shifted"):
            self.scratch(name, max(low_rank.MASK_ELEMENTS, x.columns), (), np.uint32)
        return True

    def _scan_scratch(self, plan: Plan, count: int, backward: bool) -> None:
        A, this = np.empty((plan.d_state, plan.width), self.dtype), cast(Workspace, self)
        open_block(this, plan, A, plan.group, backward)
        small(this, plan, count, (plan.group, min(CHUNK, plan.seq_len), plan.width))

    def _pass(self, elements: int) -> None:
        self.passing = max(self.passing, elements * self.dtype.itemsize)


def _whole(columns: Shape | Columns) -> Shape:
    return Shape(columns.array.rows, columns.width) if isinstance(columns, Columns) else columns
