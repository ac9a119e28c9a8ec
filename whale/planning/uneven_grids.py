"""Heterogeneous devices on a grid: which device stands at which place, and how unevenly each axis
cuts.

The device at coordinates (i, j, k) does the share x_i y_j z_k of the work. With speeds v the time
is

    time = max over places of x_i y_j z_k / v_ijk                                               (1)

where the shares of an axis sum to 1; the best possible is 1 / sum v. Only speeds that are a product
themselves, v_ijk = a_i b_j c_k, can be balanced exactly. So devices are sorted by speed such that
it differs along one axis, by preference z, which cuts samples; along it a slice is as fast as its
slowest device. Shares are whole granules: an axis that cuts n granules gives them one by one to the
slice that would finish first, which is the optimum in whole numbers:

    n_k that minimise max over k of n_k / v_k,     sum n_k = n                                  (2)

An axis has one set of weights for everything that it cuts (12 heads, 50,257 classes): those that
are best for all together. What is only stored along an axis is cut by memory instead.

All replicas of a VirtualDevice have the same grid, so that one place holds the same shard
everywhere. Each replica's devices are sorted by speed first, and a place counts as fast as the
slowest device that any replica has there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

from whale.annotation.scopes import GridShape
from whale.cluster.cluster import Cluster, DeviceKind
from whale.plans.grid import Grid
from whale.plans.sharding import Sharding
from whale.plans.virtual_devices import VirtualDevice

PREFERRED = ("z", "y", "x")
"""axes along which speed may differ; among equally good ones the first is taken"""
ROUNDS = 4
"""how often the axes are improved one after the other"""
SAME_TIME = 1e-9
"""relative: times closer than this are equal"""
UNKNOWN = 1 << 20
"""granules of an axis of which nothing is known: nearly any ratio can be cut"""


@dataclass(frozen=True)
class CutDim:
    """A dim that an axis cuts."""

    granules: int
    work: float = 1.0
    """its weight in the work of the axis"""


@dataclass(frozen=True)
class GridArrangement:
    """Devices on a grid."""

    order: tuple[int, ...]
    """place -> number of the device"""
    grid: Grid
    time: float
    """line (1), for a work of 1"""
    reason: str


@dataclass(frozen=True)
class Arranged:
    """VirtualDevices with their devices in one order on an uneven grid."""

    devices: tuple[VirtualDevice, ...]
    grid: Grid
    reason: str


Speeds = Mapping[DeviceKind, float]
"""of the work at hand, in any unit"""

# ---- VirtualDevices


def kinds_of(
    cluster: Cluster, device: VirtualDevice, speeds: Speeds
) -> tuple[tuple[float, int], ...]:
    """(speed, memory) of each place of a VirtualDevice whose devices are sorted by speed: the least
    of all replicas.
    """
    ordered = [_by_speed(cluster, members, speeds) for members in device.ranks]
    found = []
    for ranks in zip(*ordered, strict=True):
        kinds = [cluster.devices[rank].kind for rank in ranks]
        speed = min(speeds[kind] for kind in kinds)
        found.append((speed, min(kind.memory_bytes for kind in kinds)))
    return tuple(found)


def arranged(
    cluster: Cluster,
    devices: Sequence[VirtualDevice],
    grid: Grid,
    speeds: Speeds,
    cuts: Mapping[str, Sequence[CutDim]],
) -> list[Arranged]:
    """VirtualDevices of the same kinds of devices in each order worth a try, with the best weights
    of each; empty where all devices are alike.
    """
    kinds = kinds_of(cluster, devices[0], speeds)
    if len(set(kinds)) == 1:
        return []
    by_place = [speed for speed, _ in kinds]
    memories = [float(memory) for _, memory in kinds]
    capacity = memories if min(memories) > 0 else None
    result = []
    for found in arrangements((grid.gx, grid.gy, grid.gz), by_place, cuts, capacity):
        ordered = []
        for device in devices:
            by_speed = [_by_speed(cluster, members, speeds) for members in device.ranks]
            ranks = tuple(tuple(members[number] for number in found.order) for members in by_speed)
            ordered.append(replace(device, ranks=ranks, grid=found.grid))
        result.append(Arranged(tuple(ordered), found.grid, found.reason))
    return result


def what_axes_cut(shardings: Iterable[Sharding], num_samples: int) -> dict[str, list[CutDim]]:
    """Dims that each axis cuts, weighted by the size of the weights that they cut: most of the work
    is products with these. z cuts samples.
    """
    found: dict[str, dict[int, float]] = {"z": {num_samples: 1.0}, "y": {}, "x": {}}
    for sharding in shardings:
        for layout in sharding.stored.values():
            size = float(prod(layout.shape))
            for cut, axes in zip(layout.cuts, layout.axes, strict=True):
                for axis in axes:
                    if axis not in layout.stored and axis != "z":
                        found[axis][cut.count] = found[axis].get(cut.count, 0.0) + size
    return {
        axis: [CutDim(count, work) for count, work in counts.items()]
        for axis, counts in found.items()
    }


def _by_speed(cluster: Cluster, ranks: Sequence[int], speeds: Speeds) -> list[int]:
    """Ranks with the fastest first, equal ones in rank order."""

    def key(rank: int) -> tuple[float, int, int]:
        kind = cluster.devices[rank].kind
        return -speeds[kind], -kind.memory_bytes, rank

    return sorted(ranks, key=key)


# ---- lines (1) and (2)


def arrangements(
    shape: GridShape,
    speeds: Sequence[float],
    cuts: Mapping[str, Sequence[CutDim]],
    memory: Sequence[float] | None = None,
) -> list[GridArrangement]:
    """The best weights for each order that is worth a try: which order is best depends on the links
    between the devices, too. `memory`: bytes that each device has for stored shards.
    """
    even = Grid(*shape)
    if len(speeds) != even.num_devices or min(speeds) <= 0:
        raise ValueError(
            f"a grid {even.name} needs {even.num_devices} speeds above 0, not {list(speeds)}"
        )
    found: dict[tuple[int, ...], GridArrangement] = {}
    for name, order in _orders(even, speeds):
        if order not in found:
            work, time = _weights(even, [speeds[device] for device in order], cuts)
            stored = {} if memory is None else _stored(even, [memory[device] for device in order])
            grid = Grid(*shape, work=work, memory=stored)
            found[order] = GridArrangement(
                order, grid, time, _reason(name, grid, time * sum(speeds))
            )
    return list(found.values())


def axis_weights(speeds: Sequence[float], dims: Sequence[CutDim]) -> tuple[float, ...]:
    """The weights of one axis whose slices have these speeds: those that are best for one of the
    dims, or the speeds themselves.
    """
    candidates = [tuple(float(speed) for speed in speeds)]
    candidates += [shares(dim.granules, speeds) for dim in dims if dim.granules > 0]
    return min(candidates, key=lambda weights: _axis_time(weights, speeds, dims))


def shares(granules: int, speeds: Sequence[float]) -> tuple[float, ...]:
    """Granules of each slice, by line (2)."""
    given = [0] * len(speeds)
    finish = [(1 / speed, index) for index, speed in enumerate(speeds)]
    heapq.heapify(finish)
    for _ in range(granules):
        _, first = heapq.heappop(finish)
        given[first] += 1
        heapq.heappush(finish, ((given[first] + 1) / speeds[first], first))
    return tuple(float(number) for number in given)


def _known(dims: Sequence[CutDim]) -> Sequence[CutDim]:
    return [dim for dim in dims if dim.granules > 0] or [CutDim(UNKNOWN)]


def _axis_time(
    weights: tuple[float, ...], speeds: Sequence[float], dims: Sequence[CutDim]
) -> float:
    """Time of the slowest slice, as the mean over the dims by their work."""

    def slowest(dim: CutDim) -> float:
        parts = _axis_shares(weights, dim.granules)
        return max(part / speed for part, speed in zip(parts, speeds, strict=True))

    dims = _known(dims)
    return sum(dim.work * slowest(dim) for dim in dims) / sum(dim.work for dim in dims)


def _axis_shares(weights: tuple[float, ...], granules: int) -> list[float]:
    """Fraction of a dim that each coordinate gets, as a `Grid` cuts it."""
    grid = Grid(len(weights), 1, 1, work={"x": weights})
    cuts = [grid.cut((0, granules), "x", coordinate) for coordinate in range(len(weights))]
    return [(stop - first) / granules for first, stop in cuts]


def _orders(grid: Grid, speeds: Sequence[float]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Gives (name, device at each place): the given order first, then for each axis the fastest
    devices at its first coordinate. Equal devices stay in order.
    """
    yield "their given order", tuple(range(len(speeds)))
    if len(set(speeds)) == 1:
        return
    by_speed = sorted(range(len(speeds)), key=lambda device: -speeds[device])
    for axis in PREFERRED:
        if axis in grid.axes:
            places = sorted(
                range(grid.num_devices), key=lambda place: (grid.coordinate(place, axis), place)
            )
            device_at = dict(zip(places, by_speed, strict=True))
            order = tuple(device_at[place] for place in range(grid.num_devices))
            yield f"order of speed along {axis}", order


def _weights(
    grid: Grid, speeds: Sequence[float], cuts: Mapping[str, Sequence[CutDim]]
) -> tuple[dict[str, tuple[float, ...]], float]:
    """Weights of all axes and the time of line (1). One axis after the other is improved while the
    others stay, beginning with each axis once.
    """
    even = {axis: _part((1.0,) * grid.size(axis), cuts.get(axis, ())) for axis in grid.axes}
    best: dict[str, tuple[float, ...]] = {}
    best_time = _time(grid, speeds, even)
    for sequence in permutations(axis for axis in PREFERRED if axis in grid.axes):
        weights: dict[str, tuple[float, ...]] = {}
        part = dict(even)
        for axis in sequence * ROUNDS:
            weights = weights | {
                axis: axis_weights(_slice_speeds(grid, speeds, part, axis), cuts.get(axis, ()))
            }
            part[axis] = _part(weights[axis], cuts.get(axis, ()))
            time = _time(grid, speeds, part)
            if time < best_time * (1 - SAME_TIME):
                best = weights
                best_time = time
    return best, best_time


def _slice_speeds(
    grid: Grid, speeds: Sequence[float], part: Mapping[str, Sequence[float]], axis: str
) -> list[float]:
    """Speed of each slice along an axis: that of its slowest device for what the other axes leave
    it to do.
    """
    others = [other for other in grid.axes if other != axis]
    slices = [float("inf")] * grid.size(axis)
    for place, speed in enumerate(speeds):
        left = prod(part[other][grid.coordinate(place, other)] for other in others)
        coordinate = grid.coordinate(place, axis)
        # a device that has nothing to do there is as fast as need be
        slices[coordinate] = min(slices[coordinate], speed / max(1e-12, left))
    return slices


def _part(weights: tuple[float, ...], dims: Sequence[CutDim]) -> list[float]:
    """Fraction of an axis's work that each coordinate does, over all dims by their work."""
    dims = _known(dims)
    total = sum(dim.work for dim in dims)
    by_dim = [
        [dim.work / total * share for share in _axis_shares(weights, dim.granules)] for dim in dims
    ]
    return [sum(column) for column in zip(*by_dim, strict=True)]


def _time(grid: Grid, speeds: Sequence[float], part: Mapping[str, Sequence[float]]) -> float:
    """Seconds of the slowest device, line (1), for a work of 1."""
    return max(
        prod(part[axis][grid.coordinate(place, axis)] for axis in grid.axes) / speed
        for place, speed in enumerate(speeds)
    )


def _stored(grid: Grid, memory: Sequence[float]) -> dict[str, tuple[float, ...]]:
    """Weights by which axes cut what is only stored: the memory of the device that has least in a
    slice. Axes along which all slices have the same are left out.
    """
    found = {}
    for axis in grid.axes:
        slices = [float("inf")] * grid.size(axis)
        for place, capacity in enumerate(memory):
            coordinate = grid.coordinate(place, axis)
            slices[coordinate] = min(slices[coordinate], capacity)
        if len(set(slices)) > 1 and sum(slices) > 0:
            found[axis] = tuple(slices)
    return found


def _reason(order: str, grid: Grid, over_best: float) -> str:
    cut = "; ".join(f"{axis} cut {_ratio(weights)}" for axis, weights in grid.work.items())
    return (
        f"devices in {order}; {cut or 'all axes even'}; the slowest takes {over_best:.3f} of the "
        "best possible time"
    )


def _ratio(weights: Sequence[float]) -> str:
    least = min(weight for weight in weights if weight > 0)
    return " : ".join(f"{weight / least:.3g}" for weight in weights)
