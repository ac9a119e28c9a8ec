"""Which samples each device gets: the mini-batch is cut into micro-batches, these over replicas, these over the devices of a VirtualDevice.

Cuts are contiguous and in order, so a micro-batch is the same set of samples whatever the plan (docs/internals.md section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whale.planning.plan import Plan
from whale.planning.shares import (
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
from whale.planning.slices import Interval
from whale.planning.virtual_devices import VirtualDevice


@dataclass(frozen=True)
class Division:
    """How many samples of one micro-batch go where."""

    replicas: tuple[int, ...]
    devices: tuple[tuple[tuple[int, ...], ...], ...]
    """[replica][VirtualDevice][place]"""
    slowest_s: float
    """of the device that takes longest"""


def divide(size: int, virtual_devices: Sequence[VirtualDevice], loads: Sequence[Load], least: int) -> Division:
    """The best division of a micro-batch of that size; raises `DoesNotFit` where memory is too small."""
    num_replicas = len(virtual_devices[0].ranks)
    groups = [[[loads[rank] for rank in device.ranks[replica]] for device in virtual_devices] for replica in range(num_replicas)]
    known: dict[tuple[tuple[Load, ...], ...], list[float]] = {}
    series = []
    for group in groups:  # a replica takes as long as the slowest of its VirtualDevices; many replicas are alike
        key = tuple(map(tuple, group))
        if key not in known:
            known[key] = [max(times) for times in zip(*(slowest_times(size, devices, least) for devices in group), strict=True)]
        series.append(known[key])
    widest = max(device.num_devices for device in virtual_devices)
    replicas = shares_of_series(size, series, least * widest)
    inside: dict[tuple[int, tuple[Load, ...]], tuple[int, ...]] = {}
    devices = []
    for share, group in zip(replicas, groups, strict=True):
        parts = []
        for members in group:
            place = (share, tuple(members))
            if place not in inside:
                inside[place] = best_shares(share, members, least)
            parts.append(inside[place])
        devices.append(tuple(parts))
    return Division(replicas, tuple(devices), max(series[replica][share] for replica, share in enumerate(replicas)))


@dataclass(frozen=True)
class SampleMap:
    """Sample intervals [start, stop) of one mini-batch, by micro-batch, replica, VirtualDevice and place in it."""

    plan: Plan
    batch_size: int
    num_micro_batch: int

    def __post_init__(self) -> None:
        for device in self.plan.virtual_devices:
            check_batch(self.batch_size, self.num_micro_batch, self.plan.num_replicas * len(device.ranks[0]))

    @cached_property
    def micro_batches(self) -> tuple[Interval, ...]:
        return intervals(micro_batch_sizes(self.batch_size, self.num_micro_batch))

    @cached_property
    def _divisions(self) -> dict[int, Division]:
        """By size of the micro-batch."""
        return {size: self._divide(size) for size in {stop - start for start, stop in self.micro_batches}}

    def _divide(self, size: int) -> Division:
        loads = self.plan.loads()
        try:
            return divide(size, self.plan.virtual_devices, loads, self.plan.least_samples)
        except DoesNotFit:
            # larger than what was planned for: an evaluation, which keeps nothing for backward. Speed alone decides
            free = [replace(load, most=UNLIMITED) for load in loads]
            return divide(size, self.plan.virtual_devices, free, self.plan.least_samples)

    def division(self, micro_batch: int) -> Division:
        start, stop = self.micro_batches[micro_batch]
        return self._divisions[stop - start]

    def replicas(self, micro_batch: int) -> tuple[Interval, ...]:
        """The part of a micro-batch that each model replica gets."""
        return _shift(intervals(self.division(micro_batch).replicas), self.micro_batches[micro_batch][0])

    def devices(self, micro_batch: int, replica: int, virtual_device: int) -> tuple[Interval, ...]:
        """The part that each device of a VirtualDevice gets."""
        start = self.replicas(micro_batch)[replica][0]
        return _shift(intervals(self.division(micro_batch).devices[replica][virtual_device]), start)


def _shift(parts: Sequence[Interval], start: int) -> tuple[Interval, ...]:
    return tuple((first + start, last + start) for first, last in parts)
