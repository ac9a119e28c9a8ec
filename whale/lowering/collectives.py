"""Communication inside a forward: sums over all devices of a TaskGraph, with their backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SumOverDevices(torch.autograd.Function):
    """All-reduce whose backward is an all-reduce: every device computes the same value, and each one's use of it counts."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_over_devices(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    result: Tensor = SumOverDevices.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def batch_norm_over_devices(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """`aten.batch_norm` in training mode with the statistics of all devices' samples; two passes, so nothing cancels. x: [N, C, ...]."""
    dims = [0, *range(2, x.ndim)]
    shape = [1, -1] + [1] * (x.ndim - 2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    num_local = x.numel() // x.shape[1]
    sums = sum_over_devices(torch.cat([wide.sum(dims), wide.new_tensor([float(num_local)])]), group)
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - mean.view(shape)
    variance = sum_over_devices(centred.square().sum(dims), group) / count
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    result = centred * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result.to(x.dtype)
