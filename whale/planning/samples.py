"""Which samples each device gets: the mini-batch is cut into micro-batches, these over replicas, these over the devices of a VirtualDevice.

Cuts are contiguous and in order, so a micro-batch is the same set of samples whatever the plan (docs/internals.md section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.planning.plan import Plan
from whale.planning.shares import check_batch, even_shares, fair_shares, intervals, micro_batch_sizes
from whale.planning.slices import Interval


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

    def replicas(self, micro_batch: int) -> tuple[Interval, ...]:
        """The part of a micro-batch that each model replica gets, by the speed of its slowest VirtualDevice."""
        start, stop = self.micro_batches[micro_batch]
        replica_seconds = []
        least = 1
        for replica in range(self.plan.num_replicas):
            rates = [sum(1 / self.plan.device_seconds[rank] for rank in device.ranks[replica]) for device in self.plan.virtual_devices]
            replica_seconds.append(1 / min(rates))
            least = max(least, *(len(device.ranks[replica]) for device in self.plan.virtual_devices))
        return _shift(intervals(_shares(stop - start, replica_seconds, least)), start)

    def devices(self, micro_batch: int, replica: int, virtual_device: int) -> tuple[Interval, ...]:
        """The part that each device of a VirtualDevice gets."""
        start, stop = self.replicas(micro_batch)[replica]
        seconds = [self.plan.device_seconds[rank] for rank in self.plan.virtual_devices[virtual_device].ranks[replica]]
        return _shift(intervals(_shares(stop - start, seconds, 1)), start)


def _shares(total: int, seconds: Sequence[float], least: int) -> tuple[int, ...]:
    """Fair shares of at least `least` each; even ones for equal devices."""
    if len(set(seconds)) == 1:
        return even_shares(total, len(seconds))
    shares = fair_shares(total, seconds)
    if min(shares) >= least:
        return shares
    return tuple(least + share for share in fair_shares(total - least * len(seconds), seconds))


def _shift(parts: Sequence[Interval], start: int) -> tuple[Interval, ...]:
    return tuple((first + start, last + start) for first, last in parts)
