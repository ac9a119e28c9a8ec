"""Norms whose normalised entries lie on several devices: a subgroup of devices exchanges two
numbers per row, or per channel.

With n_i entries, mean m_i and sum of squared distances M_i on device i, and n = sum n_i:

    mean = sum n_i m_i / n          n variance = sum M_i + n_i (m_i - mean)^2                  (1)

so nothing cancels, as it would in E[x^2] - E[x]^2. Backward of y = x^ w + b with x^ = (x - mean) r,
g = w dy:

    dx = r (g - sum(g) / n - x^ sum(g x^) / n)                                                 (2)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from whale.lowering.subgroups import Subgroup, all_gather, all_reduce, wide


def layer_norm(
    x: Tensor,
    num_dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    subgroup: Subgroup,
) -> Tensor:
    """`aten.layer_norm` over the last `num_dims` dims, of which the devices of the subgroup have a
    part each; weight and bias are cut alike.
    """
    result: Tensor = _LayerNorm.apply(x, num_dims, weight, bias, eps, subgroup)  # type: ignore[no-untyped-call]
    return result


def rms_norm(
    x: Tensor, num_dims: int, weight: Tensor | None, eps: float | None, subgroup: Subgroup
) -> Tensor:
    """`aten.rms_norm`, cut in the same way. Without `eps` it is that of the dtype in which sums are
    made, as in torch.
    """
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    result: Tensor = _RMSNorm.apply(x, num_dims, weight, eps, subgroup)  # type: ignore[no-untyped-call]
    return result


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    subgroup: Subgroup,
) -> Tensor:
    """`aten.batch_norm` in training mode, x [N, C, ...] with its samples cut over the subgroup;
    running statistics are updated in place.
    """
    result: Tensor
    result, mean, variance, count = _BatchNorm.apply(x, weight, bias, eps, subgroup)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    return result


def _statistics(x: Tensor, dims: list[int], subgroup: Subgroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of every row and n: line (1). x: at least float32."""
    shape = [*x.shape[: x.ndim - len(dims)], *[1] * len(dims)]
    count = _entries(x, dims)
    if count:
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    else:
        variance = mean = x.new_zeros(shape)
    rows = mean.numel()
    everyone = all_gather(
        torch.cat([mean.reshape(-1), variance.reshape(-1) * count, x.new_full((1,), float(count))]),
        subgroup,
    )
    means = everyone[:, :rows]
    squares = everyone[:, rows : 2 * rows]
    counts = everyone[:, 2 * rows :]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    return mean.view(shape), variance.view(shape), total


def _entries(x: Tensor, dims: list[int]) -> int:
    """Entries of one row here."""
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    return count


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        num_dims: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        subgroup: Subgroup,
    ) -> Tensor:
        dims = list(range(x.ndim - num_dims, x.ndim))
        values = wide(x)
        mean, variance, total = _statistics(values, dims, subgroup)
        scale = torch.rsqrt(variance + eps)
        normal = (values - mean).mul_(scale)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.subgroup = subgroup
        ctx.dims = dims
        ctx.total = total
        ctx.bias_dtype = None if bias is None else bias.dtype
        if weight is not None:
            normal = (
                normal * weight if bias is None else torch.addcmul(wide(bias), normal, wide(weight))
            )
        elif bias is not None:
            normal = normal + bias
        return normal.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        dy = wide(gradients[0])
        normal = (wide(x) - mean).mul_(scale)
        rows = list(range(x.ndim - len(ctx.dims)))
        d_weight = (
            (dy * normal).sum(rows).to(weight.dtype)
            if weight is not None and ctx.needs_input_grad[2]
            else None
        )
        d_bias = (
            dy.sum(rows).to(ctx.bias_dtype)
            if ctx.bias_dtype is not None and ctx.needs_input_grad[3]
            else None
        )
        if not ctx.needs_input_grad[0]:  # the same on all devices of the subgroup
            return None, None, d_weight, d_bias, None, None
        g = dy if weight is None else dy * weight
        sums = (
            all_reduce(
                torch.stack(
                    [g.sum(ctx.dims, keepdim=True), (g * normal).sum(ctx.dims, keepdim=True)]
                ),
                ctx.subgroup,
            )
            / ctx.total
        )
        dx = (g - sums[0]).addcmul_(normal, sums[1], value=-1).mul_(scale)  # line (2)
        return dx.to(x.dtype), None, d_weight, d_bias, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, num_dims: int, weight: Tensor | None, eps: float, subgroup: Subgroup
    ) -> Tensor:
        dims = list(range(x.ndim - num_dims, x.ndim))
        values = wide(x)
        squares = values.square().sum(dims, keepdim=True)
        sums = all_reduce(
            torch.cat([squares.reshape(-1), squares.new_full((1,), float(_entries(x, dims)))]),
            subgroup,
        )
        total = sums[-1]  # stays on the device: the host does not wait for it
        scale = torch.rsqrt(sums[:-1].view(squares.shape) / total + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.subgroup = subgroup
        ctx.dims = dims
        ctx.total = total
        normal = values * scale
        return (normal if weight is None else normal * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        dy = wide(gradients[0])
        normal = wide(x) * scale
        rows = list(range(x.ndim - len(ctx.dims)))
        d_weight = (
            (dy * normal).sum(rows).to(weight.dtype)
            if weight is not None and ctx.needs_input_grad[2]
            else None
        )
        if not ctx.needs_input_grad[0]:
            return None, None, d_weight, None, None
        g = dy if weight is None else dy * weight
        sums = all_reduce((g * normal).sum(ctx.dims, keepdim=True), ctx.subgroup) / ctx.total
        return (
            torch.addcmul(g, normal, sums, value=-1).mul_(scale).to(x.dtype),
            None,
            d_weight,
            None,
            None,
        )


class _BatchNorm(torch.autograd.Function):
    """Two rounds in forward, so that nothing cancels. Saved for backward: x and two numbers a
    channel, as torch's own batch norm does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        subgroup: Subgroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(result, mean, variance, number of values), of all devices."""
        dims, shape = _around_channels(x)
        values = wide(x)
        num_here = float(x.numel() // max(1, x.shape[1]))
        sums = all_reduce(torch.cat([values.sum(dims), values.new_full((1,), num_here)]), subgroup)
        count = sums[-1].clone()
        mean = sums[:-1] / count
        variance = all_reduce((values - mean.view(shape)).square_().sum(dims), subgroup) / count
        rate = torch.rsqrt(variance + eps)
        scale = rate if weight is None else rate * weight
        result = (values - mean.view(shape)).mul_(scale.view(shape))
        if bias is not None:
            result += bias.view(shape)
        ctx.save_for_backward(x, weight, mean, rate, count)
        ctx.subgroup = subgroup
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return result.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rate, count = ctx.saved_tensors
        dims, shape = _around_channels(x)
        dy = gradients[0].to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        own = torch.stack([dy.sum(dims), (dy * centred).sum(dims)])
        d_weight = (own[1] * rate).to(weight.dtype) if weight is not None else None
        d_bias = own[0].to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        if not ctx.needs_input_grad[0]:  # the same on all devices of the subgroup
            return None, d_weight, d_bias, None, None
        sums = all_reduce(own, ctx.subgroup) / count
        scale = rate if weight is None else rate * weight
        slope = -scale * rate.square() * sums[1]
        # line (2)
        dx = (
            centred.mul_(slope.view(shape))
            .addcmul_(dy, scale.view(shape))
            .sub_((scale * sums[0]).view(shape))
        )
        return dx.to(x.dtype), d_weight, d_bias, None, None


def _around_channels(x: Tensor) -> tuple[list[int], list[int]]:
    """All dims but that of the channels, and the shape of a number for each channel."""
    return [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2)
