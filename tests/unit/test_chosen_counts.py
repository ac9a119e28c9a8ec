"""The number of micro-batches of a plan whose stages the user gave, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import whale as wh
from tests.unit.test_search import BATCH, WIDTH, Net, Normed, mixed
from whale.cluster.cluster import Cluster, Device, DeviceKind, Link
from whale.plans.plan import Plan

LAYERS = 4
FAST = DeviceKind("fast", 20e9, 10**9, 50e9)
OLD = DeviceKind("old", 6e9, 10**9, 20e9)


def devices(*kinds: DeviceKind) -> Cluster:
    """Devices of one host."""
    made = tuple(Device(rank, "a", rank, kind) for rank, kind in enumerate(kinds))
    return Cluster(made, Link(1e9, 1e-6), Link(1e9, 1e-6))


def planned(
    cluster: Cluster, model: nn.Module | None = None, size: int = BATCH, **config: object
) -> Plan:
    model = model or Net(LAYERS)
    width = next(model.parameters()).shape[-1]
    batch = torch.randn(size, width)
    return wh.plan(model, batch, cluster=cluster, config=config)


def said(plan: Plan) -> list[str]:
    """What the plan says of its number of micro-batches."""
    return [each.why for each in plan.decisions if each.what == "micro-batches"]


def score_s(plan: Plan) -> float:
    """What a search makes small: the step, and 0.1 ms for every forward and backward."""
    orders = plan.schedule.orders
    most = max(sum(action.is_compute for action in order) for order in orders)
    return wh.simulate(plan).step_s + 1e-4 * most


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_no_number_by_hand_gives_a_shorter_step(schedule: str) -> None:
    cluster = devices(FAST, OLD, OLD)
    given = {"num_task_graph": 3, "schedule": schedule}
    plan = planned(cluster, Net(LAYERS, 1024), **given)
    assert plan.num_micro_batch > 1 and len(plan.stages) == 3
    by_hand = {
        number: planned(cluster, Net(LAYERS, 1024), num_micro_batch=number, **given)
        for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    }
    assert score_s(plan) <= min(map(score_s, by_hand.values())) * (1 + 1e-9)
    same = by_hand[plan.num_micro_batch]
    assert (plan.stages, plan.schedule) == (same.stages, same.schedule)
    assert said(plan)[0].startswith('"num_micro_batch" is not set: ') and not said(same)


def test_seven_stages_on_seven_devices() -> None:
    cluster = mixed(between=1e9)
    plan = planned(cluster, Net(width=1024), num_task_graph=7)
    one = planned(cluster, Net(width=1024), num_task_graph=7, num_micro_batch=1)
    assert plan.num_micro_batch > 1 and score_s(plan) < score_s(one)
    assert len(plan.stages) == 7 and not plan.left_out


def test_more_micro_batches_where_one_does_not_fit() -> None:
    """Activations of 512 samples at once are too much for a device, those of fewer are not."""
    given = {"num_task_graph": 2, "recompute": False}
    roomy = planned(devices(FAST, FAST), size=512, num_micro_batch=1, **given)
    peak = max(device.peak_total_bytes for device in wh.simulate(roomy).devices)
    tight = replace(FAST, memory_bytes=int(0.95 * peak))
    with pytest.raises(ValueError, match="fit"):
        planned(devices(tight, tight), size=512, num_micro_batch=1, **given)
    plan = planned(devices(tight, tight), size=512, **given)
    assert plan.num_micro_batch > 1
    assert max(device.peak_total_bytes for device in wh.simulate(plan).devices) <= 0.95 * peak


def test_a_refusal_is_that_of_one_micro_batch() -> None:
    tiny = replace(FAST, memory_bytes=1000)
    refusals = []
    for config in ({"num_task_graph": 2}, {"num_task_graph": 2, "num_micro_batch": 1}):
        with pytest.raises(ValueError, match="no cut into 2 stages fits") as caught:
            planned(devices(tiny, tiny), **config)
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]


class Products(nn.Module):
    """A loss that is a product of means."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        result: torch.Tensor = self.last(hidden).mean() * hidden.square().mean()
        return result


@pytest.mark.parametrize(
    ("model", "why"), [(Normed, "batch norms .* as a number"), (Products, "no sum over samples")]
)
def test_one_where_results_depend_on_it(model: type[nn.Module], why: str) -> None:
    cluster = devices(FAST, OLD)
    plan = planned(cluster, model(), num_task_graph=2)
    assert plan.num_micro_batch == 1
    (text,) = said(plan)
    assert re.search(why, text)


def test_what_a_plan_says_of_other_numbers_is_true() -> None:
    """A number makes a product of means no sum; with "loss_per_micro_batch" it is taken."""
    cluster = devices(FAST, OLD)
    (text,) = said(planned(cluster, Products(), num_task_graph=2))
    assert '"loss_per_micro_batch": true' in text
    with pytest.raises(ValueError, match="loss_per_micro_batch"):
        planned(cluster, Products(), num_task_graph=2, num_micro_batch=4)
    alone = {"num_micro_batch": 4, "loss_per_micro_batch": True}
    assert planned(cluster, Products(), num_task_graph=2, **alone).num_micro_batch == 4


def test_one_where_times_are_not_known() -> None:
    """Equal CPUs, and devices that are in no table."""
    assert planned(Cluster.uniform(2), num_task_graph=2).num_micro_batch == 1
    unknown = replace(FAST, name="unknown", is_guess=True)
    assert planned(devices(unknown, FAST), num_task_graph=2).num_micro_batch == 1


def test_the_same_plan_in_every_run() -> None:
    cluster = devices(FAST, OLD, OLD)
    first, second = (planned(cluster, num_task_graph=3).to_json() for _ in range(2))
    assert first == second
