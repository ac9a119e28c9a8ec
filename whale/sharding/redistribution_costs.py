"""What a redistribution (one layout turned into another) costs, as the solver counts it: bytes that
a device sends, forward and backward.

Along one axis of g devices, for a tensor whose part on the other axes has n bytes:

    cut -> same     (all-gather)          n (g - 1) / g
    partial -> cut  (reduce-scatter)      n (g - 1) / g
    partial -> same (all-reduce)          2 n (g - 1) / g                                       (1)
    cut -> cut on another dim             n (g - 1) / g^2
    everything else                       0

The backward turns the conjugate of the target into the conjugate of the source. Several axes change
one after the other: reduce-scatters first, each on what the one before left of the tensor,
all-gathers last, so that every change moves as little as it can.

Where an axis outside of another that cuts the same dim changes (rows cut by z and then by y, and z
gathers), or one axis takes the place of another, what stays cut lies elsewhere afterwards: nearly
everything moves, also between coordinates of the inner axis. Lines (1) do not hold there, and
messages are counted, on an even grid: the whole tensor has the size 1, every dim runs from 0 to 1,
and a device holds an interval of each. What s sends to r is

    product over dims of |interval of s before  n  interval of r after|                         (2)

for s and r that agree on all axes where nothing moves: those that are same before, or partial after
(redistribution.py, line 2). Partial sums may be reduced in a step of their own, where the tensor is
or where it goes, when that sends less. Counting takes time with the square of the devices: where
that is too long (`GridCosts.is_counted`), lines (1) are taken all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from whale.sharding.options import PARTIAL, SAME, Placement

DEFAULT_BYTES_PER_S = 1e10

Placements = tuple[Placement, ...]
"""how a tensor lies along each axis, in the order of the axes' sizes"""


@dataclass(frozen=True)
class GridCosts:
    """How fast the devices of a grid compute and communicate."""

    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """by axis, what one device sends along it; an axis that is missing: DEFAULT_BYTES_PER_S"""
    latency_s: float = 2e-5
    """seconds of one redistribution, whatever its size"""
    flop_per_s: float = 1e13
    memory_bytes_per_s: float = 5e11
    num_micro_batch: int = 1
    """gradients of weights are all-reduced once in so many"""
    memory_price: float = 1e-16
    """seconds that one byte of a stored weight is worth: of two plans as fast the smaller is taken;
    higher where memory is short
    """
    state_per_weight: float = 4.0
    """bytes held for one byte of a weight: weight, gradient, state of the optimizer"""
    is_counted: bool = True
    """messages are counted where lines (1) do not hold"""

    def rate(self, axis: str) -> float:
        return self.bytes_per_s.get(axis, DEFAULT_BYTES_PER_S)


def sent_bytes(
    num_bytes: float,
    source: Sequence[Placement],
    target: Sequence[Placement],
    sizes: Sequence[int],
    gradient: bool,
    is_parameter: bool = False,
) -> list[float]:
    """Bytes that a device sends along each axis, those of the backward included where there is a
    gradient. `is_parameter`: axes that only store it stand innermost, so that lines (1) always
    hold.
    """
    forward = _one_way(num_bytes, source, target, sizes, is_parameter)
    if not gradient:
        return forward
    before = [_conjugate(one) for one in target]
    after = [_conjugate(one) for one in source]
    backward = _one_way(num_bytes, before, after, sizes, is_parameter)
    return [a + b for a, b in zip(forward, backward, strict=True)]


def _conjugate(placement: Placement) -> Placement:
    if placement == SAME:
        return PARTIAL
    return SAME if placement == PARTIAL else placement


def _one_way(
    num_bytes: float,
    source: Sequence[Placement],
    target: Sequence[Placement],
    sizes: Sequence[int],
    is_parameter: bool,
) -> list[float]:
    before = tuple(source)
    after = tuple(target)
    if is_parameter or _is_plain(before, after):
        parts = _by_formula(before, after, tuple(sizes))
    else:
        parts = _by_counting(before, after, tuple(sizes))
    return [num_bytes * part for part in parts]


@lru_cache(maxsize=65536)
def _is_plain(source: Placements, target: Placements) -> bool:
    """Whether lines (1) hold: in every dim axes are only added, or only taken away, inside of those
    that stay, and one axis at most goes to another dim. Later axes stand outside of earlier ones.
    """
    num_moved = sum(
        isinstance(before, int) and isinstance(after, int) and before != after
        for before, after in zip(source, target, strict=True)
    )
    if num_moved > 1:
        return False
    outer_first = range(len(source) - 1, -1, -1)
    for dim in {placement for placement in source if isinstance(placement, int)}:
        axes_before = [axis for axis in outer_first if source[axis] == dim]
        axes_after = [axis for axis in outer_first if target[axis] == dim]
        shorter = min(len(axes_before), len(axes_after))
        if axes_before[:shorter] != axes_after[:shorter]:
            return False
    return True


@lru_cache(maxsize=65536)
def _by_formula(source: Placements, target: Placements, sizes: tuple[int, ...]) -> list[float]:
    """Lines (1) for a tensor of one byte, by axis."""
    result = [0.0] * len(sizes)
    if source == target:
        return result
    changes = list(zip(source, target, sizes, strict=True))
    left = 1.0  # part of the tensor that a device has
    for before, after, size in changes:
        if isinstance(before, int) or (before == SAME and isinstance(after, int)):
            left /= size
    for axis, (before, after, size) in enumerate(changes):
        if before == PARTIAL and isinstance(after, int):
            result[axis] = left * (size - 1) / size
            left /= size
    for axis, (before, after, size) in enumerate(changes):
        if before == PARTIAL and after == SAME:
            result[axis] = 2 * left * (size - 1) / size
        elif isinstance(before, int) and isinstance(after, int) and before != after:
            result[axis] = left * (size - 1) / size
    for axis, (before, after, size) in enumerate(changes):
        if isinstance(before, int) and after == SAME:
            left *= size
            result[axis] = left * (size - 1) / size
    return result


# ---- line (2): all places at once, as matrices [sender, receiver]

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _AxisLayout:
    """The axes that cut each dim, outermost first; axes and dims are numbers."""

    axes: tuple[tuple[int, ...], ...]
    partial: frozenset[int]

    @staticmethod
    def of(placements: Placements, num_dims: int) -> _AxisLayout:
        """One dim is added that nothing cuts. Later axes stand outside of earlier ones."""
        outer_first = range(len(placements) - 1, -1, -1)
        by_dim = []
        for dim in range(num_dims + 1):
            by_dim.append(tuple(axis for axis in outer_first if placements[axis] == dim))
        partial = frozenset(axis for axis in outer_first if placements[axis] == PARTIAL)
        return _AxisLayout(tuple(by_dim), partial)

    @property
    def cut(self) -> frozenset[int]:
        return frozenset().union(*self.axes)

    def also_cut(self, dim: int, axes: Sequence[int], partial: frozenset[int]) -> _AxisLayout:
        by_dim = [(*own, *axes) if d == dim else own for d, own in enumerate(self.axes)]
        return replace(self, axes=tuple(by_dim), partial=partial)


def _by_counting(source: Placements, target: Placements, sizes: tuple[int, ...]) -> list[float]:
    """What the device that sends most sends of a tensor of one byte. All of it counts on the
    outermost axis along which something moves, whose links are the slowest ones.
    """
    # dims are numbered anew, so that the same change of other dims is counted once
    dims = dict.fromkeys(one for one in (*source, *target) if isinstance(one, int))
    number: dict[Placement, Placement] = {dim: index for index, dim in enumerate(dims)}
    before = tuple(number.get(one, one) for one in source)
    after = tuple(number.get(one, one) for one in target)
    sent, outermost = _most_sent(before, after, sizes, len(dims))
    result = [0.0] * len(sizes)
    if outermost is not None:
        result[outermost] = sent
    return result


@lru_cache(maxsize=65536)
def _most_sent(
    source: Placements, target: Placements, sizes: tuple[int, ...], num_dims: int
) -> tuple[float, int | None]:
    """(part of the tensor that the device which sends most sends, the outermost axis along which
    something moves), in one step or in two.
    """
    before = _AxisLayout.of(source, num_dims)
    after = _AxisLayout.of(target, num_dims)
    best, outermost = _one_step(before, after, sizes)
    for middle in _reduced_first(before, after):
        first, _ = _one_step(before, middle, sizes)
        second, _ = _one_step(middle, after, sizes)
        best = min(best, first + second)
    return best, outermost


def _reduced_first(before: _AxisLayout, after: _AxisLayout) -> Iterator[_AxisLayout]:
    """Layouts in between in which every element is already summed: at the place that needs it, to
    be gathered there, or at the place that has it, to be moved then.
    """
    summed = sorted(before.partial - after.partial, reverse=True)
    if not summed:
        return
    gathered = [axis for axis in summed if axis not in after.cut]
    for dim in range(len(before.axes)):
        if gathered:
            yield after.also_cut(dim, gathered, after.partial)
        yield before.also_cut(dim, summed, before.partial & after.partial)


def _one_step(
    before: _AxisLayout, after: _AxisLayout, sizes: tuple[int, ...]
) -> tuple[float, int | None]:
    """Line (2): (part of the tensor that the device which sends most sends, the outermost axis
    along which something moves).
    """
    coordinates = _coordinates(sizes)
    sent = np.ones((len(coordinates[0]), len(coordinates[0])))
    for axes_before, axes_after in zip(before.axes, after.axes, strict=True):
        if axes_before or axes_after:
            start_before, width_before = _intervals(axes_before, sizes)
            start_after, width_after = _intervals(axes_after, sizes)
            first = np.maximum(start_before[:, None], start_after[None, :])
            stop = np.minimum(
                (start_before + width_before)[:, None], (start_after + width_after)[None, :]
            )
            sent *= np.clip(stop - first, 0.0, None)
    for axis, coordinate in enumerate(coordinates):
        is_same = axis not in before.cut and axis not in before.partial
        if is_same or axis in after.partial:
            sent *= coordinate[:, None] == coordinate[None, :]
        if is_same and axis in after.partial:
            sent *= (coordinate == 0)[:, None]  # one keeps it, the others have zeros
    np.fill_diagonal(sent, 0.0)
    sent[sent < 1e-12] = 0.0  # neighbours that only touch
    outermost = None
    for axis, coordinate in enumerate(coordinates):
        if (sent * (coordinate[:, None] != coordinate[None, :])).any():
            outermost = axis
    return float(sent.sum(axis=1).max()), outermost


@lru_cache(maxsize=256)
def _coordinates(sizes: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], ...]:
    """Coordinates of every place, by axis."""
    return tuple(each.ravel() for each in np.indices(sizes))


@lru_cache(maxsize=4096)
def _intervals(axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Matrix, float]:
    """Where each place's interval of a dim that these axes cut begins, and how wide it is."""
    coordinates = _coordinates(sizes)
    width = 1.0
    start = np.zeros(len(coordinates[0]))
    for axis in axes:
        width /= sizes[axis]
        start = start + coordinates[axis] * width
    return start, width
