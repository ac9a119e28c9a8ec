"""Layers that were measured split over devices: what their rows change in a plan, to the second, and
which plan the search takes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale.cluster.cluster import Cluster, Device, Link, device_kind
from whale.cluster.kinds import DeviceKind
from whale.cluster.layer_times import Layer, LayerTime, LayerTimes
from whale.plans.plan import Plan

WIDTH = 64
NUM_LAYERS = 3
BATCH = {"x": torch.zeros(8, 10, WIDTH)}
CARD = DeviceKind("card", 1e12, 10**10, 1e11)

Row = tuple[int, int, float, float]
"""samples, width, seconds of forward and backward"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.square().mean(dim=(1, 2)).mean()


def rows(*points: Row) -> LayerTimes:
    times = (LayerTime(samples, f, b, width) for samples, width, f, b in points)
    return LayerTimes((Layer(("h.*",), "card", tuple(times)),), "a test")


def cards(times: LayerTimes | None, bytes_per_s: float = 1e9, hosts: str = "aa") -> Cluster:
    devices = [
        Device(rank, host, hosts[:rank].count(host), CARD) for rank, host in enumerate(hosts)
    ]
    link = Link(bytes_per_s, 1e-5)
    return Cluster(tuple(devices), link, link, layer_times=times)


def split_plan(cluster: Cluster, grid: tuple[int, int, int] = (1, 2, 1), count: int = 2) -> Plan:
    model = Net()
    wh.annotate(model, {"h": wh.split(cluster.num_devices, grid=grid)})
    return wh.plan(model, BATCH, cluster=cluster, config={"num_micro_batch": count})


def step(plan: Plan) -> float:
    return wh.simulate(plan).step_s


def layer_line(plan: Plan) -> str:
    return next(each.choice for each in plan.decisions if each.what == "layer times")


def test_rows_of_the_width_change_the_step_by_exactly_what_they_say() -> None:
    """2 micro-batches of 4 samples, between rows of 2 and 6: the straight line."""
    slow = split_plan(cards(rows((2, 2, 0.010, 0.030), (6, 2, 0.020, 0.070))))
    fast = split_plan(cards(rows((2, 2, 0.002, 0.005), (6, 2, 0.004, 0.009))))
    difference = NUM_LAYERS * 2 * ((0.015 + 0.050) - (0.003 + 0.007))
    assert step(slow) - step(fast) == pytest.approx(difference, rel=1e-9)
    # of the whole step only the loss, the update and the sums of gradients are beside the rows
    assert step(fast) == pytest.approx(NUM_LAYERS * 2 * (0.003 + 0.007), rel=0.05)
    assert step(fast) > NUM_LAYERS * 2 * (0.003 + 0.007)
    assert layer_line(slow) == "3 modules on card, 3 split over 2 devices"


def test_rows_say_how_much_is_forward() -> None:
    plan = split_plan(cards(rows((4, 2, 0.5, 0.6))))
    assert plan.figures is not None
    (times,) = plan.figures.stages[0].times.values()
    assert times.forward.of(4) == pytest.approx(NUM_LAYERS * 0.5, rel=1e-3)
    assert times.backward.of(4) == pytest.approx(NUM_LAYERS * 0.6, rel=1e-3)


def test_messages_of_measured_layers_are_in_their_rows() -> None:
    """A link that is a thousand times slower changes a modelled stage, and not a measured one."""
    measured, modelled = (
        [split_plan(cards(times, rate)).shardings[0].seconds for rate in (1e9, 1e6)]
        for times in (rows((4, 2, 0.5, 0.6)), None)
    )
    assert measured[0] == pytest.approx(measured[1], rel=1e-9)
    assert modelled[1] > 100 * modelled[0]


@pytest.mark.parametrize(
    ("hosts", "grid"),
    [("ab", (1, 2, 1)), ("aa", (1, 1, 2))],
    ids=["two hosts", "not the grid that is measured"],
)
def test_rows_hold_only_where_they_were_measured(hosts: str, grid: tuple[int, int, int]) -> None:
    measured = cards(rows((4, 2, 0.5, 0.6)), hosts=hosts)
    plain = cards(None, hosts=hosts)
    assert step(split_plan(measured, grid)) == step(split_plan(plain, grid))
    assert "split" not in layer_line(split_plan(measured, grid))


def test_another_width_is_not_taken() -> None:
    plan = split_plan(cards(rows((4, 4, 0.5, 0.6))))
    assert step(plan) == step(split_plan(cards(None)))


def test_a_layer_measured_on_one_device_only_is_as_much_slower_on_a_grid() -> None:
    """By samples over the grid, each device has what was measured for its samples."""
    cluster = cards(rows((1, 1, 0.3, 0.5)))
    model = Net()
    wh.annotate(model, {"h.0": wh.split(2), "h.1": wh.replicate(2), "h.2": wh.replicate(2)})
    plan = wh.plan(model, BATCH, cluster=cluster, config={"num_micro_batch": 2})
    of_one_device = 4 / 2 * (0.3 + 0.5)
    assert plan.shardings[0].seconds == pytest.approx(NUM_LAYERS * of_one_device, rel=0.05)


@pytest.mark.parametrize(
    ("second", "number"), [("h.1", 3), ("h.0.down", 2)], ids=["between layers", "through a layer"]
)
def test_a_layer_that_a_cut_goes_through_keeps_the_cost_model(second: str, number: int) -> None:
    """Two stages of two devices; what is not marked follows what it reads."""
    model = Net()
    first = "h.0" if number == NUM_LAYERS else "h.0.up"
    wh.annotate(model, {first: wh.split(2, grid=(1, 2, 1)), second: wh.split(2, grid=(1, 2, 1))})
    cluster = cards(rows((4, 2, 0.5, 0.6)), hosts="aaaa")
    plan = wh.plan(model, BATCH, cluster=cluster, config={"num_micro_batch": 2})
    assert len(plan.stages) == 2
    assert layer_line(plan) == f"3 modules on card, {number} split over 2 devices"
    assert sum(each.seconds for each in plan.shardings) == pytest.approx(number * 1.1, rel=0.01)


def test_a_row_for_data_sheet_kinds_too() -> None:
    kind = device_kind("T4")
    cluster = cards(rows((4, 2, 0.5, 0.6)))
    devices = tuple(replace(device, kind=kind) for device in cluster.devices)
    times = LayerTimes(tuple(replace(each, kind="t4") for each in cluster.layer_times.layers))  # type: ignore[union-attr]
    plan = split_plan(replace(cluster, devices=devices, layer_times=times))
    assert layer_line(plan) == "3 modules on T4, 3 split over 2 devices"


@pytest.mark.parametrize("rate", [1e9, 1e7], ids=["fast link", "slow link"])
@pytest.mark.parametrize(("split_s", "is_split"), [(0.004, True), (0.040, False)])
def test_the_search_splits_where_the_rows_say_so(
    split_s: float, is_split: bool, rate: float
) -> None:
    """One device takes 10 ms for a layer and any samples: two that share the samples take 10 ms as
    well, two that split the layer what the rows of width 2 say, whatever the cost model makes of
    their messages.
    """
    alone: list[Row] = [(samples, 1, 0.004, 0.006) for samples in (1, 2, 4, 8)]
    together: list[Row] = [(samples, 2, 0.4 * split_s, 0.6 * split_s) for samples in (1, 2, 4, 8)]
    cluster = cards(rows(*alone, *together), rate)
    plan = wh.plan(Net(), BATCH, cluster=cluster, config={"num_micro_batch": 1})
    assert bool(plan.shardings) == is_split
    assert ("split over 2 devices" in layer_line(plan)) == is_split
