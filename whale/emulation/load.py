"""What a plan asks of its devices, as plain data: times and bytes of every stage. Rank 0 finds it and tells the others.

Times come from the one cost model (`profiling/costs.py`), bytes kept for backward from `profiling/saved.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from whale.capture.graph import CapturedGraph
from whale.cluster.cluster import Cluster
from whale.planning.chunks import schedule_costs
from whale.planning.plan import Plan
from whale.planning.planner import Assignment
from whale.planning.samples import SampleMap
from whale.profiling.costs import node_costs, seconds
from whale.profiling.saved import Kept, saved_for_backward
from whale.scheduling import Action, Costs, Kind, Schedule

NEXT_TO_NOTHING = 0.01
"""an action that takes less than this part of the longest one does not set the stretch"""


@dataclass(frozen=True)
class StageLoad:
    """One stage."""

    sample_s: Mapping[str, float]
    """forward of one sample, by kind of device"""
    kept: Kept
    """from forward to backward"""


@dataclass(frozen=True)
class StateLoad:
    """All parameters and buffers that the same stages hold."""

    stages: tuple[int, ...]
    weight_bytes: int = 0
    trained_bytes: int = 0
    """of these the part that gets gradients"""
    buffer_bytes: int = 0


@dataclass(frozen=True)
class Load:
    """The whole plan."""

    stages: tuple[StageLoad, ...]
    states: tuple[StateLoad, ...]


def load_of(plan: Plan, captured: CapturedGraph, assignment: Assignment, cluster: Cluster) -> Load:
    """Times and bytes of a plan for this graph."""
    costs = node_costs(captured, plan.batch_size)
    saved = saved_for_backward(captured, max(2, plan.batch_size // plan.num_micro_batch))
    kinds = {device.kind.name: device.kind for device in cluster.devices}
    stages = []
    for index, part in enumerate(assignment.slices):
        times = {name: sum(seconds(costs[node], kind) for node in part.operations) / plan.batch_size for name, kind in kinds.items()}
        crossing = [node for node, source, destination in assignment.crossings if index in (source, destination)]
        stages.append(StageLoad(times, saved.total(part.operations, crossing)))
    states: dict[tuple[int, ...], StateLoad] = {}
    for name, holders in plan.holders.items():
        tensor, known = captured.state[name], states.get(holders, StateLoad(holders))
        if tensor.kind == "parameter":
            trained = known.trained_bytes + tensor.num_bytes * tensor.trainable
            states[holders] = replace(known, weight_bytes=known.weight_bytes + tensor.num_bytes, trained_bytes=trained)
        else:
            states[holders] = replace(known, buffer_bytes=known.buffer_bytes + tensor.num_bytes)
    return Load(tuple(stages), tuple(states.values()))


@dataclass(frozen=True)
class Times:
    """Seconds of the actions of a plan on the devices of a cluster, not stretched."""

    plan: Plan
    load: Load
    cluster: Cluster

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule.from_json(self.plan.schedule)

    @cached_property
    def _costs_of_kind(self) -> dict[str, Costs]:
        return {}

    def sample_costs(self, rank: int) -> Costs:
        """Seconds of one sample on the device of this rank."""
        name = self.cluster.devices[rank].kind.name
        if name not in self._costs_of_kind:
            stages = [replace(stage, forward_s=load.sample_s[name]) for stage, load in zip(self.plan.stages, self.load.stages, strict=True)]
            self._costs_of_kind[name] = schedule_costs(self.schedule.stage_graph, stages, (), 1)
        return self._costs_of_kind[name]

    def seconds(self, action: Action, rank: int, num_samples: int) -> float:
        """Of a compute action."""
        costs, stage = self.sample_costs(rank), action.stage
        one = {
            Kind.FORWARD: costs.forward_s[stage],
            Kind.BACKWARD: costs.backward_s(stage),
            Kind.INPUT: costs.input_backward_s[stage],
            Kind.WEIGHT: costs.weight_backward_s[stage],
        }[action.kind]
        return one * num_samples

    def num_samples(self, rank: int) -> list[int]:
        """Samples that this rank gets of each micro-batch of the planned mini-batch."""
        device, replica, place = self.plan.place_of_rank(rank)
        samples = SampleMap(self.plan, self.plan.batch_size, self.plan.num_micro_batch)
        parts = (samples.runs(m, replica, device)[place] for m in range(self.plan.num_micro_batch))
        return [stop - start for start, stop in parts]

    @cached_property
    def shortest_s(self) -> float:
        """Of all compute actions of all ranks, but for those that take next to nothing: they would stretch a step to hours."""
        times = []
        for rank in range(self.plan.num_devices):
            samples, device = self.num_samples(rank), self.plan.place_of_rank(rank)[0]
            times += [self.seconds(a, rank, samples[a.micro_batch]) for a in self.schedule.orders[device] if a.is_compute]
        return min((time for time in times if time >= NEXT_TO_NOTHING * max(times)), default=0.0)
