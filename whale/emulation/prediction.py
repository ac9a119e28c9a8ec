"""What the schedule's own simulation says of an emulated job: every action of every rank, with the times that the emulation keeps.

Each model replica is simulated by itself. Where devices of one VirtualDevice differ, the slowest counts; messages are alone on their
link (the emulation shares the network card of a host); the runtime itself takes no time. The sums of gradients come after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whale.emulation.load import Times
from whale.emulation.sums import Sum
from whale.planning.samples import SampleMap
from whale.planning.slices import bridge
from whale.scheduling import Action, Costs, Edge, Kind, simulate

Event = tuple[str, float, float]
"""(action, start, end) in seconds from the start of the step"""


@dataclass(frozen=True)
class Prediction:
    """Of one step."""

    events: tuple[tuple[Event, ...], ...]
    """by rank: compute actions and, last, the sums of gradients"""
    step_s: float
    busy_s: tuple[float, ...]
    """by rank"""


def predict(times: Times, sums: Sequence[Sum], factor: float) -> Prediction:
    """All times are stretched by `factor`."""
    plan, schedule = times.plan, times.schedule
    rows: dict[int, list[tuple[Action, float, float]]] = {}
    for replica in range(plan.num_replicas):
        timeline = simulate(schedule, replica_costs(times, replica, factor))
        for device in plan.virtual_devices:
            row = zip(schedule.orders[device.index], timeline.starts[device.index], timeline.ends[device.index], strict=True)
            computed = [each for each in row if each[0].is_compute]
            for rank in device.ranks[replica]:
                rows[rank] = computed
    ends = _ends_of_sums(times, sums, rows)
    events = []
    for rank in range(plan.num_devices):
        shown = [(str(action), start, end) for action, start, end in rows[rank]]
        done = shown[-1][2] if shown else 0.0
        events.append((*shown, ("sums", done, max(done, ends.get(rank, 0.0)))))
    busy = tuple(sum(end - start for _, start, end in rows[rank]) for rank in range(plan.num_devices))
    return Prediction(tuple(events), max(row[-1][2] for row in events), busy)


def replica_costs(times: Times, replica: int, factor: float) -> Costs:
    """Costs of one micro-batch in this model replica."""
    plan, graph = times.plan, times.schedule.stage_graph
    parts: dict[str, list[float]] = {"forward_s": [], "input_backward_s": [], "weight_backward_s": []}
    mean = {rank: sum(times.num_samples(rank)) / plan.num_micro_batch for device in plan.virtual_devices for rank in device.ranks[replica]}
    for stage in plan.stages:
        ranks = plan.virtual_devices[stage.virtual_device].ranks[replica]
        for name, values in parts.items():
            values.append(factor * max(getattr(times.sample_costs(rank), name)[stage.index] * mean[rank] for rank in ranks))
    forward: dict[Edge, float] = {}
    backward: dict[Edge, float] = {}
    for edge in graph.edges:
        forward[edge] = factor * _message_s(times, replica, edge, False)
        backward[edge] = factor * _message_s(times, replica, edge, True)
    return replace(
        times.sample_costs(0),
        forward_s=tuple(parts["forward_s"]),
        input_backward_s=tuple(parts["input_backward_s"]),
        weight_backward_s=tuple(parts["weight_backward_s"]),
        message_s=forward,
        gradient_message_s=backward,
        action_s=0.0,
    )


def _message_s(times: Times, replica: int, edge: Edge, gradient: bool) -> float:
    """Of the first micro-batch, over the slowest pair of devices."""
    plan = times.plan
    crossings = [c for c in plan.crossings if (c.source, c.destination) == edge and (c.gradient or not gradient)]
    if not crossings:
        return 0.0
    samples = SampleMap(plan, plan.batch_size, plan.num_micro_batch)
    devices = [plan.stages[stage].virtual_device for stage in edge]
    here, there = (plan.virtual_devices[device].ranks[replica] for device in devices)
    slowest = 0.0
    for part in bridge(*(samples.devices(0, replica, device) for device in devices)):
        num_bytes = sum(c.sample_bytes * (part.num_samples if c.batched else 1) for c in crossings)
        slowest = max(slowest, times.cluster.link(here[part.source], there[part.destination]).seconds(num_bytes))
    return slowest


def _ends_of_sums(times: Times, sums: Sequence[Sum], rows: dict[int, list[tuple[Action, float, float]]]) -> dict[int, float]:
    """When each rank's last sum is over."""
    free: dict[tuple[int, ...], float] = {}
    last = {rank: {a.stage: (start, end) for a, start, end in row if a.kind is not Kind.FORWARD} for rank, row in rows.items()}
    for each in sorted(sums, key=lambda s: max(last[r][stage][1] for r in s.ranks for stage in s.stages if stage in last[r])):
        before, ends = free.get(each.ranks, 0.0), []
        for rank in each.ranks:
            start, closed = max((last[rank][stage] for stage in each.stages if stage in last[rank]), key=lambda times: times[1])
            ends.append(each.end(closed, closed - start, before))
        free[each.ranks] = max(ends)
    return {rank: max(free[group] for group in free if rank in group) for rank in rows if any(rank in group for group in free)}
