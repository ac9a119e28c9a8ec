"""All devices of a grid in one process, without a message: the reference that tells whether layouts
and rules are right.

The graphs of all places run in step. An exchange puts the whole tensor together from all parts and
cuts it again, with ordinary operations, so autograd gives its exact transpose; an operation that
would talk to others runs whole on the tensors put together. Hundreds of grids take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from whale.planning.stages import carries_gradient, live_operations
from whale.plans.grid import Grid
from whale.plans.layout import Layout
from whale.plans.sharding import Sharding
from whale.sharding.emit import Special, emit
from whale.sharding.space import Space, StageProgram


class Nothing:
    """Communication of a graph that the oracle runs."""

    def exchange(self, source: Layout, target: Layout, place: int, gradient: bool) -> nn.Module:
        return nn.Identity()

    def operation(self, special: Special) -> nn.Module:
        return nn.Identity()


def whole_program(prepared: Any, by_samples: frozenset[Node] = frozenset()) -> StageProgram:
    """A captured model as one stage."""
    captured = prepared.captured
    operations = live_operations(captured)
    read = {source for node in operations for source in node.all_input_nodes}
    nodes = list(captured.graph.nodes)
    return StageProgram(
        captured=captured,
        kinds=prepared.kinds,
        operations=tuple(operations),
        inputs=tuple(node for node in nodes if node.op == "placeholder"),
        received=(),
        state=tuple(node for node in nodes if node.op == "get_attr" and node in read),
        terms=tuple(prepared.terms),
        updates=dict(captured.buffer_updates),
        by_samples=by_samples,
        gradients=carries_gradient(captured),
    )


def assemble(parts: Sequence[Tensor], layout: Layout, grid: Grid) -> Tensor:
    """The whole tensor from the parts of all places."""
    total: Tensor | None = None
    for place, part in enumerate(parts):
        if any(grid.coordinate(place, axis) for axis in layout.same_on(grid)):
            continue
        shape = layout.local_shape(grid, place)
        assert tuple(part.shape) == shape, (
            f"place {place} holds {tuple(part.shape)}, its layout {layout.text()} of "
            f"{layout.shape} says {shape}"
        )
        for dim in range(len(layout.cuts)):
            index = _index(layout, grid, place, dim)
            wide = part.new_zeros([*part.shape[:dim], layout.shape[dim], *part.shape[dim + 1 :]])
            part = (
                wide.index_copy(dim, index, part)
                if not part.is_floating_point()
                else wide.index_add(dim, index, part)
            )
        total = (
            part if total is None else total | part if part.dtype == torch.bool else total + part
        )
    assert total is not None
    return total


def cut(whole: Tensor, layout: Layout, grid: Grid, place: int) -> Tensor:
    """The part of one place."""
    assert tuple(whole.shape) == layout.shape
    for dim in range(len(layout.cuts)):
        whole = whole.index_select(dim, _index(layout, grid, place, dim))
    if any(grid.coordinate(place, axis) for axis in layout.partial):
        return whole * 0
    return whole


def _index(layout: Layout, grid: Grid, place: int, dim: int) -> Tensor:
    return torch.cat([torch.arange(a, b) for a, b in layout.ranges(grid, place, dim)])


def run_in_step(
    modules: Sequence[GraphModule], grid: Grid, arguments: Sequence[Sequence[Tensor]]
) -> list[Any]:
    """Results of all places."""
    places = range(grid.num_devices)
    values: list[dict[Node, Any]] = [{} for _ in places]
    given = [iter(each) for each in arguments]
    for nodes in zip(*(module.graph.nodes for module in modules), strict=True):
        first = nodes[0]
        if first.op == "output":
            return [
                map_arg(node.args[0], values[place].__getitem__)
                for place, node in zip(places, nodes)
            ]
        if "exchange" in first.meta:
            source, target = first.meta["exchange"]
            whole = assemble(
                [values[place][nodes[place].args[0]] for place in places], source, grid
            )
            results: list[Any] = [cut(whole, target, grid, place) for place in places]
        elif "special" in first.meta:
            results = _special(first.meta["special"], nodes, values, grid)
        else:
            results = [
                _run(node, modules[place], values[place], given[place])
                for place, node in zip(places, nodes)
            ]
        for place, node in zip(places, nodes):
            values[place][node] = results[place]
    raise AssertionError("a graph without output")


def _run(node: Node, module: GraphModule, values: Mapping[Node, Any], given: Any) -> Any:
    if node.op == "placeholder":
        return next(given)
    if node.op == "get_attr":
        found: Any = module
        for step in str(node.target).split("."):
            found = getattr(found, step)
        return found
    assert node.op == "call_function", node
    return node.target(
        *map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__)
    )


def _special(
    special: Special, nodes: Sequence[Node], values: Sequence[Mapping[Node, Any]], grid: Grid
) -> list[Any]:
    """The captured operation on whole tensors."""
    if special.kind == "replicas":
        return [values[place][node.args[0]] for place, node in enumerate(nodes)]  # there is one
    wholes = []
    for slot, layout in enumerate(special.inputs):
        wholes.append(
            assemble(
                [values[place][node.args[slot]] for place, node in enumerate(nodes)], layout, grid
            )
        )
    remaining = iter(wholes)
    result = special.node.target(
        *map_arg(special.node.args, lambda _: next(remaining)), **special.node.kwargs
    )
    assert isinstance(result, Tensor)
    return [cut(result, special.outputs[0], grid, place) for place in range(grid.num_devices)]


def run_sharded(
    space: Space,
    sharding: Sharding,
    num_samples: int,
    weights: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient of every parameter) of a whole model on the grid, from all devices put
    together.
    """
    grid = sharding.grid
    modules = []
    held = []
    for place in range(grid.num_devices):
        own = local_weights(space, sharding, place, weights)
        held.append(own)
        modules.append(emit(space, sharding, place, num_samples, own, Nothing()))
    results = run_in_step(modules, grid, [inputs] * grid.num_devices)
    loss = sum(result[0] for result in results)
    loss.backward()
    gradients = {}
    for name, layout in sharding.stored.items():
        parts = [
            own[name].grad if own[name].grad is not None else torch.zeros_like(own[name])
            for own in held
        ]
        gradients[name] = assemble(parts, layout.conjugate(grid), grid)
    return float(loss.detach()), gradients


def local_weights(
    space: Space, sharding: Sharding, place: int, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What one device holds."""
    own: dict[str, Tensor] = {}
    for node in space.program.state:
        name = str(node.target)
        if name in sharding.stored:
            part = cut(weights[name].detach(), sharding.stored[name], sharding.grid, place).clone()
            own[name] = nn.Parameter(part, requires_grad=weights[name].requires_grad)
        else:
            own[name] = weights[name].clone()
    return own
