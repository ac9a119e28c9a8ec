"""The graph that one device of a grid runs for one stage and one number of samples: local
operations with constant sizes, and redistributions.

All devices get the same nodes in the same order, so messages meet; only sizes and parts differ. A
value is brought into another layout once, whoever needs it there, when the first one does.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from whale.capture.graph import Recomputed, attribute_of, cut_region
from whale.compat import enter_autocast, exit_autocast
from whale.operations.nodes import op_name, tensor_nodes, trains_batch_norm
from whale.operations.operation import Shapes
from whale.operations.table import is_random
from whale.plans.layout import Layout
from whale.plans.sharding import Sharding
from whale.sharding.dims import Value, value_of
from whale.sharding.local import local_call
from whale.sharding.options import SAME, Option, Placement
from whale.sharding.redistribution import TWO_STEPS_FROM
from whale.sharding.space import Space, layout_of

SPECIAL = (
    "summa",
    "norm",
    "softmax",
    "argmax",
    "class loss",
    "embedding",
    "experts",
    "batch norm",
    "random",
    "replicas",
)
"""operations that talk to other devices, or draw random numbers; `replicas` all-reduces a value
over the model replicas
"""
CALLS = "calls_of_whale"
"""attribute that holds modules which send; no model has it"""


@dataclass(frozen=True)
class Special:
    """An operation that talks to other devices: everything that its implementation may want to
    know.
    """

    kind: str
    """one of SPECIAL"""
    node: Node
    axes: tuple[str, ...]
    """along which it talks: those that cut what it works over"""
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    place: int


class Communication(Protocol):
    """Makes the modules that send: real ones, or those of a test."""

    def exchange(self, source: Layout, target: Layout, place: int, gradient: bool) -> nn.Module:
        """A module that brings its argument from one layout into another."""

    def operation(self, special: Special) -> nn.Module:
        """A module that takes the tensors of the operation (after redistribution) and gives its
        results.
        """


def emit(
    space: Space,
    sharding: Sharding,
    place: int,
    num_samples: int,
    weights: Mapping[str, torch.Tensor],
    communication: Communication,
    regions: Mapping[Node, Hashable] | None = None,
) -> GraphModule:
    """Arguments of the module: received values, then inputs. Results: sent values, outputs, the sum
    of the loss terms (if the stage has any), new values of buffers. `weights`: this device's part
    of every parameter, buffers and constants whole, by name. `regions`: operations that are
    recomputed in backward, by region; what is gathered for them is gathered again there.
    """
    return _Emitter(space, sharding, place, num_samples, weights, communication).emit(regions or {})


class _Emitter:
    def __init__(
        self,
        space: Space,
        sharding: Sharding,
        place: int,
        num_samples: int,
        weights: Mapping[str, torch.Tensor],
        communication: Communication,
    ) -> None:
        self.space = space
        self.sharding = sharding
        self.place = place
        self.num_samples = num_samples
        self.weights = weights
        self.communication = communication
        self.grid = sharding.grid
        self.shapes = Shapes(space.program.captured.batch_symbol, num_samples)
        self.graph = Graph()
        self.root = nn.Module()
        self.calls = nn.Module()
        self.root.add_module(CALLS, self.calls)
        self.num_calls = 0
        self.copies: dict[Value, Node] = {}
        self.layouts: dict[Value, Layout] = {}
        self.changed: dict[tuple[Value, Layout], Node] = {}
        self.region: tuple[Any, Node] | None = None
        self.chosen = space.chosen(sharding)

    # ---- the graph

    def emit(self, regions: Mapping[Node, Hashable]) -> GraphModule:
        program = self.space.program
        for node in (*program.received, *program.inputs):
            self._set(
                value_of(node),  # a part of several results may be received, too
                self.graph.placeholder(node.name),
                dict.fromkeys(self.grid.axes, self.space.fixed_source(node)),
            )
        for node in program.state:
            self._state(node)
        runs = self._operations(regions)
        wanted: dict[Node, list[Placement]] = {}
        for node, placement in self.space.wanted():
            wanted.setdefault(node, []).append(placement)
        results = [
            self.bring(node, dict.fromkeys(self.grid.axes, wanted[node][0]))
            for node in (*program.sent, *program.outputs)
        ]
        if program.terms:
            terms = [
                self.bring(node, dict.fromkeys(self.grid.axes, wanted[node][-1]))
                for node in program.terms
            ]
            results.append(
                reduce(lambda a, b: self.graph.call_function(operator.add, (a, b)), terms)
            )
        results.extend(self.bring(node, {}) for node in program.updates.values())
        self.graph.output(tuple(results))
        for number, run in enumerate(runs):
            self._recompute(run, f"recomputed_{number}")
        for node in reversed(self.graph.nodes):
            if node.op == "get_attr" and not node.users:
                self.graph.erase_node(node)
        return GraphModule(self.root, self.graph)

    def _operations(self, regions: Mapping[Node, Hashable]) -> list[list[Node]]:
        """Emits all operations, a region in one run when its last one comes; gives the nodes of
        each run.
        """
        members: dict[Hashable, list[Node]] = {}
        for node in self.space.program.operations:
            if node in regions:
                members.setdefault(regions[node], []).append(node)
        runs = []
        for node in self.space.program.operations:
            if node not in regions:
                self._operation(node)
            elif node is members[regions[node]][-1]:
                self._autocast(None)
                start = len(self.graph.nodes)
                for member in members[regions[node]]:
                    self._operation(member)
                self._autocast(None)
                runs.append(list(self.graph.nodes)[start:])
        self._autocast(None)
        return [run for run in runs if run]

    def _recompute(self, run: list[Node], name: str) -> None:
        """Makes a run of nodes one call that saves only its arguments for backward."""
        own = set(run)
        body, entering, leaving = cut_region(run, set())
        inner = dict(zip(entering, body.nodes, strict=True))
        for node in run:
            inner[node] = body.node_copy(node, inner.__getitem__)
        body.output(tuple(inner[node] for node in leaving))
        self.calls.add_module(name, Recomputed(GraphModule(self.root, body)))
        with self.graph.inserting_before(run[0]):
            call = self.graph.call_module(f"{CALLS}.{name}", tuple(entering))
            parts = [
                self.graph.call_function(operator.getitem, (call, place))
                for place in range(len(leaving))
            ]
        for node, part in zip(leaving, parts, strict=True):
            node.replace_all_uses_with(part, delete_user_cb=lambda user: user not in own)
        for node in reversed(run):
            self.graph.erase_node(node)

    def _state(self, node: Node) -> None:
        name = str(node.target)
        _register(self.root, name, self.weights[name])
        copy = self.graph.create_node("get_attr", attribute_of(name))
        if name in self.space.program.updates:
            # what is saved for backward must not change when the buffer gets its new value
            copy = self.graph.call_function(torch.ops.aten.clone.default, (copy,))
        self._set((node, 0), copy, {})
        if name in self.sharding.stored:
            self.layouts[node, 0] = self.sharding.stored[name]

    def _set(self, value: Value, copy: Node, placements: Mapping[str, Placement]) -> None:
        self.copies[value] = copy
        self.layouts[value] = self.layout(value, placements)

    def layout(self, value: Value, placements: Mapping[str, Placement]) -> Layout:
        """The layout of a value from its placement on each axis."""
        return layout_of(self.space.granules.cuts(value, self.num_samples), placements)

    def bring(self, source: Node, placements: Mapping[str, Placement]) -> Node:
        """The value of a node in this layout: as it is, or redistributed, once for all readers."""
        value = value_of(source)
        target = self.layout(value, placements)
        if is_alike(self.layouts[value], target):
            return self.copies[value]
        if (value, target) not in self.changed:
            lies = self.layouts[value]
            between = self._reduced_first(value, lies, placements)
            copy = self.copies[value]
            if between is not None:
                copy = self._exchange(value, copy, lies, between)
                lies = between
            self.changed[value, target] = self._exchange(value, copy, lies, target)
        return self.changed[value, target]

    def _exchange(self, value: Value, copy: Node, source: Layout, target: Layout) -> Node:
        gradient = value[0] in self.space.program.gradients
        call = self._call(
            self.communication.exchange(source, target, self.place, gradient), "exchange", (copy,)
        )
        call.meta["exchange"] = (source, target)
        return call

    def _reduced_first(
        self, value: Value, source: Layout, placements: Mapping[str, Placement]
    ) -> Layout | None:
        """The layout in between where one axis reduces and another gathers: partial sums would be
        sent to everyone otherwise. None where one step is enough.
        """
        adds = [axis for axis in source.partial if isinstance(placements.get(axis, SAME), int)]
        gathers = {
            axis: dim
            for dim, axes in enumerate(source.axes)
            for axis in axes
            if placements.get(axis, SAME) == SAME
        }
        if not adds or not gathers or prod(source.shape) <= TWO_STEPS_FROM:
            return None
        return self.layout(value, {**placements, **gathers})

    def _call(self, module: nn.Module, prefix: str, arguments: tuple[Any, ...]) -> Node:
        name = f"{prefix}_{self.num_calls}"
        self.num_calls += 1
        self.calls.add_module(name, module)
        return self.graph.call_module(f"{CALLS}.{name}", arguments)

    # ---- one operation

    def _operation(self, node: Node) -> None:
        if op_name(node) == "getitem" and not isinstance(node.meta.get("val"), int):
            return  # results are taken apart where they are made
        if self._is_known(node.meta.get("val")):
            return  # a size: a constant here
        chosen = self.chosen.get(node, {})
        if node in self.space.operations:
            inputs = self.space.operations[node].inputs
        else:
            inputs = tensor_nodes((node.args, node.kwargs))
        sources = []
        for slot, source in enumerate(inputs):
            wanted = {axis: option.inputs[slot] for axis, option in chosen.items()}
            sources.append(self.bring(source, wanted))
        self._autocast(node.meta.get("autocast"))
        results = self._local(node, chosen, sources)
        if "all_reduce" in node.meta:
            results = self._over_replicas(node, chosen, results)
        results.meta.update({key: node.meta[key] for key in ("stack_trace",) if key in node.meta})
        held = node.meta.get("val")
        if not isinstance(held, list | tuple):
            if isinstance(held, torch.Tensor):
                self._set((node, 0), results, _output_placements(chosen, 0))
            else:
                self.copies[node, 0] = results
            return
        used = {value_of(user)[1] for user in node.users if op_name(user) == "getitem"}
        for number in sorted(used):
            if isinstance(held[number], torch.Tensor):
                part = self.graph.call_function(operator.getitem, (results, number))
                self._set((node, number), part, _output_placements(chosen, number))

    def _is_known(self, value: Any) -> bool:
        """Whether a value is a number that follows from the number of samples."""
        if isinstance(value, int | float | bool):
            return True
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return not value.node.expr.free_symbols - {self.shapes.symbol}
        return False

    def _local(self, node: Node, chosen: Mapping[str, Option], sources: Sequence[Node]) -> Node:
        kinds: dict[str, list[str]] = {}
        for axis in self.grid.axes:
            if axis in chosen and chosen[axis].local:
                kinds.setdefault(chosen[axis].local, []).append(axis)
        values = []
        outputs = []
        if chosen:
            values = [value_of(source) for source in self.space.operations[node].inputs]
            for value in self.space.outputs_of(node):
                outputs.append(self.layout(value, _output_placements(chosen, value[1])))
        if is_random(node):
            kinds.setdefault("random", [])
        if chosen and trains_batch_norm(node):
            # also where every device has all samples: other replicas have more
            kinds.setdefault("batch norm", [])
        for kind in SPECIAL:
            if kind in kinds:
                inputs = [
                    self.layout(v, {a: o.inputs[slot] for a, o in chosen.items()})
                    for slot, v in enumerate(values)
                ]
                special = Special(
                    kind, node, tuple(kinds[kind]), tuple(inputs), tuple(outputs), self.place
                )
                call = self._call(
                    self.communication.operation(special), kind.replace(" ", "_"), tuple(sources)
                )
                call.meta["special"] = special
                return call
        shapes = [layout.local_shape(self.grid, self.place) for layout in outputs]
        is_mean = any(kind in kinds for kind in ("mean", "mean loss"))
        return local_call(
            self.graph,
            node,
            self._arguments(node, sources),
            shapes if chosen else None,
            self.shapes if is_mean else None,
        )

    def _over_replicas(self, node: Node, chosen: Mapping[str, Option], result: Node) -> Node:
        """A loss that is not additive: its batch sums are taken over all model replicas."""
        layout = self.layout((node, 0), _output_placements(chosen, 0))
        special = Special("replicas", node, (), (layout,), (layout,), self.place)
        call = self._call(self.communication.operation(special), "replicas", (result,))
        call.meta["special"] = special
        return call

    def _arguments(
        self, node: Node, sources: Sequence[Node]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The node's arguments with local tensors and constant sizes."""
        remaining = iter(sources)

        def replaced(source: Node) -> Any:
            value = source.meta.get("val")
            if isinstance(value, torch.Tensor):
                return next(remaining, None)
            if self._is_known(value):
                return (
                    value if isinstance(value, int | float | bool) else _number(value, self.shapes)
                )
            return self.copies[value_of(source)]

        return map_arg(node.args, replaced), map_arg(node.kwargs, replaced)  # type: ignore[return-value]

    def _autocast(self, region: Any) -> None:
        """Opens and closes autocast regions around runs of nodes."""
        if self.region is not None and self.region[0] != region:
            self.graph.call_function(exit_autocast, (self.region[1],))
            self.region = None
        if region is not None and self.region is None:
            self.region = (region, self.graph.call_function(enter_autocast, tuple(region)))


def is_alike(first: Layout, second: Layout) -> bool:
    """Whether every device holds the same entries in both, however they are counted."""
    return first == second or (
        first.partial == second.partial
        and first.axes == second.axes
        and not first.stored
        and all(a == b for a, b, axes in zip(first.cuts, second.cuts, first.axes) if axes)
    )


def _number(value: Any, shapes: Shapes) -> Any:
    if isinstance(value, torch.SymInt):
        return shapes.size(value)
    found = value.node.expr.subs({shapes.symbol: shapes.num_samples})
    return bool(found) if isinstance(value, torch.SymBool) else float(found)


def _output_placements(chosen: Mapping[str, Option], number: int) -> dict[str, Placement]:
    """Placement of one output of an operation on each axis on which an option was chosen."""
    return {axis: option.outputs[number] for axis, option in chosen.items()}


def _register(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts a tensor under its original name, in nested modules."""
    *path, leaf = attribute_of(name).split(".")
    owner = root
    for step in path:
        if not hasattr(owner, step):
            owner.add_module(step, nn.Module())
        owner = getattr(owner, step)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor)
