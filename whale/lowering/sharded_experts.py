"""Products of tokens with their experts' weights where the experts lie on several devices. How many
tokens go where is known only now.

    tokens cut over the line:   rows -> the device of their expert -> product -> back     (two all-to-alls)            (1)
    the same tokens everywhere: each device does its experts' rows, 0 elsewhere           (a partial sum)              (2)

Both at once on a grid: along some axes tokens travel, along others they are the same. Then a line
holds only some of the experts, and the rows of all others give 0 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whale.dtypes import in_memory
from whale.lowering.exchange import sent
from whale.lowering.lines import Line, gathered

Bounds = tuple[int, int]
"""[first, stop) of experts"""


@dataclass(frozen=True)
class Experts:
    """Which experts the devices of a line have."""

    bounds: tuple[Bounds, ...]
    """for each device of the line, in its order"""
    line: Line
    """along which tokens travel; one device: they stay"""
    num_experts: int

    @property
    def here(self) -> Bounds:
        return self.bounds[self.line.index]


@dataclass(frozen=True)
class Route:
    """Of one set of tokens: where its rows go, and what comes."""

    num_rows: int
    """of this device"""
    rows: Tensor
    """numbers of those that leave, device after device, sorted by expert"""
    leaving: list[int]
    """rows to each device of the line"""
    arriving: list[int]
    experts: Tensor
    """of the arriving rows, counted from the first one here"""
    line: Line


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
    """x [rows, K] -> [rows, N]. Where tokens travel, lowering/expert_routes.py puts its steps into
    the graph.
    """
    if around.line.size == 1:
        return product(x, weight, experts - around.here[0], transposed)
    route = find_route(experts, around)
    return from_experts(product(to_experts(x, route), weight, route.experts, transposed), route)


def to_experts(x: Tensor, route: Route) -> Tensor:
    """This device's rows to their experts; gives the rows that arrive here."""
    return _travel(x.index_select(0, route.rows), route.arriving, route.leaving, route.line)


def from_experts(rows: Tensor, route: Route) -> Tensor:
    """The way back; rows that have not travelled are 0."""
    returned = _travel(rows, route.leaving, route.arriving, route.line)
    return returned.new_zeros(route.num_rows, returned.shape[1]).index_copy(0, route.rows, returned)


def grouped_mm_of_same_tokens(x: Tensor, weight: Tensor, ends: Tensor, around: Experts) -> Tensor:
    """Line (2) for rows that are sorted by expert, those of expert e up to `ends[e]`."""
    counts = ends.diff(prepend=ends.new_zeros(1)).to(torch.int64)
    experts = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
    return product(x, weight, experts - around.here[0], transposed=False)


def product(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """On one device: rows of experts that are not here give 0."""
    result: Tensor = torch.ops.whale.expert_mm(x, weight, experts, transposed)
    return result


def find_route(experts: Tensor, around: Experts) -> Route:
    """All devices of the line tell each other how many tokens they have for each expert."""
    counts = torch.bincount(experts, minlength=around.num_experts)
    everyone = gathered(counts, around.line).cpu()  # [devices, experts]
    own = everyone[around.line.index]
    first, stop = around.here
    mine = everyone[:, first:stop]  # [devices, experts here]
    numbers = torch.arange(stop - first).expand(around.line.size, -1).reshape(-1)
    return Route(
        num_rows=len(experts),
        rows=_rows_in_order(experts, own, around.bounds),
        leaving=[int(own[a:b].sum()) for a, b in around.bounds],
        arriving=mine.sum(1).tolist(),
        experts=numbers.repeat_interleave(mine.reshape(-1)).to(experts.device),
        line=around.line,
    )


def _rows_in_order(experts: Tensor, counts: Tensor, bounds: Sequence[Bounds]) -> Tensor:
    order = experts.argsort(stable=True)
    starts = [0, *counts.cumsum(0).tolist()]
    return torch.cat([order[starts[first] : starts[stop]] for first, stop in bounds])


def _travel(x: Tensor, arriving: list[int], leaving: list[int], line: Line) -> Tensor:
    result: Tensor = _Travel.apply(x, arriving, leaving, line)  # type: ignore[no-untyped-call]
    return result


class _Travel(torch.autograd.Function):
    """Rows to other devices of the line; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arriving: list[int], leaving: list[int], line: Line) -> Tensor:
        ctx.arriving = leaving
        ctx.leaving = arriving
        ctx.line = line
        return _all_to_all(x, arriving, leaving, line)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.arriving, ctx.leaving, ctx.line), None, None, None


def _all_to_all(x: Tensor, arriving: list[int], leaving: list[int], line: Line) -> Tensor:
    room = x.new_empty((sum(arriving), *x.shape[1:]))
    sent.num_bytes += (len(x) - leaving[line.index]) * x[0:1].numel() * x.element_size()
    sent.num_messages += 1
    dist.all_to_all_single(room, in_memory(x).contiguous(), arriving, leaving, group=line.group)
    return room
