"""Memory and times of the devices of a grid: their parts of the weights, and of what autograd
saves.

What an operation saves is sharded like its tensors: by every axis along which its option shards
something. So of the bytes that it would save on one device, a device of the grid saves the fraction

    product over the axes that shard the operation of (largest share of that axis)               (1)

Gathered copies come on top where they are saved. A region that is recomputed saves what enters it,
and gathers again. The workspace of a backward is in `grid_workspace.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from torch.fx import Node

from whale.planning.grid_workspace import grid_workspace, most_exchanged
from whale.planning.pricing import OnGrids, sharded_weights
from whale.planning.recompute import Regions
from whale.planning.split import Split, together_seconds
from whale.planning.workload import INSIDE_OPERATIONS, Workload
from whale.plans.away import SEGMENTS_HERE, StageActivations
from whale.plans.figures import Seconds, StageFigures, StageTimes
from whale.plans.grid import AXES
from whale.plans.plan import DeviceMemory
from whale.plans.sharding import Sharding
from whale.scheduling.memory import NOTHING, ActionMemory, Bytes
from whale.sharding.space import Space


def grid_memory(
    workload: Workload,
    split: Split,
    stages: Sequence[int],
    whole: DeviceMemory,
    in_flight: Sequence[int],
    recomputed: Mapping[int, Regions],
    is_away: bool = False,
) -> list[DeviceMemory]:
    """Memory of each device of the grid. `whole`: the same stages on one device; `in_flight`: most
    micro-batches of each stage at once; `recomputed`: by stage, what it recomputes; `is_away`:
    activations are at home elsewhere.
    """
    saved = NOTHING
    saved_whole = NOTHING
    for stage, number in zip(stages, in_flight, strict=True):
        space = split.spaces[stage]
        own = recomputed.get(stage, {})
        sharding = split.shardings[stage]
        if is_away:
            saved += activations_on_grid(workload, space, sharding, own).here
        else:
            saved += number * saved_on_grid(workload, space, sharding, own)
        saved_whole += number * workload.saved.total(space.program.operations, (), own)
    alone = max(0.0, whole.sample_bytes - saved_whole.sample_bytes)
    workspaces = [
        workspace_on_grid(workload, split, stage, recomputed.get(stage, {}), alone)
        for stage in stages
    ]
    # only one backward runs at a time
    largest = max(
        workspaces, key=lambda each: each.fixed_bytes + split.num_samples * each.sample_bytes
    )
    gradient_workspace = [gradient_workspaces(workload, split, stage) for stage in stages]
    found = []
    for place, held in enumerate(split.held_bytes(stages)):
        gradients = [of_stage[place] for of_stage in gradient_workspace]
        memory = replace(
            whole,
            parameter_bytes=held.parameters,
            gradient_bytes=held.trained,
            optimizer_bytes=round(workload.optimizer_ratio * held.trained),
            fixed_bytes=round(saved.fixed_bytes) + round(largest.fixed_bytes) + sum(gradients),
            sample_bytes=max(0.0, saved.sample_bytes + largest.sample_bytes),
            update_bytes=workload.update_workspace(gradients),
        )
        found.append(memory.with_shared(held.shared))
    return found


def workspace_on_grid(
    workload: Workload, split: Split, stage: int, regions: Regions, alone: float
) -> Bytes:
    """What the backward of a stage works with on a device of its grid, beside all that is saved and
    the gradients of its weights.

    `alone`: bytes for each sample on one device without a grid. A device of a grid has its part of
    that where this is more: for a region that is recomputed, or a split backward.
    """
    sharding = split.shardings[stage]
    space = split.spaces[stage]
    device = split.on_device(stage)
    part = alone / sharding.grid.num_devices
    if regions:
        return Bytes(part) + most_exchanged(device)
    if sharding.keeps_gathered not in device.workspaces:
        parts = saved_parts(workload, space, sharding, regions)
        device.workspaces[sharding.keeps_gathered] = grid_workspace(
            device, workload.saved, parts, sharding.keeps_gathered
        )
    exact = device.workspaces[sharding.keeps_gathered]
    inside = INSIDE_OPERATIONS * saved_on_grid(workload, space, sharding, regions).sample_bytes
    if exact.fixed_bytes + split.num_samples * (exact.sample_bytes + inside - part) < 0:
        return Bytes(part)
    return exact + Bytes(inside)


def gradient_workspaces(workload: Workload, split: Split, stage: int) -> list[int]:
    """Bytes that the backward of a stage works with on each device of its grid, samples aside."""
    return [
        workload.workspace_of_weights(held.largest, held.trained)
        for held in split.held_bytes((stage,))
    ]


def on_grids(
    workload: Workload,
    split: Split,
    holders: Mapping[str, tuple[int, ...]],
    device_of_stage: Sequence[int],
    regions: Sequence[Regions],
) -> OnGrids:
    """Figures of the stages on grids: all devices of a grid work together, each on its part.
    `regions`: what each stage recomputes.
    """

    def figures(stage: int, alone: StageFigures) -> StageFigures:
        sharding = split.shardings[stage]
        space = split.spaces[stage]
        saved = saved_on_grid(workload, space, sharding, regions[stage])
        again = repeated_part(workload, space, regions[stage])
        forward, inputs, weights = (
            Seconds(s / split.num_samples) for s in together_seconds(sharding, 1, again)
        )
        times = dict.fromkeys(alone.times, StageTimes(forward, inputs, weights))
        workspace = workspace_on_grid(
            workload, split, stage, regions[stage], alone.memory.workspace.sample_bytes
        )
        gradient_workspace = max(gradient_workspaces(workload, split, stage))
        weight_gradient = alone.memory.weight_gradient.sample_bytes / sharding.grid.num_devices
        return StageFigures(
            times,
            ActionMemory(
                saved=saved,
                weight_gradient=Bytes(weight_gradient),
                # exchanges of weights, less the gathered weights that are gone by then, may be
                # less than nothing
                workspace=workspace + Bytes(fixed_bytes=gradient_workspace),
            ),
            gradient_workspace_bytes=gradient_workspace,
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
    """Fraction of the forward of a stage that its backward repeats, by the work of operations."""
    if not regions:
        return 0.0
    work = {
        node: workload.costs[node].flop + workload.costs[node].moved_bytes
        for node in space.program.operations
    }
    return sum(work[node] for node in work if node in regions) / max(1.0, sum(work.values()))


def saved_on_grid(workload: Workload, space: Space, sharding: Sharding, regions: Regions) -> Bytes:
    """What a device of the grid saves for backward, line (1), with gathered copies."""
    parts = saved_parts(workload, space, sharding, regions)
    # thousands of storages for every grid that is tried: plain numbers, no objects in between
    sample_bytes = 0.0
    fixed_bytes = 0.0
    for storage, part in parts.items():
        size = workload.saved.storages[storage]
        sample_bytes += part * size.sample_bytes
        fixed_bytes += part * size.fixed_bytes
    copies = (1.0 - repeated_part(workload, space, regions)) * sharding.keeps_gathered
    return Bytes(
        sample_bytes + copies * sharding.gathered.sample_bytes,
        round(fixed_bytes + copies * sharding.gathered.fixed_bytes),
    )


def activations_on_grid(
    workload: Workload, space: Space, sharding: Sharding, regions: Regions
) -> StageActivations:
    """What a device of the grid saves of a micro-batch, if that is at home elsewhere."""
    return StageActivations.of(
        saved_on_grid(workload, space, sharding, regions),
        NOTHING,
        workload.saved.largest(saved_parts(workload, space, sharding, regions), SEGMENTS_HERE),
        workload.batch_size,
        INSIDE_OPERATIONS,
    )


def saved_parts(
    workload: Workload, space: Space, sharding: Sharding, regions: Regions
) -> dict[int, float]:
    """Storage that is saved -> the largest fraction of it that a device of the grid saves."""
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
