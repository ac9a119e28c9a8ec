"""SUMMA: a linear layer whose output stays where it is computed, and the two operands pass by in
panels (research/tensor3d.md 1.1).

On a q x q plane of axes x and y (2-D), or d such planes along z (2.5-D: each with its own rows of
X, the weight the same on all):

    X [M, K]: rows (z, y), columns x        W [N, K]: rows x, columns y        Y [M, N]: rows (z, y), columns x
    Y = sum over t of X_t W_t^T,   X_t from coordinate t of axis x,  W_t from coordinate t of axis y                    (1)
    dX_t = sum over axis x of dY W_t,   dW_t = sum over axis y of dY^T X_t   (X, W conjugated where complex)            (2)

Only a panel of X and one of W are there at a time. The next pair travels under the product of this
one. The gradient of W is a partial sum along z, as that of everything that is the same there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.dtypes import in_memory
from whale.lowering.exchange import sent
from whale.lowering.lines import Line


@dataclass(frozen=True)
class Plane:
    """The two lines through this place, and how K is cut: in the same panels over axis x (of X) and
    over axis y (of W).
    """

    x: Line
    y: Line
    panels: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.x.size == self.y.size == len(self.panels):
            raise ValueError(
                f"SUMMA needs equally many devices along x and y, and panels, not {self.x.size}, "
                f"{self.y.size} and {len(self.panels)}"
            )


def summa_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plane: Plane) -> Tensor:
    """x [..., K here], weight [N here, K here], bias [N here]: lines (1) and (2)."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows = x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)
    result: Tensor = _Summa.apply(rows, weight, plane)  # type: ignore[no-untyped-call]
    result = result.view(*x.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plane: Plane) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plane = plane
        result = x.new_zeros(x.shape[0], weight.shape[0])
        panels_x = _Panels(x, plane.x, [(x.shape[0], size) for size in plane.panels])
        panels_w = _Panels(weight, plane.y, [(weight.shape[0], size) for size in plane.panels])
        for t in range(len(plane.panels)):
            result.addmm_(panels_x.take(t), panels_w.take(t).t())
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        plane = ctx.plane
        dy = gradients[0]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            panels = _Panels(weight, plane.y, [(weight.shape[0], size) for size in plane.panels])
            parts = [_reduced(dy @ panels.take(t).conj(), t, plane.x) for t in range(plane.x.size)]
            dx = parts[plane.x.index].view(x.shape)
        if ctx.needs_input_grad[1]:
            panels = _Panels(x, plane.x, [(x.shape[0], size) for size in plane.panels])
            parts = [
                _reduced(dy.t() @ panels.take(t).conj(), t, plane.y) for t in range(plane.y.size)
            ]
            dw = parts[plane.y.index].view(weight.shape)
        return dx, dw, None


class _Panels:
    """Everyone's tensor of a line, one after the other, the next one on its way while one
    is used.
    """

    def __init__(self, own: Tensor, line: Line, shapes: Sequence[tuple[int, int]]) -> None:
        self.own = in_memory(own).contiguous()
        self.line = line
        self.shapes = shapes
        self.next = self._start(0)

    def _start(self, t: int) -> tuple[Tensor, dist.Work | None]:
        mine = t == self.line.index
        panel = self.own if mine else self.own.new_empty(self.shapes[t])
        if self.line.size == 1 or 0 in self.shapes[t]:
            return panel, None
        if mine:
            sent.num_bytes += (self.line.size - 1) * panel.numel() * panel.element_size()
            sent.num_messages += 1
        return panel, dist.broadcast(panel, group_src=t, group=self.line.group, async_op=True)

    def take(self, t: int) -> Tensor:
        panel, work = self.next
        if t + 1 < self.line.size:
            self.next = self._start(t + 1)
        if work is not None:
            work.wait()
        return panel


def _reduced(value: Tensor, root: int, line: Line) -> Tensor:
    """The sum of everyone's value, in order, at coordinate `root`; nothing elsewhere."""
    if line.size == 1 or not value.numel():
        return value
    mine = root == line.index
    room = value.new_empty(line.size * value.numel() if mine else 0)
    arriving = [value.numel() if mine else 0] * line.size
    leaving = [value.numel() if place == root else 0 for place in range(line.size)]
    if not mine:
        sent.num_bytes += value.numel() * value.element_size()
        sent.num_messages += 1
    dist.all_to_all_single(
        room, in_memory(value).contiguous().view(-1), arriving, leaving, group=line.group
    )
    return room.view(line.size, *value.shape).sum(0) if mine else room
