"""Calls in the graph of a device on a grid that bring blocks of weights before they are read: parts
of parameters that are at home on the host or on disk (docs/memory.md).

The last pass over that graph, behind `overlap.py`: what reads a weight there, or what is gathered
from it, is known then. As in `blocks.py`, `need` stands in front of a reader and `need_in_backward`
behind it; a gathered weight counts as its block, since backward may gather it again. Regions that
are recomputed get the same calls inside.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx import GraphModule, Node

from whale.capture.graph import Recomputed, name_at
from whale.lowering.blocks import (
    Blocks,
    BlockWeights,
    Readers,
    Use,
    refuse_shared_slots,
    region_contexts,
)

aten = torch.ops.aten
RESIDENCE = "residence"
"""attribute of a module that brings weights which are not always here"""

Behind = dict[Node, Blocks]
"""blocks that a value comes from, of values that are computed from weights alone"""


def bring_blocks(module: GraphModule, weights: BlockWeights) -> list[Use]:
    """Changes the graph in place; gives its uses of blocks in order."""
    bringing = _Bringing(weights, Readers({}, stays=weights.stays))
    bringing.put_calls(module, {})
    return bringing.readers.uses


@dataclass
class _Bringing:
    """The pass over one graph and the regions in it."""

    weights: BlockWeights
    readers: Readers
    num_regions: int = 0

    def put_calls(self, module: GraphModule, behind: Behind) -> list[Blocks | None]:
        """What each result comes from; None: not from weights alone. `behind`: of arguments."""
        graph = module.graph
        nodes = list(graph.nodes)
        first = next(node for node in nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            residence = graph.create_node("get_attr", RESIDENCE)
        setattr(module, RESIDENCE, self.weights.residence)
        regions: dict[Node, list[Blocks | None]] = {}
        results: list[Blocks | None] = []
        for node in nodes:
            if node.op == "get_attr":
                block = self.weights.block_of.get(name_at(node.target))
                behind[node] = () if block is None else (block,)
            elif node.op == "output":
                results = self._results(node, behind, residence)
            elif (region := _region(module, node)) is not None:
                regions[node] = self._enter(region, node, behind)
            elif node.target is operator.getitem and node.args[0] in regions:
                found = regions[node.args[0]][int(node.args[1])]  # type: ignore[index, arg-type]
                if found is not None:
                    behind[node] = found
            elif node.op != "placeholder":
                self._operation(node, behind, residence)
        module.recompile()
        return results

    def _operation(self, node: Node, behind: Behind, residence: Node) -> None:
        sources = node.all_input_nodes
        blocks = sorted({block for source in sources for block in behind.get(source, ())})
        if all(source in behind for source in sources):
            behind[node] = tuple(blocks)
        if not blocks:
            return
        self.readers.of_node[node] = tuple(blocks)
        refuse_shared_slots(node, tuple(blocks), self.weights)
        with node.graph.inserting_before(node):
            self.readers.before(node.graph, node, residence)
        with node.graph.inserting_after(node):
            self.readers.behind(node.graph, node, node, residence)

    def _enter(self, region: Recomputed, call: Node, behind: Behind) -> list[Blocks | None]:
        """The calls inside of a region."""
        inside = [node for node in region.body.graph.nodes if node.op == "placeholder"]
        given: Behind = {}
        for node, argument in zip(inside, call.args, strict=True):
            if isinstance(argument, Node) and argument in behind:
                given[node] = behind[argument]
        region.contexts = partial(region_contexts, self.weights.residence)
        self.readers.enter(self.num_regions)
        self.num_regions += 1
        found = self.put_calls(region.body, given)
        self.readers.enter(None)
        return found

    def _results(self, output: Node, behind: Behind, residence: Node) -> list[Blocks | None]:
        """What results come from. What leaves the stage must not lie in the memory of a block,
        which may hold other weights by now, and will hold others.
        """
        graph = output.graph
        given: list[Node] = list(output.args[0])  # type: ignore[arg-type]
        found = [behind.get(node) for node in given]
        for place, blocks in enumerate(found if self.readers.region is None else ()):
            node = given[place]
            if not blocks:
                continue
            is_here = node.op == "call_function" and node.target is not operator.getitem
            if not is_here:  # a weight itself, or a result of a region, which read others behind it
                with graph.inserting_before(output):
                    self.readers.bring(graph, blocks, residence)
            with graph.inserting_after(node) if is_here else graph.inserting_before(output):
                given[place] = graph.call_function(aten.clone.default, (node,))
        output.args = (tuple(given),)
        return found


def _region(module: GraphModule, node: Node) -> Recomputed | None:
    """The region that a node calls; None for any other node."""
    if node.op != "call_module":
        return None
    called = module.get_submodule(str(node.target))
    return called if isinstance(called, Recomputed) else None
