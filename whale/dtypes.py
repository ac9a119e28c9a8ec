"""What the type of a tensor says: whether torch differentiates it, and how its values lie in
memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_differentiable(value: Tensor | torch.dtype) -> bool:
    """Whether torch differentiates values of this type: floating-point and complex numbers."""
    dtype = value if isinstance(value, torch.dtype) else value.dtype
    return dtype.is_floating_point or dtype.is_complex


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
"""what every backend moves under its own name; those of GPUs have neither int16 nor complex numbers"""


def as_moved(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor that every backend can move: itself, or its bytes."""
    return tensor if tensor.dtype in MOVED_BY_NAME else as_bytes(tensor)
