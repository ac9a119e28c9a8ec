"""Which samples each device gets: the mini-batch is cut into micro-batches, these over replicas,
these over the devices of a VirtualDevice.

Cuts are contiguous and in order, so a micro-batch is the same set of samples whatever the plan
(docs/internals.md section 3).

On a grid (docs/split.md) all devices run on the samples of their replica, so they take time and
memory together; what enters and leaves is cut over the places by axis z, then y, then x, which is
the order of the places. A place may get none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whale.plans.grid import Grid
from whale.plans.plan import Plan
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
from whale.plans.virtual_devices import VirtualDevice

EDGE_AXES = ("z", "y", "x")
"""by which samples are cut at the edge of a stage on a grid, outermost first"""


@dataclass(frozen=True)
class Division:
    """How many samples of one micro-batch go where."""

    replicas: tuple[int, ...]
    devices: tuple[tuple[tuple[int, ...], ...], ...]
    """[replica][VirtualDevice][place]: samples of what enters and leaves the device"""
    runs: tuple[tuple[tuple[int, ...], ...], ...]
    """the same for samples that the device runs on: on a grid, those of its replica"""
    slowest_s: float
    """of the device that takes longest"""


def divide(
    size: int, virtual_devices: Sequence[VirtualDevice], loads: Sequence[Load], least: int
) -> Division:
    """The best division of a micro-batch of that size; raises `DoesNotFit` where memory is too
    small.
    """
    num_replicas = len(virtual_devices[0].ranks)
    groups = [
        [[loads[rank] for rank in device.ranks[replica]] for device in virtual_devices]
        for replica in range(num_replicas)
    ]
    known: dict[tuple[tuple[Load, ...], ...], list[float]] = {}
    series = []
    for group in (
        groups
    ):  # a replica takes as long as the slowest of its VirtualDevices; many replicas are alike
        key = tuple(map(tuple, group))
        if key not in known:
            times = (
                _times(size, device, members, least)
                for device, members in zip(virtual_devices, group, strict=True)
            )
            known[key] = [max(each) for each in zip(*times, strict=True)]
        series.append(known[key])
    widest = max(device.num_sample_parts for device in virtual_devices)
    replicas = shares_of_series(size, series, least * widest)
    inside: dict[tuple[int, int, tuple[Load, ...]], tuple[int, ...]] = {}
    devices = []
    runs = []
    for share, group in zip(replicas, groups, strict=True):
        parts = []
        run = []
        for device, members in zip(virtual_devices, group, strict=True):
            place = (share, device.index, tuple(members))
            if place not in inside:
                inside[place] = (
                    best_shares(share, members, least)
                    if device.grid is None
                    else edge_shares(share, device.grid)
                )
            parts.append(inside[place])
            run.append(inside[place] if device.grid is None else (share,) * device.num_devices)
        devices.append(tuple(parts))
        runs.append(tuple(run))
    return Division(
        replicas,
        tuple(devices),
        tuple(runs),
        max(series[replica][share] for replica, share in enumerate(replicas)),
    )


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


@dataclass(frozen=True)
class SampleMap:
    """Sample intervals [start, stop) of one mini-batch, by micro-batch, replica, VirtualDevice and
    place in it.
    """

    plan: Plan
    batch_size: int
    num_micro_batch: int

    def __post_init__(self) -> None:
        for device in self.plan.virtual_devices:
            check_batch(
                self.batch_size,
                self.num_micro_batch,
                self.plan.num_replicas * device.num_sample_parts,
            )

    @cached_property
    def micro_batches(self) -> tuple[Interval, ...]:
        return intervals(micro_batch_sizes(self.batch_size, self.num_micro_batch))

    @cached_property
    def _divisions(self) -> dict[int, Division]:
        """By size of the micro-batch."""
        return {
            size: self._divide(size)
            for size in {stop - start for start, stop in self.micro_batches}
        }

    def _divide(self, size: int) -> Division:
        loads = self.plan.loads()
        try:
            return divide(size, self.plan.virtual_devices, loads, self.plan.least_samples)
        except DoesNotFit:
            # larger than what was planned for: an evaluation, which keeps nothing for backward, or
            # a training step, of which
            # `runtime/shapes.py` warns. Speed alone decides
            free = [replace(load, most=UNLIMITED) for load in loads]
            return divide(size, self.plan.virtual_devices, free, self.plan.least_samples)

    def division(self, micro_batch: int) -> Division:
        start, stop = self.micro_batches[micro_batch]
        return self._divisions[stop - start]

    def replicas(self, micro_batch: int) -> tuple[Interval, ...]:
        """The part of a micro-batch that each model replica gets."""
        return _shift(
            intervals(self.division(micro_batch).replicas), self.micro_batches[micro_batch][0]
        )

    def devices(self, micro_batch: int, replica: int, virtual_device: int) -> tuple[Interval, ...]:
        """The part that enters and leaves each device of a VirtualDevice."""
        start = self.replicas(micro_batch)[replica][0]
        return _shift(intervals(self.division(micro_batch).devices[replica][virtual_device]), start)

    def runs(self, micro_batch: int, replica: int, virtual_device: int) -> tuple[Interval, ...]:
        """The part that each device of a VirtualDevice runs on."""
        device = self.plan.virtual_devices[virtual_device]
        if device.grid is None:
            return self.devices(micro_batch, replica, virtual_device)
        return (self.replicas(micro_batch)[replica],) * device.num_devices

    def num_by_rank(self) -> list[list[int]]:
        """How many samples each rank runs on: [rank][micro-batch]."""
        found: list[list[int]] = [[] for _ in range(self.plan.num_devices)]
        for micro_batch in range(self.num_micro_batch):
            division = self.division(micro_batch)
            for device in self.plan.virtual_devices:
                for replica, ranks in enumerate(device.ranks):
                    for rank, number in zip(
                        ranks, division.runs[replica][device.index], strict=True
                    ):
                        found[rank].append(number)
        return found


def _shift(parts: Sequence[Interval], start: int) -> tuple[Interval, ...]:
    return tuple((first + start, last + start) for first, last in parts)
