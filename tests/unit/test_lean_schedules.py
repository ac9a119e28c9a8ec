"""Schedules that are made for their costs stay within the memory of the devices: where 1F1B fits,
they do, and often where it does not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale.cluster.cluster import Cluster, Device, DeviceKind, Link
from whale.planning.assemble import _schedule_reason
from whale.planning.pipeline_cuts import in_flight
from whale.planning.priced_cut import Priced, PricedCut
from whale.planning.recompute_choice import Choice
from whale.planning.schedules import schedule_of_plan
from whale.planning.suggestions import with_more
from whale.plans.file import diff
from whale.plans.revise import revise
from whale.scheduling import StageGraph, build

WIDTH = 64
NUM_TOKENS = 32
NUM_DEVICES = 4
NUM_MICRO_BATCH = 16
PLENTY = 10**10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2 * NUM_DEVICES))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def devices(num_bytes: float) -> Cluster:
    """So slow that the time of the runtime's actions makes no difference."""
    kind = DeviceKind("k", 1e8, int(num_bytes), 1e12)
    return Cluster(
        tuple(Device(i, "h", i, kind) for i in range(NUM_DEVICES)), Link(1e12, 0.0), Link(1e12, 0.0)
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plan_of(num_bytes: float, cluster: Cluster | None = None, **config: object) -> wh.Plan:
    config = {
        "num_task_graph": NUM_DEVICES,
        "num_micro_batch": NUM_MICRO_BATCH,
        "recompute": False,
        **config,
    }
    batch = torch.randn(2 * NUM_MICRO_BATCH, NUM_TOKENS, WIDTH)
    return wh.plan(
        Net(), batch, cluster=cluster or devices(num_bytes), config=config, optimizer=sgd
    )


def predicted(num_bytes: float, **config: object) -> tuple[float, float]:
    """(seconds of a step, bytes of the fullest device), by simulation."""
    timeline = wh.simulate(plan_of(num_bytes, **config))
    return timeline.step_s, max(device.peak_total_bytes for device in timeline.devices)


@pytest.fixture(scope="module")
def plain() -> tuple[float, float]:
    return predicted(PLENTY, schedule="1f1b")


@pytest.mark.parametrize("name", ["zero-bubble", "auto"])
def test_a_schedule_saves_no_more_than_memory_holds(name: str, plain: tuple[float, float]) -> None:
    """Without a limit they take 1.13 (zero-bubble) and 1.53 (auto) times the memory of 1F1B."""
    plain_s, plain_bytes = plain
    step_s, peak_bytes = predicted(1.02 * plain_bytes, schedule=name)
    assert peak_bytes <= 1.02 * plain_bytes
    assert step_s < plain_s


def test_fewer_micro_batches_stay_within_the_same_memory(plain: tuple[float, float]) -> None:
    """The last mini-batch of an epoch is smaller and gets a schedule of its own. Without the caps:
    2.07 times the memory of 1F1B.
    """
    count = NUM_MICRO_BATCH - 4
    room = 1.02 * plain[1]
    plan = plan_of(room, schedule="zero-bubble")
    graph = plan.schedule.stage_graph
    made = schedule_of_plan(plan, graph, 2 * count, count)
    smaller = revise(plan, batch_size=2 * count, num_micro_batch=count, schedule=made)
    assert made.name == "zero-bubble"
    assert max(device.peak_total_bytes for device in wh.simulate(smaller).devices) <= room


def plan_of_linears(cluster: Cluster, name: str) -> wh.Plan:
    """Between its two parts a split backward of the last one keeps its input and a gradient, twice
    of what a whole one has kept.
    """
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_DEVICES)))
    batch = torch.randn(16, 64 * NUM_TOKENS, WIDTH)
    config = {
        "num_task_graph": NUM_DEVICES,
        "num_micro_batch": 8,
        "recompute": False,
        "schedule": name,
    }
    return wh.plan(
        model, batch, loss=lambda output, batch: output.sum(), cluster=cluster, config=config
    )


def test_the_planner_counts_split_backwards_as_the_simulation_does() -> None:
    split = plan_of_linears(devices(PLENTY), "zero-bubble")
    for device, memory in zip(wh.simulate(split).devices, split.memory, strict=True):
        assert device.peak_total_bytes <= memory.total_bytes(2) + 1  # up to rounding


def test_1f1b_in_place_of_another_schedule_is_said() -> None:
    taken = build("1f1b", StageGraph.chain(2), 4)
    said = 'no faster order of "zero-bubble" was found within the memory of the devices; 4 micro-batches over 2 stages'
    assert _schedule_reason(taken, "zero-bubble").startswith(said)
    assert _schedule_reason(taken, "1f1b").startswith("4 micro-batches over 2 stages")


def test_with_less_memory_than_1f1b_needs_fewer_are_in_flight(plain: tuple[float, float]) -> None:
    """0.78 of its memory: at one micro-batch in flight the fullest stage needs 0.72 of it."""
    with pytest.raises(ValueError, match="does not fit"):
        plan_of(0.78 * plain[1], schedule="1f1b")
    plan = plan_of(0.78 * plain[1], schedule="zero-bubble")
    assert max(device.peak_total_bytes for device in wh.simulate(plan).devices) <= 0.78 * plain[1]
    assert "in flight on a stage, as memory is short" in plan.decisions[0].why


def test_the_shortest_step_decides_between_recomputing_and_waiting(
    plain: tuple[float, float],
) -> None:
    waiting, recomputing = (
        predicted(0.86 * plain[1], schedule="zero-bubble", recompute=wanted)[0]
        for wanted in (False, "auto")
    )
    assert recomputing < waiting


def test_a_change_is_offered_if_the_schedule_that_was_asked_for_fits_with_it(
    plain: tuple[float, float],
) -> None:
    """A fifth device is not enough for 1F1B, and it is for an order that saves fewer
    micro-batches.
    """
    room = 0.7 * plain[1]
    offer = 'like rank 0 (k) and "num_task_graph": 5'
    for name in ("1f1b", "zero-bubble"):
        with pytest.raises(ValueError, match="Try: ") as error:
            plan_of(room, schedule=name)
        assert (offer in str(error.value)) is (name == "zero-bubble"), str(error.value)
    cluster = devices(room)
    plan_of(
        room, with_more(cluster, cluster.devices[0], 1), schedule="zero-bubble", num_task_graph=5
    )


def test_choices_that_cannot_be_the_fastest_are_left_out_and_nothing_else(
    plain: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is the same with the bound below which they are looked at and without: a bound of
    0 leaves out nothing.
    """
    looked_at: list[int] = []
    price = PricedCut._price

    def counted(drafter: PricedCut, choice: Choice, name: str) -> Priced:
        looked_at[-1] += 1
        return price(drafter, choice, name)

    monkeypatch.setattr(PricedCut, "_price", counted)
    plans = []
    for bound in (PricedCut._least_seconds, lambda drafter, choice: 0.0):
        monkeypatch.setattr(PricedCut, "_least_seconds", bound)
        looked_at.append(0)
        plans.append(plan_of(0.92 * plain[1], schedule="zero-bubble", recompute="auto"))
    assert diff(*plans) == []
    assert looked_at[0] < looked_at[1]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def test_where_1f1b_fits_by_recomputing_so_does_a_schedule_that_is_made_for_the_memory() -> None:
    """Its own order keeps other numbers in flight than 1F1B, and stages that recompute for
    these did not fit.
    """
    kinds = (
        DeviceKind("small", 2e12, 30 * 10**6, 5e10),
        DeviceKind("large", 4e12, 40 * 10**6, 9e10),
    )
    devices = tuple(Device(rank, "hg"[rank // 2], rank % 2, kinds[rank // 2]) for rank in range(4))
    cluster = Cluster(devices, Link(12e9, 1e-5), Link(6.25e9, 3e-5))
    model = nn.Sequential(nn.Linear(20, 256), *(Residual() for _ in range(8)), nn.Linear(256, 10))

    def timeline(name: str) -> wh.Timeline:
        config = {"num_task_graph": 4, "num_micro_batch": 8, "schedule": name}
        return wh.simulate(
            wh.plan(
                model,
                torch.randn(64, 64, 20),
                loss=lambda out, _: out.square().mean(),
                cluster=cluster,
                config=config,
            )
        )

    plain = timeline("1f1b")
    made = timeline("zero-bubble")
    assert made.step_s <= 1.01 * plain.step_s
    assert all(device.peak_total_bytes <= device.memory_bytes for device in made.devices)


def test_memory_too_small_for_one_micro_batch_is_refused(plain: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"no cut into 4 stages fits|does not fit"):
        predicted(0.7 * plain[1], schedule="auto")


def plan_of_different_layers(num_bytes: float, name: str) -> wh.Plan:
    """Weights of 3, 3, 1 and 1 units: two stages have 3 and 5 of them at best, two devices with two
    chunks each 4 and 4.
    """
    kind = DeviceKind("k", 1e8, int(num_bytes), 1e12)
    cluster = Cluster(
        tuple(Device(i, "h", i, kind) for i in range(2)), Link(1e12, 0.0), Link(1e12, 0.0)
    )
    sizes = (WIDTH, 3 * WIDTH, WIDTH, WIDTH, WIDTH)
    model = nn.Sequential(*(nn.Linear(here, there, bias=False) for here, there in pairwise(sizes)))
    config = {"num_task_graph": 2, "num_micro_batch": 2, "schedule": name}
    return wh.plan(
        model,
        torch.randn(4, WIDTH),
        loss=lambda output, batch: output.square().mean(),
        cluster=cluster,
        config=config,
    )


@pytest.mark.parametrize("name", ["wave", "interleaved", "auto"])
def test_chunks_that_fit_are_found_where_one_stage_a_device_does_not(name: str) -> None:
    room = 1.01 * max(
        memory.total_bytes(2) for memory in plan_of_different_layers(PLENTY, "wave").memory
    )
    with pytest.raises(ValueError, match=r"no cut into 2 stages fits|does not fit"):
        plan_of_different_layers(room, "1f1b")
    plan = plan_of_different_layers(room, name)
    assert len(plan.stages) == 4
    assert max(device.peak_total_bytes for device in wh.simulate(plan).devices) <= room


def test_before_a_schedule_is_made_only_gpipe_is_taken_to_keep_everything() -> None:
    found = {
        name: [in_flight(name, stage, 3, 8) for stage in range(3)]
        for name in ("gpipe", "1f1b", "zero-bubble", "auto")
    }
    assert found == {
        "gpipe": [8, 8, 8],
        "1f1b": [3, 2, 1],
        "zero-bubble": [3, 2, 1],
        "auto": [3, 2, 1],
    }


def test_cuts_of_chunks_are_not_moved_to_where_they_do_not_fit() -> None:
    """A device is three times as fast. With much memory cuts are moved to give the slow one half
    more than it had before.
    """

    def plan_on(*memory: float) -> wh.Plan:
        kinds = [
            DeviceKind(f"k{i}", rate, int(room), 1e12)
            for i, (rate, room) in enumerate(zip((3e8, 1e8), memory, strict=True))
        ]
        cluster = Cluster(
            tuple(Device(i, "h", i, kind) for i, kind in enumerate(kinds)),
            Link(1e12, 0.0),
            Link(1e12, 0.0),
        )
        config = {
            "num_task_graph": 2,
            "num_micro_batch": 4,
            "schedule": "interleaved",
            "num_waves": 2,
            "recompute": False,
        }
        return wh.plan(Net(), torch.randn(8, NUM_TOKENS, WIDTH), cluster=cluster, config=config)

    free = [memory.total_bytes(2) for memory in plan_on(PLENTY, PLENTY).memory]
    room = 1.25 * free[0], 0.75 * free[1]
    for device, most in zip(wh.simulate(plan_on(*room)).devices, room, strict=True):
        assert device.peak_total_bytes <= most
