"""Unlike devices on a grid: which device goes to which place, and how unevenly each axis cuts.

The device at coordinates (i, j, k) does the share x_i y_j z_k of the work, so with speeds v its
time is

    time = max over places of x_i y_j z_k / v_ijk           shares of an axis add up to 1, best possible: 1 / sum v     (1)

Only speeds that are a product themselves, v_ijk = a_i b_j c_k, can be balanced exactly. So devices
are put in order of speed, such that it differs along one axis, by preference z, which cuts samples;
along it a slice is as fast as its slowest device. Shares are whole granules: an axis that cuts n
granules gives them one by one to whoever would be done first, which is the best that whole numbers
can do:

    n_k that minimise max over k of n_k / v_k,     sum n_k = n                                                          (2)

An axis has one set of weights for all that it cuts (12 heads, 50,257 classes), so the weights that
are best for all together are taken. What is only stored along an axis is cut by memory instead.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

from whale.plans.grid import Grid

PREFERRED = ("z", "y", "x")
"""along which speed may differ; among equally good ones the first is taken"""
ROUNDS = 4
"""of improving one axis after the other"""


@dataclass(frozen=True)
class Dim:
    """Something that an axis cuts."""

    granules: int
    work: float = 1.0
    """its part of the work"""


@dataclass(frozen=True)
class Arrangement:
    """Devices on a grid."""

    order: tuple[int, ...]
    """place -> number of the device"""
    grid: Grid
    time: float
    """line (1), for a work of 1"""
    best: float
    """1 / sum of speeds"""
    reason: str


def arrangements(
    shape: tuple[int, int, int],
    speeds: Sequence[float],
    cuts: Mapping[str, Sequence[Dim]],
    memory: Sequence[float] | None = None,
) -> list[Arrangement]:
    """The best weights for each order that is worth a try: which is best depends on the links
    between the devices, too.
    """
    even = Grid(*shape)
    if len(speeds) != even.num_devices or min(speeds) <= 0:
        raise ValueError(
            f"a grid {even.name} needs {even.num_devices} speeds above 0, not {list(speeds)}"
        )
    found: dict[tuple[int, ...], Arrangement] = {}
    for axis, order in _orders(even, speeds):
        if order not in found:
            work, time = _weights(even, [speeds[device] for device in order], cuts)
            stored = {} if memory is None else _stored(even, [memory[device] for device in order])
            grid = Grid(*shape, work=work, memory=stored)
            found[order] = Arrangement(
                order, grid, time, 1 / sum(speeds), _reason(axis, grid, time * sum(speeds))
            )
    return list(found.values())


def axis_weights(speeds: Sequence[float], dims: Sequence[Dim]) -> tuple[float, ...]:
    """The weights of one axis whose slices have these speeds: those that are best for one of the
    dims, or the speeds themselves.
    """
    candidates = [
        tuple(float(v) for v in speeds),
        *(shares(dim.granules, speeds) for dim in dims if dim.granules > 0),
    ]
    return min(candidates, key=lambda weights: _axis_time(weights, speeds, dims))


def shares(granules: int, speeds: Sequence[float]) -> tuple[float, ...]:
    """Line (2)."""
    given = [0] * len(speeds)
    done = [(1 / speed, slice_) for slice_, speed in enumerate(speeds)]
    heapq.heapify(done)
    for _ in range(granules):
        _, slice_ = heapq.heappop(done)
        given[slice_] += 1
        heapq.heappush(done, ((given[slice_] + 1) / speeds[slice_], slice_))
    return tuple(float(n) for n in given)


def _axis_time(weights: tuple[float, ...], speeds: Sequence[float], dims: Sequence[Dim]) -> float:
    """The slowest slice of every dim, weighted by the dim's work."""
    dims = [dim for dim in dims if dim.granules > 0] or [Dim(1 << 20)]
    parts = [(dim.work, share) for dim in dims for share in [_axis_shares(weights, dim.granules)]]
    return sum(work * max(n / v for n, v in zip(share, speeds)) for work, share in parts) / sum(
        work for work, _ in parts
    )


def _axis_shares(weights: tuple[float, ...], granules: int) -> list[float]:
    """As a `Grid` would cut."""
    grid = Grid(len(weights), 1, 1, work={"x": weights})
    cuts = [grid.cut((0, granules), "x", coordinate) for coordinate in range(len(weights))]
    return [(stop - first) / granules for first, stop in cuts]


def _orders(grid: Grid, speeds: Sequence[float]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The given order first, then for each axis the fastest devices at its first coordinate; equal
    devices stay in order.
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
            device_at = dict(zip(places, by_speed))
            yield (
                f"order of speed along {axis}",
                tuple(device_at[place] for place in range(grid.num_devices)),
            )


def _weights(
    grid: Grid, speeds: Sequence[float], cuts: Mapping[str, Sequence[Dim]]
) -> tuple[dict[str, tuple[float, ...]], float]:
    """Weights of all axes and the time of line (1): one axis after the other is improved while the
    others stay, from every first axis.
    """
    even = {axis: _part((1.0,) * grid.size(axis), cuts.get(axis, ())) for axis in grid.axes}
    best: tuple[dict[str, tuple[float, ...]], float] = {}, _time(grid, speeds, even)
    for sequence in permutations(axis for axis in PREFERRED if axis in grid.axes):
        weights: dict[str, tuple[float, ...]] = {}
        part = dict(even)
        for axis in sequence * ROUNDS:
            others = [other for other in grid.axes if other != axis]
            room = [
                speed / max(1e-12, prod(part[q][grid.coordinate(p, q)] for q in others))
                for p, speed in enumerate(speeds)
            ]
            slices = [
                min(room[p] for p in range(len(speeds)) if grid.coordinate(p, axis) == c)
                for c in range(grid.size(axis))
            ]
            weights = weights | {axis: axis_weights(slices, cuts.get(axis, ()))}
            part[axis] = _part(weights[axis], cuts.get(axis, ()))
            time = _time(grid, speeds, part)
            if time < best[1] * (1 - 1e-9):
                best = weights, time
    return best


def _part(weights: tuple[float, ...], dims: Sequence[Dim]) -> list[float]:
    """What each coordinate does of an axis's work: over all dims, by their work."""
    dims = [dim for dim in dims if dim.granules > 0] or [Dim(1 << 20)]
    total = sum(dim.work for dim in dims)
    by_dim = [
        [dim.work / total * share for share in _axis_shares(weights, dim.granules)] for dim in dims
    ]
    return [sum(column) for column in zip(*by_dim)]


def _time(grid: Grid, speeds: Sequence[float], part: Mapping[str, Sequence[float]]) -> float:
    """Line (1)."""
    return max(
        prod(part[axis][grid.coordinate(place, axis)] for axis in grid.axes) / speed
        for place, speed in enumerate(speeds)
    )


def _stored(grid: Grid, memory: Sequence[float]) -> dict[str, tuple[float, ...]]:
    """By the memory of the device that has least in a slice."""
    slices = {
        axis: tuple(
            min(memory[p] for p in range(len(memory)) if grid.coordinate(p, axis) == c)
            for c in range(grid.size(axis))
        )
        for axis in grid.axes
    }
    return {
        axis: values for axis, values in slices.items() if len(set(values)) > 1 and sum(values) > 0
    }


def _reason(order: str, grid: Grid, over_best: float) -> str:
    cut = "; ".join(f"{axis} cut {_ratio(weights)}" for axis, weights in grid.work.items())
    return (
        f"devices in {order}; {cut or 'all axes even'}; the slowest takes {over_best:.3f} of the "
        "best possible time"
    )


def _ratio(weights: Sequence[float]) -> str:
    least = min(weight for weight in weights if weight > 0)
    return " : ".join(f"{weight / least:.3g}" for weight in weights)
