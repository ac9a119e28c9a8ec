"""Prefix sums over the segments of an outline: what the estimates of a point compute on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.cluster.cluster import DeviceKind
from whale.planning.cuts import Floats
from whale.search.crossing import Boundary


@dataclass
class StageRow:
    """One stage in all replicas: prefix sums over the segments of its slowest device."""

    forward: list[float]
    backward: list[float]
    devices: tuple[tuple[float, int, float], ...]
    """(bytes for weights and for what is saved, samples, part of what ZeRO cuts) of every different
    device
    """
    ranks: tuple[int, ...]

    @cached_property
    def is_shared(self) -> bool:
        return len(self.ranks) > 1

    @cached_property
    def both(self) -> list[float]:
        """Forward and backward together."""
        return [sum(each) for each in zip(self.forward, self.backward, strict=True)]


@dataclass(frozen=True)
class PointStages:
    """What does not depend on the cuts of a point."""

    stages: Sequence[StageRow]
    boundaries: Sequence[Boundary]
    ranks: Sequence[tuple[int, ...]]
    """of every group of devices, over all replicas"""
    kinds: Sequence[tuple[DeviceKind, ...]]
    """different ones of every group"""


def prefix_sums(values: Floats) -> list[float]:
    """Prefix sums, from 0."""
    found = [0.0]
    for value in values.tolist():
        found.append(found[-1] + value)
    return found
