"""Products of tokens with their experts' weights where the experts lie on a line of devices. How many tokens go where is known only now.

Tokens are rows, sorted by expert; `offsets[e]` is where those of expert e end. Two ways:

    tokens cut over the line:   rows -> the device of their expert -> product -> back     (two all-to-alls)            (1)
    the same tokens everywhere: each device does its experts' rows, 0 elsewhere           (a partial sum)              (2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.lowering.exchange import sent
from whale.lowering.lines import Line, gathered


@dataclass(frozen=True)
class Experts:
    """Which experts the devices of a line have."""

    bounds: tuple[tuple[int, int], ...]
    """[first, stop) for each device of the line, in its order"""
    line: Line

    @property
    def here(self) -> tuple[int, int]:
        return self.bounds[self.line.index]


@dataclass(frozen=True)
class Route:
    """Of one set of tokens: where its rows go and come from."""

    leaving: list[int]
    """rows to each device of the line"""
    arriving: list[int]
    order: Tensor
    """arrived rows sorted by expert; those of one expert stay in the order of the devices"""
    offsets: Tensor
    """of the experts here, in arrived rows"""
    line: Line


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor, experts: Experts) -> Tensor:
    """Line (1): `grouped_mm(x, weight, offsets)` of this device's own tokens x [T, K]; weight [experts here, K, N]. Gives [T, N]."""
    route = find_route(offsets, experts)
    return from_experts(local_grouped_mm(to_experts(x, route), weight, route.offsets), route)


def grouped_mm_of_same_tokens(x: Tensor, weight: Tensor, offsets: Tensor, experts: Experts) -> Tensor:
    """Line (2): x is the same on all devices of the line; the result is a partial sum over it."""
    first, stop = experts.here
    ends = [0, *offsets.tolist()]
    start, end = ends[first], ends[stop]
    result = local_grouped_mm(x[start:end], weight, offsets[first:stop] - start)
    return torch.cat([result.new_zeros(start, result.shape[1]), result, result.new_zeros(len(x) - end, result.shape[1])])


def find_route(offsets: Tensor, experts: Experts) -> Route:
    """All devices tell each other how many tokens they have for each expert. The same route serves several products in a row."""
    counts = offsets.diff(prepend=offsets.new_zeros(1)).to(torch.int64)
    everyone = gathered(counts, experts.line).cpu()  # [devices, experts]
    first, stop = experts.here
    mine = everyone[:, first:stop]
    own = everyone[experts.line.index]
    expert_of_row = torch.arange(stop - first).expand(experts.line.size, -1).reshape(-1).repeat_interleave(mine.reshape(-1))
    return Route(
        leaving=[int(own[a:b].sum()) for a, b in experts.bounds],
        arriving=mine.sum(1).tolist(),
        order=expert_of_row.argsort(stable=True).to(offsets.device),
        offsets=mine.sum(0).cumsum(0),
        line=experts.line,
    )


def to_experts(x: Tensor, route: Route) -> Tensor:
    """This device's rows to their experts; gives the rows that arrive here, sorted by expert."""
    return _travel(x, route.arriving, route.leaving, route.line).index_select(0, route.order)


def from_experts(rows: Tensor, route: Route) -> Tensor:
    """The way back."""
    back = torch.empty_like(route.order)
    back[route.order] = torch.arange(len(route.order), device=back.device)
    return _travel(rows.index_select(0, back), route.leaving, route.arriving, route.line)


def local_grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [T, K] sorted by expert, weight [E, K, N] -> [T, N]."""
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    parts = [rows @ matrix for rows, matrix in zip(x.split(sizes), weight)]
    return torch.cat(parts) if parts else x.new_zeros(0, weight.shape[2]) + weight.sum() + x.sum()


def _travel(x: Tensor, arriving: list[int], leaving: list[int], line: Line) -> Tensor:
    if line.size == 1:
        return x
    result: Tensor = _Travel.apply(x, arriving, leaving, line)  # type: ignore[no-untyped-call]
    return result


class _Travel(torch.autograd.Function):
    """Rows to other devices of the line; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arriving: list[int], leaving: list[int], line: Line) -> Tensor:
        ctx.arriving, ctx.leaving, ctx.line = leaving, arriving, line
        return _all_to_all(x, arriving, leaving, line)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.arriving, ctx.leaving, ctx.line), None, None, None


def _all_to_all(x: Tensor, arriving: list[int], leaving: list[int], line: Line) -> Tensor:
    room = x.new_empty((sum(arriving), *x.shape[1:]))
    sent.num_bytes += (len(x) - leaving[line.index]) * x[0:1].numel() * x.element_size()
    sent.num_messages += 1
    dist.all_to_all_single(room, x.contiguous(), arriving, leaving, group=line.group)
    return room
