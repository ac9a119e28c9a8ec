"""Layers of a model split over devices of one kind on one host, as a stage under `split` is: the
same solver, lowering and messages (docs/costs.md, "Layers that are split").

    team      ranks that split a layer together, on a grid 1 x w x 1
    program   a layer as a stage of its own: what enters and leaves is cut by samples
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from whale.calibration.regions import Edges, stand_in_input, stand_in_weight, timed_turn
from whale.calibration.turns import Turn
from whale.capture.kinds import ValueKind
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import Cluster
from whale.costs.layer_times import LayerRegion
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.lowering.communication import RealCommunication
from whale.lowering.sharded_chunk import OnGrid, ShardedModules
from whale.lowering.subgroups import GridGroups, groups_of_grid
from whale.planning.grids import grid_costs
from whale.planning.stages import carries_gradient
from whale.plans.grid import Grid
from whale.plans.layout import Layout
from whale.plans.sharding import Sharding, StageSharding
from whale.sharding.dims import value_of
from whale.sharding.redistribution_costs import GridCosts
from whale.sharding.solve import solve
from whale.sharding.space import Space, StageProgram, layout_of

DTYPE = "fp32"
"""for whose products layouts are chosen"""
COMPUTED = (ValueKind.ACTIVATION, ValueKind.WEIGHT)
"""values that a grid cuts"""


def widths_of(cluster: Cluster) -> list[int]:
    """2, 4, ... up to the devices of one kind that some host has."""
    most = max(len(ranks) for ranks in _classes(cluster))
    return [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]


def teams_of(cluster: Cluster, width: int) -> list[tuple[int, ...]]:
    """Ranks of one kind on one host in teams of so many; some may be in none."""
    teams = []
    for ranks in _classes(cluster):
        for start in range(0, len(ranks) - width + 1, width):
            teams.append(tuple(ranks[start : start + width]))
    return teams


def _classes(cluster: Cluster) -> list[list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for device in cluster.devices:
        found.setdefault((device.kind.name, device.host), []).append(device.rank)
    return list(found.values())


@dataclass(frozen=True)
class Team:
    """The ranks that split a layer with this one."""

    communication: RealCommunication
    costs: GridCosts
    transport: Transport

    @property
    def grid(self) -> Grid:
        return self.communication.grid

    @property
    def place(self) -> int:
        return self.communication.place


def make_team(
    teams: Sequence[tuple[int, ...]], cluster: Cluster, ranks: Ranks, transport: Transport
) -> Team | None:
    """This rank's team; None: it is in none. All ranks call it: making groups is a collective."""
    generators = ranks.generators
    collectives = transport.collectives
    own = None
    for members in teams:
        grid = Grid(1, len(members), 1)
        groups = groups_of_grid(grid, members, ranks, collectives.begin_exchange)
        if ranks.rank not in members:
            continue
        place = members.index(ranks.rank)
        communication = RealCommunication(
            GridGroups(grid, place, groups, {}, collectives.all_gather),
            ranks.backend_among(members),
            draws_alike=len({generators[rank] for rank in members}) == 1,
        )
        own = Team(communication, grid_costs(cluster, [members], grid, DTYPE), transport)
    return own


def region_program(prepared: CapturedModel, region: LayerRegion) -> StageProgram:
    """A region as a stage of its own."""
    kinds = prepared.kinds
    edges = Edges.of(region)
    tensors = [node for node in edges.entering if isinstance(node.meta.get("val"), Tensor)]
    received = [node for node in tensors if kinds[node] is ValueKind.ACTIVATION]
    return StageProgram(
        captured=prepared.captured,
        kinds=kinds,
        operations=region.nodes,
        # what depends on the batch alone every stage computes for itself, whole
        inputs=tuple(node for node in tensors if node not in received),
        received=tuple(received),
        state=edges.state,
        sent=tuple(node for node in edges.results if kinds[node] in COMPUTED),
        gradients=carries_gradient(prepared.captured),
    )


def can_split(prepared: CapturedModel, region: LayerRegion) -> bool:
    """Whether something of it is computed from weights: the rest every device computes whole."""
    return any(prepared.kinds[node] in COMPUTED for node in Edges.of(region).results)


class SplitRegion:
    """This rank's part of a region that a team splits."""

    def __init__(
        self, prepared: CapturedModel, region: LayerRegion, team: Team, ranks: Ranks
    ) -> None:
        self.program = region_program(prepared, region)
        self._space = Space(self.program)
        self._team = team
        self._device = ranks.device
        self._weights: dict[tuple[str, Layout | None], Tensor] = {}

    def modules(self, samples: int) -> ShardedModules:
        """What lowers this rank's part, with layouts that are best for so many samples."""
        team = self._team
        sharding = solve(self.program, team.grid, samples, team.costs, space=self._space)
        planned = StageSharding.of(0, sharding, samples)
        weights = {str(node.target): self._weight(node, sharding) for node in self.program.state}
        return ShardedModules(self.program, OnGrid(weights, planned, True, team.communication))

    def _weight(self, node: Node, sharding: Sharding) -> Tensor:
        """This rank's shard of a parameter; anything else is whole."""
        name = str(node.target)
        layout = sharding.stored.get(name)
        if (name, layout) not in self._weights:
            shape = layout.local_shape(self._team.grid, self._team.place) if layout else None
            weight = stand_in_weight(self.program.captured, name, self._device, shape)
            self._weights[name, layout] = weight
        return self._weights[name, layout]

    def input_layout(self, source: Node, samples: int) -> Layout:
        """How something that enters lies on the grid."""
        cuts = self._space.granules.cuts(value_of(source), samples)
        placement = self._space.fixed_source(source)
        return layout_of(cuts, dict.fromkeys(self._team.grid.axes, placement))

    def _inputs(self, samples: int) -> list[Any]:
        found: list[Any] = []
        for source in (*self.program.received, *self.program.inputs):
            layout = self.input_layout(source, samples)
            shape = layout.local_shape(self._team.grid, self._team.place)
            has_gradient = source in self.program.gradients
            found.append(stand_in_input(source, shape, self._device, has_gradient))
        return found

    def turn_of(self, samples: int) -> Callable[[], Turn]:
        """A function that runs forward and backward once, with the other ranks of the team, and
        gives the seconds of both. `samples`: of all of them together.
        """
        module = self.modules(samples)(samples)
        turn = timed_turn(module, lambda: self._inputs(samples), self._device)

        def with_others() -> Turn:
            self._team.transport.begin()
            return turn()

        return with_others
