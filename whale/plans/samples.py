"""Which samples each device gets: the mini-batch is cut into micro-batches, these over replicas,
these over the devices of a VirtualDevice.

Cuts are contiguous and in order, so a micro-batch is the same set of samples whatever the plan
(docs/internals.md section 3).

On a grid (docs/split.md) all devices run on the samples of their replica, so they take time and
memory together; what enters and leaves is cut over the places by axis z, then y, then x, which is
the order of the places. A place may get none.

A plan says who gets what of its own mini-batch (`with_samples` writes it there). For micro-batches
of other sizes `shares_of_micro_batch` divides by the plan's own data. Everybody who asks for
samples asks a `SampleMap`, which reads the one or calls the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from whale.plans.grid import Grid
from whale.plans.plan import Plan, ReplicaShare
from whale.plans.shares import (
    UNLIMITED,
    DoesNotFit,
    Load,
    best_shares,
    check_batch,
    intervals,
    micro_batch_sizes,
    shares_of_series,
    slowest_times,
)
from whale.plans.slices import Interval
from whale.plans.templates import TemplatePlan
from whale.plans.virtual_devices import VirtualDevice

EDGE_AXES = ("z", "y", "x")
"""by which samples are cut at the edge of a stage on a grid, outermost first"""


@dataclass(frozen=True)
class Division:
    """How many samples of one micro-batch go where."""

    shares: tuple[ReplicaShare, ...]
    """by replica"""
    slowest_s: float
    """seconds of the device that takes longest"""

    def by_rank(self, virtual_devices: Sequence[VirtualDevice]) -> list[int]:
        """How many samples each rank runs on."""
        found = [0] * sum(len(device.all_ranks) for device in virtual_devices)
        for device in virtual_devices:
            for ranks, share in zip(device.ranks, self.shares, strict=True):
                for rank, number in zip(ranks, share.runs[device.index], strict=True):
                    found[rank] = number
        return found


def divide(
    size: int, virtual_devices: Sequence[VirtualDevice], loads: Sequence[Load], least: int
) -> Division:
    """The best division of a micro-batch of that size; raises `DoesNotFit` where memory is too
    small.
    """
    num_replicas = len(virtual_devices[0].ranks)
    groups = []
    for replica in range(num_replicas):
        groups.append(
            tuple(
                tuple(loads[rank] for rank in device.ranks[replica]) for device in virtual_devices
            )
        )
    # A replica takes as long as the slowest of its VirtualDevices. Many replicas are alike.
    series_of: dict[tuple[tuple[Load, ...], ...], list[float]] = {}
    for group in groups:
        if group not in series_of:
            times = [
                _times(size, device, members, least)
                for device, members in zip(virtual_devices, group, strict=True)
            ]
            series_of[group] = [max(each) for each in zip(*times, strict=True)]
    series = [series_of[group] for group in groups]
    widest = max(device.num_sample_parts for device in virtual_devices)
    numbers = shares_of_series(size, series, least * widest)
    known: dict[tuple[int, tuple[tuple[Load, ...], ...]], ReplicaShare] = {}
    for number, group in zip(numbers, groups, strict=True):
        if (number, group) not in known:
            known[number, group] = _share_inside(number, virtual_devices, group, least)
    return Division(
        tuple(known[number, group] for number, group in zip(numbers, groups, strict=True)),
        max(times[number] for times, number in zip(series, numbers, strict=True)),
    )


def _share_inside(
    num_samples: int,
    virtual_devices: Sequence[VirtualDevice],
    group: Sequence[Sequence[Load]],
    least: int,
) -> ReplicaShare:
    """The samples of one replica over its devices."""
    runs = []
    edges = []
    for device, members in zip(virtual_devices, group, strict=True):
        if device.grid is None:
            parts = best_shares(num_samples, members, least)
            runs.append(parts)
            edges.append(parts)
        else:
            runs.append((num_samples,) * device.num_devices)
            edges.append(edge_shares(num_samples, device.grid))
    return ReplicaShare(num_samples, tuple(runs), tuple(edges))


def edge_shares(num_samples: int, grid: Grid) -> tuple[int, ...]:
    """Samples of what enters and leaves each place of a grid."""
    shares = []
    for place in range(grid.num_devices):
        interval = (0, num_samples)
        for axis in EDGE_AXES:
            interval = grid.cut(interval, axis, grid.coordinate(place, axis))
        shares.append(interval[1] - interval[0])
    return tuple(shares)


def _times(size: int, device: VirtualDevice, loads: Sequence[Load], least: int) -> list[float]:
    """Seconds of the slowest device of a VirtualDevice with 0 .. size samples; infinity where they
    do not fit.
    """
    if device.grid is None:
        return slowest_times(size, loads, least)
    different = tuple(dict.fromkeys(loads))
    most = min(load.most for load in different)
    return [
        max(load.seconds(number) for load in different) if number <= most else math.inf
        for number in range(size + 1)
    ]


def shares_of_micro_batch(plan: Plan, size: int) -> tuple[ReplicaShare, ...]:
    """Who gets which part of a micro-batch of this size, by replica: what the plan says, or where
    it was made for other sizes, the best division by the loads in the plan.
    """
    if size in plan.shares_by_size:
        return plan.shares_by_size[size]
    return _divide_by_plan(plan, size)


def _divide_by_plan(plan: Plan, size: int) -> tuple[ReplicaShare, ...]:
    try:
        return divide(size, plan.virtual_devices, plan.loads, plan.least_samples).shares
    except DoesNotFit:
        # Larger than what was planned for: an evaluation, which saves nothing for backward, or a
        # training step, of which `runtime/shapes.py` warns. Speed alone decides.
        free = [replace(load, most=UNLIMITED) for load in plan.loads]
        return divide(size, plan.virtual_devices, free, plan.least_samples).shares


def with_samples(plan: Plan) -> Plan:
    """The plan with the samples of every rank and micro-batch of its mini-batch, divided by the
    loads of its devices.
    """
    sizes = micro_batch_sizes(plan.batch_size, plan.num_micro_batch)
    divided = {size: _divide_by_plan(plan, size) for size in dict.fromkeys(sizes)}
    index_of: dict[ReplicaShare, int] = {}
    for shares in divided.values():
        for share in shares:
            index_of.setdefault(share, len(index_of))
    # larger micro-batches come first, so there are at most two runs
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    replicas = []
    for number, replica in enumerate(plan.replicas):
        own = tuple((index_of[divided[size][number]], times) for size, times in runs)
        replicas.append(replace(replica, shares=own))
    return replace(plan, shares=tuple(index_of), replicas=tuple(replicas))


def least_batch(plan: Plan, num_micro_batch: int) -> int:
    """Samples that the replicas of a uniform plan need at least."""
    widest = max(plan.num_replicas * device.num_sample_parts for device in plan.virtual_devices)
    return num_micro_batch * widest


def template_samples(plan: Plan, batch_size: int) -> tuple[Interval, ...]:
    """The samples of a mini-batch that the replicas of each template get: those planned, and for
    another size in the same proportion, each template at least what its devices need.
    """
    if plan.is_uniform:
        return ((0, batch_size),)
    views = plan.by_template
    planned = [view.batch_size for view in views]
    if batch_size == plan.batch_size:
        return intervals(planned)
    least = [least_batch(view, view.num_micro_batch) for view in views]
    if sum(least) > batch_size:  # an evaluation takes fewer micro-batches; training refuses it
        least = [least_batch(view, 1) for view in views]
    if sum(least) > batch_size:
        raise ValueError(
            f"a mini-batch of {batch_size} samples cannot be cut over model replicas that need "
            f"{' + '.join(map(str, least))} samples at least: one for each device that shares a "
            f"stage. Try: a mini-batch of at least {sum(least)} samples"
        )
    sizes = [
        max(fewest, batch_size * number // plan.batch_size)
        for fewest, number in zip(least, planned, strict=True)
    ]
    while sum(sizes) != batch_size:  # a few roundings, or what the smallest could not give
        change = 1 if sum(sizes) < batch_size else -1
        free = list(range(len(sizes)))
        if change < 0:
            free = [number for number in free if sizes[number] > least[number]]
        chosen = min(free, key=lambda number: change * sizes[number] / planned[number])
        sizes[chosen] += change
    return intervals(sizes)


def own_samples(plan: Plan, batch_size: int) -> Interval:
    """The samples of a mini-batch that the replicas of this plan get: all, unless it is the plan of
    one template among several.
    """
    if isinstance(plan, TemplatePlan) and plan.whole is not None:
        return template_samples(plan.whole, batch_size)[plan.number]
    return (0, batch_size)


def num_samples_by_rank(plan: Plan, batch_size: int | None = None) -> list[list[int]]:
    """How many samples each rank runs on: [rank][micro-batch]. Replicas that are not alike may have
    different numbers of micro-batches. `batch_size`: None for the planned one.
    """
    found: list[list[int]] = [[] for _ in range(plan.num_devices)]
    size = plan.mini_batch_size if batch_size is None else batch_size
    for view in plan.by_template:
        numbers = SampleMap(view, size, view.num_micro_batch).num_by_rank()
        for rank in view.ranks:
            found[rank] = numbers[rank]
    return found


@dataclass(frozen=True)
class SampleMap:
    """Sample intervals [start, stop) of one mini-batch, by micro-batch, replica, VirtualDevice and
    place in it. `plan` has one template.
    """

    plan: Plan
    batch_size: int
    """of the whole mini-batch, of which the replicas of this plan may get a part"""
    num_micro_batch: int

    @staticmethod
    def planned(plan: Plan) -> SampleMap:
        """The samples of the mini-batch that the plan was made for."""
        return SampleMap(plan, plan.mini_batch_size, plan.num_micro_batch)

    def __post_init__(self) -> None:
        for device in self.plan.virtual_devices:
            check_batch(
                self._own[1] - self._own[0],
                self.num_micro_batch,
                self.plan.num_replicas * device.num_sample_parts,
            )

    @cached_property
    def _own(self) -> Interval:
        """The samples of these replicas."""
        return own_samples(self.plan, self.batch_size)

    @cached_property
    def micro_batches(self) -> tuple[Interval, ...]:
        start, stop = self._own
        return _shift(intervals(micro_batch_sizes(stop - start, self.num_micro_batch)), start)

    @cached_property
    def _shares(self) -> dict[int, tuple[ReplicaShare, ...]]:
        """The share of every replica, by size of the micro-batch."""
        sizes = {stop - start for start, stop in self.micro_batches}
        return {size: shares_of_micro_batch(self.plan, size) for size in sizes}

    def shares(self, micro_batch: int) -> tuple[ReplicaShare, ...]:
        """What each model replica gets of a micro-batch, in numbers of samples."""
        start, stop = self.micro_batches[micro_batch]
        return self._shares[stop - start]

    def replicas(self, micro_batch: int) -> tuple[Interval, ...]:
        """The part of a micro-batch that each model replica gets."""
        numbers = [share.num_samples for share in self.shares(micro_batch)]
        return _shift(intervals(numbers), self.micro_batches[micro_batch][0])

    def devices(self, micro_batch: int, replica: int, virtual_device: int) -> tuple[Interval, ...]:
        """The part that enters and leaves each device of a VirtualDevice."""
        start = self.replicas(micro_batch)[replica][0]
        return _shift(intervals(self.shares(micro_batch)[replica].edges[virtual_device]), start)

    def runs(self, micro_batch: int, replica: int, virtual_device: int) -> tuple[Interval, ...]:
        """The part that each device of a VirtualDevice runs on."""
        device = self.plan.virtual_devices[virtual_device]
        if device.grid is None:
            return self.devices(micro_batch, replica, virtual_device)
        return (self.replicas(micro_batch)[replica],) * device.num_devices

    def num_by_rank(self) -> list[list[int]]:
        """How many samples each rank runs on: [rank][micro-batch]; empty for ranks of other
        templates.
        """
        found: list[list[int]] = [[] for _ in range(self.plan.num_devices)]
        for micro_batch in range(self.num_micro_batch):
            for replica, share in zip(self.plan.replicas, self.shares(micro_batch), strict=True):
                for ranks, numbers in zip(replica.ranks, share.runs, strict=True):
                    for rank, number in zip(ranks, numbers, strict=True):
                        found[rank].append(number)
        return found


def _shift(parts: Sequence[Interval], start: int) -> tuple[Interval, ...]:
    return tuple((first + start, last + start) for first, last in parts)
