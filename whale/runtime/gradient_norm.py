"""The norm of all gradients, of which every rank counts a part, and gradients multiplied by a
number: what clipping and loss scaling are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whale.compat import foreach_mul_, foreach_mul_in_float32_
from whale.runtime.held import HeldParameter


@dataclass(frozen=True)
class CountedGradient:
    """A gradient, or a piece of one, that a rank answers for in the norm of all."""

    name: str
    gradient: Tensor
    """its values, without those that a sparse gradient leaves out"""


def counted_gradients(held: Sequence[HeldParameter], rank: int) -> list[CountedGradient]:
    """Gradients that this rank answers for in the norm of all: each counts on one of its holders,
    which share the work.

    All holders of a set of parameters have them in the same order, so they agree on who counts
    what.
    """
    num_counted: dict[
        tuple[int, ...], list[int]
    ] = {}  # numbers that each holder of these parameters counts
    found = []
    for unit in (unit for parameter in held for unit in parameter.units):
        counted = num_counted.setdefault(unit.ranks, [0] * len(unit.ranks))
        place = counted.index(min(counted))
        counted[place] += unit.num_entries
        gradient = unit.tensor.grad
        if unit.ranks[place] == rank and gradient is not None:
            if gradient.is_sparse:
                # pieces of a sparse gradient: none of them is shared, else it would be dense
                gradient = (
                    gradient.coalesce().values() if unit.cells is None else gradient.to_dense()
                )
            found += [CountedGradient(unit.name, part) for part in unit.parts(gradient)]
    return found


def squared_norm(counted: Sequence[CountedGradient], device: str) -> Tensor:
    """Sum of squares of these gradients."""
    dense = [each.gradient for each in counted]
    if not dense:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm = torch.nn.utils.get_total_norm(dense).double().square()
    return norm.to(device)  # parts whose home is the host have their gradients there


def scale_gradients(held: Sequence[HeldParameter], factor: float | Tensor) -> None:
    """Multiplies all gradients, in one launch for each dtype. A tensor stands for a number that
    only the device knows.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in held:
        gradient = parameter.tensor.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient.mul_(factor)
        else:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, gradients in by_dtype.items():
        if not isinstance(factor, Tensor):
            foreach_mul_(gradients, factor)
        elif dtype is torch.float16:
            # a number on the device takes the dtype of what it is multiplied with: one of 16 bits
            # would be up to 0.4 % off
            foreach_mul_in_float32_(gradients, factor)
        elif dtype is torch.bfloat16:
            # the same, by hand: on GPUs that kernel knows no bfloat16 (torch 2.13)
            for gradient in gradients:
                gradient.copy_(gradient.float() * factor)
        else:
            foreach_mul_(gradients, factor.to(dtype))
