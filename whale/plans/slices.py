"""Bridges: who sends which samples to whom when a micro-batch is cut differently on two
VirtualDevices.

Source i holds the samples [s_i, s_{i+1}), destination j needs [t_j, t_{j+1}); both lists are in
order and cover the same range. Slice (i, j) is the intersection of the two:

    [ max(s_i, t_j), min(s_{i+1}, t_{j+1}) )   where it is not empty.                          (1)

Every slice but the last ends at an inner boundary of one of the two lists, so a sources and b
destinations have at most a + b - 1 slices. The backward goes the other way over the same slices:
bridge(t, s) is bridge(s, t) transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Interval = tuple[int, int]
"""samples [start, stop)"""


@dataclass(frozen=True)
class Slice:
    """Samples [start, stop), in numbers of the micro-batch, that go from one device to another."""

    source: int
    """place in the source VirtualDevice"""
    destination: int
    """place in the destination VirtualDevice"""
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


def bridge(source: Sequence[Interval], destination: Sequence[Interval]) -> tuple[Slice, ...]:
    """Line (1): the slices from `source` to `destination`, ordered by sample. Empty intervals send
    and get nothing.
    """
    if _range("source", source) != _range("destination", destination):
        raise ValueError(
            f"the source holds samples {_range('source', source)}, the destination "
            f"{_range('destination', destination)}"
        )
    slices = []
    i = j = 0
    while i < len(source) and j < len(destination):
        start = max(source[i][0], destination[j][0])
        stop = min(source[i][1], destination[j][1])
        if start < stop:
            slices.append(Slice(i, j, start, stop))
        # whoever ends first has nothing more to give or to get
        if source[i][1] <= destination[j][1]:
            i += 1
        else:
            j += 1
    return tuple(slices)


def whole(num_sources: int, num_destinations: int) -> tuple[tuple[int, int], ...]:
    """(source, destination) pairs for a value without a batch dim, which every source holds whole:
    j takes from j mod sources.
    """
    if num_sources < 1 or num_destinations < 1:
        raise ValueError(
            f"a bridge needs at least one device on each side, got {num_sources} and "
            f"{num_destinations}"
        )
    return tuple((j % num_sources, j) for j in range(num_destinations))


def _range(name: str, intervals: Sequence[Interval]) -> Interval:
    """[first start, last stop) of ordered contiguous intervals."""
    if not intervals:
        raise ValueError(f"the {name} of a bridge has no device")
    expected = intervals[0][0]
    for index, (start, stop) in enumerate(intervals):
        if start != expected or stop < start:
            raise ValueError(
                f"{name} interval {index} is [{start}, {stop}); it must start at {expected} and "
                "not end before its start"
            )
        expected = stop
    return intervals[0][0], expected
