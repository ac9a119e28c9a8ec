"""How one tensor lies on a grid.

Each dim of a tensor can be cut in granules only: a head is never torn apart, nor a sample. A fused
dim (q, k and v in one) has segments, each of which is cut in the same way:

    size of the dim = segments * count * unit                                                    (1)

A layout says for each dim which axes cut it, outermost first, and on which axes the tensor is a
partial sum. On every other axis it is the same everywhere. The device at a place holds, of dim i,
granules [a, b) of every segment: index ranges [(s * count + a) * unit, (s * count + b) * unit) for
s = 0 .. segments - 1.

What is differentiated is the sum of all devices' losses. So a tensor and its gradient have
conjugate layouts: cut alike, and the gradient is a partial sum exactly where the tensor is the same
on all devices, and the other way round (docs/split.md, line 1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from whale.plans.grid import Grid, Interval


@dataclass(frozen=True)
class Cut:
    """The pieces into which a dim may be cut: line (1)."""

    count: int
    """granules: heads, samples, or single entries"""
    unit: int = 1
    """entries of the dim that belong to one granule"""
    segments: int = 1

    @property
    def size(self) -> int:
        return self.segments * self.count * self.unit


@dataclass(frozen=True)
class Layout:
    """How one tensor lies on a grid: for each dim how it may be cut and which axes cut it, and on
    which axes it is a partial sum.
    """

    cuts: tuple[Cut, ...]
    axes: tuple[tuple[str, ...], ...]
    """by dim, outermost axis first"""
    partial: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    """axes that cut a weight only to store it (it is gathered before use): they cut by memory, not
    by speed
    """

    def __post_init__(self) -> None:
        used = [axis for axes in self.axes for axis in axes]
        if (
            len(self.cuts) != len(self.axes)
            or len(set(used)) < len(used)
            or self.partial & set(used)
        ):
            raise ValueError(f"an axis may be used once, and every dim needs its axes: {self}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(cut.size for cut in self.cuts)

    @property
    def sharded(self) -> frozenset[str]:
        """Axes that cut a dim."""
        return frozenset(axis for axes in self.axes for axis in axes)

    def same_on(self, grid: Grid) -> tuple[str, ...]:
        """Axes of the grid along which all devices hold the same numbers."""
        different = self.sharded | self.partial
        return tuple(axis for axis in grid.axes if axis not in different)

    def conjugate(self, grid: Grid) -> Layout:
        """The layout of the gradient."""
        return replace(self, partial=frozenset(self.same_on(grid)))

    def granules(self, grid: Grid, place: int, dim: int) -> Interval:
        interval = (0, self.cuts[dim].count)
        for axis in self.axes[dim]:
            interval = grid.cut(
                interval, axis, grid.coordinate(place, axis), stored=axis in self.stored
            )
        return interval

    def ranges(self, grid: Grid, place: int, dim: int) -> tuple[Interval, ...]:
        """Index ranges of one dim that the device holds, in order; neighbours are joined."""
        cut = self.cuts[dim]
        (first, stop) = self.granules(grid, place, dim)
        if (first, stop) == (0, cut.count):
            return ((0, cut.size),)
        starts = (segment * cut.count * cut.unit for segment in range(cut.segments))
        return tuple((start + first * cut.unit, start + stop * cut.unit) for start in starts)

    def held_ranges(self, grid: Grid) -> tuple[tuple[tuple[Interval, ...], ...], ...]:
        """Index ranges by [place][dim] that the devices of the grid hold."""
        dims = range(len(self.cuts))
        held = []
        for place in range(grid.num_devices):
            held.append(tuple(self.ranges(grid, place, dim) for dim in dims))
        return tuple(held)

    def local_shape(self, grid: Grid, place: int) -> tuple[int, ...]:
        return tuple(
            sum(b - a for a, b in self.ranges(grid, place, dim)) for dim in range(len(self.cuts))
        )

    def local_count(self, grid: Grid, place: int) -> int:
        return prod(self.local_shape(grid, place))

    def largest_count(self, grid: Grid) -> int:
        """Entries on the device that holds most; where devices are alike, the first of a subgroup
        gets the remainder.
        """
        places = range(grid.num_devices) if grid.work or grid.memory else (0,)
        return max(self.local_count(grid, place) for place in places)

    def same_places(self, grid: Grid, place: int) -> tuple[int, ...]:
        """The places that hold the very same part: the holders of a shard."""
        return grid.subgroup(place, self.same_on(grid))

    def text(self) -> str:
        """`[samples zy, ., heads x] partial y`, say."""
        dims = ", ".join("".join(axes) or "." for axes in self.axes)
        return f"[{dims}]" + (f" partial {''.join(sorted(self.partial))}" if self.partial else "")


def whole(cuts: Iterable[Cut]) -> Layout:
    """The layout of a tensor that every device has whole."""
    cuts = tuple(cuts)
    return Layout(cuts, ((),) * len(cuts))
