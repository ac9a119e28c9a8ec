"""`torch.fake_quantize_per_tensor_affine` and `_per_channel_affine` of elementwise operations: of
torch's own, export does not know the shape of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fake_quantize_per_tensor(
    input: Tensor,
    scale: float | Tensor,
    zero_point: int | Tensor,
    quant_min: int,
    quant_max: int,
) -> Tensor:
    """One scale and one zero point (numbers or tensors of one element) for all entries."""
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=input.device)
    if isinstance(zero_point, Tensor):
        zero_point = zero_point.reshape(())
    number, inside = _steps(input, scale.reshape(()), zero_point, quant_min, quant_max)
    value = (number - zero_point).float() * scale.detach().reshape(())  # so for float64, too
    return _straight_through(value, inside, input)


def fake_quantize_per_channel(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> Tensor:
    """A scale and a zero point for each index of the dim `axis`."""
    shape = [1] * input.ndim
    shape[axis] = input.shape[axis]
    scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    number, inside = _steps(input, scale, zero_point, quant_min, quant_max)
    return _straight_through((number - zero_point) * scale.detach(), inside, input)


def _steps(
    input: Tensor, scale: Tensor, zero_point: int | Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """How many steps of `scale` every entry is, rounded and limited, and whether it was within the
    limits. Roundings are those of torch's kernels, which take scales as float32 for every dtype.
    """
    # as in C++, where 16 bits times a float32 is a float32
    precise = input.detach().to(torch.promote_types(input.dtype, torch.float32))
    steps = precise * (1 / scale.detach().float())
    if isinstance(zero_point, Tensor) and zero_point.is_floating_point():
        number = (steps + zero_point.detach()).float().round().to(precise.dtype)
    else:
        number = steps.round() + zero_point
    return number.clamp(quant_min, quant_max), (number >= quant_min) & (number <= quant_max)


def _straight_through(value: Tensor, inside: Tensor, input: Tensor) -> Tensor:
    """`value`; its gradient goes to `input` as it is where `inside`, and is zero elsewhere."""
    passed = torch.where(inside, input, 0.0)
    return value.to(input.dtype).detach() + (passed - passed.detach())  # the difference is zero
