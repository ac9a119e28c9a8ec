"""Messages of a change of layout on an even grid, counted: where axes that cut the same dim change
places, no simple formula holds.

The whole tensor has the size 1, every dim runs from 0 to 1, and a device holds an interval of each.
What s sends to r is

    product over dims of |interval of s before  n  interval of r after|,     s and r alike on all axes where nothing moves          (1)

which are the axes that are same before, or partial after (`exchange_plan.py`, line 2). Sums may be
taken in a step of their own, where the tensor is or where it goes, when that sends less. All places
at once, as matrices [sender, receiver].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from whale.sharding.operation import PARTIAL, Placement

Lying = tuple[Placement, ...]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Layout:
    """By dim the axes that cut it, outermost first; axes are numbers."""

    axes: tuple[tuple[int, ...], ...]
    partial: frozenset[int]

    @staticmethod
    def of(lying: Lying, num_dims: int) -> _Layout:
        """Later axes stand outside of earlier ones."""
        outer_first = range(len(lying) - 1, -1, -1)
        return _Layout(
            tuple(
                tuple(axis for axis in outer_first if lying[axis] == dim) for dim in range(num_dims)
            ),
            frozenset(axis for axis, placement in enumerate(lying) if placement == PARTIAL),
        )

    @property
    def cut(self) -> frozenset[int]:
        return frozenset(axis for axes in self.axes for axis in axes)

    def also_cut(self, dim: int, axes: Sequence[int], partial: frozenset[int]) -> _Layout:
        return replace(
            self,
            axes=tuple((*own, *axes) if d == dim else own for d, own in enumerate(self.axes)),
            partial=partial,
        )


def most_sent(source: Lying, target: Lying, sizes: tuple[int, ...]) -> tuple[float, int | None]:
    """(part of the tensor that the device which sends most sends, the outermost axis along which
    something moves).
    """
    names = {
        dim: number
        for number, dim in enumerate(
            dict.fromkeys(one for one in (*source, *target) if isinstance(one, int))
        )
    }
    renamed = (
        tuple(names[one] if isinstance(one, int) else one for one in lying)
        for lying in (source, target)
    )
    return _most_sent(
        next(renamed), next(renamed), sizes, len(names) + 1
    )  # one dim more, which nothing cuts


@lru_cache(maxsize=65536)
def _most_sent(
    source: Lying, target: Lying, sizes: tuple[int, ...], num_dims: int
) -> tuple[float, int | None]:
    before = _Layout.of(source, num_dims)
    after = _Layout.of(target, num_dims)
    summed = sorted(before.partial - after.partial, reverse=True)
    best, outermost = _one_step(before, after, sizes)
    for middle in _between(before, after, summed, num_dims) if summed else ():
        steps = [_one_step(before, middle, sizes), _one_step(middle, after, sizes)]
        best = min(best, sum(sent for sent, _ in steps))
    return best, outermost


def _between(
    before: _Layout, after: _Layout, summed: Sequence[int], num_dims: int
) -> Iterator[_Layout]:
    """Every element summed at one place first: where it is needed, to be gathered there, or where
    it is, to be moved then.
    """
    gathered = [axis for axis in summed if axis not in after.cut]
    for dim in range(num_dims):
        if gathered:
            yield after.also_cut(dim, gathered, after.partial)
        yield before.also_cut(dim, summed, before.partial & after.partial)


def _one_step(before: _Layout, after: _Layout, sizes: tuple[int, ...]) -> tuple[float, int | None]:
    """Line (1)."""
    coordinates = _coordinates(sizes)
    sent = np.ones((len(coordinates[0]), len(coordinates[0])))
    for axes_before, axes_after in zip(before.axes, after.axes, strict=True):
        if axes_before or axes_after:
            (low, wide) = _intervals(axes_before, sizes)
            (start, width) = _intervals(axes_after, sizes)
            first = np.maximum(low[:, None], start[None, :])
            stop = np.minimum((low + wide)[:, None], (start + width)[None, :])
            sent *= np.clip(stop - first, 0.0, None)
    for axis, coordinate in enumerate(coordinates):
        is_same = axis not in before.cut and axis not in before.partial
        if is_same or axis in after.partial:
            sent *= coordinate[:, None] == coordinate[None, :]
        if is_same and axis in after.partial:
            sent *= (coordinate == 0)[:, None]  # one keeps it, the others have zeros
    np.fill_diagonal(sent, 0.0)
    sent[sent < 1e-12] = 0.0  # neighbours that only touch
    moving = [
        axis for axis, c in enumerate(coordinates) if (sent * (c[:, None] != c[None, :])).any()
    ]
    return float(sent.sum(axis=1).max()), max(moving, default=None)


@lru_cache(maxsize=256)
def _coordinates(sizes: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], ...]:
    """Of all places, by axis."""
    return tuple(each.ravel() for each in np.indices(sizes))


@lru_cache(maxsize=4096)
def _intervals(axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Array, float]:
    """Of one dim: where each place's interval begins, and how wide it is."""
    coordinates = _coordinates(sizes)
    width = 1.0
    start = np.zeros(len(coordinates[0]))
    for axis in axes:
        width /= sizes[axis]
        start = start + coordinates[axis] * width
    return start, width
