"""Times the parts of a captured model on the running devices: `whale profile --model`.

A part is a layer that repeats (the outermost modules with numbers for names, `h.0`, `h.1`, ...), or
what is beside these (`wte`, `ln_f`, `lm_head`). Layers that run the same operations on the same
shapes are timed once. Each part is lowered as a stage of a plan is, gets random weights and inputs,
and is timed for several numbers of samples: forward with autograd recording, then backward. All
ranks compute at the same time, as in training; kinds of devices are kept apart. Then ranks of one
kind on one host split each layer, 2, 4, ... together (`split_layers.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whale.calibration.regions import Edges, stand_in_input, stand_in_weight, timed_turn
from whale.calibration.split_layers import (
    SplitRegion,
    Team,
    can_split,
    make_team,
    teams_of,
    widths_of,
)
from whale.calibration.turns import Subject, Turn, take_turns
from whale.capture.graph import CapturedGraph
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import Cluster
from whale.cluster.layer_times import Layer, LayerTime, LayerTimes
from whale.costs.layer_times import LayerRegion, module_names, regions_of_modules, signature
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
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


Key = tuple[int, int]
"""(place of a group of layers, samples)"""
Times = dict[Key, list[float]]
"""seconds of forward and backward on one rank"""
IDLE_S = 1e-9
"""of a turn of a rank that has nothing to do"""


def measure_layers(
    prepared: CapturedModel, batch_size: int, cluster: Cluster, ranks: Ranks, progress: Progress
) -> LayerTimes:
    """Times of all different layers on every kind of device of the cluster, whose devices the ranks
    run on, whole and split over 2, 4, ... of them. All ranks call it and get the same.
    """
    groups = layer_groups(prepared.captured)
    sizes = [size for size in SAMPLES if size <= batch_size]
    progress(f"{len(groups)} different layers of {sum(len(g.modules) for g in groups)}")
    regions = {(place, size): group.region for place, group in enumerate(groups) for size in sizes}
    by_rank: list[Times] = ranks.gather(_time_whole(prepared, regions, ranks, progress))
    regions = {key: regions[key] for key in by_rank[0] if can_split(prepared, regions[key])}
    alone = [(rank,) for rank in range(len(by_rank))]
    points = _points(by_rank, alone, cluster, width=1)
    widths = widths_of(cluster)
    transport = Transport(ranks, ()) if widths else None
    for width in widths:
        assert transport is not None
        teams = teams_of(cluster, width)
        team = make_team(teams, cluster, ranks, transport)
        progress(f"layers split over {width} devices")
        by_rank = ranks.gather(_time_split(prepared, regions, team, ranks, progress))
        for key, more in _points(by_rank, teams, cluster, width).items():
            points.setdefault(key, []).extend(more)
    layers = []
    for kind in dict.fromkeys(device.kind.name for device in cluster.devices):
        for place, group in enumerate(groups):
            if found := points.get((kind, place)):
                layers.append(Layer(group.modules, kind, tuple(found), group.operations))
    return LayerTimes(tuple(layers), "whale profile --model")


def _time_whole(
    prepared: CapturedModel, regions: Mapping[Key, LayerRegion], ranks: Ranks, progress: Progress
) -> Times:
    """Seconds on this rank of every layer alone, for all numbers of samples that fit on every
    rank.
    """
    subjects: dict[Key, Subject] = {}
    timed: dict[int, TimedRegion] = {}
    for (place, size), region in regions.items():
        if place not in timed:
            timed[place] = TimedRegion(prepared.captured, region, ranks)
        if timed[place].fits(size):
            subjects[place, size] = Subject(timed[place].turn_of(size))
    known = set.intersection(*(set(keys) for keys in ranks.gather(list(subjects))))
    subjects = {key: subject for key, subject in subjects.items() if key in known}
    return take_turns(subjects, ranks, progress)


def _time_split(
    prepared: CapturedModel,
    regions: Mapping[Key, LayerRegion],
    team: Team | None,
    ranks: Ranks,
    progress: Progress,
) -> Times:
    """The same for layers that this rank's team splits. `regions`: those that fit whole, of which a
    part fits as well: nobody runs out of memory while the others wait for a message.
    """
    subjects: dict[Key, Subject] = {}
    split: dict[int, SplitRegion] = {}
    with ranks.together():
        for (place, size), region in regions.items():
            turn = _idle
            if team is not None:
                if place not in split:
                    split[place] = SplitRegion(prepared, region, team, ranks)
                turn = split[place].turn_of(size)
            subjects[place, size] = Subject(turn, is_together=True)
    return take_turns(subjects, ranks, progress)


def _idle() -> Turn:
    return [IDLE_S, IDLE_S]


def _points(
    by_rank: Sequence[Times], teams: Sequence[tuple[int, ...]], cluster: Cluster, width: int
) -> dict[tuple[str, int], list[LayerTime]]:
    """(kind, place of a group of layers) -> rows. A team takes as long as its slowest rank, a kind
    as long as its teams do on average.
    """
    found: dict[tuple[str, int], list[LayerTime]] = {}
    kinds = [cluster.devices[members[0]].kind.name for members in teams]
    for kind in dict.fromkeys(kinds):
        own = [members for members, name in zip(teams, kinds, strict=True) if name == kind]
        for place, size in by_rank[own[0][0]]:
            slowest = [max((by_rank[rank][place, size] for rank in team), key=sum) for team in own]
            forward, backward = (statistics.fmean(each) for each in zip(*slowest, strict=True))
            found.setdefault((kind, place), []).append(LayerTime(size, forward, backward, width))
    return found


class TimedRegion:
    """A region of the graph as a module of its own, with random weights and inputs."""

    def __init__(self, captured: CapturedGraph, region: LayerRegion, ranks: Ranks) -> None:
        self._captured = captured
        self._device = ranks.device
        self._gradients = carries_gradient(captured)
        self._edges = Edges.of(region)
        names = [str(source.target) for source in self._edges.state]
        weights = {name: stand_in_weight(captured, name, self._device) for name in names}
        self._module = module_of_operations(
            region.nodes, self._edges.entering, weights, self._edges.results
        )

    def _inputs(self, samples: int) -> list[Any]:
        symbol = self._captured.batch_symbol
        found: list[Any] = []
        for source in self._edges.entering:
            value = source.meta.get("val")
            if not isinstance(value, Tensor):
                assert value is not None, f"{source} has no value"
                found.append(size_at(value, symbol, samples))
                continue
            shape = shape_at(value.shape, symbol, samples)
            has_gradient = source in self._gradients
            found.append(stand_in_input(source, shape, self._device, has_gradient))
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
        return timed_turn(self._module, lambda: self._inputs(samples), self._device)
