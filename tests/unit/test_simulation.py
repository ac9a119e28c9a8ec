"""The simulation against formulas, hand-worked cases, the scheduler's own simulation and the
planner's own memory.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import whale as wh
from whale import scheduling
from whale.cluster.network import Link, Network
from whale.plans.figures import Figures, Seconds, StageFigures, StageTimes, StateFigures
from whale.plans.plan import (
    PLAN_FORMAT,
    Crossing,
    Holding,
    Plan,
    PlannedDevice,
    ReplicaTemplate,
    Settings,
    Stage,
)
from whale.plans.revise import replicas_on
from whale.plans.samples import SampleMap, with_samples
from whale.plans.virtual_devices import VirtualDevice
from whale.scheduling.memory import ActionMemory, Bytes
from whale.simulation.communication import AllReduce, Links, ring_s
from whale.simulation.simulate import run, step_seconds
from whale.simulation.timeline import DeviceTimeline, Event, Timeline

FREE = Link(1e30, 0.0)
MODEL_BYTES = 400


def plan_of(
    name: str,
    num_stages: int,
    num_micro_batch: int,
    times: list[tuple[float, float, float]],
    num_replicas: int = 1,
    hosts: tuple[str, ...] | None = None,
    link: Link = FREE,
    update_s: float = 0.0,
) -> Plan:
    """Stages in a row, one device each; `times`: forward, input gradient and weight gradient of one sample;
    one sample in a micro-batch.
    """
    graph = scheduling.StageGraph.chain(num_stages)
    ranks = [
        tuple((replica * num_stages + stage,) for replica in range(num_replicas))
        for stage in range(num_stages)
    ]
    number = num_stages * num_replicas
    stages = tuple(
        StageFigures(
            {"toy": StageTimes(Seconds(f), Seconds(i), Seconds(w))},
            ActionMemory(saved=Bytes(10.0), workspace=Bytes(1.0)),
        )
        for f, i, w in times
    )
    figures = Figures(
        stages=stages,
        states=tuple(
            StateFigures((stage,), MODEL_BYTES, MODEL_BYTES) for stage in range(num_stages)
        ),
        network=Network(hosts or ("one",) * number, link, link),
        update_s=(update_s,) * number,
        memory_bytes=(10_000,) * number,
        optimizer_ratio=2.0,
        batch_bytes=3,
    )
    edges = [(stage, stage + 1) for stage in range(num_stages - 1)]
    devices = tuple(VirtualDevice(stage, ranks[stage]) for stage in range(num_stages))
    template = ReplicaTemplate(
        grids=(None,) * num_stages,
        stages=tuple(
            Stage(stage, stage, (), 1, 1.0, 1.0, (f"w{stage}",), MODEL_BYTES)
            for stage in range(num_stages)
        ),
        stage_of_operation=(),
        crossings=tuple(Crossing("h", a, b, 50, True, True, 0.0, "") for a, b in edges),
        tensors={f"w{stage}": Holding((stage,)) for stage in range(num_stages)},
        schedule=scheduling.build(name, graph, num_micro_batch),
    )
    return with_samples(
        Plan(
            format=PLAN_FORMAT,
            model="none",
            settings=Settings(bucket_bytes=2**20),
            batch_size=num_micro_batch * num_replicas,
            num_micro_batch=num_micro_batch,
            devices=(PlannedDevice("toy", 1.0),),
            device_of_rank=(0,) * number,
            task_graphs=(),
            templates=(template,),
            replicas=replicas_on(devices),
            figures=figures,
        )
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "auto"])
@pytest.mark.parametrize("link", [FREE, Link(1e3, 0.1)])
def test_the_seconds_alone_are_those_of_the_whole_simulation(name: str, link: Link) -> None:
    times = [(1.0, 1.0, 0.5), (2.0, 1.5, 1.0), (1.5, 2.0, 1.0)]
    hosts = ("a", "a", "b", "b", "b", "a")
    plan = plan_of(name, 3, 4, times, num_replicas=2, hosts=hosts, link=link, update_s=0.25)
    whole = wh.simulate(plan)
    alone = step_seconds(plan)
    assert (alone.gradients_s, alone.step_s) == (whole.gradients_s, whole.step_s)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    num_stages=st.integers(1, 4),
    num_micro_batch=st.integers(1, 6),
    latency=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_one_replica_takes_the_times_of_the_schedulers_own_simulation(
    name: str, num_stages: int, num_micro_batch: int, latency: float, seed: int
) -> None:
    draw = random.Random(seed)
    times = [
        (draw.uniform(0.5, 2), draw.uniform(0.5, 2), draw.uniform(0.5, 2))
        for _ in range(num_stages)
    ]
    plan = plan_of(name, num_stages, num_micro_batch, times, link=Link(1e30, latency))
    schedule = plan.schedule
    edges = schedule.stage_graph.edges
    costs = scheduling.Costs(
        *(tuple(column) for column in zip(*times, strict=True)),
        message_s=dict.fromkeys(edges, latency),
    )  # type: ignore[arg-type]
    expected = scheduling.simulate(schedule, costs)
    found = wh.simulate(plan)
    assert found.step_s == pytest.approx(expected.step_s)
    assert [device.compute_s for device in found.devices] == pytest.approx(expected.busy_s)
    for device, order, starts in zip(found.devices, schedule.orders, expected.starts, strict=True):
        computed = [
            (str(action), start)
            for action, start in zip(order, starts, strict=True)
            if action.is_compute
        ]
        assert [
            (event.name, pytest.approx(event.start_s))
            for event in device.events
            if event.is_compute
        ] == computed
        assert device.busy_s + device.wait_s + found.idle_s(device.rank) == pytest.approx(
            found.step_s
        )


def test_messages_of_two_devices_that_leave_a_host_take_turns_on_its_card() -> None:
    links = Links(Network(("a", "a", "b"), Link(100.0, 0.1), Link(10.0, 0.5)), 1.0)
    assert links.send("m", 0, 2, 50, now=1.0) == pytest.approx(1 + 5 + 0.5)
    assert links.send("m", 1, 2, 50, now=2.0) == pytest.approx(6 + 5 + 0.5)  # behind the first
    assert links.send("m", 0, 1, 50, now=2.0) == pytest.approx(
        2 + 0.5 + 0.1
    )  # inside the host nobody is in its way
    assert links.send("m", 2, 0, 50, now=2.0) == pytest.approx(2 + 5 + 0.5)  # another card
    assert [message.start_s for message in links.messages] == pytest.approx([1.0, 6.0, 2.0, 2.0])


def test_two_pipelines_with_their_first_stages_on_one_host_wait_for_each_other() -> None:
    """2 stages x 2 replicas: both first stages send 50 bytes at 1.0 s over a card of 100
    bytes/s.
    """
    hosts = ("a", "b", "a", "b")
    plan = plan_of(
        "gpipe", 2, 1, [(1.0, 1.0, 0.0)] * 2, num_replicas=2, hosts=hosts, link=Link(100.0, 0.0)
    )
    silent = replace(plan, figures=replace(plan.figures, states=()))  # type: ignore[type-var]
    found = wh.simulate(silent)
    starts = {
        device.rank: {event.name: event.start_s for event in device.events}
        for device in found.devices
    }
    assert (starts[1]["F1.0"], starts[3]["F1.0"]) == pytest.approx((1.5, 2.0))
    waits = [event for event in found.devices[3].events if event.name == "receive F 0>1.0"]
    assert [(event.start_s, event.end_s) for event in waits] == [(0.0, pytest.approx(2.0))]


def test_gradients_are_added_in_every_backward_but_the_first() -> None:
    plan = plan_of("1f1b", 2, 3, [(1.0, 1.0, 1.0)] * 2)
    assert plan.figures is not None
    times = StageTimes(Seconds(1.0), Seconds(1.0), Seconds(1.0), Seconds(0.0, 0.25))
    stages = tuple(replace(stage, times={"toy": times}) for stage in plan.figures.stages)
    found = wh.simulate(replace(plan, figures=replace(plan.figures, stages=stages)))
    for device in found.devices:
        backwards = [
            event.end_s - event.start_s for event in device.events if event.name.startswith("B")
        ]
        assert backwards == pytest.approx([2.0, 2.25, 2.25])


@pytest.mark.parametrize(("fixed_s", "limit"), [(3.0, "launches"), (1.0, "compute")])
def test_work_that_any_number_of_samples_takes_is_no_compute(fixed_s: float, limit: str) -> None:
    """Each action of two micro-batches takes a second for its sample, and the rest for none."""
    plan = plan_of("gpipe", 1, 2, [(1.0, 1.0, 1.0)])
    assert plan.figures is not None
    each = Seconds(1.0, fixed_s / 3)
    stages = (replace(plan.figures.stages[0], times={"toy": StageTimes(each, each, each)}),)
    found = wh.simulate(replace(plan, figures=replace(plan.figures, stages=stages)))
    assert found.devices[0].fixed_s == pytest.approx(2 * fixed_s)
    assert found.step_s == pytest.approx(2 * (3.0 + fixed_s))
    assert found.limit.startswith(limit)
    assert f"{fixed_s / (3 + fixed_s) if limit == 'launches' else 1:.0%} of the step" in found.limit


def test_sums_come_after_the_last_backward_and_the_update_after_all_sums() -> None:
    """Data parallel on two hosts: a ring of 2 devices sends 400 bytes over each link; then 0.25 s
    for the optimizer.
    """
    link = Link(100.0, 0.01)
    plan = plan_of(
        "gpipe", 1, 2, [(1.0, 1.0, 1.0)], num_replicas=2, hosts=("a", "b"), link=link, update_s=0.25
    )
    found = wh.simulate(plan)
    closed = 2 * 3.0
    assert (
        found.gradients_s
        == pytest.approx(closed + ring_s(MODEL_BYTES, [link], 2))
        == pytest.approx(closed + 4.02)
    )
    assert found.step_s == pytest.approx(found.gradients_s + 0.25)
    assert found.samples_per_s == pytest.approx(4 / found.step_s)
    assert found.bubble == pytest.approx(1 - 6.25 / found.step_s)
    assert "all-reduce of gradients" in found.limit and "waits 39% of the step" in found.limit


def test_two_rings_that_leave_the_same_hosts_take_turns() -> None:
    """2 stages x 2 replicas, stages side by side on each host: the second ring waits for
    the card.
    """
    hosts = ("a", "a", "b", "b")
    plan = plan_of(
        "gpipe", 2, 1, [(1.0, 1.0, 0.0)] * 2, num_replicas=2, hosts=hosts, link=Link(100.0, 0.0)
    )
    quick = replace(
        plan, figures=replace(plan.figures, network=replace(plan.figures.network, intra_host=FREE))
    )  # type: ignore[union-attr, type-var]
    found = wh.simulate(quick)
    # stage 1 closes at 3 s, stage 0 at 4 s; 4 s on the card each
    assert found.gradients_s == pytest.approx(3 + 4 + 4)


def test_sums_end_when_buckets_sent_one_by_one_would() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        start = draw.random()
        length = draw.random()
        free = 2 * draw.random()
        seconds = draw.random()
        count = draw.randint(1, 6)
        clock = free
        for bucket in range(count):
            ready = start + length * (bucket + 1) / count
            clock = max(clock, ready) + seconds / count
        assert AllReduce((0,), (0, 1), seconds, count).end(
            start + length, length, free
        ) == pytest.approx(clock)


def test_memory_follows_the_micro_batches_in_flight() -> None:
    """GPipe saves all 4 micro-batches, 10 bytes each; a backward needs 1 more, and gradients are
    there from the end of the first.

    Weights, optimizer and batch are there all the time. So most is used when the second backward
    begins.
    """
    found = wh.simulate(plan_of("gpipe", 2, 4, [(1.0, 1.0, 1.0)] * 2))
    first = found.devices[0]
    static = MODEL_BYTES + 2 * MODEL_BYTES + 3
    assert [point.total_bytes for point in first.memory[:2]] == [static, static + 10]
    assert first.peak_bytes == {
        "weights": 400, "gradients": 400, "optimizer state": 800, "activations": 3 * 10 + 1, "buffers": 3,
    }  # fmt: skip
    assert max(point.total_bytes for point in first.memory) == first.peak_total_bytes
    assert first.memory[-1].activation_bytes == 0
    assert [point.time_s for point in first.memory] == sorted(
        point.time_s for point in first.memory
    )


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_the_memory_curve_reaches_the_peak(name: str) -> None:
    """Also where most is there for a moment only: one micro-batch keeps less than its backward
    works with when its gradients are there.
    """
    for device in wh.simulate(plan_of(name, 2, 1, [(1.0, 1.0, 1.0)] * 2)).devices:
        assert max(point.total_bytes for point in device.memory) == device.peak_total_bytes


def test_the_bubble_is_of_devices_that_work() -> None:
    """One computes for 3 s of 4, one for 2 s, and the plan leaves the third out: 3 s of 8 are idle."""
    rows = (
        (Event("F0.0", 0.0, 3.0),),
        (Event("F0.0", 1.0, 2.0), Event("update", 2.0, 3.0)),
        (Event("update", 2.0, 2.1),),
    )
    devices = tuple(
        DeviceTimeline(rank, "V100-16GB", "a", events, (), {}, 0)
        for rank, events in enumerate(rows)
    )
    assert Timeline(devices, (), 3.0, 4.0, 8).bubble == 3 / 8


def test_all_times_can_be_stretched() -> None:
    plan = plan_of("1f1b", 3, 4, [(1.0, 1.0, 1.0)] * 3, link=Link(100.0, 0.1), update_s=0.5)
    assert plan.figures is not None
    assert run(plan, plan.figures, 7.0).step_s == pytest.approx(7 * wh.simulate(plan).step_s)


def test_a_plan_without_figures_says_what_to_do() -> None:
    with pytest.raises(
        ValueError,
        match=r"has no figures of its cluster, so it cannot be simulated: make it again with wh\.plan",
    ):
        wh.simulate(replace(plan_of("1f1b", 1, 1, [(1.0, 1.0, 1.0)]), figures=None))


# ---- plans of the planner


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


CLUSTER = """
hosts: [{name: big, kind: V100-16GB, count: 2}, {name: small, kind: P100, count: 2}]
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> wh.Plan:
    file = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    file.write_text(CLUSTER)
    return wh.plan(
        Block(),
        torch.randn(32, 64),
        loss=lambda output, batch: output.square().mean(),
        cluster=str(file),
        config={"num_task_graph": 2, "num_micro_batch": 4},
    )


def test_busy_time_is_what_the_shares_were_planned_with(planned: wh.Plan) -> None:
    found = wh.simulate(planned)
    loads = planned.loads
    samples = SampleMap(planned, 32, 4)
    for device in found.devices:
        place, replica, position = planned.place_of_rank(device.rank)
        shares = [samples.shares(m)[replica].runs[place][position] for m in range(4)]
        assert device.compute_s == pytest.approx(
            sum(loads[device.rank].seconds(share) for share in shares)
        )


def test_memory_is_the_planners(planned: wh.Plan) -> None:
    """The planner counts the largest micro-batch of each stage at once, the simulation what is
    there together: at most that.
    """
    found = wh.simulate(planned)
    samples = SampleMap(planned, 32, 4)
    for device, memory in zip(found.devices, planned.memory, strict=True):
        place, replica, position = planned.place_of_rank(device.rank)
        share = samples.shares(0)[replica].runs[place][position]
        assert device.peak_bytes["weights"] == memory.parameter_bytes
        assert device.peak_bytes["buffers"] == memory.buffer_bytes
        assert device.peak_bytes["optimizer state"] == memory.optimizer_bytes
        assert device.peak_total_bytes == pytest.approx(memory.total_bytes(share), rel=0.05)
        assert device.peak_total_bytes <= memory.total_bytes(share) + 1  # up to rounding


def test_a_saved_plan_gives_the_same_timeline(planned: wh.Plan, tmp_path: Path) -> None:
    planned.save(tmp_path / "plan.json")
    assert (
        wh.simulate(wh.Plan.load(tmp_path / "plan.json")).to_json()
        == wh.simulate(planned).to_json()
    )


def test_the_trace_holds_every_action_message_and_memory(planned: wh.Plan, tmp_path: Path) -> None:
    timeline = wh.simulate(planned)
    timeline.save_trace(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    actions = [
        str(action) for order in planned.schedule.orders for action in order if action.is_compute
    ]
    assert sorted(
        row["name"] for row in rows if row.get("cat") == "compute" and row["name"] != "update"
    ) == sorted(actions * 2)
    assert sum(row.get("cat") == "message" for row in rows) == len(timeline.messages) > 0
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {
        "host big",
        "host small",
    }
    assert sum(row["ph"] == "C" for row in rows) == sum(
        len(device.memory) for device in timeline.devices
    )
    last = max(row["ts"] + row["dur"] for row in rows if row["ph"] == "X")
    assert last == pytest.approx(timeline.step_s * 1e6)
