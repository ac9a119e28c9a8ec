"""Regions that the user put under `torch.utils.checkpoint`: their activations are not kept but computed again in backward.

The capture marks the operations of each region. Here a region of a stage becomes one sub-graph that is called through
`torch.utils.checkpoint`, which also brings back the random numbers of dropout. A region with batch statistics is left as it is: running
statistics must not be updated twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from whale.capture.guards import RECOMPUTE_TAG
from whale.capture.kinds import trains_batch_norm


def regions_of(operations: Sequence[Node]) -> dict[int, list[Node]]:
    """Operations of each checkpointed region of a stage, in graph order; only regions that can be called as one block."""
    regions: dict[int, list[Node]] = {}
    for node in operations:
        tag = (node.meta.get("custom") or {}).get(RECOMPUTE_TAG)
        if tag is not None:
            regions.setdefault(tag, []).append(node)
    return {tag: nodes for tag, nodes in regions.items() if _is_block(nodes, operations)}


def _is_block(nodes: list[Node], operations: Sequence[Node]) -> bool:
    """Nothing outside uses a value of the region before its last operation."""
    own, last = set(nodes), operations.index(nodes[-1])
    if any(trains_batch_norm(node) for node in nodes):
        return False
    return not any(source in own for node in operations[:last] if node not in own for source in node.all_input_nodes)


class Recomputed(torch.nn.Module):
    """A region as a module that keeps only its inputs for backward."""

    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: object) -> object:
        if not torch.is_grad_enabled():
            return self.body(*inputs)
        return checkpoint(self.body, *inputs, use_reentrant=False)


def cut_region(nodes: list[Node], results: set[Node]) -> tuple[Graph, list[Node], list[Node]]:
    """(empty graph with its inputs as placeholders, what enters, what leaves); the caller copies the operations in."""
    own = set(nodes)
    entering = list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in own))
    leaving = [node for node in nodes if node in results or any(user not in own for user in node.users)]
    graph = Graph()
    for source in entering:
        graph.placeholder(source.name)
    return graph, entering, leaving
