"""What a plan says of a stage on a grid, as plain data: no torch here, so that saved plans print at
once.

A layout is written in short: `cuts` as (granules, entries of one granule, segments) for each dim,
`axes` as the letters of the axes that cut each dim, outermost first.
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.sharding.grid import Grid
from whale.sharding.layout import Cut, Layout
from whale.sharding.sharding import ShardedOperation, Sharding

Options = tuple[str, str, str]
"""names of an operation's options on x, y and z"""


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
        return StoredLayout(
            cuts, tuple("".join(axes) for axes in layout.axes), "".join(sorted(layout.stored))
        )

    def layout(self) -> Layout:
        return Layout(
            tuple(Cut(*cut) for cut in self.cuts),
            tuple(map(tuple, self.axes)),
            stored=frozenset(self.stored),
        )

    @property
    def is_cut(self) -> bool:
        return any(self.axes)


@dataclass(frozen=True)
class StageSharding:
    """Everything decided for one stage on a grid; the grid is the VirtualDevice's."""

    stage: int
    stored: dict[str, StoredLayout]
    """of every parameter of the stage"""
    options: tuple[Options, ...] = ()
    """every combination that some operation takes, once"""
    choices: tuple[tuple[int, int], ...] = ()
    """(place of an operation in the graph, number of its combination)"""
    operations: tuple[ShardedOperation, ...] = ()
    """those with work or messages, for the reader"""
    replicated: tuple[str, ...] = ()
    """operations with work that every device does whole"""
    seconds: float = 0.0
    """predicted for one micro-batch, forward and backward"""
    sent_bytes: float = 0.0
    """by one device in that time"""
    work: tuple[float, ...] = ()
    """by place, its part of the stage's FLOP"""
    num_samples: int = 0
    """of a model replica in the micro-batch that it was chosen for"""
    keeps_gathered: bool = True
    """gathered tensors are kept for backward; otherwise they are gathered again there"""
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(stage: int, sharding: Sharding, num_samples: int) -> StageSharding:
        options = {
            names: number for number, names in enumerate(dict.fromkeys(sharding.choices.values()))
        }
        return StageSharding(
            stage=stage,
            stored={name: StoredLayout.of(layout) for name, layout in sharding.stored.items()},
            options=tuple(options),
            choices=tuple((node, options[names]) for node, names in sharding.choices.items()),
            operations=sharding.operations,
            replicated=sharding.replicated,
            seconds=sharding.seconds - sharding.sum_seconds,
            sent_bytes=sharding.sent_bytes,
            work=sharding.work,
            num_samples=num_samples,
            keeps_gathered=sharding.keeps_gathered,
            notes=sharding.notes,
        )

    def sharding(self, grid: Grid) -> Sharding:
        """What the lowering needs of it."""
        choices = {node: self.options[number] for node, number in self.choices}
        return Sharding(
            grid, choices, {name: stored.layout() for name, stored in self.stored.items()}
        )
