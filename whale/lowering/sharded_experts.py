"""Products of tokens with their experts' weights where the experts lie on several devices. How many
tokens go where is known only now.

    tokens cut over the subgroup:                                         (two all-to-alls)     (1)
        rows -> the device of their expert -> product -> back
    the same tokens everywhere:                                           (a partial sum)       (2)
        each device does its experts' rows, 0 elsewhere

Both at once on a grid: along some axes tokens travel, along others they are the same. Then a
subgroup holds only some of the experts, and the rows of all others give 0 there.

A pass over the graph of one device, after `sharding/emit.py`, keeps tokens that travel at their
experts until they are done:

    product of rows that travel  ->  route, rows to their experts, product, rows back      (3)
    rows back, and to the same experts again, with only row-by-row operations between:
    both vanish                                                                            (4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from whale.devices import device_of
from whale.dtypes import in_memory
from whale.lowering.exchange import sent
from whale.lowering.subgroups import Subgroup, all_gather
from whale.sharding.expert_rows import readers_in_place

Bounds = tuple[int, int]
"""[first, stop) of experts"""


@dataclass(frozen=True)
class Experts:
    """Which experts the devices of a subgroup have."""

    bounds: tuple[Bounds, ...]
    """for each device of the subgroup, in its order"""
    subgroup: Subgroup
    """along which tokens travel; one device: they stay"""
    num_experts: int

    @property
    def here(self) -> Bounds:
        return self.bounds[self.subgroup.index]


@dataclass(frozen=True)
class Route:
    """Where the rows of one set of tokens go, and which rows come."""

    num_rows: int
    """of this device"""
    rows: Tensor
    """numbers of those that leave, device after device, sorted by expert"""
    leaving: list[int]
    """rows to each device of the subgroup"""
    arriving: list[int]
    experts: Tensor
    """of the arriving rows, counted from the first one here"""
    subgroup: Subgroup


class ExpertProduct(nn.Module):
    """`expert_mm` of capture/experts.py with the rows of this device and the weights of the experts
    here.
    """

    def __init__(self, experts: Experts, transposed: bool) -> None:
        super().__init__()
        self.experts = experts
        self.transposed = transposed

    def forward(self, x: Tensor, weight: Tensor, numbers: Tensor) -> Tensor:
        return expert_mm(x, weight, numbers, self.transposed, self.experts)


def expert_mm(
    x: Tensor, weight: Tensor, experts: Tensor, transposed: bool, around: Experts
) -> Tensor:
    """x [rows, K] -> [rows, N]. Where tokens travel, `stay_at_experts` puts its steps into the
    graph.
    """
    if around.subgroup.size == 1:
        return product(x, weight, experts - around.here[0], transposed)
    route = find_route(experts, around)
    return from_experts(product(to_experts(x, route), weight, route.experts, transposed), route)


def to_experts(x: Tensor, route: Route) -> Tensor:
    """This device's rows to their experts; gives the rows that arrive here."""
    return _travel(x.index_select(0, route.rows), route.arriving, route.leaving, route.subgroup)


def from_experts(rows: Tensor, route: Route) -> Tensor:
    """The way back; rows that have not travelled are 0."""
    returned = _travel(rows, route.leaving, route.arriving, route.subgroup)
    return returned.new_zeros(route.num_rows, returned.shape[1]).index_copy(0, route.rows, returned)


def grouped_mm_of_same_tokens(x: Tensor, weight: Tensor, ends: Tensor, around: Experts) -> Tensor:
    """Case (2) for rows that are sorted by expert, those of expert e up to `ends[e]`."""
    # the number of ends before a row is its expert; rows behind the last end have none
    rows = torch.arange(len(x), device=x.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, rows, right=True)
    return product(x, weight, experts - around.here[0], transposed=False)


def product(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """The product on one device; rows of experts that are not here give 0."""
    result: Tensor = torch.ops.whale.expert_mm(x, weight, experts, transposed)
    return result


def find_route(experts: Tensor, around: Experts) -> Route:
    """All devices of the subgroup exchange how many tokens they have for each expert. The host
    waits for these numbers: it launches an exchange of so many rows.
    """
    device = device_of(experts.device)
    # not `bincount`, which on GPUs waits for the smallest and the largest number
    counts = experts.new_zeros(around.num_experts).index_add_(0, experts, torch.ones_like(experts))
    everyone = all_gather(counts, around.subgroup).cpu()  # [devices, experts]
    own = everyone[around.subgroup.index]
    first, stop = around.here
    mine = everyone[:, first:stop]  # [devices, experts here]
    numbers = torch.arange(stop - first).expand(around.subgroup.size, -1).reshape(-1)
    return Route(
        num_rows=len(experts),
        rows=_rows_in_order(experts, own, around.bounds),
        leaving=[int(own[a:b].sum()) for a, b in around.bounds],
        arriving=mine.sum(1).tolist(),
        experts=device.start_copy(numbers.repeat_interleave(mine.reshape(-1))).take(),
        subgroup=around.subgroup,
    )


def _rows_in_order(experts: Tensor, counts: Tensor, bounds: Sequence[Bounds]) -> Tensor:
    order = experts.argsort(stable=True)
    starts = [0, *counts.cumsum(0).tolist()]
    return torch.cat([order[starts[first] : starts[stop]] for first, stop in bounds])


def _travel(x: Tensor, arriving: list[int], leaving: list[int], subgroup: Subgroup) -> Tensor:
    result: Tensor = _Travel.apply(x, arriving, leaving, subgroup)  # type: ignore[no-untyped-call]
    return result


class _Travel(torch.autograd.Function):
    """Rows to other devices of the subgroup; their gradients come back the same way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, arriving: list[int], leaving: list[int], subgroup: Subgroup
    ) -> Tensor:
        ctx.arriving = leaving
        ctx.leaving = arriving
        ctx.subgroup = subgroup
        return _all_to_all(x, arriving, leaving, subgroup)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.arriving, ctx.leaving, ctx.subgroup), None, None, None


def _all_to_all(x: Tensor, arriving: list[int], leaving: list[int], subgroup: Subgroup) -> Tensor:
    received = x.new_empty((sum(arriving), *x.shape[1:]))
    sent.num_bytes += (len(x) - leaving[subgroup.index]) * x[0:1].numel() * x.element_size()
    sent.num_messages += 1
    dist.all_to_all_single(
        received, in_memory(x).contiguous(), arriving, leaving, group=subgroup.group
    )
    return received


# ---- the pass over a graph


def stay_at_experts(module: GraphModule) -> None:
    """Lines (3) and (4), also inside regions that are recomputed."""
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
    """Takes products apart as in (3); whether there was one. Products of the same tokens have the
    same route.
    """
    graph = module.graph
    routes = {}
    for node in list(graph.nodes):
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(called, ExpertProduct) or called.experts.subgroup.size == 1:
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
    """Removes the exchanges of (4)."""
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
