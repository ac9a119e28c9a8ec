"""The schedule of a draft: the fastest one, and where memory is too small for it, one made for the memory that there is.

The list scheduler knows one device for each VirtualDevice. Of its ranks the tightest counts: with n samples of a micro-batch on it,

    a stage keeps                       n * bytes a sample + bytes of a micro-batch
    all stages together may keep        memory of the device - weights, gradients, optimizer state, buffers - room for a backward to work

Where no order stays within that, 1F1B is taken: few orders keep less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from whale import scheduling
from whale.planning.balance import Situation
from whale.planning.workload import StageBytes

FIXED_ORDERS = ("gpipe", "1f1b", "interleaved", "wave")
"""schedules that are the same whatever the stages cost: made once for all drafts"""


@lru_cache(maxsize=8)
def fixed_schedule(name: str, graph: scheduling.StageGraph, num_micro_batch: int) -> scheduling.Schedule:
    return scheduling.build(name, graph, num_micro_batch)


def fastest_schedule(name: str, graph: scheduling.StageGraph, num_micro_batch: int, costs: scheduling.Costs) -> scheduling.Schedule:
    """Whatever the memory."""
    if name in FIXED_ORDERS:
        return fixed_schedule(name, graph, num_micro_batch)
    return scheduling.build(name, graph, num_micro_batch, costs)


def lean_schedule(name: str, graph: scheduling.StageGraph, num_micro_batch: int, costs: scheduling.Costs) -> scheduling.Schedule:
    """Within the memory caps of the costs, if there is an order that is."""
    try:
        return scheduling.build(name, graph, num_micro_batch, costs)
    except ValueError:  # no order was found that stays within the caps
        return fixed_schedule("1f1b", graph, num_micro_batch)


def with_memory(
    costs: scheduling.Costs,
    device_of_stage: Sequence[int],
    stages: Sequence[StageBytes],
    room_to_work: Sequence[int],
    situation: Situation,
    micro_batch: int,
) -> scheduling.Costs:
    """The costs with what every stage keeps of a micro-batch of that size, and what every VirtualDevice has room for.

    `room_to_work`: of every stage, bytes beside the samples. A grid has no cap here: its schedule is the fastest one or 1F1B.
    """
    shares = situation.without_limits().samples_by_rank(micro_batch)
    activation, weight_part = [0.0] * len(stages), [0.0] * len(stages)
    caps = [math.inf] * len(situation.virtual_devices)
    for device in situation.virtual_devices:
        own = [stage for stage, index in enumerate(device_of_stage) if index == device.index]
        limited = []
        for rank in (rank for members in device.ranks for rank in members):
            memory = situation.memory[rank]
            if memory.capacity_bytes and shares[rank] and device.grid is None:
                static = memory.static_bytes - memory.fixed_bytes + sum(room_to_work[stage] for stage in own)
                limited.append(((memory.capacity_bytes - static) / shares[rank], shares[rank]))
        if limited:
            sample_room, number = min(limited)
            working = max(number * stages[stage].working_sample_bytes + stages[stage].working_fixed_bytes for stage in own)
            caps[device.index] = max(0.0, number * sample_room - working)
            for stage in own:
                kept, later = stages[stage].kept, stages[stage].weight_part
                activation[stage] = number * kept.sample_bytes + kept.fixed_bytes
                weight_part[stage] = number * later.sample_bytes + later.fixed_bytes
    return replace(costs, activation=tuple(activation), weight_part=tuple(weight_part), memory_cap=tuple(caps))
