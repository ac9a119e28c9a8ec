"""A linear layer on a grid as one function, so that messages travel under the products
(research/tensor3d.md 0 and 4.6).

    forward:   x and w -> gathered, both at once;   Y = X W^T;   Y -> its layout (a reduce-scatter where K is cut)
    backward:  dY <- gathered;   dX = dY W -> on its way while dW = dY^T X is computed;   dW -> on its way            (1)
               (X and W conjugated where they are complex)

A gather of rows may go in chunks, each chunk's product computed while the next one travels:

    Y[rows of chunk c] = gather(X[rows of chunk c]) W^T                                                               (2)

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

from whale.dtypes import in_memory
from whale.lowering.exchange import Groups, Pending, run, sent, start
from whale.sharding.redistribution_steps import Redistribution, Step


@dataclass(frozen=True)
class LinearPlan:
    """The exchanges around one product."""

    x: Redistribution
    weight: Redistribution
    y: Redistribution
    """the product's layout, a partial sum where K is cut, -> the layout of the result"""
    keep: bool = True
    """gathered x and w are kept for backward; otherwise they are gathered again there, which saves
    memory
    """
    num_chunks: int = 1
    """in which rows of x are gathered, where they can be: line (2)"""

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

    def __init__(self, x: Tensor, steps: Sequence[Step], groups: Groups) -> None:
        self.rest = steps[1:]
        self.groups = groups
        self.x = x
        self.first: Pending | None = start(x, steps[0], groups) if steps else None

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
    result: Tensor = _ShardedLinear.apply(x, weight, plan, groups)  # type: ignore[no-untyped-call]
    return result if bias is None else result + bias.to(result.dtype)


class _ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: LinearPlan, groups: Groups) -> Tensor:
        pending_w = Under(weight, plan.weight.forward, groups)
        pending_x = (
            _Chunks(x, plan.x.forward[0], groups, plan.num_chunks)
            if plan.is_chunked
            else Under(x, plan.x.forward, groups)
        )
        whole_w = pending_w.wait()
        if isinstance(pending_x, _Chunks):
            whole_x, product = pending_x.products(whole_w)
        else:
            whole_x = pending_x.wait()
            product = F.linear(whole_x, whole_w)
        ctx.plan = plan
        ctx.groups = groups
        ctx.dtypes = (x.dtype, weight.dtype)
        ctx.save_for_backward(
            *((whole_x.to(product.dtype), whole_w.to(product.dtype)) if plan.keep else (x, weight))
        )
        return run(product, plan.y.forward, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        plan = ctx.plan
        groups = ctx.groups
        of_x, of_w = ctx.dtypes  # under autocast wider than those of the products
        x, weight = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
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
        dx = pending_dx.wait() if pending_dx is not None else None
        dw = pending_dw.wait() if pending_dw is not None else None
        return dx, dw, None, None


class _Chunks:
    """Line (2): all gathers are under way; they arrive in order."""

    def __init__(self, x: Tensor, step: Step, groups: Groups, num_chunks: int) -> None:
        self.num_devices = len(step.places)
        self.x = x
        self.shape = step.shape
        group = groups[step.places]
        sent.num_bytes += step.num_sent * x.element_size()
        self.arriving: list[tuple[Tensor, dist.Work | None]] = []
        for chunk in in_memory(x).contiguous().tensor_split(min(num_chunks, max(1, len(x)))):
            room = chunk.new_empty(self.num_devices, *chunk.shape)
            sent.num_messages += 1
            if dist.get_backend(group) == "nccl":
                work = dist.all_gather_single(
                    room.view(-1), chunk.reshape(-1), group=group, async_op=True
                )
            else:
                work = dist.all_to_all_single(
                    room.view(-1),
                    chunk.reshape(-1).repeat(self.num_devices),
                    group=group,
                    async_op=True,
                )
            self.arriving.append((room, work))

    def products(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(x gathered, its product with the weight)"""
        whole = self.x.new_empty(self.num_devices, *self.x.shape)
        dtype = F.linear(self.x[:0], weight).dtype  # another one under autocast
        result = self.x.new_empty(
            self.num_devices, *self.x.shape[:-1], weight.shape[0], dtype=dtype
        )
        first = 0
        for room, work in self.arriving:
            if work is not None:
                work.wait()
            stop = first + room.shape[1]
            whole[:, first:stop] = room
            result[:, first:stop] = F.linear(room, weight)
            first = stop
        return whole.view(self.shape), result.view(*self.shape[:-1], -1)


def _rows(x: Tensor) -> Tensor:
    """[..., K] as a matrix."""
    return x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)
