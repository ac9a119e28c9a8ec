"""What a plan says of a stage on a grid, as plain data: no torch here, so that saved plans print at once.

A layout is written in short: `cuts` as (granules, entries of one granule, segments) for each dim, `axes` as the letters of the axes that
cut each dim, outermost first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from whale.sharding.layout import Cut, Layout


@dataclass(frozen=True)
class StoredLayout:
    """How a parameter lies on the grid."""

    cuts: tuple[tuple[int, int, int], ...]
    axes: tuple[str, ...]
    stored: str = ""
    """axes that cut it only to store it: it is gathered before use"""

    @staticmethod
    def of(layout: Layout) -> StoredLayout:
        cuts = tuple((cut.count, cut.unit, cut.segments) for cut in layout.cuts)
        return StoredLayout(cuts, tuple("".join(axes) for axes in layout.axes), "".join(sorted(layout.stored)))

    def layout(self) -> Layout:
        return Layout(tuple(Cut(*cut) for cut in self.cuts), tuple(map(tuple, self.axes)), stored=frozenset(self.stored))


@dataclass(frozen=True)
class ShardedOperation:
    """How one operation, or several alike, runs on the grid."""

    what: str
    """module and operation"""
    pattern: str
    """layouts in and out, in words"""
    sent_bytes: float
    """by the device that sends most, forward and backward of one mini-batch"""
    why: str
    replicated: bool = False
    """every device does all of it: it has no rule, or none that pays"""
    times: int = 1
    """operations of the stage that run like this"""


@dataclass(frozen=True)
class StageSharding:
    """Everything decided for one stage on a grid; the grid is the VirtualDevice's."""

    stage: int
    stored: dict[str, StoredLayout]
    """parameters that are cut; every device of the grid holds the others whole"""
    choices: tuple[int, ...] = ()
    """by operation of the stage: what was chosen for it, as a number of the table `patterns`"""
    patterns: tuple[str, ...] = ()
    operations: tuple[ShardedOperation, ...] = ()
    notes: tuple[str, ...] = field(default=())
