"""What the type of a tensor says: whether torch differentiates it, how far rounding takes two
results apart, and how its values lie in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def is_differentiable(value: Tensor | torch.dtype) -> bool:
    """Whether torch differentiates values of this type: floating-point and complex numbers."""
    dtype = value if isinstance(value, torch.dtype) else value.dtype
    return dtype.is_floating_point or dtype.is_complex


class Rounding(NamedTuple):
    """Largest differences that rounding explains, as parts of the largest compared value."""

    same_work: float
    """of results of the same operations, as on two ranks: the exactness that Whale promises, and
    four units of the 16-bit types"""
    other_order: float
    """of results of another program for the same, as of a captured graph and its model"""


ROUNDING = {
    torch.float64: Rounding(1e-10, 1e-8),
    torch.complex128: Rounding(1e-10, 1e-8),
    torch.float32: Rounding(1e-5, 1e-3),
    torch.complex64: Rounding(1e-5, 1e-3),
    torch.float16: Rounding(4e-3, 5e-2),
    torch.complex32: Rounding(4e-3, 5e-2),
    torch.bfloat16: Rounding(3e-2, 1e-1),
}
"""types whose results are rounded; those of others must be equal"""
EXACT = Rounding(0.0, 0.0)


def rounding(dtype: torch.dtype) -> Rounding:
    """What rounding explains in values of this type."""
    return ROUNDING.get(dtype, EXACT)


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor with its own values in its memory; itself where they already are.

    `x.conj()` and `x.conj().imag` are views with a bit that says "conjugate" or "negative" when
    read. Whoever reads the memory itself (a message, a hash, a file) would miss that bit.
    """
    return tensor.resolve_conj().resolve_neg()


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's values as bytes, flat: a view of its memory where they lie there one after the
    other. Backends know few types by name (gloo no int16, uint16 nor float8), but what is only
    moved has none.
    """
    flat = in_memory(tensor).reshape(-1).contiguous()
    # a single number counts as contiguous with any stride, but `view` asks for stride 1
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


MOVED_BY_NAME = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
    }
)
"""what every backend moves under its own name; those of GPUs have neither int16 nor complex numbers
"""


def as_moved(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor that every backend can move: itself, or its bytes."""
    return tensor if tensor.dtype in MOVED_BY_NAME else as_bytes(tensor)
