"""Regions whose activations are computed again in backward (`planning/recompute.py`), as modules.

A region of a stage becomes one sub-graph that is called through `torch.utils.checkpoint`, which
also brings back the random numbers of dropout.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint


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
    """(empty graph with its inputs as placeholders, what enters, what leaves); the caller copies
    the operations in.
    """
    own = set(nodes)
    entering = list(
        dict.fromkeys(
            source for node in nodes for source in node.all_input_nodes if source not in own
        )
    )
    leaving = [
        node for node in nodes if node in results or any(user not in own for user in node.users)
    ]
    graph = Graph()
    for source in entering:
        graph.placeholder(source.name)
    return graph, entering, leaving
