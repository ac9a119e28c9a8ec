"""A grid gx x gy x gz of the devices of one VirtualDevice, and how an axis cuts a number of things.

Place p of the VirtualDevice has the coordinates x fastest, z slowest:

    p = (cz * gy + cy) * gx + cx                                                     (1)

An axis of g devices with weights w_1..w_g cuts n things into n_1..n_g, in order, by largest
remainder; n_i = 0 is legal:

    n_i = floor(n w_i / sum w), the rest one each to the largest remainders          (2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

AXES = ("x", "y", "z")

Interval = tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """The devices of one VirtualDevice as a block."""

    gx: int
    gy: int
    gz: int
    work: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """axis -> speed of each coordinate, for what is computed; an axis that is not there is even"""
    memory: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """the same for what is only stored: the part of a weight that is gathered before its use"""

    def __post_init__(self) -> None:
        for name, weights in (("work", self.work), ("memory", self.memory)):
            for axis, values in weights.items():
                if axis not in AXES:
                    raise ValueError(
                        f"{name} weights are given for axis {axis!r}, which is not x, y or z"
                    )
                if len(values) != self.size(axis) or min(values) < 0 or sum(values) <= 0:
                    raise ValueError(
                        f"{name} weights of axis {axis} are {values}: {self.size(axis)} numbers "
                        "are needed, none negative, one above 0"
                    )

    @property
    def num_devices(self) -> int:
        return self.gx * self.gy * self.gz

    @property
    def axes(self) -> tuple[str, ...]:
        """Those with more than one device."""
        return tuple(axis for axis in AXES if self.size(axis) > 1)

    def size(self, axis: str) -> int:
        return self._sizes[axis]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {"x": self.gx, "y": self.gy, "z": self.gz}

    @cached_property
    def _strides(self) -> dict[str, int]:
        """How far neighbours along an axis are apart: line (1)."""
        return {"x": 1, "y": self.gx, "z": self.gx * self.gy}

    def coordinate(self, place: int, axis: str) -> int:
        """Line (1), backwards."""
        return place // self._strides[axis] % self._sizes[axis]

    def subgroup(self, place: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The places that differ from this one on these axes only, this one included, in order."""
        places = [place]
        for axis in dict.fromkeys(axes):
            steps = [
                (other - self.coordinate(place, axis)) * self._strides[axis]
                for other in range(self.size(axis))
            ]
            places = [at + step for at in places for step in steps]
        return tuple(sorted(places))

    def cut(
        self, interval: Interval, axis: str, coordinate: int, *, stored: bool = False
    ) -> Interval:
        """The part of an interval that one coordinate of an axis gets: line (2)."""
        weights = (self.memory if stored else self.work).get(axis, (1.0,) * self.size(axis))
        first, stop = interval
        bounds = _bounds(stop - first, weights)
        return first + bounds[coordinate], first + bounds[coordinate + 1]

    @cached_property
    def name(self) -> str:
        return f"{self.gx} x {self.gy} x {self.gz}"


@lru_cache(maxsize=4096)
def _bounds(count: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Line (2) as running sums; ties go to the first."""
    total = math.fsum(weights)
    exact = [count * weight / total for weight in weights]
    sizes = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (sizes[i] - exact[i], i))
    for i in by_remainder[: count - sum(sizes)]:
        sizes[i] += 1
    return (0, *accumulate(sizes))
