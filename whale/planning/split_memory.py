"""Memory and times of the devices of a grid: their parts of the weights, and of what autograd keeps.

What an operation keeps lies like its tensors: cut by every axis along which its option cuts something. So of the bytes that it would keep
on one device a place keeps the part

    product over the axes that cut the operation of (largest share of that axis)                                        (1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from whale.planning.figures import Seconds, StageFigures, StageTimes
from whale.planning.plan import DeviceMemory
from whale.planning.pricing import OnGrids, sharded_weights
from whale.planning.split_stages import Split, together_seconds
from whale.planning.workload import Workload
from whale.profiling.saved import Kept
from whale.sharding.grid import AXES
from whale.sharding.sharding import Sharding
from whale.sharding.space import Space


def grid_memory(
    workload: Workload, split: Split, stages: Sequence[int], whole: DeviceMemory, in_flight: Sequence[int]
) -> list[DeviceMemory]:
    """By place. `whole`: the same stages on one device."""
    grid = split.shardings[stages[0]].grid
    kept = [kept_on_grid(workload, split.spaces[stage], split.shardings[stage]) for stage in stages]
    fixed = sum(flying * each.fixed_bytes for flying, each in zip(in_flight, kept, strict=True))
    per_sample = sum(flying * each.sample_bytes for flying, each in zip(in_flight, kept, strict=True))
    all_kept = [workload.saved.total(split.spaces[stage].program.operations) for stage in stages]
    working = max(0.0, whole.sample_bytes - sum(flying * each.sample_bytes for flying, each in zip(in_flight, all_kept, strict=True)))
    found = []
    for place in range(grid.num_devices):
        parameters = trainable = 0
        for name, layout in {name: layout for stage in stages for name, layout in split.shardings[stage].stored.items()}.items():
            state = workload.captured.state[name]
            num_bytes = layout.local_count(grid, place) * state.dtype.itemsize
            parameters += num_bytes
            trainable += num_bytes if state.trainable else 0
        found.append(
            replace(
                whole,
                parameter_bytes=parameters,
                gradient_bytes=trainable,
                optimizer_bytes=round(workload.optimizer_ratio * trainable),
                fixed_bytes=round(fixed),
                sample_bytes=per_sample + working / grid.num_devices,
            )
        )
    return found


def on_grids(workload: Workload, split: Split, holders: Mapping[str, tuple[int, ...]], device_of_stage: Sequence[int]) -> OnGrids:
    """The figures of the stages on grids: all devices of a grid work together, each on its part."""

    def figures(stage: int, alone: StageFigures) -> StageFigures:
        sharding = split.shardings[stage]
        kept = kept_on_grid(workload, split.spaces[stage], sharding)
        forward, inputs, weights = (Seconds(s / split.num_samples) for s in together_seconds(sharding, 1))
        times = dict.fromkeys(alone.times, StageTimes(forward, inputs, weights))
        working = alone.working_sample_bytes / sharding.grid.num_devices
        return StageFigures(times, kept.sample_bytes, kept.fixed_bytes, working)

    layouts = {name: layout for sharding in split.shardings.values() for name, layout in sharding.stored.items()}
    devices = {stage: split.placement.virtual_devices[device] for stage, device in enumerate(device_of_stage)}
    return OnGrids(
        {stage: partial(figures, stage) for stage in split.shardings}, sharded_weights(workload.captured, layouts, holders, devices)
    )


def kept_on_grid(workload: Workload, space: Space, sharding: Sharding) -> Kept:
    """Line (1), every storage counted where it is kept largest."""
    nodes = list(space.program.captured.graph.nodes)
    largest: dict[int, float] = {}
    chosen = {nodes[index]: names for index, names in sharding.choices.items()}
    for node in space.program.operations:
        part = 1.0
        if node in chosen:
            options = {option.name: option for option in space.options[node]}
            for axis, name in zip(AXES, chosen[node], strict=True):
                if name and options[name].is_cut:
                    part /= sharding.grid.size(axis)
        for storage in workload.saved.of_node.get(node, ()):
            largest[storage] = max(largest.get(storage, 0.0), part)
    kept = workload.saved.kept
    return Kept(
        sum(part * kept[storage].sample_bytes for storage, part in largest.items()),
        round(sum(part * kept[storage].fixed_bytes for storage, part in largest.items())),
    )
