"""Sends and receives between stages, prepared for one program: everything that goes from one rank
to another for one edge and micro-batch is one `Message` (`distributed/message.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whale.distributed.message import Message, MessagePiece, tag_of
from whale.distributed.transport import Arrival
from whale.lowering.messages import MessagePart
from whale.lowering.program import Program
from whale.runtime.boundaries import Boundary, Role, parts_of
from whale.scheduling import Action
from whale.scheduling.slots import Slots

if TYPE_CHECKING:
    from whale.runtime.actions import Pass


class Send:
    """Sends the results of a forward, or the gradients of received inputs after a backward."""

    def __init__(self, program: Program, action: Action, slots: Slots[Boundary]) -> None:
        self.messages = messages_of(program, action)
        role = Role.RETURNED if action.gradient else Role.RESULT
        self.slots = [_slots_of(each, role, action, slots) for each in self.messages]

    def run(self, state: Pass) -> None:
        assert state.transport is not None
        for message, slots in zip(self.messages, self.slots, strict=True):
            tensors = [tensor for slot in slots if (tensor := state.held[slot]) is not None]
            state.transport.send(message.pack(tensors), message)


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
        self.device = program.device.name
        self.num_before = num_before
        self.messages = messages_of(program, action)
        role = Role.GRADIENT if action.gradient else Role.INPUT
        self.slots = [_slots_of(each, role, action, slots) for each in self.messages]
        peers = {message.peer for message in self.messages}
        self.arrived: list[Message] = []
        for send in arrived:
            self.arrived += [message for message in send.messages if message.peer in peers]

    def post(self, state: Pass) -> None:
        """Posts the receive ahead of time, where that makes messages come earlier; what comes
        through memory needs no buffer before it is read.
        """
        assert state.transport is not None
        if not all(state.transport.is_through_memory(message.peer) for message in self.messages):
            self._post(state)

    def _post(self, state: Pass) -> None:
        assert state.transport is not None
        arrivals: list[Arrival] = []
        # by their slots: values that come in several messages, rows of each
        wholes: dict[int, Tensor] = {}
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
            arrivals.append(state.transport.post(buffer, message, self.description))
        state.arrivals[self.num_before] = arrivals, wholes

    def run(self, state: Pass) -> None:
        state.post_receives(self.num_before + 1)
        assert state.transport is not None
        if self.num_before not in state.arrivals:
            self._post(state)
        arrivals, complete = state.arrivals.pop(self.num_before)
        for message, slots, arrival in zip(self.messages, self.slots, arrivals, strict=True):
            state.transport.wait(arrival)
            for piece, slot, tensor in zip(
                message.pieces, slots, message.unpack(arrival.buffer), strict=True
            ):
                if piece.rows is not None:
                    target = piece.of(complete[slot])
                    if target.data_ptr() != tensor.data_ptr():
                        target.copy_(tensor)
                elif slot in complete:
                    # a value without batch dim, used by several devices
                    complete[slot] = complete[slot] + tensor
                else:
                    complete[slot] = tensor
        for message in self.arrived:
            state.transport.retire(message)
        for slot, tensor in complete.items():
            if self.gradient:
                state.add(slot, tensor)
            else:
                state.held[slot] = tensor


def _slots_of(message: Message, role: Role, action: Action, slots: Slots[Boundary]) -> list[int]:
    """The slots of a message's tensors, piece by piece."""
    stage = action.stage
    micro_batch = action.micro_batch
    return [slots.of[role, stage, micro_batch, piece.value] for piece in message.pieces]


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
    of_peer: dict[int, list[MessagePart]] = {}
    for part in parts:
        of_peer.setdefault(part.peer, []).append(part)
    messages = []
    for peer, own in sorted(of_peer.items()):
        made = [_piece(program, action.micro_batch, part) for part in own]
        pieces = tuple(sorted(made, key=_place_in_message))
        messages.append(Message(peer, tag_of(number, [piece.shape for piece in pieces]), pieces))
    return messages


def _place_in_message(piece: MessagePiece) -> tuple[int, int, int]:
    """Orders pieces so that each begins at a multiple of its entry, and one with an even number of
    real entries at an even one: autograd may view such a gradient as complex, which needs that.
    """
    return -piece.dtype.itemsize, piece.numel % 2, piece.value


def _piece(program: Program, micro_batch: int, part: MessagePart) -> MessagePiece:
    value = part.value
    start, stop = program.edges[micro_batch]
    rows = None
    if not part.is_all:
        assert value.batch_dim is not None
        per_sample = value.rows_per_sample()
        rows = (value.batch_dim, part.start * per_sample, part.num_samples * per_sample)
    return MessagePiece(value.index, rows, value.shape_for(stop - start), value.dtype)
