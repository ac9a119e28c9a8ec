"""Communication inside a forward: sums over all devices of a TaskGraph, with their backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.lowering.lines import Line, sum_over_line, summed


def sum_over_devices(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Every device computes the same value, and each one's use of it counts: the backward is a sum, too."""
    return sum_over_line(value, _line(group))


def _line(group: dist.ProcessGroup | None) -> Line:
    return Line(dist.get_world_size(group), dist.get_rank(group), group)


class BatchNormOverDevices(torch.autograd.Function):
    """Batch norm in training mode over the samples of all devices; two passes, so nothing cancels. x: [N, C, ...].

    With n values of a channel on all devices together, y = (x - mean) * r * weight + bias, r = 1 / sqrt(variance + eps) and g the
    gradient of y:

        grad x = weight * r * (g - sum(g) / n - (x - mean) * r^2 * sum(g * (x - mean)) / n),    sums over all devices.

    Kept for backward: x and two numbers a channel, as torch's own batch norm does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(result, mean, variance, number of values), of all devices."""
        dims, shape = _around_channels(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        sums = torch.cat([wide.sum(dims), wide.new_tensor([float(x.numel() // x.shape[1])])])
        sums = summed(sums, _line(group))
        count = sums[-1].clone()
        mean = sums[:-1] / count
        squares = (wide - mean.view(shape)).square_().sum(dims)
        variance = summed(squares, _line(group)) / count
        rate = torch.rsqrt(variance + eps)
        scale = rate if weight is None else rate * weight
        result = (wide - mean.view(shape)).mul_(scale.view(shape))
        if bias is not None:
            result += bias.view(shape)
        ctx.save_for_backward(x, weight, mean, rate, count)
        ctx.group, ctx.bias_dtype = group, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return result.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rate, count = ctx.saved_tensors
        dims, shape = _around_channels(x)
        gradient = gradients[0].to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        own = torch.stack([gradient.sum(dims), (gradient * centred).sum(dims)])
        sums = summed(own, _line(ctx.group))
        scale = rate if weight is None else rate * weight
        slope = -scale * rate.square() * sums[1] / count
        grad_x = centred.mul_(slope.view(shape)).addcmul_(gradient, scale.view(shape)).sub_((scale * sums[0] / count).view(shape))
        grad_weight = (own[1] * rate).to(weight.dtype) if weight is not None else None
        return grad_x.to(x.dtype), grad_weight, own[0].to(ctx.bias_dtype) if ctx.bias_dtype else None, None, None


def _around_channels(x: Tensor) -> tuple[list[int], list[int]]:
    """All dims but that of the channels, and the shape of a number for each channel."""
    return [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2)


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
    """`aten.batch_norm` in training mode with the statistics of all devices' samples."""
    result: Tensor
    result, mean, variance, count = BatchNormOverDevices.apply(x, weight, bias, eps, group)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    return result
