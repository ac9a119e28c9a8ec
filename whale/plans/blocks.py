"""Blocks: parameters that come and go together, and which elements of them each rank holds.

The parameters of a block lie one behind the other, flat. Rank i of its group holds the elements
[ends[i - 1], ends[i]), and every end is the end of a row of a parameter: so of each parameter a rank
holds some rows, which is a box (`plans/shards.py`). docs/memory.md says what this is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Memory = Literal["device", "host", "disk"]
"""where a tensor is at home"""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """Parameters of one layer, cut over the ranks that use them together."""

    parameters: tuple[str, ...]
    """one behind the other, in the order of their first use"""
    ranks: tuple[int, ...]
    """that hold it together; they use it at the same places of the same order of actions"""
    ends: tuple[int, ...]
    """by these ranks: element at which the rank's part ends"""
    weights: Memory = "device"
    """where a rank's part of the weights lies"""
    states: Memory = "device"
    """where the optimizer state of it lies"""

    def interval(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the block that a rank of its group holds."""
        place = self.ranks.index(rank)
        return (self.ends[place - 1] if place else 0, self.ends[place])

    def rows(self, shapes: Mapping[str, Shape], rank: int) -> dict[str, tuple[int, int]]:
        """Rows [start, stop) of every parameter that the rank holds; a parameter without dims has
        one.
        """
        start, stop = self.interval(rank)
        found = {}
        for name, (first, last) in intervals(self.parameters, shapes).items():
            width = row_size(shapes[name])
            low = min(max(start, first), last)
            high = min(max(stop, low), last)
            found[name] = ((low - first) // width, (high - first) // width)
        return found


def intervals(names: Sequence[str], shapes: Mapping[str, Shape]) -> dict[str, tuple[int, int]]:
    """Elements [start, stop) of the block at which each of its parameters lies."""
    found = {}
    start = 0
    for name in names:
        stop = start + math.prod(shapes[name])
        found[name] = (start, stop)
        start = stop
    return found


def row_size(shape: Shape) -> int:
    """Elements of one row: all dims but the first. 1 where there is nothing, to divide by."""
    return max(1, math.prod(shape[1:]))


def ends_at_rows(
    names: Sequence[str], shapes: Mapping[str, Shape], wanted: Sequence[float]
) -> tuple[int, ...]:
    """Ends of parts that hold about `wanted` elements each (whose sum is the block), moved to the
    nearest end of a row. A part that wants nothing gets nothing.
    """
    places = intervals(names, shapes)
    total = max((stop for _, stop in places.values()), default=0)
    ends: list[int] = []
    target = 0.0
    for size in wanted:
        target += size
        ends.append(_nearest_row(places, shapes, target) if size else (ends[-1] if ends else 0))
    last = max((place for place, size in enumerate(wanted) if size), default=len(ends) - 1)
    ends[last:] = [total] * (len(ends) - last)
    return tuple(max(end, before) for before, end in pairwise([0, *ends]))


def _nearest_row(
    places: Mapping[str, tuple[int, int]], shapes: Mapping[str, Shape], target: float
) -> int:
    for name, (start, stop) in places.items():
        if target < stop:
            width = row_size(shapes[name])
            return start + round((target - start) / width) * width
    return max((stop for _, stop in places.values()), default=0)
