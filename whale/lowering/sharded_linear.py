"""A linear layer on a grid as one function, so that messages travel under the products (research/tensor3d.md 0 and 4.6).

    forward:   x and w -> gathered, both at once;   Y = X W^T;   Y -> its layout (a reduce-scatter where K is cut)
    backward:  dY <- gathered;   dX = dY W -> on its way while dW = dY^T X is computed;   dW -> on its way            (1)

Which layouts these are is the plans' business: 1-D, 2-D, 3-D and ZeRO-3 are the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whale.lowering.exchange import Groups, Pending, run, start
from whale.sharding.exchange_steps import ExchangePlan, Step


@dataclass(frozen=True)
class LinearPlan:
    """The exchanges around one product."""

    x: ExchangePlan
    weight: ExchangePlan
    y: ExchangePlan
    """the product's layout, a partial sum where K is cut, -> the layout of the result"""
    keep: bool = True
    """gathered x and w are kept for backward; otherwise they are gathered again there, which saves memory"""


class Under:
    """An exchange of some steps under way: the first step travels, the others follow in `wait`."""

    def __init__(self, x: Tensor, steps: Sequence[Step], groups: Groups) -> None:
        self.rest, self.groups, self.x = steps[1:], groups, x
        self.first: Pending | None = start(x, steps[0], groups) if steps else None

    def wait(self) -> Tensor:
        return run(self.first.wait() if self.first is not None else self.x, self.rest, self.groups)


def sharded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: LinearPlan, groups: Groups) -> Tensor:
    """x [..., K], weight [N, K], bias [N], each this place's part; the result in the layout of `plan.y`. Bias is cut like the result."""
    result: Tensor = _ShardedLinear.apply(x, weight, plan, groups)  # type: ignore[no-untyped-call]
    return result if bias is None else result + bias


class _ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: LinearPlan, groups: Groups) -> Tensor:
        pending_x, pending_w = Under(x, plan.x.forward, groups), Under(weight, plan.weight.forward, groups)
        whole_x, whole_w = pending_x.wait(), pending_w.wait()
        ctx.plan, ctx.groups = plan, groups
        ctx.save_for_backward(*((whole_x, whole_w) if plan.keep else (x, weight)))
        return run(F.linear(whole_x, whole_w), plan.y.forward, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        plan, groups = ctx.plan, ctx.groups
        x, weight = ctx.saved_tensors
        needs_x, needs_w = ctx.needs_input_grad[:2]
        pending_y = Under(gradients[0], plan.y.backward, groups)
        again_w = Under(weight, () if plan.keep else plan.weight.forward, groups) if needs_x else None
        again_x = Under(x, () if plan.keep else plan.x.forward, groups) if needs_w else None
        dy = pending_y.wait()
        pending_dx = pending_dw = None
        if again_w is not None:
            pending_dx = Under(torch.matmul(dy, again_w.wait()), plan.x.backward, groups)
        if again_x is not None:
            rows = again_x.wait()
            product = _rows(dy).t() @ _rows(rows)
            pending_dw = Under(product, plan.weight.backward, groups)
        dx = pending_dx.wait() if pending_dx is not None else None
        dw = pending_dw.wait() if pending_dw is not None else None
        return dx, dw, None, None


def _rows(x: Tensor) -> Tensor:
    """[..., K] as a matrix."""
    return x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)
