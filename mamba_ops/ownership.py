"""Which rows of which tensors each shard of the optimizer owns: a pure function of shapes and number of shards."""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TypeAlias

Owned: TypeAlias = Mapping[str, tuple[int, int]]
"""The rows first .. end - 1 that a shard owns, by name; a name of which it owns none is missing."""


def shards(shapes: Mapping[str, tuple[int, ...]], number: int) -> list[dict[str, tuple[int, int]]]:
    """Return what each of `number` shards owns: every row of every tensor once, as one range of rows a tensor.

    Rows of one width (elements of a row; 1 for a vector) are laid end to end by name, the widest first, and the shards
    are filled up with them to one level, each end at the nearest row: what wide rows leave uneven, narrow ones fill.
    The largest shard has at most the mean and one widest row, and none is empty unless there are fewer rows than
    shards. The order of `shapes` does not count. Raises ValueError on fewer than one shard.
    """
    if number < 1:
        raise ValueError(f"shards: expected at least 1, got {number}")
    owned: list[dict[str, tuple[int, int]]] = [{} for _ in range(number)]
    loads = [0] * number
    for width, heights in sorted(_by_width(shapes).items(), reverse=True):
        ends = _ends(loads, sum(heights.values()), width)
        for shard, (first, end) in enumerate(pairwise([0, *ends])):
            owned[shard].update(_cut(heights, first, end))
            loads[shard] += (end - first) * width
    return owned


def _by_width(shapes: Mapping[str, tuple[int, ...]]) -> dict[int, dict[str, int]]:
    """Return the number of rows by name, by width."""
    found: dict[int, dict[str, int]] = {}
    for name, shape in sorted(shapes.items()):
        found.setdefault(max(1, math.prod(shape[1:])), {})[name] = shape[0]
    return found


def _ends(loads: list[int], rows: int, width: int) -> list[int]:
    """Return where each shard's part of so many rows ends. loads: elements that each has already."""
    # the level to which they fill all shards that lie below it: over fewer shards, or a higher one, it is higher
    filled = enumerate(accumulate(sorted(loads)), 1)
    level = min(Fraction(rows * width + elements, count) for count, elements in filled)
    parts = accumulate(max(Fraction(0), level - load) / width for load in loads)
    return [math.floor(end + Fraction(1, 2)) for end in parts]


def _cut(heights: Mapping[str, int], first: int, end: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the rows of each tensor that lie among the rows first .. end - 1 of all of them laid end to end."""
    start = 0
    for name, height in heights.items():
        begin, stop = max(first - start, 0), min(end - start, height)
        if begin < stop:
            yield name, (begin, stop)
        start += height
