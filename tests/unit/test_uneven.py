"""Uneven shards: against all ways to order devices and to give out granules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import whale as wh
from tests.thorough import many
from whale.cluster.cluster import Cluster, Device, DeviceKind, Link
from whale.planning.uneven_grids import CutDim, GridArrangement, arrangements, axis_weights, shares
from whale.plans.grid import Grid
from whale.plans.layout import Cut, Layout

speeds = st.integers(1, 6).map(float)


def compositions(n: int, parts: int):
    """All ways to give n granules to some devices."""
    return (way for way in product(range(n + 1), repeat=parts) if sum(way) == n)


def arrange(
    shape: tuple[int, int, int],
    speeds: Sequence[float],
    cuts: Mapping[str, Sequence[CutDim]],
    memory: Sequence[float] | None = None,
) -> GridArrangement:
    """The best order and weights found for these devices. `cuts`: axis -> what it cuts; `memory`:
    what each has left for stored shards.
    """
    found = arrangements(shape, speeds, cuts, memory)
    best = found[0]
    for other in found[1:]:
        best = other if other.time < best.time * (1 - 1e-9) else best
    return best


def real_time(grid: Grid, order, speeds, counts) -> float:
    """The slowest device's share of the work over its speed, from the layout of a tensor with one
    dim for each axis.
    """
    axes = list(counts)
    layout = Layout(tuple(Cut(counts[axis]) for axis in axes), tuple((axis,) for axis in axes))
    whole = prod(counts.values())
    return max(
        layout.local_count(grid, place) / whole / speeds[order[place]]
        for place in range(grid.num_devices)
    )


@given(st.lists(speeds, min_size=2, max_size=4), st.integers(1, 9))
@settings(max_examples=many(500), deadline=None)
def test_one_axis_is_as_good_as_every_other_way(device_speeds, granules) -> None:
    best = min(
        max(n / v for n, v in zip(way, device_speeds))
        for way in compositions(granules, len(device_speeds))
    )
    assert max(n / v for n, v in zip(shares(granules, device_speeds), device_speeds)) == best
    found = arrange((1, 1, len(device_speeds)), device_speeds, {"z": [CutDim(granules)]})
    assert real_time(found.grid, found.order, device_speeds, {"z": granules}) == pytest.approx(
        best / granules
    )
    assert found.time == pytest.approx(best / granules)


@given(st.lists(speeds, min_size=4, max_size=4), st.integers(2, 5), st.integers(2, 5))
@settings(max_examples=many(200), deadline=None)
def test_two_axes_against_all_orders_and_shares(device_speeds, rows, columns) -> None:
    """Never worse than even shards in the given order; the time that it reports is the real one, so
    at least the best of all ways.
    """
    best = min(
        max(zs[p // 2] * ys[p % 2] / device_speeds[order[p]] for p in range(4)) / rows / columns
        for order in set(permutations(range(4)))
        for zs in compositions(rows, 2)
        for ys in compositions(columns, 2)
    )
    found = arrange((1, 2, 2), device_speeds, {"z": [CutDim(rows)], "y": [CutDim(columns)]})
    time = real_time(found.grid, found.order, device_speeds, {"z": rows, "y": columns})
    even = real_time(Grid(1, 2, 2), range(4), device_speeds, {"z": rows, "y": columns})
    assert found.time == pytest.approx(time) and best <= time * (1 + 1e-9)
    assert time <= even * (1 + 1e-9)
    assert sorted(found.order) == [0, 1, 2, 3]


@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.randoms())
@settings(max_examples=many(200), deadline=None)
def test_two_kinds_of_devices_balance_exactly_along_z(kinds, random) -> None:
    """Each kind fills whole slices of z: with enough samples the time is the best possible."""
    slice_size = 4
    device_speeds = [float(kind) for kind in kinds for _ in range(slice_size)]
    random.shuffle(device_speeds)
    samples = 12 * sum(kinds)
    found = arrange(
        (2, 2, len(kinds)),
        device_speeds,
        {"z": [CutDim(samples)], "y": [CutDim(8)], "x": [CutDim(8)]},
    )
    assert found.time == pytest.approx(1 / sum(device_speeds))
    assert set(found.grid.work) <= {"x", "y", "z"}


def test_four_v100_and_four_p100() -> None:
    """15.7 and 9.3 TFLOP/s: 16 samples go 10 : 6."""
    device_speeds = [15.7, 9.3] * 4
    found = arrange(
        (1, 4, 2), device_speeds, {"z": [CutDim(16)], "y": [CutDim(12)]}, memory=[32.0, 16.0] * 4
    )
    assert [device_speeds[device] for device in found.order] == [15.7] * 4 + [9.3] * 4
    assert found.grid.cut((0, 16), "z", 0) == (0, 10) and found.grid.memory["z"] == (32.0, 16.0)
    assert "order of speed along z; z cut 1.69 : 1" in found.reason
    assert found.time == pytest.approx(max(10 / 16 / 4 / 15.7, 6 / 16 / 4 / 9.3))


def test_one_set_of_weights_serves_all_that_an_axis_cuts() -> None:
    """3 heads and 1000 classes on two devices of speeds 2 and 1: heads 2 : 1 fit both; 4 heads
    would cost the classes something.
    """
    assert axis_weights([2.0, 1.0], [CutDim(3), CutDim(1000)]) == (2.0, 1.0)
    dims = [CutDim(4, work=1.0), CutDim(1000, work=9.0)]
    assert axis_weights([2.0, 1.0], dims) == (
        2.0,
        1.0,
    )  # 3 : 1 for both would be slower for the classes


def test_wrong_speeds() -> None:
    with pytest.raises(ValueError, match=r"grid 1 x 2 x 1 needs 2 speeds above 0"):
        arrange((1, 2, 1), [1.0], {})


# ---- predicted steps


class Wide(nn.Module):
    """Much that moves memory for each product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.last = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(8):
            x = torch.tanh(x)
        result: torch.Tensor = self.last(x).square().mean()
        return result


def split_step_s(*kinds: DeviceKind) -> float:
    """The predicted step of `Wide` under `split` on one host."""
    devices = tuple(Device(rank, "a", rank, kind) for rank, kind in enumerate(kinds))
    cluster = Cluster(devices, Link(1e12, 1e-9), Link(1e12, 1e-9))
    model = wh.annotate(Wide(), {"*": wh.split(len(kinds))})
    return wh.simulate(wh.plan(model, torch.zeros(512, 64), cluster=cluster)).step_s


def test_fast_products_are_no_fast_memory() -> None:
    """A device that multiplies ten times as fast and has the same memory gets little more work
    where memory counts: beside it a slow one is no faster than a second fast one.
    """
    fast = DeviceKind("fast", 1e13, 10**9, 1e10)
    slow = DeviceKind("slow", 1e12, 10**9, 1e10)
    both_fast_s = split_step_s(fast, fast)
    mixed_s = split_step_s(fast, slow)
    assert both_fast_s <= mixed_s <= split_step_s(slow, slow) * (1 + 1e-9)
