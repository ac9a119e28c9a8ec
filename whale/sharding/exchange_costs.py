"""What a change of layout costs, as the solver counts it: bytes that a device sends, forward and
backward.

Along one axis of g devices, of a tensor whose part on the other axes is n bytes:

    cut -> same   (gather)             n (g - 1) / g
    partial -> cut (reduce-scatter)    n (g - 1) / g
    partial -> same (all-reduce)       2 n (g - 1) / g                                               (1)
    cut -> cut on another dim          n (g - 1) / g^2
    everything else                    0

The backward turns the conjugate of the target into the conjugate of the source. Several axes change
one after the other: sums first, each on what the one before left of the tensor, gathers last, so
every change moves as little as it can.

Where an axis outside of another that cuts the same dim changes (rows cut by z and then by y, and z
gathers), or one axis takes the place of another, what stays cut lies elsewhere afterwards: nearly
everything moves, also between coordinates of the inner axis. Lines (1) do not hold there, and the
messages themselves are counted (`exchange_counts.py`); where that takes too long
(`GridCosts.is_counted`), lines (1) are taken all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from whale.sharding.exchange_counts import most_sent
from whale.sharding.operation import PARTIAL, SAME, Placement


@dataclass(frozen=True)
class GridCosts:
    """How fast the devices of a grid compute and talk."""

    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """by axis, what one device sends along it; an axis that is not there: DEFAULT_BYTES_PER_S"""
    latency_s: float = 2e-5
    """of one exchange"""
    flop_per_s: float = 1e13
    memory_bytes_per_s: float = 5e11
    num_micro_batch: int = 1
    """gradients of weights are summed once in so many"""
    memory_price: float = 1e-16
    """seconds that one byte of a stored weight is worth: of two plans as fast the smaller is taken;
    higher where memory is short
    """
    state_per_weight: float = 4.0
    """bytes held for one byte of a weight: weight, gradient, state of the optimizer"""

    is_counted: bool = True
    """messages of exchanges are counted where lines (1) do not hold; the time for that grows with
    the square of the devices
    """

    def rate(self, axis: str) -> float:
        return self.bytes_per_s.get(axis, DEFAULT_BYTES_PER_S)


DEFAULT_BYTES_PER_S = 1e10

Placements = Sequence[Placement]
"""by axis, in the order of `sizes`"""


def sent_bytes(
    num_bytes: float,
    source: Placements,
    target: Placements,
    sizes: Sequence[int],
    gradient: bool,
    is_parameter: bool = False,
) -> list[float]:
    """Lines (1) for each axis, backward included where there is one. `is_parameter`: axes that only
    store it stand innermost, so that lines (1) always hold."""
    forward = _one_way(num_bytes, source, target, sizes, is_parameter)
    if not gradient:
        return forward
    gradients = [_conjugate(one) for one in target], [_conjugate(one) for one in source]
    return [a + b for a, b in zip(forward, _one_way(num_bytes, *gradients, sizes, is_parameter))]


def _conjugate(placement: Placement) -> Placement:
    return (
        {SAME: PARTIAL, PARTIAL: SAME}.get(placement, placement)
        if isinstance(placement, str)
        else placement
    )


def _one_way(
    num_bytes: float,
    source: Placements,
    target: Placements,
    sizes: Sequence[int],
    is_parameter: bool,
) -> list[float]:
    key = tuple(source), tuple(target), tuple(sizes)
    parts = _parts(*key) if is_parameter or _is_plain(*key[:2]) else _counted(*key)
    return [num_bytes * part for part in parts]


@lru_cache(maxsize=65536)
def _parts(
    source: tuple[Placement, ...], target: tuple[Placement, ...], sizes: tuple[int, ...]
) -> list[float]:
    """Of a tensor of one byte."""
    result = [0.0] * len(sizes)
    if source == target:
        return result
    changes = list(enumerate(zip(source, target, sizes)))
    left = 1.0
    for _, (before, after, size) in changes:
        if isinstance(before, int) or (before == SAME and isinstance(after, int)):
            left /= size
    for place, (before, after, size) in changes:
        if before == PARTIAL and isinstance(after, int):
            result[place] = left * (size - 1) / size
            left /= size
    for place, (before, after, size) in changes:
        if before == PARTIAL and after == SAME:
            result[place] = 2 * left * (size - 1) / size
        elif isinstance(before, int) and isinstance(after, int) and before != after:
            result[place] = left * (size - 1) / size
    for place, (before, after, size) in changes:
        if isinstance(before, int) and after == SAME:
            left *= size
            result[place] = left * (size - 1) / size
    return result


# ---- axes that change places
# ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def _is_plain(source: tuple[Placement, ...], target: tuple[Placement, ...]) -> bool:
    """Whether in every dim axes are only added, or only taken away, inside of those that stay, and
    one axis at most goes to another dim. Later axes stand outside of earlier ones."""
    if (
        sum(
            isinstance(before, int) and isinstance(after, int) and before != after
            for before, after in zip(source, target)
        )
        > 1
    ):
        return False
    for dim in {placement for placement in source if isinstance(placement, int)}:
        before, after = (
            [axis for axis in reversed(range(len(source))) if lying[axis] == dim]
            for lying in (source, target)
        )
        shorter = min(len(before), len(after))
        if before[:shorter] != after[:shorter]:
            return False
    return True


def _counted(
    source: tuple[Placement, ...], target: tuple[Placement, ...], sizes: tuple[int, ...]
) -> list[float]:
    """Of a tensor of one byte; all of it on the outermost axis along which something moves, whose
    links are the slowest ones.
    """
    result = [0.0] * len(sizes)
    sent, axis = most_sent(source, target, sizes)
    if axis is not None:
        result[axis] = sent
    return result
