"""What the search does where memory is short and nothing is set: the cheapest of recomputation, ZeRO,
more stages and homes outside of the devices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale import api
from whale.cluster.cluster import Cluster, Device, DeviceKind, HostMemory, Link
from whale.cluster.kinds import GIGA
from whale.planning.problem import Problem
from whale.plans.plan import Plan
from whale.plans.shares import DoesNotFit
from whale.search.search import search
from whale.search.settings import OpenSettings

WIDTH = 256
LAYERS = 10
TRAINED_BYTES = LAYERS * (WIDTH + 1) * WIDTH * 4
"""2.6 MB; with gradients and the states of Adam four times as much"""
MEGA = 10**6
HOST = HostMemory(GIGA, 10 * GIGA, 4 * GIGA)


class Net(nn.Module):
    """Layers that are used so often, one round after the other: no cut of the second round makes a
    stage hold fewer of them.
    """

    def __init__(self, rounds: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x.square().mean()


def cluster(memory_bytes: float, memory: HostMemory | None = None) -> Cluster:
    """Two devices on two hosts with a slow network between them."""
    kind = DeviceKind("gpu", 1e12, round(memory_bytes), 1e11)
    devices = tuple(Device(rank, f"host{rank}", 0, kind) for rank in range(2))
    made = Cluster(devices, Link(1e9, 1e-6), Link(1e9, 1e-6))
    return made.with_memories(memory) if memory is not None else made


def plan_of(devices: Cluster, batch: int = 8, rounds: int = 1, **config: Any) -> Plan:
    return wh.plan(Net(rounds), torch.zeros(batch, WIDTH), cluster=devices, config=config)


def fits(plan: Plan) -> bool:
    return all(
        device.peak_total_bytes <= device.memory_bytes for device in wh.simulate(plan).devices
    )


def is_elsewhere(plan: Plan) -> bool:
    assert plan.figures is not None
    return any(each.held for each in plan.figures.away)


def test_a_model_that_fits_only_with_zero() -> None:
    """Every stage reads all layers, so neither stages nor recomputation make it fit. (A grid
    would, so none is allowed.)
    """
    problems: list[Problem] = []
    devices = cluster(4.2 * TRAINED_BYTES)
    with api.planning_only(devices.num_devices, devices, problems.append):
        plan_of(devices, rounds=3, strategy="auto")
    open_settings = OpenSettings.of(problems[0])
    found = search(problems[0], replace(open_settings, may_split=False)).best
    assert found is not None and found.plan.zero > 0 and fits(found.plan)
    assert search(problems[0], replace(open_settings, may_split=False, zero=0)).best is None


def test_a_model_that_fits_only_with_homes_on_the_host() -> None:
    """All devices together have less than weights, gradients and states take. A pipeline moves what
    data parallelism would, and has nothing to all-reduce.
    """
    devices = cluster(1.99 * TRAINED_BYTES, HOST)
    plan = plan_of(devices)
    assert is_elsewhere(plan) and fits(plan)
    assert wh.simulate(plan).step_s <= wh.simulate(plan_of(devices, strategy="data")).step_s
    assert len(plan.stages) > 1
    with pytest.raises(DoesNotFit):
        plan_of(devices, offload=False)


@pytest.mark.parametrize(("link_bytes_per_s", "moves"), [(1 * MEGA, False), (100 * GIGA, True)])
def test_the_cheaper_of_recomputation_and_offload(link_bytes_per_s: float, moves: bool) -> None:
    """Weights are small beside what forward saves."""
    host = HostMemory(8 * GIGA, 1000 * GIGA, link_bytes_per_s)
    plan = plan_of(cluster(400 * MEGA, host), 65536, num_micro_batch=1)
    assert fits(plan)
    assert is_elsewhere(plan) == moves
    assert any(stage.num_recomputed for stage in plan.stages) != moves


def test_homes_on_the_host_that_were_forbidden_are_named() -> None:
    """More devices would help, too, but what was set is said first."""
    blamed = r'"offload": False makes every plan impossible\. Try: leave it open: .* on the host'
    with pytest.raises(DoesNotFit, match=blamed):
        plan_of(cluster(1.99 * TRAINED_BYTES, HOST), strategy="auto", offload=False)


def test_what_is_missing_is_said_of_all_memories() -> None:
    tiny = HostMemory(round(0.1 * TRAINED_BYTES), GIGA, GIGA)
    with pytest.raises(DoesNotFit, match=r"No plan fits: .* beside them\. Try: .* more memory"):
        plan_of(cluster(0.5 * TRAINED_BYTES, tiny))
