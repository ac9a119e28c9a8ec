"""The grid of every `split` TaskGraph: shape, order of its devices, and the sharding of its stages.

A VirtualDevice is a grid when a `split` TaskGraph runs on it; everything else on it joins the same
program, `replicate` TaskGraphs with their samples cut over all devices (docs/split.md).

    minimise    seconds of one micro-batch, summed over the stages of VirtualDevices that are alike
    over        all shapes (gx, gy, gz) of n devices                          -> grid_shapes
                even shards, and uneven ones in every order of the devices    -> _try
                layouts of all tensors, per shape and order                   -> sharding/solve.py
    subject to  weights, gradients and optimizer state fit on every device    -> _fits

Shapes are ranked by a quick prediction, and the best few are solved in full (`_promising`). Where
none fits, the search is made once more with a price on every byte that outweighs time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import Node

from whale.annotation.scopes import GridShape
from whale.capture.graph import CapturedGraph
from whale.capture.kinds import ValueKind
from whale.cluster.cluster import Cluster
from whale.cluster.kinds import DeviceKind
from whale.cluster.network import Link
from whale.costs.costs import NodeCost, node_costs
from whale.planning.grid_seconds import Place, places_of, seconds_by_kind, with_cost_model
from whale.planning.measured_grids import GridRows, RegionsOn, no_regions
from whale.planning.split import Split, stage_program
from whale.planning.stages import Assignment
from whale.planning.task_graphs import TaskGraphs
from whale.planning.uneven_grids import arranged, kinds_of, what_axes_cut
from whale.plans.grid import Grid
from whale.plans.layout import Cut, Layout, whole
from whale.plans.plan import Decision
from whale.plans.sharding import Sharding
from whale.plans.virtual_devices import DevicePlacement, VirtualDevice
from whale.sharding.reasons import with_reasons
from whale.sharding.redistribution_costs import GridCosts
from whale.sharding.solve import predict_seconds, solve
from whale.sharding.space import Space
from whale.sharding.terms import Terms
from whale.units import human_bytes, human_seconds

SHORT_OF_MEMORY = 1e-9
"""seconds that a byte of a stored weight is worth where the fastest way does not fit: more than any
message costs
"""
COUNTED_UP_TO = 64
COUNTED_IN_A_QUICK_LOOK = 16
"""devices of a grid up to which messages are counted where no formula holds
(`sharding/redistribution_costs.py`): when solved, when ranked
"""
LEAST_S = 1e-12
"""a stage without work takes this long"""
SOLVED = 3
"""grids that are solved in full, of all shapes of so many devices"""


def with_grids(placement: DevicePlacement, task_graphs: TaskGraphs) -> DevicePlacement:
    """The placement with a grid for the VirtualDevices of `split` TaskGraphs: the one that was
    asked for, else (1, n, 1) until a better one is chosen.
    """
    asked: dict[int, dict[GridShape | None, str]] = {}
    summa: dict[int, str] = {}
    for index, strategy in enumerate(task_graphs.strategies):
        device = placement.of_task_graph[index]
        if strategy.kind == "split" and placement.virtual_devices[device].num_devices > 1:
            text = f"wh.{strategy} on {task_graphs.labels[index]}"
            asked.setdefault(device, {}).setdefault(strategy.grid, text)
            if strategy.method == "summa":
                summa.setdefault(device, text)
    devices = list(placement.virtual_devices)
    for index, shapes in asked.items():
        given = [shape for shape in shapes if shape is not None]
        if len(given) > 1:
            raise ValueError(
                f"{shapes[given[0]]} and {shapes[given[1]]} run on the same devices, which can "
                "have one grid: give both the same, or leave the grid out of one of them"
            )
        if given and index in summa and not given[0][0] == given[0][1] > 1:
            raise ValueError(
                f"{summa[index]} and {shapes[given[0]]} run on the same devices, and SUMMA needs "
                "a grid with as many devices along x as along y, like "
                f"(2, 2, {devices[index].num_devices // 4 or 1}): change the grid, or leave it out"
            )
        shape = given[0] if given else (1, devices[index].num_devices, 1)
        devices[index] = replace(devices[index], grid=Grid(*shape))
    return replace(placement, virtual_devices=tuple(devices))


def grid_shapes(num_devices: int, is_flat: bool = False) -> list[GridShape]:
    """All shapes of so many devices, (1, n, 1) first. `is_flat`: x and y may be swapped, so one of
    the two orders is enough.
    """
    shapes = []
    for x in range(1, num_devices + 1):
        for y in range(1, num_devices // x + 1):
            if num_devices % (x * y) == 0 and (x <= y or not is_flat):
                shapes.append((x, y, num_devices // (x * y)))
    return sorted(shapes, key=lambda shape: (shape != (1, num_devices, 1), shape))


@dataclass(frozen=True)
class _Tried:
    """One grid for some VirtualDevices."""

    grid: Grid
    devices: tuple[VirtualDevice, ...]
    """in the order in which they stand on it"""
    shardings: Mapping[int, Sharding]
    """by stage"""
    uneven: str = ""
    """how heterogeneous devices stand on it"""

    @property
    def seconds(self) -> float:
        return sum(sharding.seconds for sharding in self.shardings.values())


@dataclass(frozen=True)
class GridProblem:
    """The stages of one draft that are to be put on grids."""

    captured: CapturedGraph
    kinds: Mapping[Node, ValueKind]
    assignment: Assignment
    device_of_stage: Sequence[int]
    placement: DevicePlacement
    task_graphs: TaskGraphs
    cluster: Cluster
    dtype: str
    num_samples: int
    """samples of a model replica in the largest micro-batch"""
    num_micro_batch: int
    state_per_weight: float
    """bytes held for one byte of a weight: weight, gradient, state of the optimizer"""
    regions_on: RegionsOn = no_regions
    """parts of the model that were measured on a kind of device"""

    def solve(self) -> Split:
        """The best grids, and the shardings of all stages on them."""
        devices = list(self.placement.virtual_devices)
        decisions = []
        shardings: dict[int, Sharding] = {}
        for (_, given), alike in self._alike.items():
            best, decision = self._choose(alike, given)
            shardings |= self._with_reasons(best)
            decisions.append(decision)
            for device in best.devices:
                devices[device.index] = device
        placement = replace(self.placement, virtual_devices=tuple(devices))
        return Split(placement, shardings, self._spaces, self.num_samples, tuple(decisions))

    def _choose(
        self, alike: Sequence[VirtualDevice], given: GridShape | None
    ) -> tuple[_Tried, Decision]:
        """The best grid of VirtualDevices that are alike. `given`: its shape, if the user said."""
        shapes = [given]
        if given is None:
            shapes = [*grid_shapes(alike[0].num_devices, self._is_flat(alike))]
        is_summa = self._is_summa(alike)
        grids = [Grid(*each) for each in shapes if each]
        if is_summa:
            grids = [grid for grid in grids if grid.gx == grid.gy > 1]
        tried = [self._try(alike, grid) for grid in self._promising(alike, grids)]
        fitting = [each for each in tried if self._fits(each)]
        if not fitting and not self._is_hopeless(alike):  # less memory is worth time then
            promising = self._promising(alike, grids, SHORT_OF_MEMORY)
            tried = [self._try(alike, grid, SHORT_OF_MEMORY) for grid in promising]
            fitting = [each for each in tried if self._fits(each)]
            fitting = fitting or [min(tried, key=self._weight_bytes)]
        best = min(fitting or tried, key=lambda each: each.seconds)
        return best, _decision(best, tried, len(grids))

    def _promising(
        self,
        devices: Sequence[VirtualDevice],
        grids: Sequence[Grid],
        memory_price: float | None = None,
    ) -> list[Grid]:
        """The grids of least time by a quick prediction, and those that were measured."""
        if len(grids) <= SOLVED:
            return list(grids)

        def predicted(grid: Grid) -> float:
            total = 0.0
            for device in devices:
                costs = self._costs(replace(device, grid=grid), grid, memory_price)
                costs = replace(costs, is_counted=grid.num_devices <= COUNTED_IN_A_QUICK_LOOK)
                total += sum(
                    predict_seconds(self._spaces[stage], grid, self.num_samples, costs)
                    for stage in self._stages_of([device])
                )
            return total

        found = sorted(grids, key=predicted)[:SOLVED]
        # what was measured on such devices is no prediction
        for grid in grids:
            if grid not in found and self._has_rows(devices, grid):
                found.append(grid)
        return found

    def _has_rows(self, devices: Sequence[VirtualDevice], grid: Grid) -> bool:
        """Whether layers were measured on this grid of these devices."""
        return any(
            self._rows.of_stage(self._spaces[stage], replace(device, grid=grid)).parts
            for device in devices
            for stage in self._stages_of([device])
        )

    def _try(
        self, devices: Sequence[VirtualDevice], grid: Grid, memory_price: float | None = None
    ) -> _Tried:
        """One grid for VirtualDevices that are alike: even, or as uneven as its devices are, in the
        order that takes least time.
        """
        on_grid = [replace(device, grid=grid) for device in devices]
        found = self._shard(on_grid, grid, memory_price)
        even = _Tried(grid, tuple(on_grid), found)
        if self._is_summa(devices):  # panels along x and along y must have one size
            return even
        cuts = what_axes_cut(found.values(), self.num_samples)
        tried = [even]
        if len(self._kinds_of(devices)) > 1:
            speeds = self._speeds(on_grid, grid, found)
            for way in arranged(self.cluster, on_grid, grid, speeds, cuts):
                shardings = self._shard(way.devices, way.grid, memory_price)
                tried.append(_Tried(way.grid, way.devices, shardings, way.reason))
        return min(tried, key=lambda each: each.seconds)

    def _speeds(
        self, devices: Sequence[VirtualDevice], grid: Grid, shardings: Mapping[int, Sharding]
    ) -> dict[DeviceKind, float]:
        """Even parts of all stages that each kind does in a second, by the cost model."""
        kinds = sorted(self._kinds_of(devices), key=lambda kind: kind.name)
        costs = {device.index: self._costs(device, grid) for device in devices}
        on_grid = {device.index: device for device in devices}
        totals = [0.0] * len(kinds)
        for stage, sharding in shardings.items():
            space = self._spaces[stage]
            own = costs[self.device_of_stage[stage]]
            terms = Terms(space, grid, self.num_samples, own, self._node_costs(space))
            measured = self._rows.of_stage(space, on_grid[self.device_of_stage[stage]])
            seconds = seconds_by_kind(sharding, terms, kinds, self.dtype, measured)
            totals = [total + more for total, more in zip(totals, seconds, strict=True)]
        return {kind: 1.0 / max(total, LEAST_S) for kind, total in zip(kinds, totals, strict=True)}

    def _shard(
        self, devices: Sequence[VirtualDevice], grid: Grid, memory_price: float | None
    ) -> dict[int, Sharding]:
        """The shardings of all stages of some VirtualDevices on one grid each."""
        costs = {device.index: self._costs(device, grid, memory_price) for device in devices}
        on_grid = {device.index: device for device in devices}
        places: set[Place] = set()
        for device in devices:
            for members in device.ranks:
                kinds = [self.cluster.devices[rank].kind for rank in members]
                places |= places_of(kinds, grid)
        found: dict[int, Sharding] = {}
        for stage in self._stages_of(devices):
            space = self._spaces[stage]
            fixed = self._fixed(stage, list(costs), found)
            own = costs[self.device_of_stage[stage]]
            solved = solve(space.program, grid, self.num_samples, own, fixed, space)
            terms = Terms(space, grid, self.num_samples, own, self._node_costs(space))
            measured = self._rows.of_stage(space, on_grid[self.device_of_stage[stage]])
            found[stage] = with_cost_model(solved, terms, places, self.dtype, measured)
        return found

    @cached_property
    def _rows(self) -> GridRows:
        live = frozenset(node for part in self.assignment.slices for node in part.operations)
        return GridRows(self.cluster, self.regions_on, live, self.dtype, self.num_samples)

    def _node_costs(self, space: Space) -> Mapping[Node, NodeCost]:
        return space.node_costs(self.num_samples, node_costs)

    def _fixed(
        self, stage: int, alike: Sequence[int], done: Mapping[int, Sharding]
    ) -> dict[str, Layout]:
        """Layouts of the parameters that other stages use too: the same everywhere, as on the first
        of these stages, or whole where their grids differ.
        """
        fixed: dict[str, Layout] = {}
        for node in self._spaces[stage].parameters:
            name = str(node.target)
            others = []
            for other, part in enumerate(self.assignment.slices):
                if other != stage and node in part.state:
                    others.append(other)
            earlier = [done[other].stored[name] for other in others if other in done]
            if any(self.device_of_stage[other] not in alike for other in others):
                fixed[name] = whole(Cut(size) for size in self.captured.state[name].shape)
            elif earlier:
                fixed[name] = earlier[0]
        return fixed

    def _with_reasons(self, best: _Tried) -> dict[int, Sharding]:
        costs = {device.index: self._costs(device, best.grid) for device in best.devices}
        found = {}
        for stage, sharding in best.shardings.items():
            own_costs = costs[self.device_of_stage[stage]]
            found[stage] = with_reasons(self._spaces[stage], sharding, self.num_samples, own_costs)
        return found

    # ---- memory

    def _fits(self, tried: _Tried) -> bool:
        """Whether weights, gradients and optimizer state fit on every device of known memory."""
        limits = self._limits(tried.devices)
        return not limits or self._weight_bytes(tried) * self.state_per_weight <= min(limits)

    def _is_hopeless(self, devices: Sequence[VirtualDevice]) -> bool:
        """Whether not even an equal part of all weights fits on a device: no grid helps then, and
        planning refuses soon.
        """
        names = set()
        for stage in self._stages_of(devices):
            names |= {str(node.target) for node in self._spaces[stage].parameters}
        total = sum(self.captured.state[name].num_bytes for name in names)
        part = total / sum(device.num_devices for device in devices)
        limits = self._limits(devices)
        return bool(limits) and part * self.state_per_weight > max(limits)

    def _limits(self, devices: Sequence[VirtualDevice]) -> list[int]:
        """Bytes of the devices whose memory is known."""
        kinds = self._kinds_of(devices)
        return [kind.memory_bytes for kind in kinds if kind.memory_bytes]

    def _weight_bytes(self, tried: _Tried) -> float:
        """Bytes of weights on the device that holds most, over all stages of its VirtualDevice."""
        held = dict.fromkeys((device.index for device in tried.devices), 0.0)
        for stage, sharding in tried.shardings.items():
            held[self.device_of_stage[stage]] += sharding.weight_bytes
        return max(held.values())

    # ---- the devices, and what they run

    def _stages_of(self, devices: Sequence[VirtualDevice]) -> list[int]:
        """Stages on grids that run on one of these VirtualDevices."""
        indices = {device.index for device in devices}
        return [stage for stage in self._spaces if self.device_of_stage[stage] in indices]

    def _kinds_of(self, devices: Sequence[VirtualDevice]) -> set[DeviceKind]:
        kinds = set()
        for device in devices:
            for members in device.ranks:
                kinds |= {self.cluster.devices[rank].kind for rank in members}
        return kinds

    def _is_flat(self, devices: Sequence[VirtualDevice]) -> bool:
        """Whether every VirtualDevice lies on one host in each replica, so that x and y are
        alike.
        """
        return all(
            len({self.cluster.devices[rank].host for rank in members}) == 1
            for device in devices
            for members in device.ranks
        )

    def _is_summa(self, devices: Sequence[VirtualDevice]) -> bool:
        """Whether SUMMA is asked for on one of these VirtualDevices."""
        asked = set()
        for index, strategy in enumerate(self.task_graphs.strategies):
            if strategy.method == "summa":
                asked.add(self.placement.of_task_graph[index])
        return any(device.index in asked for device in devices)

    @cached_property
    def _alike(self) -> dict[tuple[object, GridShape | None], list[VirtualDevice]]:
        """VirtualDevices of the same kinds of devices, for which the user gave the same shape or
        none: they all get the same grid, so that weights that several of them use can be cut alike.
        """
        asked = zip(self.task_graphs.strategies, self.placement.of_task_graph, strict=True)
        given = {device: strategy.grid for strategy, device in asked if strategy.grid}
        rates = {each.kind: each.kind.rate(self.dtype) for each in self.cluster.devices}
        found: dict[tuple[object, GridShape | None], list[VirtualDevice]] = {}
        for device in self.placement.virtual_devices:
            if device.grid is not None:
                kinds = kinds_of(self.cluster, device, rates), self._is_summa([device])
                found.setdefault((kinds, given.get(device.index)), []).append(device)
        return found

    @cached_property
    def _spaces(self) -> dict[int, Space]:
        """The programs of all stages on grids, with the options of their operations."""
        by_samples = set()
        summa = set()
        for node, task_graph in self.task_graphs.of_operation.items():
            strategy = self.task_graphs.strategies[task_graph]
            if strategy.kind == "replicate":
                by_samples.add(node)
            if strategy.method == "summa":
                summa.add(node)
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
                    by_samples=frozenset(by_samples),
                    summa=frozenset(summa),
                )
                spaces[stage] = Space(program)
        return spaces

    def _costs(
        self, device: VirtualDevice, grid: Grid, memory_price: float | None = None
    ) -> GridCosts:
        """Speeds of the slowest device and of the slowest link along each axis."""
        costs = replace(
            grid_costs(self.cluster, device.ranks, grid, self.dtype),
            num_micro_batch=self.num_micro_batch,
            state_per_weight=self.state_per_weight,
            is_counted=grid.num_devices <= COUNTED_UP_TO,
        )
        return costs if memory_price is None else replace(costs, memory_price=memory_price)


def grid_costs(
    cluster: Cluster, ranks: Sequence[Sequence[int]], grid: Grid, dtype: str
) -> GridCosts:
    """Speeds of the slowest device and of the slowest link along each axis. `ranks`: those of the
    grid in each model replica.
    """
    kinds = {cluster.devices[rank].kind for members in ranks for rank in members}
    rates = {}
    latencies = []
    for axis in grid.axes:
        links = _links(cluster, ranks, grid, axis)
        rates[axis] = min(link.bytes_per_s for link in links)
        latencies.append(max(link.latency_s for link in links))
    return GridCosts(
        bytes_per_s=rates,
        latency_s=max(latencies, default=0.0),
        flop_per_s=min(kind.reached_flop_per_s(dtype) for kind in kinds),
        memory_bytes_per_s=min(kind.reached_bytes_per_s for kind in kinds),
    )


def _links(cluster: Cluster, ranks: Sequence[Sequence[int]], grid: Grid, axis: str) -> list[Link]:
    """Links that the subgroups along an axis use, one for each pair of hosts: hosts decide which
    link two devices have.
    """
    firsts = [place for place in range(grid.num_devices) if grid.coordinate(place, axis) == 0]
    found: dict[tuple[str, str], Link] = {}
    for first, *others in (grid.subgroup(place, [axis]) for place in firsts):
        for members in ranks:
            for other in others:
                pair = (cluster.devices[members[first]].host, cluster.devices[members[other]].host)
                if pair not in found:
                    found[pair] = cluster.link(members[first], members[other])
    return list(found.values())


def _decision(best: _Tried, tried: Sequence[_Tried], num_grids: int) -> Decision:
    sent = sum(each.sent_bytes for each in best.shardings.values())
    why = (
        f"one micro-batch with its part of the all-reduces takes {human_seconds(best.seconds)}, a "
        f"device sends {human_bytes(sent)} in it"
    )
    others = sorted((each for each in tried if each is not best), key=lambda each: each.seconds)
    compared = ", ".join(f"{each.grid.name} {human_seconds(each.seconds)}" for each in others)
    why += f"; the next of {num_grids} grids: {compared}" if others else "; as asked for"
    if best.uneven:
        why += f"; {best.uneven}"
    numbers = ", ".join(str(device.index) for device in best.devices)
    return Decision(f"grid of VirtualDevice {numbers}", best.grid.name, why)
