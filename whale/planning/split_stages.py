"""Stages on grids: what the sharding is asked to shard, which grid it gets, and what that means for
time and memory.

A VirtualDevice is a grid when a `split` TaskGraph runs on it; everything else on it joins the same
program, `replicate` TaskGraphs with their samples cut over all devices (docs/split.md). Of all
grids of n devices the one is taken whose stages take least time together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.capture.kinds import Kind
from whale.cluster.cluster import Cluster
from whale.cluster.network import Link
from whale.planning.split import Split
from whale.planning.split_devices import Arranged, arranged, kinds_of, what_axes_cut
from whale.planning.stages import Assignment
from whale.planning.task_graphs import TaskGraphs
from whale.plans.grid import Grid
from whale.plans.layout import Cut, Layout, whole
from whale.plans.plan import Decision
from whale.plans.sharding import Sharding
from whale.plans.virtual_devices import Placement, VirtualDevice
from whale.sharding.exchange_costs import GridCosts
from whale.sharding.reasons import with_reasons
from whale.sharding.solve import predict_seconds, solve
from whale.sharding.space import Space, StageProgram
from whale.units import human_bytes, human_seconds

GridShape = tuple[int, int, int]
SHORT_OF_MEMORY = 1e-9
"""seconds that a byte of a stored weight is worth where the fastest way has no room: more than any
message costs
"""
COUNTED_UP_TO = 64
COUNTED_IN_A_QUICK_LOOK = 16
"""devices of a grid up to which messages are counted where no formula holds
(`sharding/exchange_costs.py`): when solved, when ranked
"""
LOOKED_AT = 3
"""grids that are solved to the end, of all of so many devices"""


def stage_program(
    captured: CapturedGraph,
    kinds: Mapping[Node, Kind],
    assignment: Assignment,
    stage: int,
    terms: Sequence[Node],
    outputs: Sequence[Node] = (),
    by_samples: frozenset[Node] = frozenset(),
    summa: frozenset[Node] = frozenset(),
) -> StageProgram:
    """One stage as something to be sharded. `terms`: loss terms of this stage; `outputs`: results
    that the user wants from it.
    """
    part = assignment.slices[stage]
    return StageProgram(
        captured=captured,
        kinds=kinds,
        operations=part.operations,
        inputs=part.inputs,
        received=part.received,
        state=part.state,
        sent=tuple(sorted({node for node, source, _ in assignment.crossings if source == stage})),
        outputs=tuple(outputs),
        terms=tuple(terms),
        updates={
            name: node
            for name, node in captured.buffer_updates.items()
            if assignment.result_stage[node] == stage
        },
        by_samples=by_samples,
        gradients=assignment.gradients,
        summa=summa & frozenset(part.operations),
    )


def with_grids(placement: Placement, task_graphs: TaskGraphs) -> Placement:
    """VirtualDevices of `split` TaskGraphs get a grid: the one that was asked for, else a line,
    until a better one is chosen.
    """
    asked: dict[int, dict[GridShape | None, str]] = {}
    summa: dict[int, str] = {}
    for index, (strategy, label) in enumerate(
        zip(task_graphs.strategies, task_graphs.labels, strict=True)
    ):
        device = placement.of_task_graph[index]
        if strategy.kind == "split" and placement.virtual_devices[device].num_devices > 1:
            asked.setdefault(device, {}).setdefault(strategy.grid, f"wh.{strategy} on {label}")
            if strategy.method == "summa":
                summa.setdefault(device, f"wh.{strategy} on {label}")
    devices = list(placement.virtual_devices)
    for index, shapes in asked.items():
        given = [shape for shape in shapes if shape is not None]
        if len(given) > 1:
            raise ValueError(
                f"{shapes[given[0]]} and {shapes[given[1]]} run on the same devices, which can "
                "have one grid: give both the same, "
                f"or leave the grid out of one of them"
            )
        if given and index in summa and not given[0][0] == given[0][1] > 1:
            raise ValueError(
                f"{summa[index]} and {shapes[given[0]]} run on the same devices, and SUMMA needs "
                "a grid with as many devices along x as "
                f"along y, like (2, 2, {devices[index].num_devices // 4 or 1}): change the grid, "
                "or leave it out"
            )
        sizes = given[0] if given else (1, devices[index].num_devices, 1)
        devices[index] = replace(devices[index], grid=Grid(*sizes))
    return replace(placement, virtual_devices=tuple(devices))


@dataclass(frozen=True)
class _Tried:
    """One grid for some VirtualDevices."""

    grid: Grid
    devices: tuple[VirtualDevice, ...]
    """in the order in which they stand on it"""
    shardings: Mapping[int, Sharding]
    uneven: str = ""
    """how unlike devices stand on it"""

    @property
    def seconds(self) -> float:
        return sum(sharding.seconds for sharding in self.shardings.values())


@dataclass(frozen=True)
class SplitProblem:
    """What is to be put on grids: the stages of one draft."""

    captured: CapturedGraph
    kinds: Mapping[Node, Kind]
    assignment: Assignment
    device_of_stage: Sequence[int]
    placement: Placement
    task_graphs: TaskGraphs
    cluster: Cluster
    dtype: str
    num_samples: int
    num_micro_batch: int
    state_per_weight: float
    """bytes held for one byte of a weight: weight, gradient, state of the optimizer"""

    def solve(self) -> Split:
        """Grids and shardings of all stages."""
        devices = list(self.placement.virtual_devices)
        decisions = []
        shardings: dict[int, Sharding] = {}
        for (_, given), alike in self._alike.items():
            shapes = (
                [given]
                if given is not None
                else grid_shapes(alike[0].num_devices, self._is_flat(alike))
            )
            grids = [
                Grid(*sizes)
                for sizes in shapes
                if not self._is_summa(alike) or sizes[0] == sizes[1] > 1
            ]
            tried = [self._try(alike, grid) for grid in self._promising(alike, grids)]
            fitting = [each for each in tried if self._fits(each)]
            if not fitting and not self._is_hopeless(alike):  # less memory is worth time then
                tried = [
                    self._try(alike, grid, SHORT_OF_MEMORY)
                    for grid in self._promising(alike, grids, SHORT_OF_MEMORY)
                ]
                fitting = [each for each in tried if self._fits(each)] or [
                    min(tried, key=self._weight_bytes)
                ]
            best = min(fitting or tried, key=lambda each: each.seconds)
            shardings |= self._with_reasons(best)
            for device in best.devices:
                devices[device.index] = device
            decisions.append(_decision(best, tried, len(grids)))
        placement = replace(self.placement, virtual_devices=tuple(devices))
        return Split(placement, shardings, self._spaces, self.num_samples, tuple(decisions))

    def _with_reasons(self, best: _Tried) -> dict[int, Sharding]:
        costs = {device.index: self._costs(device, best.grid) for device in best.devices}
        return {
            stage: with_reasons(
                self._spaces[stage], sharding, self.num_samples, costs[self.device_of_stage[stage]]
            )
            for stage, sharding in best.shardings.items()
        }

    def _is_flat(self, devices: Sequence[VirtualDevice]) -> bool:
        """Whether every VirtualDevice lies on one host in each replica, so that x and y
        are alike.
        """
        return all(
            len({self.cluster.devices[rank].host for rank in members}) == 1
            for device in devices
            for members in device.ranks
        )

    def _promising(
        self,
        devices: Sequence[VirtualDevice],
        grids: Sequence[Grid],
        memory_price: float | None = None,
    ) -> list[Grid]:
        """The grids that are worth a close look: those of least time by a quick one."""
        if len(grids) <= LOOKED_AT:
            return list(grids)
        predicted: dict[str, float] = {}
        for grid in grids:
            total = 0.0
            for device in devices:
                costs = self._costs(replace(device, grid=grid), grid)
                costs = replace(costs, is_counted=grid.num_devices <= COUNTED_IN_A_QUICK_LOOK)
                costs = costs if memory_price is None else replace(costs, memory_price=memory_price)
                own = [
                    stage for stage in self._spaces if self.device_of_stage[stage] == device.index
                ]
                total += sum(
                    predict_seconds(self._spaces[stage], grid, self.num_samples, costs)
                    for stage in own
                )
            predicted[grid.name] = total
        return sorted(grids, key=lambda grid: predicted[grid.name])[:LOOKED_AT]

    def _try(
        self, devices: Sequence[VirtualDevice], grid: Grid, memory_price: float | None = None
    ) -> _Tried:
        """One grid for VirtualDevices that are alike: even, and then as uneven as its devices are,
        in the order that takes least time.
        """
        on_grid = [replace(device, grid=grid) for device in devices]
        found = self._shard(on_grid, grid, memory_price)
        even = _Tried(grid, tuple(on_grid), found)
        if self._is_summa(devices):  # panels along x and along y must be the same
            return even
        ways = arranged(
            self.cluster, on_grid, grid, self.dtype, what_axes_cut(found.values(), self.num_samples)
        )
        return min(
            (even, *(self._try_uneven(way, memory_price) for way in ways)),
            key=lambda tried: tried.seconds,
        )

    def _try_uneven(self, way: Arranged, memory_price: float | None) -> _Tried:
        """Unlike devices in one order. What is not sent takes the time of uneven parts."""
        found = self._shard(way.devices, way.grid, memory_price)
        costs = self._costs(way.devices[0], way.grid)
        for stage, sharding in found.items():
            sent_s = min(
                sharding.seconds,
                sharding.sum_seconds + sharding.sent_bytes / min(costs.bytes_per_s.values()),
            )
            found[stage] = replace(
                sharding, seconds=sent_s + (sharding.seconds - sent_s) * way.factor
            )
        return _Tried(way.grid, way.devices, found, way.reason)

    def _fits(self, tried: _Tried) -> bool:
        """Whether weights, gradients and optimizer state have room on every device of unlimited or
        known memory.
        """
        kinds = [
            self.cluster.devices[rank].kind
            for device in tried.devices
            for members in device.ranks
            for rank in members
        ]
        limits = [kind.memory_bytes for kind in kinds if kind.memory_bytes]
        return not limits or self._weight_bytes(tried) * self.state_per_weight <= min(limits)

    def _is_hopeless(self, devices: Sequence[VirtualDevice]) -> bool:
        """Whether not even an equal part of all weights has room on a device: no grid fits then,
        and planning refuses soon.
        """
        stages = [
            stage
            for stage in self._spaces
            if self.device_of_stage[stage] in {device.index for device in devices}
        ]
        names = {str(node.target) for stage in stages for node in self._spaces[stage].parameters}
        part = sum(self.captured.state[name].num_bytes for name in names) / sum(
            device.num_devices for device in devices
        )
        kinds = {
            self.cluster.devices[rank].kind
            for device in devices
            for members in device.ranks
            for rank in members
        }
        limits = [kind.memory_bytes for kind in kinds if kind.memory_bytes]
        return bool(limits) and part * self.state_per_weight > max(limits)

    def _weight_bytes(self, tried: _Tried) -> float:
        """On the device that holds most: all stages of its VirtualDevice."""
        held = dict.fromkeys((device.index for device in tried.devices), 0.0)
        for stage, sharding in tried.shardings.items():
            held[self.device_of_stage[stage]] += sharding.weight_bytes
        return max(held.values())

    def _is_summa(self, devices: Sequence[VirtualDevice]) -> bool:
        """Whether SUMMA is asked for on one of these VirtualDevices."""
        asked = {
            device
            for s, device in zip(
                self.task_graphs.strategies, self.placement.of_task_graph, strict=True
            )
            if s.method == "summa"
        }
        return any(device.index in asked for device in devices)

    @cached_property
    def _alike(self) -> dict[tuple[object, GridShape | None], list[VirtualDevice]]:
        """Grids of the same kinds of devices, for which the user gave the same shape or none: they
        all get the same one, so that weights that several of them use can be cut alike everywhere."""
        asked = zip(self.task_graphs.strategies, self.placement.of_task_graph, strict=True)
        given = {device: strategy.grid for strategy, device in asked if strategy.grid}
        found: dict[tuple[object, GridShape | None], list[VirtualDevice]] = {}
        for device in self.placement.virtual_devices:
            if device.grid is not None:
                kinds = kinds_of(self.cluster, device, self.dtype), self._is_summa([device])
                found.setdefault((kinds, given.get(device.index)), []).append(device)
        return found

    @cached_property
    def _spaces(self) -> dict[int, Space]:
        """The programs of all stages on grids, with the options of their operations."""
        strategies = self.task_graphs.strategies
        by_samples = frozenset(
            node
            for node, tg in self.task_graphs.of_operation.items()
            if strategies[tg].kind == "replicate"
        )
        summa = frozenset(
            node
            for node, tg in self.task_graphs.of_operation.items()
            if strategies[tg].method == "summa"
        )
        spaces = {}
        for stage, device in enumerate(self.device_of_stage):
            if self.placement.virtual_devices[device].grid is not None:
                terms = [
                    node
                    for node in self.captured.output.all_input_nodes
                    if self.assignment.result_stage[node] == stage
                ]
                program = stage_program(
                    self.captured,
                    self.kinds,
                    self.assignment,
                    stage,
                    terms,
                    by_samples=by_samples,
                    summa=summa,
                )
                spaces[stage] = Space(program)
        return spaces

    def _shard(
        self, devices: Sequence[VirtualDevice], grid: Grid, memory_price: float | None
    ) -> dict[int, Sharding]:
        """All stages of some VirtualDevices on one grid each."""
        costs = {device.index: self._costs(device, grid) for device in devices}
        if memory_price is not None:
            costs = {
                index: replace(each, memory_price=memory_price) for index, each in costs.items()
            }
        found: dict[int, Sharding] = {}
        for stage, space in self._spaces.items():
            device = self.device_of_stage[stage]
            if device in costs:
                fixed = self._fixed(stage, list(costs), found)
                found[stage] = solve(
                    space.program, grid, self.num_samples, costs[device], fixed, space
                )
        return found

    def _fixed(
        self, stage: int, alike: Sequence[int], done: Mapping[int, Sharding]
    ) -> dict[str, Layout]:
        """Parameters that other stages use too lie everywhere alike: as on the first of these
        stages, or whole where their grids differ.
        """
        fixed: dict[str, Layout] = {}
        for node in self._spaces[stage].parameters:
            name = str(node.target)
            others = [
                other
                for other, part in enumerate(self.assignment.slices)
                if other != stage and node in part.state
            ]
            earlier = [done[other].stored[name] for other in others if other in done]
            if any(self.device_of_stage[other] not in alike for other in others):
                fixed[name] = whole(Cut(size) for size in self.captured.state[name].shape)
            elif earlier:
                fixed[name] = earlier[0]
        return fixed

    def _links(self, device: VirtualDevice, grid: Grid, axis: str) -> list[Link]:
        """That the lines of an axis use, each sort once: the hosts say which link two
        devices have.
        """
        firsts = [place for place in range(grid.num_devices) if grid.coordinate(place, axis) == 0]
        found: dict[tuple[str, str], Link] = {}
        for first, *others in (grid.line(place, [axis]) for place in firsts):
            for members in device.ranks:
                for other in others:
                    pair = (
                        self.cluster.devices[members[first]].host,
                        self.cluster.devices[members[other]].host,
                    )
                    if pair not in found:
                        found[pair] = self.cluster.link(members[first], members[other])
        return list(found.values())

    def _costs(self, device: VirtualDevice, grid: Grid) -> GridCosts:
        kinds = {self.cluster.devices[rank].kind for members in device.ranks for rank in members}
        rates = {}
        latencies = []
        for axis in grid.axes:
            links = self._links(device, grid, axis)
            rates[axis] = min(link.bytes_per_s for link in links)
            latencies.append(max(link.latency_s for link in links))
        return GridCosts(
            bytes_per_s=rates,
            latency_s=max(latencies, default=0.0),
            flop_per_s=min(kind.rate(self.dtype) for kind in kinds),
            memory_bytes_per_s=min(kind.bytes_per_s for kind in kinds),
            num_micro_batch=self.num_micro_batch,
            state_per_weight=self.state_per_weight,
            is_counted=grid.num_devices <= COUNTED_UP_TO,
        )


def together_seconds(
    sharding: Sharding, num_micro_batch: int, again: float = 0.0
) -> tuple[float, float, float]:
    """Of a mini-batch on a grid: forward, input part and weight part of the backward. `again`: the
    part of the forward that is repeated in backward."""
    forward = (
        (sharding.seconds - sharding.sum_seconds) / 3 * num_micro_batch
    )  # a backward has two products where its forward has one
    return forward, (1.0 + again) * forward, forward


def _decision(best: _Tried, tried: Sequence[_Tried], num_grids: int) -> Decision:
    sent = sum(each.sent_bytes for each in best.shardings.values())
    why = (
        f"one micro-batch takes {human_seconds(best.seconds)}, a device sends {human_bytes(sent)} "
        "in it"
    )
    others = sorted((each for each in tried if each is not best), key=lambda each: each.seconds)
    compared = ", ".join(f"{each.grid.name} {human_seconds(each.seconds)}" for each in others)
    why += f"; the next of {num_grids} grids: {compared}" if others else "; as asked for"
    numbers = ", ".join(str(device.index) for device in best.devices)
    return Decision(
        f"grid of VirtualDevice {numbers}",
        best.grid.name,
        why + (f"; {best.uneven}" if best.uneven else ""),
    )


def grid_shapes(num_devices: int, is_flat: bool = False) -> list[GridShape]:
    """Every grid of so many devices, the line first. `is_flat`: x and y may be exchanged, so one of
    the two orders is enough.
    """
    shapes = [
        (x, y, num_devices // (x * y))
        for x in range(1, num_devices + 1)
        if num_devices % x == 0
        for y in range(1, num_devices // x + 1)
        if num_devices // x % y == 0 and (x <= y or not is_flat)
    ]
    return sorted(shapes, key=lambda shape: (shape != (1, num_devices, 1), shape))
