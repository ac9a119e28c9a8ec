"""Boxes of a tensor: index ranges, one [start, stop) for each dim. Exact cover, intersection, and
which bytes a box is.

A tensor's pieces are right when each lies inside the shape, no two overlap, and their volumes add
up to the tensor's:

    inside  and  disjoint  and  sum of volumes = volume        <=>        every element exactly once                    (1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Range = tuple[int, int]
"""indices [start, stop) of one dim"""
Box = tuple[Range, ...]
"""one range for each dim; a 0-dim tensor has the empty box"""

PAIRS_AT_ONCE = 1 << 22  # comparisons in one numpy call: bounds its memory to a few tens of MB


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def extents(box: Box) -> tuple[int, ...]:
    """The shape of what is inside a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(extents(box))


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    return len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape)
    )


def intersect(a: Box, b: Box) -> Box | None:
    """What both boxes hold, or None. Two 0-dim boxes meet in the one element."""
    both = tuple((max(i[0], j[0]), min(i[1], j[1])) for i, j in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def relative(box: Box, origin: Box) -> Box:
    """`box` in the indices of a tensor that holds `origin`."""
    return tuple(
        (start - base, stop - base) for (start, stop), (base, _) in zip(box, origin, strict=True)
    )


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def why_not_cover(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Line (1): '' when the boxes hold every element exactly once, else what is wrong."""
    for box in boxes:
        if not is_inside(box, shape):
            return f"piece {_text(box)} does not lie inside shape {list(shape)}"
    if any(size == 0 for size in shape):
        return "" if boxes else "it has no piece"
    for box in boxes:
        if volume(box) == 0:
            return f"piece {_text(box)} is empty"
    pair = _first_overlap(boxes)
    if pair is not None:
        return f"pieces {_text(boxes[pair[0]])} and {_text(boxes[pair[1]])} overlap"
    covered = sum(volume(box) for box in boxes)
    if covered != math.prod(shape):
        return (
            f"its pieces hold {covered:,} of the {math.prod(shape):,} elements of shape "
            f"{list(shape)}"
        )
    return ""


def byte_segments(
    shape: Sequence[int], box: Box, itemsize: int, grain: int
) -> list[tuple[int, int]]:
    """Bytes [start, stop) of a row-major tensor that hold `box`, widened to multiples of `grain`
    bytes, joined where they touch.
    """
    total = math.prod(shape) * itemsize
    cut = max((dim for dim, (r, size) in enumerate(zip(box, shape)) if r != (0, size)), default=0)
    inner = math.prod(shape[cut + 1 :]) * itemsize
    starts = np.zeros(1, dtype=np.int64)
    stride = total
    for dim in range(cut if shape else 0):
        stride //= shape[dim]
        starts = np.add.outer(starts, np.arange(*box[dim], dtype=np.int64) * stride).reshape(-1)
    run_bytes = total
    if shape:
        starts = starts + box[cut][0] * inner
        run_bytes = (box[cut][1] - box[cut][0]) * inner
    first = starts // grain
    stop = (starts + run_bytes + grain - 1) // grain
    breaks = np.flatnonzero(first[1:] > stop[:-1])
    from_block = first[np.concatenate(([0], breaks + 1))]
    to_block = stop[np.concatenate((breaks, [len(stop) - 1]))]
    return [(int(a) * grain, min(int(b) * grain, total)) for a, b in zip(from_block, to_block)]


def _first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes that share an element. They are sorted by start, so each is compared with later
    ones only.
    """
    if len(boxes) < 2:
        return None
    bounds = np.array(boxes, dtype=np.int64).reshape(len(boxes), -1, 2)
    if bounds.shape[1] == 0:  # two pieces of a 0-dim tensor
        return 0, 1
    order = np.lexsort(bounds[:, ::-1, 0].T)
    start = bounds[order, :, 0]
    stop = bounds[order, :, 1]
    varying = np.flatnonzero((start != start[0]).any(0) | (stop != stop[0]).any(0))
    if len(varying) == 1:  # cut along one dim: neighbours only
        dim = varying[0]
        bad = np.flatnonzero(start[1:, dim] < stop[:-1, dim])
        return (int(order[bad[0]]), int(order[bad[0] + 1])) if len(bad) else None
    rows = max(1, PAIRS_AT_ONCE // len(boxes))
    for begin in range(0, len(boxes), rows):
        some = slice(begin, begin + rows)
        meet = ((start[some, None] < stop[None]) & (start[None] < stop[some, None])).all(-1)
        meet &= np.arange(len(boxes))[None] > np.arange(begin, begin + meet.shape[0])[:, None]
        if meet.any():
            i, j = np.argwhere(meet)[0]
            return int(order[begin + i]), int(order[j])
    return None


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
