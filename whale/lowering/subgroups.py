"""Subgroups of devices that hold one dim of a tensor together, and collectives of a few numbers for
each row between them.

Larger tensors change their layout by `exchange.py`. Here every device computes the same from
everyone's numbers, in the same order, so that results are equal to the bit on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.devices import backend_of
from whale.distributed.ranks import Ranks
from whale.dtypes import as_bytes, in_memory
from whale.lowering.exchange import Exchange, Groups, HostGroups, sent
from whale.plans.grid import Grid
from whale.plans.plan import Plan
from whale.plans.virtual_devices import VirtualDevice
from whale.sharding.row_messages import DIRECT_UP_TO_BYTES

AllGather = Callable[[Tensor, dist.ProcessGroup | None], Tensor | None]
"""a faster way to everyone's value of a group, [members, *shape]; None where it does not lead there
"""
PURPOSE = "exchange"
"""these groups are apart from those that all-reduce gradients: both have messages under way during
a backward, in no common order
"""


@dataclass(frozen=True)
class Subgroup:
    """Devices that hold one dim together, seen from one of them."""

    size: int
    index: int
    """of this device among them"""
    group: dist.ProcessGroup | None
    shortcut: AllGather | None = None
    """through memory, where all members run on CPUs of one host: steps of a small ResNet, whose
    batch norms make 45 such sums, went from 40 to 32 ms (docs/log.md)
    """

    @staticmethod
    def of(
        grid: Grid,
        place: int,
        axes: Sequence[str],
        groups: Groups,
        shortcut: AllGather | None = None,
    ) -> Subgroup:
        """The devices of a grid that differ from `place` along these axes only."""
        places = grid.subgroup(place, axes)
        group = groups[places] if len(places) > 1 else None
        return Subgroup(len(places), places.index(place), group, shortcut)


def subgroups_of_grid(grid: Grid) -> list[tuple[int, ...]]:
    """Places that differ along some axes only, for every set of axes; single places first."""
    found = set()
    for number in range(len(grid.axes) + 1):
        for axes in combinations(grid.axes, number):
            found |= {grid.subgroup(place, axes) for place in range(grid.num_devices)}
    return sorted(found, key=lambda places: (len(places), places))


def groups_of_grid(
    grid: Grid, members: Sequence[int], ranks: Ranks, exchange: Exchange | None
) -> HostGroups:
    """Process groups of all subgroups of a grid. All ranks call it, whether or not they are among
    the members. `exchange`: a way through memory.
    """
    groups = HostGroups()
    groups.exchange = exchange
    for places in subgroups_of_grid(grid):
        if len(places) > 1:
            groups[places] = ranks.group(tuple(members[place] for place in places), PURPOSE)
    return groups


class StageGroups:
    """Subgroups that the stages of a plan need. Made on every rank, in the same order: making a
    process group is a collective of all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        has_statistics: bool,
        shortcut: AllGather | None,
        exchange: Exchange | None = None,
    ) -> None:
        """`has_statistics`: the model trains batch norms, or has a loss that is not additive: such
        sums go over all replicas. `shortcut` and `exchange`: ways through memory.
        """
        self._plan = plan.of_rank(ranks.rank)
        self._ranks = ranks
        self._shortcut = shortcut
        self._exchange = exchange
        self._purpose = PURPOSE if has_statistics else ""
        self._on_grid: dict[tuple[int, ...], Groups] = {}
        """ranks of a grid -> groups of its places"""
        self._statistics: dict[tuple[int, tuple[int, ...]], Subgroup] = {}
        for view in plan.by_template:
            for stage in view.stages:
                if has_statistics:
                    self._of_ranks(view.ranks_of_stage(stage.index))
            for device in view.virtual_devices:
                self._make_groups(view, device, has_statistics)

    def _of_ranks(self, members: Sequence[int]) -> dist.ProcessGroup | None:
        """What carries sums of these ranks. All ranks ask for all of them, in the same order."""
        is_shared = len(members) > 1
        return self._ranks.group(members, self._purpose) if is_shared else None

    def _make_groups(self, view: Plan, device: VirtualDevice, has_statistics: bool) -> None:
        if device.grid is None:
            return
        subgroups = subgroups_of_grid(device.grid)
        for members in device.ranks:
            groups = groups_of_grid(device.grid, members, self._ranks, self._exchange)
            self._on_grid[members] = groups
        # not between replicas that are not alike: the planner refuses statistics there
        if has_statistics and view.num_replicas > 1:
            for places in subgroups:
                self._statistics[device.index, places] = self._over_replicas(
                    [members[place] for members in device.ranks for place in places]
                )

    def _over_replicas(self, members: Sequence[int]) -> Subgroup:
        everyone = tuple(sorted(members))
        group = self._ranks.group(everyone, PURPOSE)
        is_member = self._ranks.rank in everyone
        index = everyone.index(self._ranks.rank) if is_member else -1
        return Subgroup(len(everyone), index, group, self._shortcut)

    def stage(self, stage: int) -> Subgroup | None:
        """All devices that run a stage of this rank by samples; None where it is the only one."""
        members = self._plan.ranks_of_stage(stage)
        if len(members) == 1:
            return None
        group = self._of_ranks(members)
        return Subgroup(len(members), members.index(self._ranks.rank), group, self._shortcut)

    def grid(self, device: int) -> GridGroups:
        """Those of this rank, which is in this VirtualDevice."""
        grid = self._plan.virtual_devices[device].grid
        assert grid is not None
        _, replica, place = self._plan.place_of_rank(self._ranks.rank)
        members = self._plan.virtual_devices[device].ranks[replica]
        statistics = {}
        for (index, places), subgroup in self._statistics.items():
            if index == device:
                statistics[places] = subgroup
        return GridGroups(grid, place, self._on_grid[members], statistics, self._shortcut)


@dataclass(frozen=True)
class GridGroups:
    """Process groups of one place of a grid."""

    grid: Grid
    place: int
    groups: Groups
    statistics: dict[tuple[int, ...], Subgroup]
    """places of a subgroup of this grid -> the same in all replicas; empty where there is one"""
    shortcut: AllGather | None = None

    def along(self, axes: Sequence[str]) -> Subgroup:
        """The devices that differ from this one along these axes only."""
        return Subgroup.of(self.grid, self.place, axes, self.groups, self.shortcut)


def all_gather(value: Tensor, subgroup: Subgroup) -> Tensor:
    """Everyone's value, [size, *shape], in the order of the members. Without history."""
    if subgroup.size == 1:
        return value.unsqueeze(0)
    _count((subgroup.size - 1) * value.numel() * value.element_size())
    if subgroup.shortcut is not None:
        found = subgroup.shortcut(value, subgroup.group)
        if found is not None:
            return found
    result = value.new_empty((subgroup.size, *value.shape))
    into = as_bytes(result.view(-1))
    own = in_memory(value).reshape(-1)
    if backend_of(subgroup.group).has_even_collectives:
        dist.all_gather_single(into, as_bytes(own.contiguous()), group=subgroup.group)
    else:
        # gloo's all-gather is a ring of size - 1 hops; everything to everyone takes one
        dist.all_to_all_single(into, as_bytes(own.repeat(subgroup.size)), group=subgroup.group)
    return result


def all_reduce(value: Tensor, subgroup: Subgroup) -> Tensor:
    """The sum of everyone's value. Without history."""
    if subgroup.size == 1:
        return value
    num_bytes = value.numel() * value.element_size()
    has_rings = not backend_of(subgroup.group).has_even_collectives
    if num_bytes <= DIRECT_UP_TO_BYTES and has_rings:
        return all_gather(value, subgroup).sum(0)
    _count(2 * (subgroup.size - 1) * num_bytes // subgroup.size)
    total = in_memory(value).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=subgroup.group)
    return total


def _count(num_bytes: int) -> None:
    sent.num_bytes += num_bytes
    sent.num_messages += 1


class _SumOverSubgroup(torch.autograd.Function):
    """A partial sum becomes the same everywhere; so its gradient, the same conjugated, does too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, subgroup: Subgroup) -> Tensor:
        ctx.subgroup = subgroup
        return all_reduce(value, subgroup)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradients[0], ctx.subgroup), None


def sum_over_subgroup(value: Tensor, subgroup: Subgroup) -> Tensor:
    """The sum of everyone's value, differentiable. Each device's use of it counts, so the backward
    is an all-reduce, too.
    """
    if subgroup.size == 1:
        return value
    result: Tensor = _SumOverSubgroup.apply(value, subgroup)  # type: ignore[no-untyped-call]
    return result


def wide(x: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
