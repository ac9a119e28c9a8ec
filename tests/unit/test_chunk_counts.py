"""How many chunks "auto" puts on each device: more of them fill the pipeline faster, and every cut
adds messages and actions.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale.cluster.cluster import Device
from whale.cluster.kinds import DeviceKind
from whale.cluster.network import Link
from whale.planning.chunks import AUTO_COUNTS
from whale.plans.plan import Plan

pytestmark = pytest.mark.usefixtures("fresh_session")

WIDTH = 64
NUM_DEVICES = 4
NUM_LAYERS = 16
BATCH_SIZE = 32
FREE = Link(bytes_per_s=1e15, latency_s=0.0)
SLOW = DeviceKind("slow", flop_per_s=1e6, memory_bytes=0, bytes_per_s=1e15)
"""a layer takes a quarter of a second: far more than an action of the runtime"""


class Net(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum(dim=1).mean()


def planned(link: Link, num_layers: int = NUM_LAYERS, **more: object) -> Plan:
    devices = tuple(Device(rank, "host", rank, SLOW) for rank in range(NUM_DEVICES))
    config = {
        "num_task_graph": NUM_DEVICES,
        "num_micro_batch": NUM_DEVICES,
        "schedule": "auto",
        "check_capture": False,
        **more,
    }
    return wh.plan(
        Net(num_layers),
        torch.randn(BATCH_SIZE, WIDTH),
        cluster=wh.Cluster(devices, link, link),
        config=config,
    )


def num_chunks(plan: Plan) -> int:
    return len(plan.stages) // NUM_DEVICES


def why_schedule(plan: Plan) -> str:
    return next(decision.why for decision in plan.decisions if decision.what == "schedule")


def test_more_chunks_without_latency() -> None:
    """With C chunks and split backwards the last device waits for (P - 1) forwards of a chunk, so
    the step takes its work and (P - 1) / C forwards of a device.
    """
    plan = planned(FREE)
    assert num_chunks(plan) == max(AUTO_COUNTS)
    assert {action.kind for order in plan.schedule.orders for action in order} >= {"I", "W"}
    assert f"; {max(AUTO_COUNTS)} chunks on each VirtualDevice take least time" in why_schedule(
        plan
    )
    work_s = sum(device.compute_s for device in wh.simulate(plan).devices) / NUM_DEVICES
    forward_s = work_s / NUM_DEVICES / 3  # of one micro-batch on one device
    fill_s = (NUM_DEVICES - 1) * forward_s / max(AUTO_COUNTS)
    assert wh.simulate(plan).gradients_s == pytest.approx(work_s + fill_s, rel=0.03)


def test_fewer_chunks_where_messages_take_long() -> None:
    plan = planned(Link(bytes_per_s=1e15, latency_s=3.0))
    assert num_chunks(plan) == 1
    assert "; 1 chunks on each VirtualDevice take least time" in why_schedule(plan)


def test_as_many_chunks_as_the_model_has_points() -> None:
    """Larger numbers than it can be cut into are left out; a number that the user asks for is
    refused.
    """
    assert num_chunks(planned(FREE, num_layers=8)) <= 2
    with pytest.raises(ValueError, match="needs 8 chunks on each of 4 VirtualDevices, 32 in all"):
        planned(FREE, num_layers=8, num_waves=4)
