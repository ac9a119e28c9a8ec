"""Who holds which part of which tensor, as the plan says it, and how parts are taken from whole
tensors and put together again.

A device of a grid holds of each dim some index ranges (several for a fused dim: one in each
segment). So a shard is a product of ranges, and in the whole tensor a few boxes. Its holders are
all ranks with the very same ranges: the same place of other replicas, the places along axes that do
not cut it, and the devices of other stages that use it.

Under ZeRO the ranks of a block hold some rows each of its parameters (`plans/blocks.py`): of the
optimizer state and of gradients at every level, of weights at level 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from whale.plans.blocks import WEIGHTS_TOO, Block
from whale.plans.plan import WHOLE, Holding, Plan, Ranges

Range = tuple[int, int]
Box = tuple[Range, ...]


@dataclass(frozen=True)
class Shard:
    """A part of a tensor, and the ranks that hold it."""

    name: str
    ranges: Ranges | None
    """None: the whole tensor"""
    ranks: tuple[int, ...]
    """in rank order"""
    whole_shape: tuple[int, ...] = ()
    """of the whole tensor, where this is only a part"""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """None: that of the whole tensor."""
        return (
            None
            if self.ranges is None
            else tuple(sum(stop - start for start, stop in dim) for dim in self.ranges)
        )

    def boxes(self, shape: Sequence[int]) -> list[tuple[Box, Box]]:
        """(box of the whole tensor, the same in the indices of the shard); empty ones are left out.
        `shape`: of the whole tensor.
        """
        if self.ranges is None:
            everything = tuple((0, size) for size in shape)
            return [(everything, everything)]
        found = []
        for parts in product(*(_with_offsets(dim) for dim in self.ranges)):
            box = tuple(part[0] for part in parts)
            own = tuple(part[1] for part in parts)
            if all(start < stop for start, stop in box):
                found.append((box, own))
        return found

    def take(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor, in memory of its own (the whole tensor can go)."""
        if self.ranges is None:
            return whole
        part = whole.detach()
        for dim, ranges in enumerate(self.ranges):
            if ranges != ((0, whole.shape[dim]),):
                part = torch.cat(
                    [part.narrow(dim, start, stop - start) for start, stop in ranges], dim
                )
        part = part.clone(memory_format=torch.contiguous_format)
        return (
            torch.nn.Parameter(part, requires_grad=whole.requires_grad)
            if isinstance(whole, torch.nn.Parameter)
            else part
        )

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Writes this part into the whole tensor."""
        for box, own in self.boxes(whole.shape):
            whole[_slices(box)] = part[_slices(own)]


class Shards:
    """All shards of a plan: of its weights, or of the state that its ranks update."""

    def __init__(self, plan: Plan, of: Literal["weights", "states"] = "weights") -> None:
        self.plan = plan
        self._of_name: dict[str, tuple[Shard, ...]] = {}
        self._blocks_of: dict[str, list[Block]] = {}
        """blocks in which a tensor is cut by rows, one for each group that holds it"""
        if of == "states" or plan.zero == WEIGHTS_TOO:
            for block in plan.blocks:
                for name in block.parameters:
                    self._blocks_of.setdefault(name, []).append(block)

    def of(self, name: str) -> tuple[Shard, ...]:
        """The different parts of a tensor, those of lower ranks first. What the graph does not use
        is whole on stage 0.
        """
        if name not in self._of_name:
            self._of_name[name] = self._find(name)
        return self._of_name[name]

    def first(self, name: str) -> Shard:
        """The first part of a tensor that is not empty."""
        parts = self.of(name)
        return next(
            (shard for shard in parts if shard.ranges is None or shard.boxes(shard.whole_shape)),
            parts[0],
        )

    def on(self, name: str, rank: int) -> Shard:
        """The part that a rank holds."""
        return next(shard for shard in self.of(name) if rank in shard.ranks)

    def _find(self, name: str) -> tuple[Shard, ...]:
        if name in self._blocks_of:
            return self._in_rows(name)
        found: dict[Ranges | None, set[int]] = {}
        empty: list[Shard] = []
        shape: tuple[int, ...] = ()
        template = self.plan.template
        holding = template.tensors.get(name, Holding((0,)))
        for number, stage in enumerate(holding.stages):
            device = self.plan.virtual_devices[template.stages[stage].virtual_device]
            index = holding.boxes[number] if holding.boxes else WHOLE
            if index == WHOLE:
                found.setdefault(None, set()).update(device.all_ranks)
                continue
            boxes = template.boxes[index]
            shape = boxes.shape
            everything = tuple(((0, size),) for size in shape)
            for ranks in device.ranks:
                for rank, ranges in zip(ranks, boxes.places, strict=True):
                    part = None if ranges == everything else ranges
                    if part is not None and _is_empty(part):
                        # nothing to all-reduce: it needs no group with anybody
                        empty.append(Shard(name, ranges, (rank,), shape))
                    else:
                        found.setdefault(part, set()).add(rank)
        held = [rank for ranks in found.values() for rank in ranks]
        assert len(held) == len(set(held)), f"{name} is cut in two ways on one rank"
        shards = [
            Shard(name, ranges, tuple(sorted(ranks)), shape if ranges is not None else ())
            for ranges, ranks in found.items()
        ]
        return tuple(sorted([*shards, *dict.fromkeys(empty)], key=lambda shard: shard.ranks))

    def _in_rows(self, name: str) -> tuple[Shard, ...]:
        """Parts of a parameter that blocks cut."""
        found: dict[Ranges, list[int]] = {}
        empty: list[Shard] = []
        for block in self._blocks_of[name]:
            shape = block.shapes[block.parameters.index(name)]
            for rank in block.ranks:
                rows = block.rows(name, rank)
                ranges = ((rows,), *(((0, size),) for size in shape[1:]))
                if rows[0] == rows[1]:
                    empty.append(Shard(name, ranges, (rank,), shape))
                else:
                    found.setdefault(ranges, []).append(rank)
        shards = [
            Shard(name, ranges, tuple(sorted(ranks)), shape) for ranges, ranks in found.items()
        ]
        return tuple(sorted([*shards, *empty], key=lambda shard: shard.ranks))


def _is_empty(ranges: Ranges) -> bool:
    return any(all(start == stop for start, stop in dim) for dim in ranges)


def _with_offsets(ranges: Sequence[Range]) -> list[tuple[Range, Range]]:
    """Each range, and where it lies in the shard."""
    found = []
    offset = 0
    for start, stop in ranges:
        found.append(((start, stop), (offset, offset + stop - start)))
        offset += stop - start
    return found


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
