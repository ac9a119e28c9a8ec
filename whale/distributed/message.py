"""One message from one rank to another, and its tag.

A message with one tensor is that tensor. Several are packed into one block of bytes, the widest
dtypes first, so that each lies at a multiple of its own size and the receiver reads it in place:

    sender  a [float32], b [int64], c [bool]   ->   | b | a | c |   ->   views of it   receiver

Tags are numbers of 31 bits: edge and micro-batch, a hash of the shapes, and the epoch
(`Transport.epoch`), which differs from step to step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from whale.dtypes import as_bytes, in_memory

WIDEST_BYTES = torch.complex128.itemsize
NUM_EPOCHS = 256
"""then epochs repeat; ranks are never more than a step apart"""
NUM_SHAPES = 61
"""hashes of shapes in tags"""
MOST_MESSAGES = 2**31 // (NUM_EPOCHS * NUM_SHAPES)
"""of one step between two ranks: about 137,000"""


@dataclass(frozen=True)
class MessagePiece:
    """A tensor, or rows of it, in a message."""

    value: int
    """its number among all that cross"""
    rows: tuple[int, int, int] | None
    """dim, start and length; None: everything"""
    whole_shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:
        if self.rows is None:
            return self.whole_shape
        dim, _, length = self.rows
        return (*self.whole_shape[:dim], length, *self.whole_shape[dim + 1 :])

    @cached_property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor.narrow(*self.rows)


@dataclass(frozen=True)
class Message:
    """What goes to or comes from one rank."""

    peer: int
    """the other rank"""
    tag: int
    """without the epoch"""
    pieces: tuple[MessagePiece, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def is_packed(self) -> bool:
        return len(self.pieces) > 1

    def empty(self, device: str) -> Tensor:
        """What it is received in."""
        if self.is_packed:
            # operations that copy a whole storage (select_scatter) count it in items of the view
            whole = -(-self.num_bytes // WIDEST_BYTES) * WIDEST_BYTES
            return torch.empty(whole, dtype=torch.uint8, device=device)[: self.num_bytes]
        return torch.empty(self.pieces[0].shape, dtype=self.pieces[0].dtype, device=device)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Contiguous and without history; one tensor that is contiguous already is not copied."""
        if self.is_packed:
            return torch.cat(
                [
                    as_bytes(piece.of(t).detach())
                    for piece, t in zip(self.pieces, tensors, strict=True)
                ]
            )
        return in_memory(self.pieces[0].of(tensors[0]).detach()).contiguous()

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The tensors of the pieces, without a copy."""
        if not self.is_packed:
            return [buffer]
        parts = buffer.split([piece.num_bytes for piece in self.pieces])
        return [
            part.view(piece.dtype).view(piece.shape)
            for part, piece in zip(parts, self.pieces, strict=True)
        ]


def tag_of(number: int, shapes: Sequence[tuple[int, ...]]) -> int:
    """A number for the message in which its shapes take part: ranks with batches of different
    shapes wait for each other, and the watch says why, instead of reading a message of another
    size (gloo ends the process when it is too long and says nothing when it is too short).
    """
    if number >= MOST_MESSAGES:
        raise ValueError(
            f"a step has more than {MOST_MESSAGES} messages between two ranks, and tags of 31 bits "
            "cannot number more. Try: fewer micro-batches or fewer stages"
        )
    shape = zlib.crc32(repr([tuple(map(int, shape)) for shape in shapes]).encode()) % NUM_SHAPES
    return (number * NUM_SHAPES + shape) * NUM_EPOCHS
