"""One stage of the plan as an FX module: slice, weights under their own names, results for other
stages, its part of the loss.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from whale.capture.graph import CapturedGraph, Recomputed, attribute_of, cut_region, name_at
from whale.capture.lengths import Numbers
from whale.capture.sample_states import batch_dim
from whale.compat import enter_autocast, exit_autocast
from whale.lowering.blocks import (
    BlockWeights,
    Readers,
    Use,
    readers_of,
    region_contexts,
)
from whale.lowering.sharded_norms import batch_norm
from whale.lowering.subgroups import Subgroup, sum_over_subgroup
from whale.operations.nodes import sums_over_devices
from whale.operations.sizes import Size, shape_at, size_at
from whale.operations.table import is_random
from whale.planning.recompute import Regions
from whale.planning.stages import Assignment

aten = torch.ops.aten
_GROUP = "devices_of_stage"  # attribute of the chunk that holds its subgroup
_RESIDENCE = "residence"  # attribute of the chunk that brings weights which are not always here


@dataclass(frozen=True)
class CrossingValue:
    """A tensor that crosses between stages."""

    index: int
    """place among all crossing values of the graph: the message's number"""
    name: str
    dtype: torch.dtype
    batch_dim: int | None
    gradient: bool
    shape: tuple[Size, ...]
    """with the batch symbol, and those of lengths until `at` puts numbers there"""
    symbol: sympy.Symbol

    def at(self, numbers: Numbers) -> CrossingValue:
        """The value in a batch of these lengths."""
        known = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
        shape: list[Size] = []
        for size in self.shape:
            shape.append(size.node.expr.xreplace(known) if isinstance(size, torch.SymInt) else size)
        return replace(self, shape=tuple(shape))

    def shape_for(self, num_samples: int) -> tuple[int, ...]:
        return shape_at(self.shape, self.symbol, num_samples)

    def rows_per_sample(self) -> int:
        """Entries of the batch dim that belong to one sample (16 for [16*batch, width])."""
        assert self.batch_dim is not None
        return size_at(self.shape[self.batch_dim], self.symbol, 1)


@dataclass
class Chunk:
    """What one rank runs for one stage."""

    stage: int
    module_for: Callable[[int], GraphModule]
    """what runs so many samples"""
    received: tuple[CrossingValue, ...]
    """first arguments of the module"""
    inputs: tuple[int, ...]
    """then these placeholders of the graph: batch tensors, then whole-mini-batch values"""
    sent: tuple[CrossingValue, ...]
    """first results of the module"""
    num_outputs: int
    """then the results the user asked for (evaluation)"""
    has_loss: bool
    """then this stage's part of the loss"""
    updates: tuple[torch.Tensor, ...]
    """then new values of these buffers"""
    is_random: bool
    uses: Sequence[Use] = ()
    """places in its forward at which blocks of weights must be here, in order; on a grid known when
    its first module is made
    """
    is_sharded: bool = False
    """runs together with the other devices of a grid, and has a module of its own for each number
    of samples
    """
    has_sums: bool = False
    """sums over the devices that share its micro-batches are all-reduced in it: all of them must
    run every operation, in backward too
    """
    compiled: dict[Hashable, Any] = field(default_factory=dict)
    """what the runtime made of its modules, for all executors"""

    def at(self, numbers: Numbers) -> Chunk:
        """The chunk for batches of these lengths: the same modules, other shapes of messages."""
        return replace(
            self,
            received=tuple(value.at(numbers) for value in self.received),
            sent=tuple(value.at(numbers) for value in self.sent),
        )


@dataclass(frozen=True)
class Surroundings:
    """What a chunk needs to know of the rank it runs on."""

    weights: Mapping[str, torch.Tensor]
    subgroup: Subgroup | None
    """all devices that run this stage; None: only this one"""
    regions: Regions = field(default_factory=dict)
    """operations that are recomputed in backward"""
    blocks: BlockWeights | None = None
    """weights that are not always here; None: all are"""


@dataclass(frozen=True)
class _Objects:
    """Nodes of a graph that stand for what is no tensor."""

    group: Node | None
    residence: Node | None
    readers: Readers | None

    @property
    def nodes(self) -> list[Node]:
        return [node for node in (self.group, self.residence) if node is not None]

    def inside(self, body: Graph) -> _Objects:
        """These objects in the graph of a region, which gets them behind its other arguments."""
        return _Objects(
            body.placeholder(_GROUP) if self.group is not None else None,
            body.placeholder(_RESIDENCE) if self.residence is not None else None,
            self.readers,
        )


def crossing_values(captured: CapturedGraph, assignment: Assignment) -> dict[Node, CrossingValue]:
    """Every value that crosses, numbered in graph order, the same on all ranks."""
    nodes = sorted({node for node, _, _ in assignment.crossings})
    values = {}
    for index, node in enumerate(nodes):
        fake = node.meta["val"]
        dim = batch_dim(node, captured.batch_symbol)
        values[node] = CrossingValue(
            index,
            node.name,
            fake.dtype,
            dim,
            node in assignment.gradients,
            tuple(fake.shape),
            captured.batch_symbol,
        )
    return values


def build_chunk(
    captured: CapturedGraph,
    assignment: Assignment,
    stage: int,
    terms: Sequence[Node],
    outputs: Sequence[Node],
    around: Surroundings,
) -> Chunk:
    """Lowers one stage. `terms`: the loss terms of this stage; `outputs`: the results that the user
    wants from it.
    """
    part = assignment.slices[stage]
    values = crossing_values(captured, assignment)
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    sent = sorted({node for node, source, _ in assignment.crossings if source == stage})
    updates = _buffers_written(captured, assignment, stage)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in (*part.received, *part.inputs):
        copies[node] = graph.placeholder(node.name)
    _copy_state(graph, part.state, set(updates), copies)
    for name in sorted(set(updates) - {str(node.target) for node in part.state}):
        graph.create_node("get_attr", attribute_of(name))  # written and never read
    readers = readers_of(part.state, part.operations, around.blocks)
    objects = _Objects(
        graph.create_node("get_attr", _GROUP) if around.subgroup is not None else None,
        graph.create_node("get_attr", _RESIDENCE) if readers is not None else None,
        readers,
    )
    written = [captured.buffer_updates[name] for name in updates]
    wanted = dict.fromkeys((*sent, *outputs, *terms, *written))
    if readers is not None:
        readers.leaving = {node for node in wanted if readers.lies_in.get(node)}
    regions = _copy_operations(graph, part.operations, around.regions, copies, objects, set(wanted))
    if readers is not None:
        for node in filter(readers.leaving.__contains__, part.state):  # weights themselves
            readers.bring(graph, readers.lies_in[node], objects.residence)
            copies[node] = readers.own_memory(graph, node, copies[node])
    results = [copies[node] for node in (*sent, *outputs)]
    results += _sum_of_terms(graph, [copies[node] for node in terms])
    results += [copies[node] for node in written]
    graph.output(tuple(results))
    _drop_unused(graph, set(updates))
    if part.received:
        _relax_views([graph, *(region.body.graph for region in regions.values())])
    names = dict.fromkeys([*(str(node.target) for node in part.state), *updates])
    attributes = {name: _tensor(name, captured, around) for name in names}
    module = GraphModule(_root(attributes, regions, around), graph)
    return Chunk(
        stage=stage,
        module_for=lambda num_samples: module,  # a symbolic batch: the same for all
        received=tuple(values[node] for node in part.received),
        inputs=tuple(placeholders.index(node) for node in part.inputs),
        sent=tuple(values[node] for node in sent),
        num_outputs=len(outputs),
        has_loss=bool(terms),
        updates=tuple(attributes[name] for name in updates),
        is_random=any(is_random(node) for node in part.operations),
        uses=tuple(readers.uses) if readers is not None else (),
        has_sums=around.subgroup is not None and any(map(sums_over_devices, part.operations)),
    )


def _buffers_written(captured: CapturedGraph, assignment: Assignment, stage: int) -> list[str]:
    """Names of the buffers that get new values in a stage."""
    written = []
    for name, node in captured.buffer_updates.items():
        if assignment.result_stage[node] == stage:
            written.append(name)
    return written


def _sum_of_terms(graph: Graph, terms: Sequence[Node]) -> list[Node]:
    """The loss of a stage, nothing where it has no terms."""
    if not terms:
        return []
    return [reduce(lambda a, b: graph.call_function(operator.add, (a, b)), terms)]


def module_of_operations(
    operations: Sequence[Node],
    entering: Sequence[Node],
    weights: Mapping[str, torch.Tensor],
    results: Sequence[Node],
) -> GraphModule:
    """Some operations alone as a module: called with the values `entering`, it gives the values of
    `results`. `weights`: tensors of all weights, buffers and constants that they read, by name.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in entering:
        copies[node] = graph.placeholder(node.name)
    for node in operations:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.create_node("get_attr", attribute_of(str(source.target)))
    _copy_run(graph, operations, copies, _Objects(None, None, None))
    graph.output(tuple(copies[node] for node in results))
    return GraphModule(_root(weights, {}, Surroundings(weights, None)), graph)


def _tensor(name: str, captured: CapturedGraph, around: Surroundings) -> torch.Tensor:
    return (
        captured.constants[name]
        if captured.state[name].kind == "constant"
        else around.weights[name]
    )


def _root(
    attributes: Mapping[str, Any],
    regions: Mapping[str, Recomputed],
    around: Surroundings,
) -> torch.nn.Module:
    """Nested modules that hold the tensors under their original names, and the recomputed
    regions.
    """
    root = torch.nn.Module()
    for name, region in regions.items():
        root.add_module(name, region)
    for name, tensor in attributes.items():
        *path, leaf = attribute_of(name).split(".")
        owner = root
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, torch.nn.Module())
            owner = getattr(owner, step)
        if isinstance(tensor, torch.nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor)
    if around.subgroup is not None:
        setattr(root, _GROUP, around.subgroup)
    if around.blocks is not None:
        setattr(root, _RESIDENCE, around.blocks.residence)
        for region in regions.values():
            region.contexts = partial(region_contexts, around.blocks.residence)
    return root


def _copy_state(
    graph: Graph, state: Sequence[Node], updated: set[str], copies: dict[Node, Node]
) -> None:
    for node in state:
        copies[node] = graph.create_node("get_attr", attribute_of(str(node.target)))
        if str(node.target) in updated:
            # what is saved for backward must not change when the buffer gets its new value
            copies[node] = graph.call_function(aten.clone.default, (copies[node],))


def _copy_operations(
    graph: Graph,
    operations: Sequence[Node],
    regions: Regions,
    copies: dict[Node, Node],
    objects: _Objects,
    results: set[Node],
) -> dict[str, Recomputed]:
    """Copies operations, regions that are recomputed as one call each; gives the modules of
    these regions by attribute name.
    """
    members: dict[Any, list[Node]] = {}
    for node in operations:
        if node in regions:
            members.setdefault(regions[node], []).append(node)
    modules: dict[str, Recomputed] = {}
    run: list[Node] = []
    for node in operations:
        region = regions.get(node)
        if region is None:
            run.append(node)
        elif node is members[region][-1]:  # what stands between its operations needs none of them
            _copy_run(graph, run, copies, objects)
            run = []
            name = f"recomputed_{len(modules)}"
            if objects.readers is not None:
                objects.readers.enter(len(modules))
            modules[name] = _copy_region(graph, members[region], name, copies, objects, results)
            if objects.readers is not None:
                objects.readers.enter(None)
    _copy_run(graph, run, copies, objects)
    return modules


def _copy_region(
    graph: Graph,
    nodes: list[Node],
    name: str,
    copies: dict[Node, Node],
    objects: _Objects,
    results: set[Node],
) -> Recomputed:
    """One checkpointed region: its own graph, called with what enters it, and its results taken
    apart again.
    """
    body, entering, leaving = cut_region(nodes, results)
    inner = dict(zip(entering, body.nodes, strict=True))
    _copy_run(body, nodes, inner, objects.inside(body))
    body.output(tuple(inner[node] for node in leaving))
    arguments = [copies[source] for source in entering] + objects.nodes
    call = graph.call_module(name, tuple(arguments))
    for place, node in enumerate(leaving):
        copies[node] = graph.call_function(operator.getitem, (call, place))
    return Recomputed(GraphModule(torch.nn.Module(), body))


def _copy_run(
    graph: Graph, operations: Sequence[Node], copies: dict[Node, Node], objects: _Objects
) -> None:
    """Copies operations one by one, with autocast regions around runs of nodes."""
    open_region: Any = None
    region_node: Node | None = None
    for node in operations:
        region = node.meta.get("autocast")
        if region != open_region:
            if region_node is not None:
                graph.call_function(exit_autocast, (region_node,))
            region_node = (
                graph.call_function(enter_autocast, tuple(region)) if region is not None else None
            )
            open_region = region
        if objects.readers is not None:
            objects.readers.before(graph, node, objects.residence)
        copies[node] = _copy_operation(graph, node, copies, objects.group)
        copies[node].meta = {
            key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta
        }
        if objects.readers is not None:
            objects.readers.behind(graph, node, copies[node], objects.residence)
            copies[node] = objects.readers.own_memory(graph, node, copies[node])
    if region_node is not None:
        graph.call_function(exit_autocast, (region_node,))


def _copy_operation(graph: Graph, node: Node, copies: dict[Node, Node], group: Node | None) -> Node:
    if group is not None and node.target is aten.batch_norm.default and node.args[5]:
        x, weight, bias, mean, variance, _, momentum, eps = (
            copies.get(a, a) if isinstance(a, Node) else a for a in node.args[:8]
        )
        return graph.call_function(
            batch_norm, (x, weight, bias, mean, variance, momentum, eps, group)
        )
    copy = graph.node_copy(node, copies.__getitem__)
    if group is None or "all_reduce" not in node.meta:
        return copy
    # a loss that is not additive: its batch sums are taken over all devices
    return graph.call_function(sum_over_subgroup, (copy, group))


def _relax_views(graphs: Sequence[Graph]) -> None:
    """A received tensor is contiguous where the captured one may have had other strides: `view` may
    not fit it, `reshape` does.
    """
    for graph in graphs:
        for node in graph.nodes:
            if node.target is aten.view.default:
                node.target = aten.reshape.default
        if graph.owning_module is not None:
            graph.owning_module.recompile()


def _drop_unused(graph: Graph, updates: set[str]) -> None:
    """Received values and inputs stay as arguments even when unused; weights that nothing reads or
    writes go.
    """
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users and name_at(node.target) not in updates:
            graph.erase_node(node)
