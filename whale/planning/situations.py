"""Load and memory of every rank under one draft of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whale.capture.graph import CapturedGraph
from whale.capture.kinds import trains_batch_norm
from whale.capture.sample_states import batch_dim
from whale.cluster.cluster import Cluster
from whale.planning.assignment import Assignment
from whale.planning.balance import Situation
from whale.planning.describe import holders
from whale.planning.plan import DeviceMemory
from whale.planning.pricing import shared_gradient_bytes
from whale.planning.shares import Load
from whale.planning.split_memory import grid_memory
from whale.planning.split_stages import Split
from whale.planning.workload import Workload


def make_situation(
    cluster: Cluster,
    workload: Workload,
    split: Split,
    assignment: Assignment,
    device_of_stage: Sequence[int],
    peak_in_flight: Sequence[int],
) -> Situation:
    """What every rank has to do for a sample and to hold. On a grid a sample is one of the replica's, which all its devices do together."""
    kinds = [device.kind for device in cluster.devices]
    placement = split.placement
    held = holders(workload.captured, assignment)
    loads: dict[int, Load] = {}
    memory: dict[int, DeviceMemory] = {}

    def is_shared(stages: tuple[int, ...]) -> bool:
        owners = {device_of_stage[stage] for stage in stages}
        return len(owners) > 1 or placement.num_replicas * placement.virtual_devices[min(owners)].num_devices > 1

    for device in placement.virtual_devices:
        stages = [stage for stage, index in enumerate(device_of_stage) if index == device.index]
        slices = [assignment.slices[stage] for stage in stages]
        crossing = [[node for node, source, destination in assignment.crossings if stage in (source, destination)] for stage in stages]
        operations = [node for part in slices for node in part.operations]
        flying = [peak_in_flight[stage] for stage in stages]
        needed = workload.memory(slices, crossing, flying)
        if device.grid is not None:
            load = Load(sum(split.shardings[stage].seconds for stage in stages) / split.num_samples)
            for place, part in enumerate(grid_memory(workload, split, stages, needed, flying)):
                for rank in (members[place] for members in device.ranks):
                    loads[rank], memory[rank] = load, replace(part, capacity_bytes=kinds[rank].memory_bytes)
            continue
        sums = shared_gradient_bytes(workload.captured, held, stages, is_shared)
        needed = replace(needed, buffer_bytes=needed.buffer_bytes + sums)
        own_ranks = [rank for replica in device.ranks for rank in replica]
        totals = {kind: workload.times(operations, kind).total for kind in {kinds[rank] for rank in own_ranks}}
        for rank in own_ranks:
            loads[rank] = Load(totals[kinds[rank]].sample_s, totals[kinds[rank]].fixed_s)
            memory[rank] = replace(needed, capacity_bytes=kinds[rank].memory_bytes)
    ranks = range(cluster.num_devices)
    return Situation(
        placement.virtual_devices,
        tuple(loads[rank] for rank in ranks),
        tuple(memory[rank] for rank in ranks),
        tuple(kind.name for kind in kinds),
        _least_samples(workload.captured, assignment),
        workload.batch_bytes / workload.batch_size,
    )


def _least_samples(captured: CapturedGraph, assignment: Assignment) -> int:
    """0 where a device may skip a micro-batch: no sums over devices inside it, no buffers to update, no value without samples to send."""
    sums_inside = any(trains_batch_norm(node) or "all_reduce" in node.meta for node in captured.compute_nodes())
    unbatched = any(batch_dim(node, captured.batch_symbol) is None for node, _, _ in assignment.crossings)
    return 1 if sums_inside or unbatched or captured.buffer_updates else 0
