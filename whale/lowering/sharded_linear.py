"""A linear layer on a grid as one function, so that messages travel under the products
(research/tensor3d.md 0 and 4.6).

    forward:   x and w -> gathered, both at once;   Y = X W^T;
               Y -> its layout (a reduce-scatter where K is cut)
    backward:  dY <- gathered;   dX = dY W -> sent while dW = dY^T X is computed;  dW -> sent   (1)
               (X and W conjugated where they are complex)

A gather of rows may go in chunks, each chunk's product computed while the next one travels:

    Y[rows of chunk c] = gather(X[rows of chunk c]) W^T                                        (2)

Which layouts these are is the plans' business: 1-D, 2-D, 3-D and ZeRO-3 are the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from whale.devices import backend_of
from whale.dtypes import in_memory
from whale.lowering.exchange import Groups, PendingExchange, run, sent, start
from whale.lowering.subgroups import Subgroup
from whale.sharding.redistribution_steps import Redistribution, RedistributionStep


@dataclass(frozen=True)
class LinearPlan:
    """The exchanges around one product."""

    x: Redistribution
    weight: Redistribution
    y: Redistribution
    """the product's layout, a partial sum where K is cut, -> the layout of the result"""
    keep: bool = True
    """gathered x and w are saved for backward; otherwise they are gathered again there, which saves
    memory
    """
    num_chunks: int = 1
    """in which rows of x are gathered, where they can be: line (2)"""

    @property
    def adds_bias_in_product(self) -> bool:
        """The product has the layout of the result: no pass of its own over it for the bias."""
        return not self.y.forward and not self.y.backward

    @property
    def is_chunked(self) -> bool:
        """One gather of rows, as many from each device."""
        steps = self.x.forward
        return (
            self.num_chunks > 1
            and len(steps) == 1
            and steps[0].pattern == "gather"
            and steps[0].is_in_order
        )


class Under:
    """An exchange of some steps under way: the first step travels, the others follow in `wait`."""

    def __init__(self, x: Tensor, steps: Sequence[RedistributionStep], groups: Groups) -> None:
        self.rest = steps[1:]
        self.groups = groups
        self.x = x
        self.first: PendingExchange | None = start(x, steps[0], groups) if steps else None

    def wait(self) -> Tensor:
        first = self.first
        self.first = None
        x = self.x if first is None else first.wait()
        del first  # with its buffers, before the steps that follow
        return run(x, self.rest, self.groups)


def sharded_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, groups: Groups
) -> Tensor:
    """x [..., K], weight [N, K], bias [N], each this place's part; the result in the layout of
    `plan.y`. Bias is cut like the result.
    """
    own = bias if plan.adds_bias_in_product else None
    result: Tensor = _ShardedLinear.apply(x, weight, own, plan, groups)  # type: ignore[no-untyped-call]
    return result if bias is None or own is not None else result + bias.to(result.dtype)


class _ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        groups: Groups,
    ) -> Tensor:
        pending_w = Under(weight, plan.weight.forward, groups)
        pending_x = (
            _Chunks(x, plan.x.forward[0], groups, plan.num_chunks)
            if plan.is_chunked
            else Under(x, plan.x.forward, groups)
        )
        whole_w = pending_w.wait()
        if isinstance(pending_x, _Chunks):
            whole_x, product = pending_x.products(whole_w, bias)
        else:
            whole_x = pending_x.wait()
            product = F.linear(whole_x, whole_w, bias)
        ctx.plan = plan
        ctx.groups = groups
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(
            *((whole_x.to(product.dtype), whole_w.to(product.dtype)) if plan.keep else (x, weight))
        )
        return run(product, plan.y.forward, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        groups = ctx.groups
        of_x, of_w, of_bias = ctx.dtypes  # under autocast wider than those of the products
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        pending_y = Under(gradients[0], plan.y.backward, groups)
        again_w = (
            Under(weight, () if plan.keep else plan.weight.forward, groups) if needs_x else None
        )
        again_x = Under(x, () if plan.keep else plan.x.forward, groups) if needs_w else None
        dy = pending_y.wait()
        pending_dx = pending_dw = None
        if again_w is not None:
            pending_dx = Under(
                torch.matmul(dy, again_w.wait().to(dy.dtype).conj()).to(of_x),
                plan.x.backward,
                groups,
            )
        if again_x is not None:
            rows = again_x.wait().to(dy.dtype).conj()
            product = _rows(dy).t() @ _rows(rows)
            pending_dw = Under(product.to(of_w), plan.weight.backward, groups)
        dbias = _rows(dy).sum(0).to(of_bias) if needs_bias else None
        dx = pending_dx.wait() if pending_dx is not None else None
        dw = pending_dw.wait() if pending_dw is not None else None
        return dx, dw, dbias, None, None


class _Chunks:
    """Line (2): all gathers are under way; they arrive in order."""

    def __init__(
        self, x: Tensor, step: RedistributionStep, groups: Groups, num_chunks: int
    ) -> None:
        self.num_devices = len(step.places)
        self.x = x
        self.shape = step.shape
        group = groups[step.places]
        sent.num_bytes += step.num_sent * x.element_size()
        self.arriving: list[tuple[Tensor, dist.Work | None]] = []
        for chunk in in_memory(x).contiguous().tensor_split(min(num_chunks, max(1, len(x)))):
            received = chunk.new_empty(self.num_devices, *chunk.shape)
            sent.num_messages += 1
            if backend_of(group).has_even_collectives:
                work = dist.all_gather_single(
                    received.view(-1), chunk.reshape(-1), group=group, async_op=True
                )
            else:
                work = dist.all_to_all_single(
                    received.view(-1),
                    chunk.reshape(-1).repeat(self.num_devices),
                    group=group,
                    async_op=True,
                )
            self.arriving.append((received, work))

    def products(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x gathered, its product with the weight, and the bias)"""
        whole = self.x.new_empty(self.num_devices, *self.x.shape)
        dtype = F.linear(self.x[:0], weight).dtype  # another one under autocast
        result = self.x.new_empty(
            self.num_devices, *self.x.shape[:-1], weight.shape[0], dtype=dtype
        )
        first = 0
        for received, work in self.arriving:
            if work is not None:
                work.wait()
            stop = first + received.shape[1]
            whole[:, first:stop] = received
            result[:, first:stop] = F.linear(received, weight, bias)
            first = stop
        return whole.view(self.shape), result.view(*self.shape[:-1], -1)


def _rows(x: Tensor) -> Tensor:
    """[..., K] as a matrix."""
    return x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)


# ---- SUMMA
#
# SUMMA: a linear layer whose output stays where it is computed, and the two operands pass by in
# panels (research/tensor3d.md 1.1).
#
# On a q x q plane of axes x and y (2-D), or d such planes along z (2.5-D: each with its own rows of
# X, the weight the same on all):
#
#     X [M, K]: rows (z, y), columns x
#     W [N, K]: rows x, columns y
#     Y [M, N]: rows (z, y), columns x
#     Y = sum over t of X_t W_t^T                                                             (1)
#     (X_t from coordinate t of axis x, W_t from coordinate t of axis y)
#     dX_t = sum over axis x of dY W_t,   dW_t = sum over axis y of dY^T X_t                  (2)
#     (X and W conjugated where they are complex)
#
# Only a panel of X and one of W are there at a time. The next pair travels under the product of
# this one. The gradient of W is a partial sum along z, as that of everything that is the same
# there.


@dataclass(frozen=True)
class Plane:
    """The two subgroups through this place, and how K is cut: in the same panels over axis x (of X)
    and over axis y (of W).
    """

    x: Subgroup
    y: Subgroup
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
    """Everyone's tensor of a subgroup, one after the other, the next one on its way while one
    is used.
    """

    def __init__(self, own: Tensor, subgroup: Subgroup, shapes: Sequence[tuple[int, int]]) -> None:
        self.own = in_memory(own).contiguous()
        self.subgroup = subgroup
        self.shapes = shapes
        self.next = self._start(0)

    def _start(self, t: int) -> tuple[Tensor, dist.Work | None]:
        mine = t == self.subgroup.index
        panel = self.own if mine else self.own.new_empty(self.shapes[t])
        if self.subgroup.size == 1 or 0 in self.shapes[t]:
            return panel, None
        if mine:
            sent.num_bytes += (self.subgroup.size - 1) * panel.numel() * panel.element_size()
            sent.num_messages += 1
        return panel, dist.broadcast(panel, group_src=t, group=self.subgroup.group, async_op=True)

    def take(self, t: int) -> Tensor:
        panel, work = self.next
        if t + 1 < self.subgroup.size:
            self.next = self._start(t + 1)
        if work is not None:
            work.wait()
        return panel


def _reduced(value: Tensor, root: int, subgroup: Subgroup) -> Tensor:
    """The sum of everyone's value, in order, at coordinate `root`; nothing elsewhere."""
    if subgroup.size == 1 or not value.numel():
        return value
    mine = root == subgroup.index
    received = value.new_empty(subgroup.size * value.numel() if mine else 0)
    arriving = [value.numel() if mine else 0] * subgroup.size
    leaving = [value.numel() if place == root else 0 for place in range(subgroup.size)]
    if not mine:
        sent.num_bytes += value.numel() * value.element_size()
        sent.num_messages += 1
    dist.all_to_all_single(
        received, in_memory(value).contiguous().view(-1), arriving, leaving, group=subgroup.group
    )
    return received.view(subgroup.size, *value.shape).sum(0) if mine else received
