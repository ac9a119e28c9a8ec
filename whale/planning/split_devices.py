"""Unlike devices on a grid: which of them stands at which place, and how unevenly the axes cut
(sharding/uneven.py decides).

All replicas of a VirtualDevice have the same grid, so that the same place holds the same shard
everywhere. Each replica's devices are put in order of speed first, and a place counts as fast as
the slowest device that any replica has there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from whale.cluster.cluster import Cluster
from whale.plans.grid import Grid
from whale.plans.sharding import Sharding
from whale.plans.virtual_devices import VirtualDevice
from whale.sharding.uneven import Dim, arrangements


@dataclass(frozen=True)
class Arranged:
    """VirtualDevices with their devices in the best order on an uneven grid."""

    devices: tuple[VirtualDevice, ...]
    grid: Grid
    factor: float
    """time of the work on it, in units of what even parts on the slowest device take"""
    reason: str


def kinds_of(cluster: Cluster, device: VirtualDevice, dtype: str) -> tuple[tuple[float, int], ...]:
    """(speed, memory) of the places of a VirtualDevice whose devices are in order of speed: the
    least of all replicas.
    """
    ordered = [_by_speed(cluster, members, dtype) for members in device.ranks]
    return tuple(
        (
            min(cluster.devices[rank].kind.rate(dtype) for rank in place),
            min(cluster.devices[rank].kind.memory_bytes for rank in place),
        )
        for place in zip(*ordered, strict=True)
    )


def arranged(
    cluster: Cluster,
    devices: Sequence[VirtualDevice],
    grid: Grid,
    dtype: str,
    cuts: dict[str, list[Dim]],
) -> list[Arranged]:
    """Orders of VirtualDevices of the same kinds, with the best weights of each; none where all
    devices are alike.
    """
    kinds = kinds_of(cluster, devices[0], dtype)
    speeds = [speed for speed, _ in kinds]
    memories = [memory for _, memory in kinds]
    if len(set(kinds)) == 1:
        return []
    room = [float(each) for each in memories] if min(memories) > 0 else None
    result = []
    for found in arrangements((grid.gx, grid.gy, grid.gz), speeds, cuts, room):
        ordered = []
        for device in devices:
            by_speed = [_by_speed(cluster, members, dtype) for members in device.ranks]
            ranks = tuple(tuple(members[number] for number in found.order) for members in by_speed)
            ordered.append(replace(device, ranks=ranks, grid=found.grid))
        result.append(
            Arranged(
                tuple(ordered),
                found.grid,
                found.time * grid.num_devices * min(speeds),
                found.reason,
            )
        )
    return result


def what_axes_cut(shardings: Iterable[Sharding], num_samples: int) -> dict[str, list[Dim]]:
    """Granules along each axis, weighted by the weights that they cut: most of the work is products
    with these. z cuts samples.
    """
    found: dict[str, dict[int, float]] = {"z": {num_samples: 1.0}, "y": {}, "x": {}}
    for sharding in shardings:
        for layout in sharding.stored.values():
            size = 1.0
            for cut in layout.cuts:
                size *= cut.size
            for cut, axes in zip(layout.cuts, layout.axes, strict=True):
                for axis in axes:
                    if axis not in layout.stored and axis != "z":
                        found[axis][cut.count] = found[axis].get(cut.count, 0.0) + size
    return {
        axis: [Dim(count, work) for count, work in counts.items()] for axis, counts in found.items()
    }


def _by_speed(cluster: Cluster, ranks: Sequence[int], dtype: str) -> list[int]:
    """Fastest first, equal ones in rank order."""
    return sorted(
        ranks,
        key=lambda rank: (
            -cluster.devices[rank].kind.rate(dtype),
            -cluster.devices[rank].kind.memory_bytes,
            rank,
        ),
    )
