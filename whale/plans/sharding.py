"""What a plan says of a stage on a grid, as plain data: no torch here, so that saved plans print at
once.

A layout is written in short: `cuts` as (granules, entries of one granule, segments) for each dim,
`axes` as the letters of the axes that cut each dim, outermost first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale.plans.grid import AXES, Grid
from whale.plans.layout import Cut, Layout

ORDER = tuple(reversed(AXES))
"""z, y, x: from the outermost axis of a dim to the innermost"""
FORWARD_PART = 1 / 3
"""of forward and backward: a backward has two products where its forward has one"""


@dataclass(frozen=True)
class ShardedOperation:
    """How one operation runs on the grid."""

    node: int
    """place among all nodes of the captured graph"""
    what: str
    """`blocks.0.up: linear`"""
    pattern: str
    """`column over y, by samples over z`"""
    sent_bytes: float
    """by one device, for its inputs: forward and backward of one micro-batch"""
    exchanged_bytes: float = 0.0
    """by one device inside of the operation: maxima and sums of rows over a dim that is cut"""
    why: str = ""
    """what the next best pattern would cost, or what left no choice"""


@dataclass(frozen=True)
class Gathered:
    """Copies that gathers make and backward reads, on one device, for one micro-batch."""

    sample_bytes: float = 0.0
    """of activations, for each sample of the replica"""
    fixed_bytes: float = 0.0
    """of weights"""
    seconds: float = 0.0
    """to gather all of them once more"""


@dataclass(frozen=True)
class Sharding:
    """The choice for every operation, and how every parameter is stored."""

    grid: Grid
    choices: Mapping[int, tuple[str, str, str]]
    """node -> names of its options on x, y and z; "" on an axis of one device"""
    stored: Mapping[str, Layout]
    """of every parameter of the stage"""
    operations: tuple[ShardedOperation, ...] = ()
    replicated: tuple[str, ...] = ()
    """operations that every device does whole, though they have work: no rule fits them"""
    seconds: float = 0.0
    """predicted: forward and backward of one micro-batch, and its share of the all-reduces of
    gradients
    """
    sum_seconds: float = 0.0
    """of these the share of the all-reduces of gradients"""
    forward_part: float = FORWARD_PART
    """fraction of the seconds without the all-reduces that is forward"""
    measured: tuple[str, ...] = ()
    """modules whose part of the seconds was measured on such a grid"""
    sent_bytes: float = 0.0
    """by one device in that time"""
    weight_bytes: float = 0.0
    """stored by the device that stores most"""
    work: tuple[float, ...] = ()
    """by place, its part of the stage's FLOP; the parts of operations that several places do are
    more than 1 together
    """
    gathered: Gathered = Gathered()
    keeps_gathered: bool = True
    """gathered tensors are saved for backward; otherwise they are gathered again there"""
    notes: tuple[str, ...] = field(default=())


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
    """gathered tensors are saved for backward; otherwise they are gathered again there"""
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
