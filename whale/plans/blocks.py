"""Blocks: parameters that come and go together, and which elements of them each rank holds.

The parameters of a block lie one behind the other, flat. Rank i of its group holds the elements
[ends[i - 1], ends[i]), and every end is the end of a row of a parameter: so of each parameter a
rank holds some rows, which is a box (`plans/shards.py`). docs/memory.md says what this is for.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

Memory = Literal["device", "host", "disk"]
"""where a tensor is at home"""
Shape = tuple[int, ...]
STATES = 1
GRADIENTS_TOO = 2
WEIGHTS_TOO = 3
"""levels of ZeRO: what is cut"""


@dataclass(frozen=True)
class Block:
    """Parameters of one layer, cut over the ranks that use them together, and where each rank's
    part of them is at home. A block of one rank, or one without `ends`, is there for its homes
    alone.
    """

    parameters: tuple[str, ...]
    """one behind the other, in the order of their first use"""
    shapes: tuple[Shape, ...]
    """of these parameters, whole"""
    ranks: tuple[int, ...]
    """that hold it together; they use it at the same places of the same order of actions"""
    ends: tuple[int, ...]
    """by these ranks: element at which the rank's part ends. Empty on a grid, which cuts parameters
    itself: each rank's part of each parameter is its box
    """
    weights: Memory = "device"
    """where a rank's part of the weights lies"""
    states: Memory = "device"
    """where the optimizer state of it lies"""
    gradients: Memory = "device"
    """where gradients of it are summed over micro-batches. Elsewhere: they go there in each
    backward, as soon as the block is done
    """
    updated_on: Literal["device", "host"] = "device"
    """where the optimizer runs: "device": states that lie elsewhere are streamed through it;
    "host": gradients go there and updated weights come back
    """

    @property
    def is_away(self) -> bool:
        """Whether something of it is at home outside of the device."""
        return {self.weights, self.states, self.gradients} != {"device"}

    @property
    def may_wait(self) -> bool:
        """Whether its update may run under the next forward: on the host, where nothing else uses
        its weights, of a block that the forward can wait for. Weights of a grid that are on the
        device are used without being brought.
        """
        return self.updated_on == "host" and (bool(self.ends) or self.weights != "device")

    def interval(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the block that a rank of its group holds."""
        place = self.ranks.index(rank)
        return (self.ends[place - 1] if place else 0, self.ends[place])

    @cached_property
    def num_elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    @cached_property
    def intervals(self) -> dict[str, tuple[int, int]]:
        """Elements [start, stop) of the block at which each of its parameters lies."""
        return intervals(self.parameters, dict(zip(self.parameters, self.shapes, strict=True)))

    def is_row_end(self, element: int) -> bool:
        """Whether a part may end there."""
        for shape, (start, stop) in zip(self.shapes, self.intervals.values(), strict=True):
            if start <= element <= stop:
                return (element - start) % row_size(shape) == 0
        return False

    def rows(self, name: str, rank: int) -> tuple[int, int]:
        """Rows [start, stop) of a parameter that the rank holds."""
        start, stop = self.interval(rank)
        first, last = self.intervals[name]
        width = row_size(self.shapes[self.parameters.index(name)])
        low = min(max(start, first), last)
        high = min(max(stop, low), last)
        return (low - first) // width, (high - first) // width


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
        before = ends[-1] if ends else 0
        ends.append(_nearest_row(places, shapes, target) if size else before)
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


LARGE = 1.5
"""a block so many times larger than the usual one has a slot apart, with others like it"""


def slots_of(sizes: Sequence[int], kinds: Sequence[Hashable]) -> tuple[int, ...]:
    """The slot of every block of a rank, by sizes and kinds (dtype, trained or not): those of a
    kind alternate between two, so that one can come while the one before it is used; large ones
    (embeddings) share a third.
    """
    number_of: dict[Hashable, int] = {}
    count: dict[Hashable, int] = {}
    found = []
    for size, kind in zip(sizes, kinds, strict=True):
        alike = sorted(other for other, also in zip(sizes, kinds, strict=True) if also == kind)
        key: Hashable
        if size > LARGE * alike[(len(alike) - 1) // 2]:
            key = (kind, "large")
        else:
            place = count[kind] = count.get(kind, -1) + 1
            key = (kind, place % 2)
        found.append(number_of.setdefault(key, len(number_of)))
    return tuple(found)
