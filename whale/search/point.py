"""Points of the space before the model is cut, and what they are estimated to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from whale.scheduling.placement import zigzag

Stages = tuple[tuple[int, ...], ...]
"""the ranks of every stage of a replica"""


@dataclass(frozen=True)
class Shape:
    """Devices in replicas and stages."""

    replicas: tuple[Stages, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: it goes over all ranks."""
        return hash(self.replicas)

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    @property
    def num_stages(self) -> int:
        return len(self.replicas[0])

    @cached_property
    def widest(self) -> int:
        """Over how many devices a micro-batch is cut at most."""
        return max(sum(map(len, stage)) for stage in zip(*self.replicas, strict=True))

    @cached_property
    def num_devices(self) -> int:
        return sum(len(ranks) for stages in self.replicas for ranks in stages)


@dataclass(frozen=True)
class Point:
    """One point of the space, before the model is cut."""

    shape: Shape
    num_micro_batch: int
    num_chunks: int = 1
    """stages on each group of devices, laid in waves"""

    @cached_property
    def group_of_stage(self) -> tuple[int, ...]:
        """The group of devices of each stage."""
        return zigzag(self.shape.num_stages, self.num_chunks)

    @cached_property
    def flying(self) -> tuple[int, ...]:
        """Micro-batches that 1F1B has in flight on every stage. A group with several stages does
        one micro-batch after the other through each of them.
        """
        lefts = range(len(self.group_of_stage), 0, -1)
        return tuple(min(self.num_micro_batch, -(-left // self.num_chunks)) for left in lefts)


@dataclass(frozen=True)
class Estimate:
    """What a point is taken to do."""

    point: Point
    step_s: float
    cuts: tuple[int, ...] = ()
    """first segment of every stage"""
    recomputed: tuple[float, ...] = ()
    """by stage"""

    @property
    def fits(self) -> bool:
        return math.isfinite(self.step_s)
