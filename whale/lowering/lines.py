"""The devices that cut one dim together, and the few numbers per row that they tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.dtypes import in_memory
from whale.lowering.exchange import Groups, as_bytes, sent
from whale.plans.grid import Grid
from whale.sharding.row_numbers import DIRECT_UP_TO_BYTES

Teller = Callable[[Tensor, dist.ProcessGroup | None], Tensor | None]
"""everyone's value of a group; None where they cannot tell each other that way"""


@dataclass
class Shortcut:
    """A way between ranks of one host that is shorter than their process group's; the runtime sets
    it for each pass, on all ranks alike.
    """

    tell: Teller | None = None


shortcut = Shortcut()


@dataclass(frozen=True)
class Line:
    """The places along some axes of a grid, seen from one of them. What is computed from everyone's
    numbers is equal to the bit on all.
    """

    size: int
    index: int
    """of this place among them"""
    group: dist.ProcessGroup | None

    @staticmethod
    def of(grid: Grid, place: int, axes: Sequence[str], groups: Groups) -> Line:
        places = grid.line(place, axes)
        return Line(len(places), places.index(place), groups[places] if len(places) > 1 else None)


def line_places(grid: Grid, axes: Sequence[str]) -> set[tuple[int, ...]]:
    """The sets of places that need a process group for lines along these axes."""
    lines = {grid.line(place, axes) for place in range(grid.num_devices)}
    return {line for line in lines if len(line) > 1}


def gathered(value: Tensor, line: Line) -> Tensor:
    """Everyone's value, [size, *shape], in the order of the places. Without history."""
    if line.size == 1:
        return value.unsqueeze(0)
    _count((line.size - 1) * value.numel() * value.element_size())
    told = shortcut.tell(value, line.group) if shortcut.tell is not None else None
    if told is not None:
        return told
    room = value.new_empty((line.size, *value.shape))
    if dist.get_backend(line.group) == "nccl":
        dist.all_gather_single(
            as_bytes(room.view(-1)),
            as_bytes(in_memory(value).contiguous().view(-1)),
            group=line.group,
        )
    else:
        dist.all_to_all_single(
            as_bytes(room.view(-1)),
            as_bytes(in_memory(value).reshape(-1).repeat(line.size)),
            group=line.group,
        )
    return room


def summed(value: Tensor, line: Line) -> Tensor:
    """The sum of everyone's value. Without history."""
    if line.size == 1:
        return value
    if (
        value.numel() * value.element_size() <= DIRECT_UP_TO_BYTES
        and dist.get_backend(line.group) != "nccl"
    ):
        return gathered(value, line).sum(0)
    _count(2 * (line.size - 1) * value.numel() * value.element_size() // line.size)
    total = in_memory(value).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=line.group)
    return total


def _count(num_bytes: int) -> None:
    sent.num_bytes += num_bytes
    sent.num_messages += 1


class _SumOverLine(torch.autograd.Function):
    """A partial sum becomes the same everywhere; so its gradient, the same conjugated, does too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return summed(value, line)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return summed(gradients[0], ctx.line), None


def sum_over_line(value: Tensor, line: Line) -> Tensor:
    """The sum of everyone's value, differentiable: every device's use of it counts."""
    if line.size == 1:
        return value
    result: Tensor = _SumOverLine.apply(value, line)  # type: ignore[no-untyped-call]
    return result


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
