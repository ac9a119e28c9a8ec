"""What was decided for one stage on a grid: plain data that ranks turn into their graphs again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale.sharding.grid import AXES, Grid
from whale.sharding.layout import Layout


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
    told_bytes: float = 0.0
    """by one device inside the operation: maxima and sums of rows over a dim that is cut"""
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
    """predicted: forward and backward of one micro-batch, and its share of the sums of gradients"""
    sum_seconds: float = 0.0
    """of these the share of the sums of gradients"""
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
    """gathered tensors are kept for backward; otherwise they are gathered again there"""
    notes: tuple[str, ...] = field(default=())


ORDER = tuple(reversed(AXES))
"""z, y, x: from the outermost axis of a dim to the innermost"""
