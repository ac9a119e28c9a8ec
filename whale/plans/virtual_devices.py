"""Which devices each TaskGraph runs on.

K devices; TaskGraph i wants d_i of them; s = d_1 + ... + d_N.

    K == 1                        one VirtualDevice runs everything, whatever was asked        (1)
    colocate, all d_i equal d     one VirtualDevice of d devices; K / d model replicas         (2)
    every d_i == K                one VirtualDevice of all devices; one model replica          (3)
    otherwise                     one VirtualDevice per TaskGraph; K / s model replicas        (4)

Devices are taken in order. In (4), place j of TaskGraph i in replica r is rank  r * s + (d_1 + ...
+ d_{i-1}) + j. A division that leaves a rest is refused: a device would stay idle, or a replica
would miss a part of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from whale.plans.grid import Grid


@dataclass(frozen=True)
class VirtualDevice:
    """The ordered devices that one TaskGraph (or several, colocated) runs on, in each model
    replica.
    """

    index: int
    ranks: tuple[tuple[int, ...], ...]
    """`ranks[replica]`: the ranks in that model replica, in order"""
    grid: Grid | None = None
    """where a `split` TaskGraph runs here: the devices of a replica as a block, the same in every
    replica
    """

    @property
    def num_devices(self) -> int:
        """Devices in one model replica."""
        return len(self.ranks[0])

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        """The ranks of all model replicas, one replica after the other."""
        return tuple(rank for members in self.ranks for rank in members)

    @property
    def num_sample_parts(self) -> int:
        """Over how many devices of a replica a micro-batch must be cut. On a grid all devices run
        on the same samples.
        """
        return 1 if self.grid is not None else self.num_devices


@dataclass(frozen=True)
class DevicePlacement:
    """Where every TaskGraph runs, and why."""

    virtual_devices: tuple[VirtualDevice, ...]
    of_task_graph: tuple[int, ...]
    """index into `virtual_devices` for each TaskGraph"""
    num_replicas: int
    reason: str


def place(wanted: Sequence[int], num_devices: int, *, colocate: bool = False) -> DevicePlacement:
    """Give every TaskGraph its VirtualDevice; `wanted[i]` is the number of devices that TaskGraph i
    asks for.
    """
    _check(wanted, num_devices)
    if num_devices == 1:
        return _shared(
            wanted,
            1,
            1,
            f"there is one device, so it runs everything ({_task_graphs(len(wanted))})",
        )
    if colocate:
        return _place_colocated(wanted, num_devices)
    if all(count == num_devices for count in wanted):
        reason = (
            f"{_task_graphs(len(wanted))} want all {num_devices} devices, so they share one "
            "VirtualDevice"
        )
        if len(wanted) == 1:
            reason = f"the only TaskGraph wants all {num_devices} devices"
        return _shared(wanted, num_devices, num_devices, reason)
    if num_devices % sum(wanted):
        raise ValueError(_misfit(wanted, num_devices))
    return _place_in_order(wanted, num_devices)


def _place_in_order(wanted: Sequence[int], num_devices: int) -> DevicePlacement:
    """Line (4): the TaskGraphs of a replica on consecutive devices, the replicas one after the
    other.
    """
    total = sum(wanted)
    num_replicas = num_devices // total
    firsts = [0, *accumulate(wanted)]
    virtual_devices = tuple(
        VirtualDevice(
            index,
            tuple(
                _consecutive(replica * total + firsts[index], count)
                for replica in range(num_replicas)
            ),
        )
        for index, count in enumerate(wanted)
    )
    reason = (
        f"{_task_graphs(len(wanted))} on {_counts(wanted)} device{'s' * (total > 1)}, {total} in "
        f"all; {num_devices} device{'s' * (num_devices > 1)} / {total} = {_replicas(num_replicas)}"
    )
    return DevicePlacement(virtual_devices, tuple(range(len(wanted))), num_replicas, reason)


def _place_colocated(wanted: Sequence[int], num_devices: int) -> DevicePlacement:
    """Line (2): all TaskGraphs on the same devices, as many replicas as fit."""
    if len(set(wanted)) > 1:
        raise ValueError(
            '"colocate": true puts all TaskGraphs on the same devices, but they ask for '
            f'{_counts(wanted)} devices; give all the same count, or remove "colocate"'
        )
    count = wanted[0]
    if num_devices % count:
        raise ValueError(
            f'with "colocate": true the TaskGraphs share {count} devices, which does not divide '
            f"{num_devices} devices; use {_either(_nearest(num_devices, {1}, count))} devices"
        )
    reason = (
        f"{_task_graphs(len(wanted))} colocated on {count} device{'s' * (count > 1)}; "
        f"{num_devices} devices / {count} = {_replicas(num_devices // count)}"
    )
    return _shared(wanted, count, num_devices, reason)


def _shared(wanted: Sequence[int], count: int, num_devices: int, reason: str) -> DevicePlacement:
    """One VirtualDevice of `count` devices for everything, repeated over `num_devices`."""
    ranks = tuple(_consecutive(first, count) for first in range(0, num_devices, count))
    return DevicePlacement((VirtualDevice(0, ranks),), (0,) * len(wanted), len(ranks), reason)


def _check(wanted: Sequence[int], num_devices: int) -> None:
    if num_devices < 1:
        raise ValueError(f"at least 1 device is needed, got {num_devices}")
    if not wanted:
        raise ValueError(
            "there is no TaskGraph to place; mark a part of the model, or give the whole model "
            "one TaskGraph"
        )
    for index, count in enumerate(wanted):
        if count < 1:
            raise ValueError(f"TaskGraph {index} asks for {count} devices; the smallest count is 1")


def _misfit(wanted: Sequence[int], num_devices: int) -> str:
    """The message for line (4) with a rest, and every change that helps."""
    total = sum(wanted)
    same = len(set(wanted)) == 1
    special = {1, wanted[0]} if same else {1}  # lines (1) and (3) make these counts right too
    fix = f"use {_either(_nearest(num_devices, special, total))} devices"
    if same and num_devices % wanted[0] == 0:
        shared = f"{wanted[0]} device{'s' * (wanted[0] > 1)}"
        fix += f', or set "colocate": true to share {shared} between the TaskGraphs'
    return (
        f"the TaskGraphs ask for {_counts(wanted)} = {total} devices, which does not divide "
        f"{num_devices} devices; {fix}"
    )


def _nearest(num_devices: int, special: set[int], step: int) -> tuple[int | None, int]:
    """The right device counts next to `num_devices`, below and above: the multiples of `step` and
    the special counts.
    """
    below = {count for count in special | {num_devices // step * step} if 0 < count < num_devices}
    above = {
        count for count in special | {num_devices // step * step + step} if count > num_devices
    }
    return max(below, default=None), min(above)


def _either(nearest: tuple[int | None, int]) -> str:
    below, above = nearest
    return str(above) if below is None else f"{below} or {above}"


def _consecutive(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def _counts(wanted: Sequence[int]) -> str:
    return " + ".join(map(str, wanted))


def _task_graphs(count: int) -> str:
    return "1 TaskGraph" if count == 1 else f"{count} TaskGraphs"


def _replicas(count: int) -> str:
    return "1 model replica" if count == 1 else f"{count} model replicas"
