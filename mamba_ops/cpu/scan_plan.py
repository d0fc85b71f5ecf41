"""How the selective scan is cut: into tasks by batch elements and channels, and into chunks and blocks by time."""

from typing import NamedTuple

import numpy as np

from mamba_ops.cpu.workspace import Workspace, view
from mamba_ops.ops import Columns

BLOCK = 16
"""Steps in a block: its states are all in cache at once, and the state before it is saved."""

CHUNK = 64
"""Steps for which everything that has no state is computed at once: whole blocks."""

_WIDEST_STATE = 8192
_GROUPED_STATE = 4096


class Plan(NamedTuple):
    """How the work is cut into tasks: `group` batch elements by `width` channels. By shape alone."""

    batch: int
    seq_len: int
    d_inner: int
    d_state: int
    group: int
    width: int

    @property
    def tiles(self) -> int:
        """Channel ranges."""
        return -(-self.d_inner // self.width)

    @property
    def tasks(self) -> int:
        """Tasks in all."""
        return -(-self.batch // self.group) * self.tiles

    @property
    def blocks(self) -> int:
        """Blocks of time."""
        return -(-self.seq_len // BLOCK)

    def piece(self, index: int) -> tuple[int, slice, slice]:
        """Return a task's channel range by number, its batch elements and its channels."""
        g, tile = divmod(index, self.tiles)
        return tile, _range(g, self.group, self.batch), _range(tile, self.width, self.d_inner)

    def chunks(self) -> list[slice]:
        """Return the time ranges for which everything that has no state is computed at once."""
        return [_range(i, CHUNK, self.seq_len) for i in range(-(-self.seq_len // CHUNK))]

    def by_row(self, array: np.ndarray | Columns) -> np.ndarray:
        """Return (T, columns) as a (batch, seq_len, columns) view."""
        return view(array).reshape(self.batch, self.seq_len, -1)


def make_plan(batch: int, seq_len: int, d_inner: int, d_state: int) -> Plan:
    """Return tasks whose states of one step are about 8,192 elements."""
    tiles = -(-d_inner * d_state // _WIDEST_STATE)
    width = min(d_inner, -(-d_inner // tiles // 16) * 16)
    return Plan(batch, seq_len, d_inner, d_state, max(1, min(batch, _GROUPED_STATE // (width * d_state))), width)


def blocks(t: slice) -> list[tuple[int, slice, slice]]:
    """Return the blocks of a chunk: number, range in the sequence, range in the chunk."""
    firsts = range(t.start, t.stop, BLOCK)
    ranges = [(first, min(first + BLOCK, t.stop)) for first in firsts]
    return [(a // BLOCK, slice(a, b), slice(a - t.start, b - t.start)) for a, b in ranges]


def small(ops: Workspace, plan: Plan, count: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return `count` scratch arrays of one shape, for arrays without states."""
    capacity = count * CHUNK * plan.group * plan.width
    return ops.scratch(f"scan small {count}", capacity, (count, *shape))


def _range(index: int, size: int, stop: int) -> slice:
    return slice(index * size, min((index + 1) * size, stop))
