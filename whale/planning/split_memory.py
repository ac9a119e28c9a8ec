"""Memory and times of the devices of a grid: their parts of the weights, and of what autograd
keeps.

What an operation keeps lies like its tensors: cut by every axis along which its option cuts
something. So of the bytes that it would keep on one device a place keeps the part

    product over the axes that cut the operation of (largest share of that axis)                                        (1)

Gathered copies come on top where they are kept. A region that is computed again keeps what enters
it, and gathers again. What a backward works with beside all that is in `grid_room.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from torch.fx import Node

from whale.costs.saved import Kept
from whale.planning.grid_room import most_exchanged, room_on_grid
from whale.planning.pricing import OnGrids, sharded_weights
from whale.planning.recompute import Regions
from whale.planning.split import Split, together_seconds
from whale.planning.workload import INSIDE_OPERATIONS, Workload
from whale.plans.figures import Seconds, StageFigures, StageTimes
from whale.plans.grid import AXES
from whale.plans.plan import DeviceMemory
from whale.plans.sharding import Sharding
from whale.sharding.space import Space


def grid_memory(
    workload: Workload,
    split: Split,
    stages: Sequence[int],
    whole: DeviceMemory,
    in_flight: Sequence[int],
    regions: Mapping[int, Regions] | None = None,
) -> list[DeviceMemory]:
    """By place. `whole`: the same stages on one device; `regions`: of each stage, what is computed
    again.
    """
    again = regions or {}
    kept = [
        kept_on_grid(workload, split.spaces[stage], split.shardings[stage], again.get(stage, {}))
        for stage in stages
    ]
    fixed = sum(flying * each.fixed_bytes for flying, each in zip(in_flight, kept, strict=True))
    per_sample = sum(
        flying * each.sample_bytes for flying, each in zip(in_flight, kept, strict=True)
    )
    all_kept = [
        workload.saved.total(split.spaces[stage].program.operations, (), again.get(stage, {}))
        for stage in stages
    ]
    alone = max(
        0.0,
        whole.sample_bytes
        - sum(flying * each.sample_bytes for flying, each in zip(in_flight, all_kept, strict=True)),
    )
    working = [
        working_on_grid(workload, split, stage, again.get(stage, {}), alone) for stage in stages
    ]
    most = max(working, key=lambda each: each.fixed_bytes + split.num_samples * each.sample_bytes)
    rooms = [rooms_to_work(workload, split, stage) for stage in stages]
    found = []
    for place, held in enumerate(split.held_bytes(stages)):
        here = [room[place] for room in rooms]
        memory = replace(
            whole,
            parameter_bytes=held.parameters,
            gradient_bytes=held.trained,
            optimizer_bytes=round(workload.optimizer_ratio * held.trained),
            fixed_bytes=round(fixed) + most.fixed_bytes + sum(here),
            sample_bytes=max(0.0, per_sample + most.sample_bytes),
            update_bytes=workload.room_to_update(here),
        )
        found.append(memory.with_shared(held.shared))
    return found


def working_on_grid(
    workload: Workload, split: Split, stage: int, regions: Regions, alone: float
) -> Kept:
    """What the backward of a stage works with beside all that is kept, weights' own gradients
    apart. `alone`: on one device, for each sample; a grid has its part of that where this is more,
    for a region that is computed again or a backward in two parts."""
    sharding = split.shardings[stage]
    space = split.spaces[stage]
    device = split.on_device(stage)
    part = alone / sharding.grid.num_devices
    if regions:
        exchanged = most_exchanged(device)
        return Kept(part + exchanged.sample_bytes, exchanged.fixed_bytes)
    if sharding.keeps_gathered not in device.rooms:
        parts = kept_parts(workload, space, sharding, regions)
        device.rooms[sharding.keeps_gathered] = room_on_grid(
            device, workload.saved, parts, sharding.keeps_gathered
        )
    room = device.rooms[sharding.keeps_gathered]
    inside = INSIDE_OPERATIONS * kept_on_grid(workload, space, sharding, regions).sample_bytes
    if room.fixed_bytes + split.num_samples * (room.sample_bytes + inside - part) < 0:
        return Kept(part, 0)
    return Kept(room.sample_bytes + inside, room.fixed_bytes)


def rooms_to_work(workload: Workload, split: Split, stage: int) -> list[int]:
    """By place: bytes beside the samples that the backward of a stage works with, as
    `Workload.room_to_work` without a grid.
    """
    return [workload.room_beside(held.largest, held.trained) for held in split.held_bytes((stage,))]


def on_grids(
    workload: Workload,
    split: Split,
    holders: Mapping[str, tuple[int, ...]],
    device_of_stage: Sequence[int],
    regions: Sequence[Regions],
) -> OnGrids:
    """The figures of the stages on grids: all devices of a grid work together, each on its part.
    `regions`: of each stage.
    """

    def figures(stage: int, alone: StageFigures) -> StageFigures:
        sharding = split.shardings[stage]
        space = split.spaces[stage]
        kept = kept_on_grid(workload, space, sharding, regions[stage])
        again = repeated_part(workload, space, regions[stage])
        forward, inputs, weights = (
            Seconds(s / split.num_samples) for s in together_seconds(sharding, 1, again)
        )
        times = dict.fromkeys(alone.times, StageTimes(forward, inputs, weights))
        working = working_on_grid(
            workload, split, stage, regions[stage], alone.working_sample_bytes
        )
        return StageFigures(
            times,
            kept.sample_bytes,
            kept.fixed_bytes,
            working_sample_bytes=working.sample_bytes,
            weight_part_sample_bytes=alone.weight_part_sample_bytes / sharding.grid.num_devices,
            working_fixed_bytes=max(rooms_to_work(workload, split, stage)),
            exchanged_fixed_bytes=working.fixed_bytes,
        )

    layouts = {
        name: layout
        for sharding in split.shardings.values()
        for name, layout in sharding.stored.items()
    }
    devices = {
        stage: split.placement.virtual_devices[device]
        for stage, device in enumerate(device_of_stage)
    }
    return OnGrids(
        {stage: partial(figures, stage) for stage in split.shardings},
        sharded_weights(workload.captured, layouts, holders, devices),
    )


def repeated_part(workload: Workload, space: Space, regions: Regions) -> float:
    """Of the forward of a stage, what is done again in backward, by its operations' work."""
    if not regions:
        return 0.0
    work = {
        node: workload.costs[node].flop + workload.costs[node].moved_bytes
        for node in space.program.operations
    }
    return sum(work[node] for node in work if node in regions) / max(1.0, sum(work.values()))


def kept_on_grid(workload: Workload, space: Space, sharding: Sharding, regions: Regions) -> Kept:
    """Line (1); and gathered copies."""
    saved = workload.saved
    parts = kept_parts(workload, space, sharding, regions)
    copies = (1.0 - repeated_part(workload, space, regions)) * sharding.keeps_gathered
    return Kept(
        sum(part * saved.kept[storage].sample_bytes for storage, part in parts.items())
        + copies * sharding.gathered.sample_bytes,
        round(
            sum(part * saved.kept[storage].fixed_bytes for storage, part in parts.items())
            + copies * sharding.gathered.fixed_bytes
        ),
    )


def kept_parts(
    workload: Workload, space: Space, sharding: Sharding, regions: Regions
) -> dict[int, float]:
    """Of every storage that is kept the part that a place keeps: where it is kept largest."""
    nodes = list(space.program.captured.graph.nodes)
    largest: dict[int, float] = {}
    chosen = {nodes[index]: names for index, names in sharding.choices.items()}

    @cache
    def part_of(node: Node) -> float:
        part = 1.0
        if node in chosen:
            options = {option.name: option for option in space.options[node]}
            for axis, name in zip(AXES, chosen[node], strict=True):
                if name and options[name].is_cut:
                    part /= sharding.grid.size(axis)
        return part

    saved = workload.saved
    for node in space.program.operations:
        found = [(node, saved.of_node.get(node, frozenset()))]
        if node in regions:
            outside = [
                source for source in node.all_input_nodes if regions.get(source) != regions[node]
            ]
            found = [(source, saved.result_of_node.get(source, frozenset())) for source in outside]
        for owner, storages in found:
            part = part_of(owner)
            for storage in storages:
                largest[storage] = max(largest.get(storage, 0.0), part)
    return largest
