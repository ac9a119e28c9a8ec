"""Messages between stages, prepared for one program: everything that goes from one rank to another
for one edge and micro-batch.

A message with one tensor is that tensor. Several are packed into one block of bytes, the widest
dtypes first, so that each lies at a multiple of its own size and the receiver reads it in place:

    sender    a [float32], b [int64], c [bool]   ->   | b | a | c |   ->   views of the block       receiver

Tags are numbers of 31 bits: edge and micro-batch, a hash of the shapes, and the epoch
(`Transport.epoch`), which differs from step to step.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whale.distributed.transport import NUM_EPOCHS, Arrival
from whale.dtypes import in_memory
from whale.lowering.messages import Part
from whale.lowering.program import Program
from whale.runtime.boundaries import Boundary, Role, parts_of
from whale.scheduling import Action
from whale.scheduling.slots import Slots

if TYPE_CHECKING:
    from whale.runtime.actions import Pass

NUM_SHAPES = 61
"""hashes of shapes in tags"""
MOST_MESSAGES = 2**31 // (NUM_EPOCHS * NUM_SHAPES)
"""of one step between two ranks: about 137,000"""


@dataclass(frozen=True)
class Piece:
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
    pieces: tuple[Piece, ...]

    @cached_property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def is_packed(self) -> bool:
        return len(self.pieces) > 1

    def empty(self, device: str) -> Tensor:
        """What it is received in."""
        if self.is_packed:
            return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        return torch.empty(self.pieces[0].shape, dtype=self.pieces[0].dtype, device=device)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Contiguous and without history; one tensor that is contiguous already is not copied."""
        if self.is_packed:
            return torch.cat(
                [
                    in_memory(piece.of(t).detach()).reshape(-1).view(torch.uint8)
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


class Send:
    """Sends the results of a forward, or the gradients of received inputs after a backward."""

    def __init__(self, program: Program, action: Action, slots: Slots[Boundary]) -> None:
        self.messages = messages_of(program, action)
        role = Role.RETURNED if action.gradient else Role.RESULT
        self.slots = [
            [slots.of[role, action.stage, action.micro_batch, piece.value] for piece in each.pieces]
            for each in self.messages
        ]

    def run(self, this: Pass) -> None:
        assert this.transport is not None
        for message, slots in zip(self.messages, self.slots, strict=True):
            tensors = [tensor for slot in slots if (tensor := this.held[slot]) is not None]
            this.transport.send(message.pack(tensors), message)


class Receive:
    """Waits for tensors or gradients that were posted earlier."""

    def __init__(
        self,
        program: Program,
        action: Action,
        slots: Slots[Boundary],
        num_before: int,
        arrived: Iterable[Send],
    ) -> None:
        """`num_before`: receives of the program that come earlier. `arrived`: sends that these
        messages show to have arrived.
        """
        self.gradient = action.gradient
        self.description = str(action)
        self.device = program.device
        self.num_before = num_before
        self.messages = messages_of(program, action)
        role = Role.GRADIENT if action.gradient else Role.INPUT
        self.slots = [
            [slots.of[role, action.stage, action.micro_batch, piece.value] for piece in each.pieces]
            for each in self.messages
        ]
        peers = {message.peer for message in self.messages}
        self.arrived = [
            message for send in arrived for message in send.messages if message.peer in peers
        ]

    def post(self, this: Pass) -> None:
        """Ahead of time, where that makes messages come earlier; what comes through memory needs no
        room before it is read.
        """
        assert this.transport is not None
        if not all(this.transport.is_through_memory(message.peer) for message in self.messages):
            self._post(this)

    def _post(self, this: Pass) -> None:
        assert this.transport is not None
        arrivals: list[Arrival] = []
        wholes: dict[
            int, Tensor
        ] = {}  # by their slots: values that come in several messages, rows of each
        for message, slots in zip(self.messages, self.slots, strict=True):
            buffer = None
            for piece, slot in zip(message.pieces, slots, strict=True):
                if piece.rows is not None:
                    if slot not in wholes:
                        wholes[slot] = torch.empty(
                            piece.whole_shape, dtype=piece.dtype, device=self.device
                        )
                    buffer = piece.of(wholes[slot])
            if buffer is None or message.is_packed or not buffer.is_contiguous():
                buffer = message.empty(self.device)
            arrivals.append(this.transport.post(buffer, message, self.description))
        this.arrivals[self.num_before] = arrivals, wholes

    def run(self, this: Pass) -> None:
        this.post_receives(self.num_before + 1)
        assert this.transport is not None
        if self.num_before not in this.arrivals:
            self._post(this)
        arrivals, complete = this.arrivals.pop(self.num_before)
        for message, slots, arrival in zip(self.messages, self.slots, arrivals, strict=True):
            this.transport.wait(arrival)
            for piece, slot, tensor in zip(
                message.pieces, slots, message.unpack(arrival.buffer), strict=True
            ):
                if piece.rows is not None:
                    target = piece.of(complete[slot])
                    if target.data_ptr() != tensor.data_ptr():
                        target.copy_(tensor)
                elif slot in complete:
                    complete[slot] = (
                        complete[slot] + tensor
                    )  # a value without batch dim, used by several devices
                else:
                    complete[slot] = tensor
        for message in self.arrived:
            this.transport.retire(message)
        for slot, tensor in complete.items():
            if self.gradient:
                this.add(slot, tensor)
            else:
                this.held[slot] = tensor


def messages_of(program: Program, action: Action) -> list[Message]:
    """All messages of a send or receive of this rank, in the order of their peers."""
    edge = (
        (action.destination, action.source)
        if action.gradient
        else (action.source, action.destination)
    )
    number = (
        2 * (program.bridges.number_of_edge[edge] * program.num_micro_batch + action.micro_batch)
        + action.gradient
    )
    parts = parts_of(program, action)
    of_peer: dict[int, list[Part]] = {}
    for part in sorted(parts, key=lambda part: (-part.value.dtype.itemsize, part.value.index)):
        of_peer.setdefault(part.peer, []).append(part)
    messages = []
    for peer, own in sorted(of_peer.items()):
        pieces = tuple(_piece(program, action.micro_batch, part) for part in own)
        messages.append(Message(peer, tag_of(number, [piece.shape for piece in pieces]), pieces))
    return messages


def _piece(program: Program, micro_batch: int, part: Part) -> Piece:
    value = part.value
    start, stop = program.edges[micro_batch]
    rows = None
    if not part.is_all:
        assert value.batch_dim is not None
        per_sample = value.rows_per_sample()
        rows = (value.batch_dim, part.start * per_sample, part.num_samples * per_sample)
    return Piece(value.index, rows, value.shape_for(stop - start), value.dtype)


def tag_of(number: int, shapes: Sequence[tuple[int, ...]]) -> int:
    """A number for the message in which its shapes take part: ranks with batches of unlike shapes
    wait for each other, and the watch says why, instead of reading a message of another size (gloo
    ends the process when it is too long and says nothing when it is too short)."""
    if number >= MOST_MESSAGES:
        raise ValueError(
            f"a step has more than {MOST_MESSAGES} messages between two ranks, which tags of 31 "
            "bits cannot tell apart: "
            f"use fewer micro-batches or fewer stages"
        )
    shape = zlib.crc32(repr([tuple(map(int, shape)) for shape in shapes]).encode()) % NUM_SHAPES
    return (number * NUM_SHAPES + shape) * NUM_EPOCHS
