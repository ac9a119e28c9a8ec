"""A pass over the graph of one device on a grid, after `sharding/emit.py`: tokens that travel to
their experts stay until they are done.

product of rows that travel  ->  route, rows to their experts, product, rows back                                             (1)
rows back, and to the same experts again, with only row-by-row operations between  ->  nothing                              (2)
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from whale.lowering.sharded_experts import (
    ExpertProduct,
    Experts,
    Route,
    find_route,
    from_experts,
    product,
    to_experts,
)
from whale.sharding.expert_rows import readers_in_place


def stay_at_experts(module: GraphModule) -> None:
    """Lines (1) and (2), also inside regions that are computed again."""
    for each in [part for part in module.modules() if isinstance(part, GraphModule)]:
        if _take_apart(each):
            _cancel(each)
            each.recompile()


class FindRoute(nn.Module):
    """Where the rows of these tokens go."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, numbers: Tensor) -> Route:
        return find_route(numbers, self.experts)


def product_at_experts(rows: Tensor, weight: Tensor, route: Route, transposed: bool) -> Tensor:
    return product(rows, weight, route.experts, transposed)


def _take_apart(module: GraphModule) -> bool:
    """Line (1); whether there was something to do. Products of the same tokens have the
    same route.
    """
    graph = module.graph
    routes = {}
    for node in list(graph.nodes):
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(called, ExpertProduct) or called.experts.line.size == 1:
            continue
        x, weight, numbers = node.args
        with graph.inserting_before(node):
            key = (numbers, called.experts)
            if key not in routes:
                name = f"{node.target}_route"
                module.add_submodule(name, FindRoute(called.experts))
                routes[key] = graph.call_module(name, (numbers,))
            arrived = graph.call_function(to_experts, (x, routes[key]))
            done = graph.call_function(
                product_at_experts, (arrived, weight, routes[key], called.transposed)
            )
            back = graph.call_function(from_experts, (done, routes[key]))
        back.meta = dict(node.meta)
        node.replace_all_uses_with(back)
        graph.erase_node(node)
    return bool(routes)


def _cancel(module: GraphModule) -> None:
    """Line (2)."""
    graph = module.graph
    for back in [node for node in graph.nodes if node.target is from_experts]:
        ends = readers_in_place(back, lambda node, route=back.args[1]: _leaves_again(node, route))  # type: ignore[misc]
        if ends:
            for end in ends:
                end.replace_all_uses_with(end.args[0])  # type: ignore[arg-type]
                graph.erase_node(end)
            back.replace_all_uses_with(back.args[0])  # type: ignore[arg-type]
            graph.erase_node(back)


def _leaves_again(node: Node, route: Node) -> bool:
    return node.target is to_experts and node.args[1] is route
