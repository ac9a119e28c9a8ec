"""What measured layer times say of a stage on a grid (docs/costs.md, "Layers that are split").

parts    layers that were measured split over as many devices as the grid has: their seconds
         stand for all their work and messages                            -> GridRows._parts
scale    layers that were measured on one device only: how many times longer than the cost
         model says, for each of their operations                         -> GridRows._scales
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from whale.cluster.cluster import Cluster
from whale.cluster.kinds import DeviceKind
from whale.costs.costs import node_costs
from whale.costs.layer_times import MeasuredRegion
from whale.planning.grid_seconds import NOT_MEASURED, Measured, MeasuredPart, part_seconds
from whale.plans.virtual_devices import VirtualDevice
from whale.sharding.space import Space

RegionsOn = Callable[[str], Sequence[MeasuredRegion]]
"""name of a kind of device -> regions of the model that were measured on it"""


def no_regions(kind: str) -> Sequence[MeasuredRegion]:
    """No measured regions, for a model without measured layers."""
    return ()


@dataclass(frozen=True)
class GridRows:
    """The measured layers of a model, asked for stages on grids."""

    cluster: Cluster
    regions_on: RegionsOn
    live: frozenset[Node]
    """operations of all stages"""
    dtype: str
    num_samples: int
    """of a model replica in a micro-batch"""
    _scale_of: dict[tuple[Space, DeviceKind], dict[Node, float]] = field(
        default_factory=dict, repr=False
    )

    def of_stage(self, space: Space, device: VirtualDevice) -> Measured:
        """What was measured of a stage on the grid of this VirtualDevice."""
        kinds = {self.cluster.devices[rank].kind for rank in device.all_ranks}
        kinds = {kind for kind in kinds if self.regions_on(kind.name)}
        if not kinds:
            return NOT_MEASURED
        scale = {}
        for kind in kinds:
            if (space, kind) not in self._scale_of:
                found = dict(self._scales(space, device.num_devices, kind))
                self._scale_of[space, kind] = found
            scale[kind] = self._scale_of[space, kind]
        return Measured(tuple(self._parts(space, device)), scale)

    def _parts(self, space: Space, device: VirtualDevice) -> Iterator[MeasuredPart]:
        kind = self._kind_of_rows(device)
        if kind is None:
            return
        width = device.num_devices
        program = space.program
        here = self.live.intersection(program.operations)
        for measured in self.regions_on(kind.name):
            nodes = here.intersection(measured.region.nodes)
            if not nodes or width not in measured.layer.widths:
                continue
            elsewhere = self.live.intersection(measured.region.nodes) - here
            if self._has_work(elsewhere, space) or not nodes.isdisjoint(program.by_samples):
                continue
            seconds = measured.layer.seconds(self.num_samples, width)
            yield MeasuredPart(measured.region.module, nodes, *seconds)

    def _has_work(self, nodes: Iterable[Node], space: Space) -> bool:
        """Whether one of these takes time: a cut in front of a view goes through no layer."""
        costs = space.node_costs(self.num_samples, node_costs)
        return any(costs[node].flop or costs[node].moved_bytes for node in nodes)

    def _kind_of_rows(self, device: VirtualDevice) -> DeviceKind | None:
        """The kind whose rows of that width hold on this grid: as layers are measured, it has one
        axis that cuts weights, and in each replica devices of one kind on one host.
        """
        grid = device.grid
        if grid is None or grid.num_devices not in (grid.gx, grid.gy):
            return None
        devices = self.cluster.devices
        if any(len({devices[rank].host for rank in members}) > 1 for members in device.ranks):
            return None
        kinds = {devices[rank].kind for rank in device.all_ranks}
        return kinds.pop() if len(kinds) == 1 else None

    def _scales(self, space: Space, width: int, kind: DeviceKind) -> Iterator[tuple[Node, float]]:
        """Measured by modelled seconds of each operation of which one device of the grid has an
        equal part: measured are layers with an equal part of the samples.
        """
        samples = self.num_samples / width
        costs = space.node_costs(self.num_samples, node_costs)
        gradients = space.program.gradients
        for measured in self.regions_on(kind.name):
            nodes = self.live.intersection(measured.region.nodes)
            if 1 not in measured.layer.widths or nodes.isdisjoint(space.operations):
                continue
            modelled_s = part_seconds(nodes, 1 / width, costs, gradients, (kind, self.dtype))
            if modelled_s > 0:
                factor = sum(measured.layer.seconds(samples)) / modelled_s
                yield from ((node, factor) for node in nodes)
