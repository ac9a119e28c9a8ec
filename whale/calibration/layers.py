"""Times the parts of a captured model on the running devices: `whale profile --model`.

A part is a layer that repeats (the outermost modules with numbers for names, `h.0`, `h.1`, ...), or
what is beside these (`wte`, `ln_f`, `lm_head`). Layers that run the same operations on the same
shapes are timed once. Each part is lowered as a stage of a plan is, gets random weights and inputs,
and is timed for several numbers of samples: forward with autograd recording, then backward. All
ranks compute at the same time, as in training; kinds of devices are kept apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from whale.calibration.turns import Subject, Turn, take_turns
from whale.capture.graph import CapturedGraph
from whale.cluster.cluster import Cluster
from whale.cluster.layer_times import Layer, LayerTime, LayerTimes
from whale.costs.layer_times import LayerRegion, module_names, regions_of_modules, signature
from whale.distributed.ranks import Ranks
from whale.lowering.chunk import module_of_operations
from whale.operations.sizes import shape_at, size_at
from whale.planning.stages import carries_gradient

Progress = Callable[[str], None]

SAMPLES = (1, 2, 4, 8)
"""samples of a micro-batch that are timed, as far as the mini-batch has so many"""


def layer_modules(captured: CapturedGraph) -> list[str]:
    """Names of the modules that are timed, none of them inside another, in the order of the model.
    Operations outside of all of them keep the times of the cost model.
    """
    stacks = [module_names(node) for node in captured.compute_nodes()]
    numbered = {
        next(name for name in names if _is_numbered(name))
        for names in stacks
        if any(map(_is_numbered, names))
    }
    found: dict[str, None] = {}
    for names in stacks:
        layer = next((name for name in names if name in numbered), None)
        if layer is None:
            # the outermost module that has none of the numbered ones inside
            layer = next((name for name in names if not _has_inside(name, numbered)), None)
        if layer is not None:
            found[layer] = None
    return list(found)


def _is_numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()


def _has_inside(name: str, others: set[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in others)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that run the same, of which the first is timed."""

    modules: tuple[str, ...]
    operations: str
    region: LayerRegion


def layer_groups(captured: CapturedGraph) -> list[LayerGroup]:
    """The different layers of a model."""
    members: dict[str, list[LayerRegion]] = {}
    for region in regions_of_modules(captured, layer_modules(captured)):
        members.setdefault(signature(region), []).append(region)
    return [
        LayerGroup(tuple(region.module for region in regions), operations, regions[0])
        for operations, regions in members.items()
    ]


def measure_layers(
    captured: CapturedGraph, batch_size: int, cluster: Cluster, ranks: Ranks, progress: Progress
) -> LayerTimes:
    """Times of all different layers on every kind of device of the cluster, whose devices the ranks
    run on. All ranks call it and get the same.
    """
    groups = layer_groups(captured)
    sizes = [size for size in SAMPLES if size <= batch_size]
    subjects: dict[Hashable, Subject] = {}
    for place, group in enumerate(groups):
        timed = TimedRegion(captured, group.region, ranks)
        for size in sizes:
            if timed.fits(size):
                subjects[place, size] = Subject(timed.turn_of(size))
    known = set.intersection(*(set(keys) for keys in ranks.gather(list(subjects))))
    subjects = {key: subject for key, subject in subjects.items() if key in known}
    progress(f"{len(groups)} different layers of {sum(len(g.modules) for g in groups)}")
    seconds = take_turns(subjects, ranks, progress)
    kinds = [device.kind.name for device in cluster.devices]
    by_rank = ranks.gather({key: tuple(times) for key, times in seconds.items()})
    layers = []
    for kind in dict.fromkeys(kinds):
        own = [times for times, name in zip(by_rank, kinds, strict=True) if name == kind]
        for place, group in enumerate(groups):
            points = tuple(
                LayerTime(size, *_means([times[place, size] for times in own]))
                for size in sizes
                if (place, size) in known
            )
            if points:
                layers.append(Layer(group.modules, kind, points, group.operations))
    return LayerTimes(tuple(layers), "whale profile --model")


def _means(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    forward = statistics.fmean(each[0] for each in times)
    return forward, statistics.fmean(each[1] for each in times)


class TimedRegion:
    """A region of the graph as a module of its own, with random weights and inputs."""

    def __init__(self, captured: CapturedGraph, region: LayerRegion, ranks: Ranks) -> None:
        self._captured = captured
        self._ranks = ranks
        self._gradients = carries_gradient(captured)
        inside = set(region.nodes)
        sources: dict[Node, None] = {}
        for node in region.nodes:
            sources.update(dict.fromkeys(s for s in node.all_input_nodes if s not in inside))
        self._entering = [source for source in sources if source.op != "get_attr"]
        results = []
        for node in region.nodes:
            is_read_outside = not inside.issuperset(node.users)
            if is_read_outside and isinstance(node.meta.get("val"), Tensor):
                results.append(node)
        weights = {
            str(source.target): self._state(str(source.target))
            for source in sources
            if source.op == "get_attr"
        }
        self._module = module_of_operations(region.nodes, self._entering, weights, results)

    def _state(self, name: str) -> Tensor:
        """A weight, buffer or constant with values that keep the numbers small."""
        state = self._captured.state[name]
        device = self._ranks.device.name
        if state.kind == "constant":
            return self._captured.constants[name].to(device)
        if not state.dtype.is_floating_point:
            return torch.zeros(state.shape, dtype=state.dtype, device=device)
        value = torch.full(state.shape, 0.02, dtype=state.dtype, device=device)
        return torch.nn.Parameter(value, state.trainable) if state.kind == "parameter" else value

    def _inputs(self, samples: int) -> list[Any]:
        symbol = self._captured.batch_symbol
        found: list[Any] = []
        for source in self._entering:
            value = source.meta.get("val")
            if not isinstance(value, Tensor):
                assert value is not None, f"{source} has no value"
                found.append(size_at(value, symbol, samples))
                continue
            shape = shape_at(value.shape, symbol, samples)
            tensor = torch.zeros(shape, dtype=value.dtype, device=self._ranks.device.name)
            if value.dtype.is_floating_point:
                tensor = torch.rand_like(tensor)
                tensor.requires_grad_(source in self._gradients)
            found.append(tensor)
        return found

    def fits(self, samples: int) -> bool:
        """Whether so many samples fit into the free memory: it is tried once."""
        try:
            self.turn_of(samples)()
        except (torch.OutOfMemoryError, MemoryError):
            return False
        return True

    def turn_of(self, samples: int) -> Callable[[], Turn]:
        """A function that runs forward and backward once and gives the seconds of both."""
        inputs: list[Any] = []

        def turn() -> Turn:
            if not inputs:
                inputs.extend(self._inputs(samples))
            synchronise = self._ranks.device.synchronise
            synchronise()
            start = time.perf_counter()
            results = [result for result in self._module(*inputs) if result.requires_grad]
            synchronise()
            middle = time.perf_counter()
            gradients = [torch.ones_like(result) for result in results]
            synchronise()
            again = time.perf_counter()
            if results:
                torch.autograd.backward(results, gradients)
            synchronise()
            end = time.perf_counter()
            self._module.zero_grad(set_to_none=True)
            for value in inputs:
                if isinstance(value, Tensor):
                    value.grad = None
            return [middle - start, end - again]

        return turn
