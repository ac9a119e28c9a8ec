"""What the graph of a device on a grid calls to talk to the others: exchanges, and operations that
need more than their own part.

`GridGroups` makes the process groups, all at once and on all ranks in one order.
`RealCommunication` gives the modules that `sharding/emit.py` puts into a device's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from whale.capture.graph import user_line
from whale.compat import schema
from whale.lowering import sharded_ops
from whale.lowering.lines import Line
from whale.lowering.sharded_random import Draw, drawing
from whale.operations.nodes import named_args, op_name
from whale.plans.grid import Grid
from whale.plans.layout import Layout
from whale.sharding.emit import Special
from whale.sharding.redistribution import plan_redistribution
from whale.sharding.redistribution_steps import Redistribution

if TYPE_CHECKING:
    from whale.distributed.ranks import Ranks
    from whale.plans.plan import Plan

Groups = Mapping[tuple[int, ...], dist.ProcessGroup | None]
PURPOSE = "exchange"
"""these groups are apart from those that sum gradients: both have messages under way during a
backward, in no common order
"""


class GridGroups:
    """Process groups of all lines of all grids of a plan. Made on every rank, in the same order."""

    def __init__(self, plan: Plan, ranks: Ranks, has_statistics: bool) -> None:
        """`has_statistics`: the model trains batch norms, or has a loss that is not additive: such
        sums go over all replicas.
        """
        self._plan = plan
        self._ranks = ranks
        self._lines: dict[tuple[int, int], dict[tuple[int, ...], dist.ProcessGroup | None]] = {}
        self._statistics: dict[tuple[int, tuple[int, ...]], Line] = {}
        for device in plan.virtual_devices:
            if device.grid is None:
                continue
            lines = all_lines(device.grid)
            for replica, members in enumerate(device.ranks):
                self._lines[device.index, replica] = {
                    line: ranks.group(tuple(members[place] for place in line), PURPOSE)
                    for line in lines
                    if len(line) > 1
                }
            for line in lines if has_statistics and plan.num_replicas > 1 else ():
                everyone = tuple(
                    sorted(members[place] for members in device.ranks for place in line)
                )
                group = ranks.group(everyone, PURPOSE)
                index = everyone.index(ranks.rank) if ranks.rank in everyone else -1
                self._statistics[device.index, line] = Line(len(everyone), index, group)

    def communication(self, device: int) -> RealCommunication:
        """For this rank, which is in this VirtualDevice."""
        grid = self._plan.virtual_devices[device].grid
        assert grid is not None
        _, replica, place = self._plan.place_of_rank(self._ranks.rank)
        statistics = {
            line: found for (index, line), found in self._statistics.items() if index == device
        }
        backend = self._ranks.device.backend.name
        return RealCommunication(grid, place, self._lines[device, replica], statistics, backend)


def all_lines(grid: Grid) -> list[tuple[int, ...]]:
    """Places that differ along some axes only, for every set of axes; single places first."""
    found = {
        grid.line(place, axes)
        for number in range(4)
        for axes in combinations(grid.axes, number)
        for place in range(grid.num_devices)
    }
    return sorted(found, key=lambda line: (len(line), line))


@dataclass(frozen=True)
class RealCommunication:
    """Modules for one place of a grid."""

    grid: Grid
    place: int
    groups: Groups
    statistics: Mapping[tuple[int, ...], Line]
    """line of this grid -> the same line in all replicas; empty where there is one"""
    backend: str

    def exchange(self, source: Layout, target: Layout, place: int, gradient: bool) -> nn.Module:
        plan = plan_redistribution(
            source, target, self.grid, place, backend=self.backend, backward=gradient
        )
        places = range(self.grid.num_devices)
        grows = all(
            0 < source.local_count(self.grid, place) <= target.local_count(self.grid, place)
            for place in places
        )
        return Exchange(plan, self.groups, is_gather=grows and not source.partial)

    def operation(self, special: Special) -> nn.Module:
        made = OPERATIONS[special.kind](special, self)
        return made if isinstance(made, nn.Module) else Called(made)

    def line(self, special: Special) -> Line:
        return Line.of(self.grid, self.place, special.axes, self.groups)

    def first_of(self, special: Special, slot: int, dim: int) -> int:
        """Index in the whole tensor of the first entry of a dim that this place has."""
        ranges = special.inputs[slot].ranges(self.grid, self.place, dim)
        assert len(ranges) == 1, (
            f"{op_name(special.node)} takes a dim of segments apart ({user_line(special.node)})"
        )
        return ranges[0][0]


class Exchange(nn.Module):
    """Brings its argument into another layout."""

    def __init__(self, plan: Redistribution, groups: Groups, is_gather: bool = False) -> None:
        """`is_gather`: nothing is summed, every device has something, and none has less of it
        afterwards.
        """
        super().__init__()
        self.plan = plan
        self.groups = groups
        self.is_gather = is_gather

    def forward(self, x: Tensor) -> Tensor:
        return sharded_ops.exchange(x, self.plan, self.groups)


class Called(nn.Module):
    """A function of the tensors of an operation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


Build = Callable[[Special, RealCommunication], Callable[..., Any]]


def _by_name(node: Node, function: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Calls a function with the operation's arguments by their names in aten, defaults included.
    Its tensors come in their order there.
    """
    declared = schema(node.target).arguments
    defaults = {each.name: each.default_value for each in declared}
    given = {**dict(zip((each.name for each in declared), node.args)), **node.kwargs}

    def call(*tensors: Tensor) -> Any:
        remaining = iter(tensors)
        return function({**defaults, **map_arg(given, lambda source: next(remaining))})

    return call


def _dtype(special: Special) -> torch.dtype:
    """What torch's own operation gave when the model was captured, on the type of device that runs:
    autocast has a list for each (on CUDA norms and softmax run in float32, on the CPU in the type
    of their input)."""
    dtype: torch.dtype = special.node.meta["val"].dtype
    return dtype


def _norm(special: Special, around: RealCommunication) -> Callable[..., Any]:
    line = around.line(special)
    is_layer = op_name(special.node) == "layer_norm"

    def run(given: dict[str, Any]) -> Tensor:
        num_dims = len(given["normalized_shape"])
        x = given["input"].to(_dtype(special))
        if is_layer:
            return sharded_ops.layer_norm(
                x, num_dims, given["weight"], given["bias"], given["eps"], line
            )
        return sharded_ops.rms_norm(x, num_dims, given["weight"], given["eps"], line)

    return _by_name(special.node, run)


def _summa(special: Special, around: RealCommunication) -> Callable[..., Any]:
    weight = special.inputs[1]
    panels = [
        sum(b - a for a, b in weight.ranges(around.grid, place, 1))
        for place in around.grid.line(around.place, "y")
    ]
    lines = (Line.of(around.grid, around.place, axis, around.groups) for axis in "xy")
    plane = sharded_ops.Plane(next(lines), next(lines), tuple(panels))
    return _by_name(
        special.node,
        lambda given: sharded_ops.summa_linear(
            given["input"], given["weight"], given["bias"], plane
        ),
    )


def _softmax(special: Special, around: RealCommunication) -> Callable[..., Any]:
    line = around.line(special)
    function = sharded_ops.log_softmax if "log" in op_name(special.node) else sharded_ops.softmax
    return _by_name(
        special.node, lambda given: function(given["self"].to(_dtype(special)), given["dim"], line)
    )


def _argmax(special: Special, around: RealCommunication) -> Callable[..., Any]:
    line = around.line(special)
    rank = len(special.inputs[0].cuts)
    dim = int(named_args(special.node)["dim"]) % rank
    first = around.first_of(special, 0, dim)
    return _by_name(
        special.node,
        lambda given: sharded_ops.argmax(given["self"], dim, bool(given["keepdim"]), first, line),
    )


def _class_loss(special: Special, around: RealCommunication) -> Callable[..., Any]:
    line = around.line(special)
    first = around.first_of(special, 0, 1)
    num_classes = special.inputs[0].shape[1]

    def run(given: dict[str, Any]) -> Tensor:
        return sharded_ops.cross_entropy(
            given["self"],
            given["target"],
            given["weight"],
            given["reduction"],
            int(given["ignore_index"]),
            given["label_smoothing"],
            num_classes,
            first,
            line,
        )

    return _by_name(special.node, run)


def _embedding(special: Special, around: RealCommunication) -> Callable[..., Any]:
    first = around.first_of(special, 0, 0)
    num_rows = special.inputs[0].shape[0]
    return _by_name(
        special.node,
        lambda given: sharded_ops.embedding(
            given["weight"], given["indices"], first, num_rows, int(given["padding_idx"])
        ),
    )


def _experts(special: Special, around: RealCommunication) -> Callable[..., Any]:
    """Along axes that cut the rows as well as the experts, tokens travel."""
    rows = special.inputs[0]
    weight = special.inputs[1]
    axes = tuple(axis for axis in weight.axes[0] if axis in rows.axes[0])
    places = around.grid.line(around.place, axes)
    bounds = tuple((weight.ranges(around.grid, place, 0) or [(0, 0)])[0] for place in places)
    experts = sharded_ops.Experts(
        bounds, Line.of(around.grid, around.place, axes, around.groups), weight.shape[0]
    )
    if op_name(special.node) != "expert_mm":
        return lambda x, weight, ends: sharded_ops.grouped_mm_of_same_tokens(
            x, weight, ends, experts
        )
    return sharded_ops.ExpertProduct(experts, bool(named_args(special.node)["transposed"]))


def _batch_norm(special: Special, around: RealCommunication) -> Callable[..., Any]:
    places = around.grid.line(around.place, special.axes)
    line = around.statistics.get(places) or around.line(special)

    def run(given: dict[str, Any]) -> Tensor:
        statistics = given["running_mean"], given["running_var"]
        return sharded_ops.batch_norm(
            given["input"],
            given["weight"],
            given["bias"],
            *statistics,
            given["momentum"],
            given["eps"],
            line,
        )

    return _by_name(special.node, run)


def _replicas(special: Special, around: RealCommunication) -> Callable[..., Any]:
    line = around.statistics.get((around.place,))
    return lambda value: value if line is None else sharded_ops.sum_over_line(value, line)


def _random(special: Special, around: RealCommunication) -> Callable[..., Any]:
    """Any operation that draws numbers; those that make a tensor of random numbers make their part
    of it.
    """
    node = special.node
    output = special.outputs[0]
    number = next(place for place, other in enumerate(node.graph.nodes) if other is node)
    draw = Draw.of(number, output, around.grid, around.place)
    shape = list(output.local_shape(around.grid, around.place))

    def run(*tensors: Tensor) -> Any:
        remaining = iter(tensors)

        def replaced(source: Node) -> Any:
            return next(remaining) if isinstance(source.meta.get("val"), Tensor) else shape[0]

        arguments: tuple[Any, ...] = tuple(
            shape if _is_size(value) else map_arg(value, replaced) for value in node.args
        )
        device = tensors[0].device if tensors else torch.device(node.kwargs.get("device") or "cpu")  # type: ignore[arg-type]
        with drawing(draw, device):
            return node.target(*arguments, **map_arg(node.kwargs, replaced))  # type: ignore[operator]

    return run


def _is_size(value: Any) -> bool:
    """Whether an argument is the shape of what an operation makes."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(
        isinstance(each, int)
        or (isinstance(each, Node) and not isinstance(each.meta.get("val"), Tensor))
        for each in value
    )


OPERATIONS: dict[str, Build] = {
    "summa": _summa,
    "norm": _norm,
    "softmax": _softmax,
    "argmax": _argmax,
    "class loss": _class_loss,
    "embedding": _embedding,
    "experts": _experts,
    "batch norm": _batch_norm,
    "random": _random,
    "replicas": _replicas,
}
"""kind of a special operation (`sharding/emit.py`) -> what runs it"""
