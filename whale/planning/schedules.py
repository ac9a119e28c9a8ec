"""The schedule of a draft or a plan: the fastest one, and where memory is too small for it, one
made for the memory that there is.

The list scheduler knows one device for each VirtualDevice. Of its ranks the tightest counts: with n
samples of a micro-batch on it,

    a stage saves                  n * bytes a sample + bytes of a micro-batch
    all stages together may save   memory of the device - weights, gradients, optimizer state and
                                   buffers - workspace of a backward

Where no order stays within that, 1F1B is taken: few orders save less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from whale import scheduling
from whale.plans.plan import Crossing, DeviceMemory, Plan, Stage
from whale.plans.samples import SampleMap
from whale.plans.virtual_devices import VirtualDevice
from whale.scheduling.memory import ActionMemory, Bytes

FIXED_ORDERS = ("gpipe", "1f1b", "interleaved", "wave")
"""schedules whose order does not depend on what stages cost: made once for all drafts"""
ACTION_S = 1e-4
"""seconds that the runtime adds to a forward or backward"""


def schedule_costs(
    graph: scheduling.StageGraph,
    stages: Sequence[Stage],
    crossings: Sequence[Crossing],
    num_micro_batch: int,
) -> scheduling.Costs:
    """Seconds that the schedule is made for: of one micro-batch on the devices of each stage."""
    messages: dict[scheduling.Edge, float] = {}
    gradients: dict[scheduling.Edge, float] = {}
    for crossing in crossings:
        edge = (crossing.source, crossing.destination)
        messages[edge] = messages.get(edge, 0.0) + crossing.message_s
        if crossing.gradient:
            gradients[edge] = gradients.get(edge, 0.0) + crossing.message_s
    return scheduling.Costs(
        forward_s=tuple(stage.forward_s / num_micro_batch for stage in stages),
        input_backward_s=tuple(stage.input_backward_s / num_micro_batch for stage in stages),
        weight_backward_s=tuple(stage.weight_backward_s / num_micro_batch for stage in stages),
        message_s=messages,
        gradient_message_s=gradients,
        action_s=ACTION_S,
        unsplit=scheduling.stages_without_input_gradient(graph),
    )


@lru_cache(maxsize=8)
def fixed_schedule(
    name: str, graph: scheduling.StageGraph, num_micro_batch: int
) -> scheduling.Schedule:
    return scheduling.build(name, graph, num_micro_batch)


def fastest_schedule(
    name: str,
    graph: scheduling.StageGraph,
    num_micro_batch: int,
    costs: scheduling.Costs,
    tries: int | None = None,
    is_proved: bool = True,
) -> scheduling.Schedule:
    """The fastest schedule of this name, whatever the memory. `tries`: size of the search.
    `is_proved`: as in `scheduling.build`.
    """
    if name in FIXED_ORDERS:
        return fixed_schedule(name, graph, num_micro_batch)
    return scheduling.build(name, graph, num_micro_batch, costs, tries=tries, is_proved=is_proved)


def lean_schedule(
    name: str,
    graph: scheduling.StageGraph,
    num_micro_batch: int,
    costs: scheduling.Costs,
    tries: int | None = None,
    is_proved: bool = True,
) -> scheduling.Schedule:
    """A schedule within the memory caps of the costs; 1F1B where no order is found that is.
    `tries`: size of the search. `is_proved`: as in `scheduling.build`.
    """
    try:
        return scheduling.build(
            name, graph, num_micro_batch, costs, tries=tries, is_proved=is_proved
        )
    except ValueError:  # no order was found that stays within the caps
        return fixed_schedule("1f1b", graph, num_micro_batch)


@dataclass(frozen=True)
class MemoryLimits:
    """What stages save of a micro-batch, and the memory of the devices that run them."""

    virtual_devices: Sequence[VirtualDevice]
    device_of_stage: Sequence[int]
    stages: Sequence[ActionMemory]
    gradient_workspace: Sequence[int]
    """of every stage, bytes beside the samples"""
    memory: Sequence[DeviceMemory]
    """by rank"""
    num_samples: Sequence[int]
    """by rank, of a micro-batch"""

    @staticmethod
    def of_plan(plan: Plan, batch_size: int, num_micro_batch: int) -> MemoryLimits | None:
        """The limits for a mini-batch that may have another size than the planned one; None where
        the plan knows no memory.
        """
        if plan.figures is None or not plan.memory:
            return None
        stages = []
        for each in plan.figures.stages:
            # the fixed part of the workspace is counted apart, in `gradient_workspace`
            workspace = Bytes(each.memory.workspace.sample_bytes)
            stages.append(replace(each.memory, workspace=workspace))
        return MemoryLimits(
            virtual_devices=plan.virtual_devices,
            device_of_stage=[stage.virtual_device for stage in plan.stages],
            stages=stages,
            gradient_workspace=[
                round(each.gradient_workspace_bytes) for each in plan.figures.stages
            ],
            memory=plan.memory,
            num_samples=[
                max(numbers, default=0)  # ranks of other replicas have none
                for numbers in SampleMap(plan, batch_size, num_micro_batch).num_by_rank()
            ],
        )

    def limit(self, costs: scheduling.Costs) -> scheduling.Costs:
        """The costs with what every stage saves and what every VirtualDevice can hold.

        A grid has no cap here: its schedule is the fastest one or 1F1B.
        """
        saved = [0.0] * len(self.stages)
        weight_gradient = [0.0] * len(self.stages)
        caps = [math.inf] * len(self.virtual_devices)
        for device in self.virtual_devices:
            own = [
                stage for stage, index in enumerate(self.device_of_stage) if index == device.index
            ]
            limited = []
            for rank in (rank for members in device.ranks for rank in members):
                memory = self.memory[rank]
                number = self.num_samples[rank]
                if memory.capacity_bytes and number and device.grid is None:
                    static = (
                        memory.static_bytes
                        - memory.fixed_bytes
                        + sum(self.gradient_workspace[stage] for stage in own)
                    )
                    limited.append(((memory.capacity_bytes - static) / number, number))
            if limited:
                free_per_sample, number = min(limited)
                parts = [self.stages[stage] for stage in own]
                working = max(
                    number * part.workspace.sample_bytes + part.workspace.fixed_bytes
                    for part in parts
                )
                caps[device.index] = max(0.0, number * free_per_sample - working)
                for stage, part in zip(own, parts, strict=True):
                    saved[stage] = part.saved.of(number)
                    weight_gradient[stage] = part.weight_gradient.of(number)
        return replace(
            costs,
            saved=tuple(saved),
            weight_gradient=tuple(weight_gradient),
            memory_cap=tuple(caps),
        )


def schedule_of_plan(
    plan: Plan, graph: scheduling.StageGraph, batch_size: int, num_micro_batch: int
) -> scheduling.Schedule:
    """A schedule for what the plan's own does not fit: fewer micro-batches, or a graph with other
    edges. Within the same memory.
    """
    name = plan.schedule.name
    costs = schedule_costs(graph, plan.stages, plan.crossings, num_micro_batch)
    limits = MemoryLimits.of_plan(plan, batch_size, num_micro_batch)
    if name in FIXED_ORDERS or limits is None:
        return fastest_schedule(name, graph, num_micro_batch, costs)
    return lean_schedule(name, graph, num_micro_batch, limits.limit(costs))
