"""What the graph of a device on a grid calls to talk to the others: exchanges, and operations that
need more than their own part.

`RealCommunication` gives the modules that `sharding/emit.py` puts into a device's graph. What they
do stands in `exchange.py` (a tensor takes another layout) and `sharded_*.py` (operations that need
a few numbers of other devices, by `subgroups.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from whale.capture.graph import user_line
from whale.compat import pytree, schema
from whale.devices import Backend, device_of
from whale.lowering.exchange import Groups, exchange
from whale.lowering.sharded_experts import ExpertProduct, Experts, grouped_mm_of_same_tokens
from whale.lowering.sharded_linear import Plane, summa_linear
from whale.lowering.sharded_norms import batch_norm, layer_norm, rms_norm
from whale.lowering.sharded_vocabulary import argmax, cross_entropy, embedding, log_softmax, softmax
from whale.lowering.subgroups import GridGroups, Subgroup, sum_over_subgroup
from whale.operations.nodes import named_args, op_name
from whale.plans.grid import Grid
from whale.plans.layout import Layout
from whale.sharding.emit import Special
from whale.sharding.redistribution import plan_redistribution
from whale.sharding.redistribution_steps import Redistribution


@dataclass(frozen=True)
class RealCommunication:
    """Modules for one place of a grid."""

    own: GridGroups
    backend: Backend
    draws_alike: bool = True
    """all devices of the grid draw the same random numbers from a seed"""

    @property
    def grid(self) -> Grid:
        return self.own.grid

    @property
    def place(self) -> int:
        return self.own.place

    @property
    def groups(self) -> Groups:
        return self.own.groups

    def exchange(self, source: Layout, target: Layout, place: int, gradient: bool) -> nn.Module:
        plan = plan_redistribution(
            source,
            target,
            self.grid,
            place,
            even_collectives=self.backend.has_even_collectives,
            backward=gradient,
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

    def subgroup(self, special: Special) -> Subgroup:
        """The devices that hold the cut dims of an operation together."""
        return self.own.along(special.axes)

    def first_of(self, special: Special, dim: int) -> int:
        """Index in the whole first argument of the first entry of a dim that this place has."""
        ranges = special.inputs[0].ranges(self.grid, self.place, dim)
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
        return exchange(x, self.plan, self.groups)


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
    autocast has a list for each (on GPUs norms and softmax run in float32, on the CPU in the type
    of their input)."""
    dtype: torch.dtype = special.node.meta["val"].dtype
    return dtype


def _norm(special: Special, around: RealCommunication) -> Callable[..., Any]:
    subgroup = around.subgroup(special)
    is_layer = op_name(special.node) == "layer_norm"

    def run(given: dict[str, Any]) -> Tensor:
        num_dims = len(given["normalized_shape"])
        x = given["input"].to(_dtype(special))
        if is_layer:
            return layer_norm(x, num_dims, given["weight"], given["bias"], given["eps"], subgroup)
        return rms_norm(x, num_dims, given["weight"], given["eps"], subgroup)

    return _by_name(special.node, run)


def _summa(special: Special, around: RealCommunication) -> Callable[..., Any]:
    weight = special.inputs[1]
    panels = [
        sum(b - a for a, b in weight.ranges(around.grid, place, 1))
        for place in around.grid.subgroup(around.place, "y")
    ]
    plane = Plane(around.own.along("x"), around.own.along("y"), tuple(panels))
    return _by_name(
        special.node,
        lambda given: summa_linear(given["input"], given["weight"], given["bias"], plane),
    )


def _softmax(special: Special, around: RealCommunication) -> Callable[..., Any]:
    subgroup = around.subgroup(special)
    function = log_softmax if "log" in op_name(special.node) else softmax
    return _by_name(
        special.node,
        lambda given: function(given["self"].to(_dtype(special)), given["dim"], subgroup),
    )


def _argmax(special: Special, around: RealCommunication) -> Callable[..., Any]:
    subgroup = around.subgroup(special)
    rank = len(special.inputs[0].cuts)
    dim = int(named_args(special.node)["dim"]) % rank
    first = around.first_of(special, dim)
    return _by_name(
        special.node,
        lambda given: argmax(given["self"], dim, bool(given["keepdim"]), first, subgroup),
    )


def _class_loss(special: Special, around: RealCommunication) -> Callable[..., Any]:
    subgroup = around.subgroup(special)
    first = around.first_of(special, 1)
    num_classes = special.inputs[0].shape[1]

    def run(given: dict[str, Any]) -> Tensor:
        return cross_entropy(
            given["self"],
            given["target"],
            given["weight"],
            given["reduction"],
            int(given["ignore_index"]),
            given["label_smoothing"],
            num_classes,
            first,
            subgroup,
        )

    return _by_name(special.node, run)


def _embedding(special: Special, around: RealCommunication) -> Callable[..., Any]:
    first = around.first_of(special, 0)
    num_rows = special.inputs[0].shape[0]
    return _by_name(
        special.node,
        lambda given: embedding(
            given["weight"], given["indices"], first, num_rows, int(given["padding_idx"])
        ),
    )


def _experts(special: Special, around: RealCommunication) -> Callable[..., Any]:
    """Along axes that cut the rows as well as the experts, tokens travel."""
    rows = special.inputs[0]
    weight = special.inputs[1]
    axes = tuple(axis for axis in weight.axes[0] if axis in rows.axes[0])
    places = around.grid.subgroup(around.place, axes)
    bounds = tuple((weight.ranges(around.grid, place, 0) or [(0, 0)])[0] for place in places)
    experts = Experts(bounds, around.own.along(axes), weight.shape[0])
    if op_name(special.node) != "expert_mm":
        return lambda x, weight, ends: grouped_mm_of_same_tokens(x, weight, ends, experts)
    return ExpertProduct(experts, bool(named_args(special.node)["transposed"]))


def _batch_norm(special: Special, around: RealCommunication) -> Callable[..., Any]:
    places = around.grid.subgroup(around.place, special.axes)
    subgroup = around.own.statistics.get(places) or around.subgroup(special)

    def run(given: dict[str, Any]) -> Tensor:
        statistics = given["running_mean"], given["running_var"]
        return batch_norm(
            given["input"],
            given["weight"],
            given["bias"],
            *statistics,
            given["momentum"],
            given["eps"],
            subgroup,
        )

    return _by_name(special.node, run)


def _replicas(special: Special, around: RealCommunication) -> Callable[..., Any]:
    subgroup = around.own.statistics.get((around.place,))
    return lambda value: value if subgroup is None else sum_over_subgroup(value, subgroup)


# ---- random numbers
#
# Devices that hold the same values must draw the same numbers, and other ones where the tensor is
# cut. The chunk's seed is the same on all devices of the grid; a random operation draws from
#
#     hash(chunk's seed, number of the operation, coordinates on the axes that cut its result)
#
# and leaves the stream of the chunk as it was, so that operations do not depend on each other.
# Different GPUs give different numbers for the same seed; where some that must agree are in a grid,
# the CPU's generator draws for them.


@dataclass(frozen=True)
class Draw:
    """The seed without the chunk's seed, which is known when it runs."""

    number: int
    """of the operation in its TaskGraph"""
    coordinates: tuple[tuple[str, int], ...]

    @staticmethod
    def of(number: int, layout: Layout, grid: Grid, place: int) -> Draw:
        """`layout`: of the operation's result."""
        return Draw(
            number,
            tuple(
                (axis, grid.coordinate(place, axis)) for axis in grid.axes if axis in layout.sharded
            ),
        )

    def seed(self, chunk_seed: int) -> int:
        text = f"{chunk_seed}|{self.number}|{self.coordinates}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


@contextlib.contextmanager
def drawing(draw: Draw, device: torch.device) -> Iterator[None]:
    """Operations inside draw from the seed of `draw`. `torch.manual_seed` has set the chunk's
    seed.
    """
    with device_of(device).fork_random():
        torch.manual_seed(draw.seed(torch.initial_seed()))
        yield


def _random(special: Special, around: RealCommunication) -> Callable[..., Any]:
    """Any operation that draws numbers; those that make a tensor of random numbers make their part
    of it.
    """
    node = special.node
    output = special.outputs[0]
    number = next(place for place, other in enumerate(node.graph.nodes) if other is node)
    draw = Draw.of(number, output, around.grid, around.place)
    shape = list(output.local_shape(around.grid, around.place))
    must_agree = any(axis not in output.sharded for axis in around.grid.axes)
    call = _on_the_cpu if must_agree and not around.draws_alike else _as_it_is

    def run(*tensors: Tensor) -> Any:
        remaining = iter(tensors)

        def replaced(source: Node) -> Any:
            return next(remaining) if isinstance(source.meta.get("val"), Tensor) else shape[0]

        arguments: tuple[Any, ...] = tuple(
            shape if _is_size(value) else map_arg(value, replaced) for value in node.args
        )
        device = tensors[0].device if tensors else torch.device(node.kwargs.get("device") or "cpu")  # type: ignore[arg-type]
        with drawing(draw, device):
            return call(node.target, arguments, map_arg(node.kwargs, replaced), device)

    return run


def _as_it_is(target: Any, args: tuple[Any, ...], kwargs: Any, device: torch.device) -> Any:
    return target(*args, **kwargs)


def _on_the_cpu(target: Any, args: tuple[Any, ...], kwargs: Any, device: torch.device) -> Any:
    """What the operation gives with numbers of the CPU's generator. Of dropout only the mask is
    made there; anything else runs there as a whole, which waits for the device.
    """
    if target is torch.ops.aten.dropout.default:
        x, probability, is_training = args
        if not is_training or probability in (0.0, 1.0):
            return target(*args)
        mask = torch.empty(x.shape, dtype=x.dtype).bernoulli_(1.0 - probability)
        return x * device_of(device).start_copy(mask.div_(1.0 - probability)).take()

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value.cpu() if isinstance(value, Tensor) else value

    drawn = target(*pytree.tree_map(moved, args), **pytree.tree_map(moved, kwargs))
    return pytree.tree_map(lambda value: device_of(device).start_copy(value).take(), drawn)


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
