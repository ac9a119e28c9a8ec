"""Who holds which part of which tensor, as the plan says it, and how parts are taken from whole
tensors and put together again.

A device of a grid holds of each dim some index ranges (several for a fused dim: one in each
segment). So a shard is a product of ranges, and in the whole tensor a few boxes. Its holders are
all ranks with the very same ranges: the same place of other replicas, the places along axes that do
not cut it, and the devices of other stages that use it.

Under ZeRO the ranks of a block hold some rows each of its parameters (`plans/blocks.py`): of the
optimizer state and of gradients at every level, of weights at level 3.

Model replicas that are not alike may cut a tensor differently: one device holds it whole, two of
another replica hold a half each. Gradients are then summed over the **common refinement**: the
cells between all cuts of all replicas, each with whoever holds it (`pieces`). For one purpose each
entry must count once (checkpoints, gathering): there the shards of template 0 stand for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import torch
from torch import Tensor

from whale.plans.blocks import WEIGHTS_TOO, Block
from whale.plans.plan import WHOLE, Holding, Plan, Ranges

Range = tuple[int, int]
"""indices [start, stop) of one dim"""
Box = tuple[Range, ...]
"""one range for each dim; a 0-dim tensor has the empty box"""


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


@dataclass(frozen=True)
class Piece:
    """Entries of a tensor that the same ranks hold."""

    ranks: tuple[int, ...]
    """in rank order"""
    cells: tuple[Box, ...] | None
    """boxes of the whole tensor, in order; None: all that each of these ranks holds"""

    def inside(self, shard: Shard) -> tuple[tuple[slice, ...], ...]:
        """Where the cells lie in a shard that holds them all."""
        assert self.cells is not None
        found = []
        for cell in self.cells:
            own = []
            for dim, (start, stop) in enumerate(cell):
                ranges = shard.ranges[dim] if shard.ranges is not None else ((0, stop),)
                held = next(
                    part for part in _with_offsets(ranges) if part[0][0] <= start < part[0][1]
                )
                first = held[1][0] + start - held[0][0]
                own.append(slice(first, first + stop - start))
            found.append(tuple(own))
        return tuple(found)

    @property
    def num_entries(self) -> int:
        assert self.cells is not None
        return sum(math.prod(stop - start for start, stop in cell) for cell in self.cells)


class Shards:
    """All shards of a plan: of its weights, or of the state that its ranks update."""

    def __init__(self, plan: Plan, of: Literal["weights", "states", "owned"] = "weights") -> None:
        """`owned`: as `states`, but what an owner updates whole is whole there and nowhere else."""
        self.plan = plan
        self._owners = plan.owners if of == "owned" else {}
        self._of_name: dict[str, tuple[Shard, ...]] = {}
        self._blocks_of: dict[str, list[Block]] = {}
        """blocks in which a tensor is cut by rows, one for each group that holds it"""
        if of != "weights" or plan.zero == WEIGHTS_TOO:
            for block in plan.blocks:
                if not block.ends:
                    continue  # a grid cuts these
                for name in block.parameters:
                    self._blocks_of.setdefault(name, []).append(block)

    def of(self, name: str) -> tuple[Shard, ...]:
        """The different parts of a tensor, those of lower ranks first, each entry in one of them.
        What the graph does not use is whole on stage 0.

        Of replicas that cut it otherwise than those of template 0 nothing is said here.
        """
        if self.plan.is_uniform:
            return self.held(name)
        first = self.plan.by_template[0]
        own = {
            rank
            for stage in self._holding(first, name).stages
            for rank in first.ranks_of_stage(stage)
        }
        return tuple(shard for shard in self.held(name) if own & set(shard.ranks))

    def held(self, name: str) -> tuple[Shard, ...]:
        """All different parts of a tensor that some rank holds; they overlap where model replicas
        cut it differently.
        """
        if name not in self._of_name:
            self._of_name[name] = self._find(name)
        return self._of_name[name]

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """The tensor taken apart so that the holders of each piece are the same: what gradients
        are summed over. In the same order on every rank; pieces of one holder included.
        """
        shards = [shard for shard in self.held(name) if shard.boxes(())]
        if self.plan.is_uniform or len(shards) == 1:
            return tuple(Piece(shard.ranks, None) for shard in shards)
        shape = next(shard.whole_shape for shard in shards if shard.ranges is not None)
        everything = tuple(((0, size),) for size in shape)
        ranges = [shard.ranges or everything for shard in shards]
        cells_of: dict[tuple[int, ...], list[Box]] = {}
        for cell in product(
            *(_between([each[dim] for each in ranges]) for dim in range(len(shape)))
        ):
            ranks: set[int] = set()
            for shard, held in zip(shards, ranges, strict=True):
                if all(_is_inside(interval, dim) for interval, dim in zip(cell, held, strict=True)):
                    ranks.update(shard.ranks)
            if ranks:
                cells_of.setdefault(tuple(sorted(ranks)), []).append(cell)
        return tuple(Piece(ranks, tuple(cells)) for ranks, cells in cells_of.items())

    def piece_sizes(self, name: str) -> list[tuple[Piece, int]]:
        """The pieces of a tensor that some replica cuts, with their numbers of entries."""
        found = []
        for piece in self.pieces(name):
            if piece.cells is None:
                shard = next(shard for shard in self.held(name) if shard.ranks == piece.ranks)
                found.append((piece, math.prod(shard.shape or shard.whole_shape)))
            else:
                found.append((piece, piece.num_entries))
        return found

    def first(self, name: str) -> Shard:
        """The first part of a tensor that is not empty."""
        parts = self.of(name)
        return next((shard for shard in parts if shard.boxes(shard.whole_shape)), parts[0])

    def on(self, name: str, rank: int) -> Shard:
        """The part that a rank holds."""
        return next(shard for shard in self.held(name) if rank in shard.ranks)

    @staticmethod
    def _holding(view: Plan, name: str) -> Holding:
        return view.template.tensors.get(name, Holding((0,)))

    def _find(self, name: str) -> tuple[Shard, ...]:
        if name in self._owners:
            return (Shard(name, None, (self._owners[name],)),)
        if name in self._blocks_of:
            return self._in_rows(name)
        found: dict[Ranges | None, set[int]] = {}
        empty: list[Shard] = []
        shape: tuple[int, ...] = ()
        for view, number, stage in self._places(name):
            template = view.template
            holding = self._holding(view, name)
            device = view.virtual_devices[template.stages[stage].virtual_device]
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

    def _places(self, name: str) -> Iterator[tuple[Plan, int, int]]:
        """(plan of a template, place among its holders, stage) of all stages that hold a tensor."""
        for view in self.plan.by_template:
            for number, stage in enumerate(self._holding(view, name).stages):
                yield view, number, stage

    def _in_rows(self, name: str) -> tuple[Shard, ...]:
        """Parts of a parameter that blocks cut."""
        found: dict[Ranges | None, list[int]] = {}
        empty: list[Shard] = []
        for block in self._blocks_of[name]:
            shape = block.shapes[block.parameters.index(name)]
            for rank in block.ranks:
                rows = block.rows(name, rank)
                ranges = ((rows,), *(((0, size),) for size in shape[1:]))
                if rows[0] == rows[1]:
                    empty.append(Shard(name, ranges, (rank,), shape))
                else:  # a rank that holds all rows holds the whole parameter
                    part = None if rows == (0, shape[0]) else ranges
                    found.setdefault(part, []).append(rank)
        shards = [
            Shard(name, part, tuple(sorted(ranks)), shape if part is not None else ())
            for part, ranks in found.items()
        ]
        return tuple(sorted([*shards, *empty], key=lambda shard: shard.ranks))


def _between(cuts: Sequence[Sequence[Range]]) -> list[Range]:
    """The intervals between all ends of these ranges of one dim."""
    ends = sorted({end for ranges in cuts for part in ranges for end in part})
    return list(pairwise(ends))


def _is_inside(interval: Range, ranges: Sequence[Range]) -> bool:
    return any(start <= interval[0] and interval[1] <= stop for start, stop in ranges)


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
