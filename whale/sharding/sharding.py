"""What was decided for one stage on a grid: plain data that ranks turn into their graphs again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whale.sharding.grid import AXES, Grid
from whale.sharding.layout import Cut, Layout


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
    """predicted: forward and backward of one micro-batch, and its share of the sums of gradients"""
    sum_seconds: float = 0.0
    """of these the share of the sums of gradients"""
    sent_bytes: float = 0.0
    """by one device in that time"""
    weight_bytes: float = 0.0
    """stored by the device that stores most"""
    gathered: Gathered = Gathered()
    keeps_gathered: bool = True
    """gathered tensors are kept for backward; otherwise they are gathered again there"""
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        grid = self.grid
        return {
            "grid": [grid.gx, grid.gy, grid.gz],
            "work": {axis: list(weights) for axis, weights in grid.work.items()},
            "memory": {axis: list(weights) for axis, weights in grid.memory.items()},
            "choices": {str(node): list(names) for node, names in self.choices.items()},
            "stored": {name: layout_to_json(layout) for name, layout in self.stored.items()},
            "operations": [[op.node, op.what, op.pattern, op.sent_bytes] for op in self.operations],
            "replicated": list(self.replicated),
            "seconds": self.seconds,
            "sum_seconds": self.sum_seconds,
            "sent_bytes": self.sent_bytes,
            "weight_bytes": self.weight_bytes,
            "gathered": [self.gathered.sample_bytes, self.gathered.fixed_bytes, self.gathered.seconds],
            "keeps_gathered": self.keeps_gathered,
            "notes": list(self.notes),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Sharding:
        gx, gy, gz = data["grid"]
        weights = {key: {axis: tuple(values) for axis, values in data[key].items()} for key in ("work", "memory")}
        return Sharding(
            grid=Grid(gx, gy, gz, weights["work"], weights["memory"]),
            choices={int(node): tuple(names) for node, names in data["choices"].items()},  # type: ignore[misc]
            stored={name: layout_from_json(layout) for name, layout in data["stored"].items()},
            operations=tuple(ShardedOperation(*op) for op in data["operations"]),
            replicated=tuple(data["replicated"]),
            seconds=data["seconds"],
            sum_seconds=data["sum_seconds"],
            sent_bytes=data["sent_bytes"],
            weight_bytes=data["weight_bytes"],
            gathered=Gathered(*data["gathered"]),
            keeps_gathered=data["keeps_gathered"],
            notes=tuple(data["notes"]),
        )


def layout_to_json(layout: Layout) -> dict[str, Any]:
    return {
        "cuts": [[cut.count, cut.unit, cut.segments] for cut in layout.cuts],
        "axes": ["".join(axes) for axes in layout.axes],
        "stored": "".join(sorted(layout.stored)),
    }


def layout_from_json(data: Mapping[str, Any]) -> Layout:
    return Layout(tuple(Cut(*cut) for cut in data["cuts"]), tuple(map(tuple, data["axes"])), stored=frozenset(data["stored"]))


ORDER = tuple(reversed(AXES))
"""z, y, x: from the outermost axis of a dim to the innermost"""
