"""Parts of tensors: boxes of indices, and a rank's shard as boxes of the whole tensor, so that any
grid loads what any other saved.

A box has one range [start, stop) for each dim. A tensor's pieces are right when each lies inside
the shape, no two overlap, and their volumes add up to the tensor's:

    inside  and  disjoint  and  sum of volumes = volume   <=>   every element exactly once    (1)

A shard that is cut in a fused dim is several boxes (one in each segment); each is a piece of its
own in the rank's file. Optimizer state that has the shape of its parameter is cut like it. A number
of its own (the step) is written by the rank of the first part. Statistics of the matrices of a
stack (row and column means of Adafactor, of a stack of experts) are cut as the stack is in front of
its last two dims. Anything else belongs to that very part of the parameter (the row means of a
matrix of which a device has some columns): it has a name of its own and fits only the same cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whale.checkpoint.errors import CheckpointError
from whale.plans.shards import Box, Shard

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


# ---- shards


@dataclass(frozen=True)
class TensorPart:
    """Where a rank's tensor lies in the whole one."""

    shape: tuple[int, ...]
    ranges: Box
    name: str = ""
    """of the whole tensor, where the rank writes several parts of it, each under a name of its own
    """


Pieces = tuple[dict[str, Tensor], dict[str, TensorPart]]
"""tensors and, for those that are not whole, where they lie; both by the name in the file"""
Read = Callable[[str, Box | None], Tensor]


def pieces(name: str, tensor: Tensor, shard: Shard, shape: Sequence[int]) -> Pieces:
    """A shard as it is written. `shape`: of the whole tensor."""
    if shard.ranges is None:
        return {name: tensor}, {}
    boxes = shard.boxes(shape)
    keys = [name] if len(boxes) == 1 else [f"{name}[{number}]" for number in range(len(boxes))]
    tensors = {key: tensor[slices(own)] for key, (_, own) in zip(keys, boxes, strict=True)}
    return tensors, {
        key: TensorPart(tuple(shape), box, name) for key, (box, _) in zip(keys, boxes, strict=True)
    }


@dataclass(frozen=True)
class StatePart:
    """The part of a parameter whose optimizer state a rank has."""

    shard: Shard
    shape: tuple[int, ...]
    """of the whole parameter"""
    is_stack: bool = False
    """the optimizer treats every matrix of it by itself, but for numbers (`Plan.summed_norms`)"""

    def of_matrices(self, shape: Sequence[int]) -> Shard | None:
        """The part of statistics of this whole shape, if they are those of every matrix of a stack,
        each of which this rank has whole; else None.
        """
        ranges = self.shard.ranges
        if ranges is None or not self.is_stack or len(shape) != len(self.shape):
            return None
        if tuple(shape[:-MATRIX_DIMS]) != self.shape[:-MATRIX_DIMS]:
            return None
        own = list(ranges[:-MATRIX_DIMS])
        for dim in range(len(shape) - MATRIX_DIMS, len(shape)):
            if ranges[dim] != ((0, self.shape[dim]),) or shape[dim] not in (1, self.shape[dim]):
                return None
            own.append(((0, shape[dim]),))
        return Shard(self.shard.name, tuple(own), self.shard.ranks, tuple(shape))


MATRIX_DIMS = 2
"""last dims of a stack of matrices, which are one of them"""


def state_pieces(name: str, tensor: Tensor, part: StatePart, is_first: bool) -> Pieces:
    """A tensor of the optimizer state of a parameter. `is_first`: this rank writes the first part
    of the parameter.
    """
    shard = part.shard
    if shard.ranges is None or tensor.shape == shard.shape:
        return pieces(name, tensor, shard, part.shape)
    if not tensor.dim():
        return ({name: tensor}, {}) if is_first else ({}, {})
    whole_shape = (*part.shape[:-MATRIX_DIMS], *tensor.shape[-MATRIX_DIMS:])
    statistics = part.of_matrices(whole_shape)
    if statistics is not None and tensor.shape == statistics.shape:
        return pieces(name, tensor, statistics, whole_shape)
    return {_own_name(name, shard): tensor}, {}


def read_shard(
    read: Read, name: str, shard: Shard, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """A shard, box by box: `read(name, box)` gives one; None for all."""
    if shard.ranges is None:
        return read(name, None)
    assert shard.shape is not None
    tensor = torch.empty(shard.shape, dtype=dtype)
    for box, own in shard.boxes(shape):
        tensor[slices(own)] = read(name, box)
    return tensor


def read_state(
    read: Read, shapes: Mapping[str, Sequence[int]], name: str, part: StatePart
) -> Tensor:
    """A tensor of the optimizer state. `shapes`: of everything in the checkpoint."""
    shard = part.shard
    own = _own_name(name, shard)
    if own in shapes:
        return read(own, None)
    if name in shapes:
        saved = tuple(shapes[name])
        if shard.ranges is None or not saved:
            return read(name, None)
        wanted = shard if saved == part.shape else part.of_matrices(saved)
        if wanted is not None:
            return read_shard(read, name, wanted, saved, read(name, ((0, 0),) * len(saved)).dtype)
    raise CheckpointError(
        f"the optimizer state {name!r} belongs to another part of the parameter than this rank "
        "holds, and cannot be cut anew: load it with the grid and the number of devices that it "
        "was saved with, or start the optimizer afresh (weights=...)"
    )


def _own_name(name: str, shard: Shard) -> str:
    """Name of what belongs to this very part: `optimizer/w/row of [0:4] x [2:6]`."""
    if shard.ranges is None:
        return name
    return f"{name} of " + " x ".join(_text(dim) for dim in shard.ranges)
