"""The tensors at the boundaries of one rank's stages: who makes and who wants each, and the
numbered slot that it lies in meanwhile.

    INPUT     what a stage received, or took from another stage of this rank:
              from receive or forward to backward
    RESULT    what other stages want of it: from forward to the last send or forward that takes it
    GRADIENT  of a result, summed over the stages that used it: from the first one to backward
    RETURNED  the gradient of an input, for the stage that made it: from backward to send

Slots are numbered when the program is made (`scheduling/slots.py`). So the memory of boundaries is
what is in flight, however many micro-batches there are, and known before anything runs.
"""

from __future__ import annotations

from enum import Enum, auto

from whale.lowering.messages import MessagePart, parts_of_action
from whale.lowering.program import Program
from whale.scheduling import Action, Kind
from whale.scheduling.slots import Slots, assign_slots


class Role(Enum):
    """What a tensor is to the stage that it belongs to."""

    INPUT = auto()
    RESULT = auto()
    GRADIENT = auto()
    RETURNED = auto()


Boundary = tuple[Role, int, int, int]
"""(role, stage, micro-batch, value)"""


def boundary_slots(program: Program) -> Slots[Boundary]:
    """The slots of all boundary tensors of a rank."""
    return assign_slots([_mentioned(program, action) for action in program.actions])


def _mentioned(program: Program, action: Action) -> list[Boundary]:
    stage = action.stage
    micro_batch = action.micro_batch
    if action.is_message:
        role = {
            (Kind.RECEIVE, False): Role.INPUT,
            (Kind.SEND, False): Role.RESULT,
            (Kind.RECEIVE, True): Role.GRADIENT,
            (Kind.SEND, True): Role.RETURNED,
        }[action.kind, action.gradient]
        return [(role, stage, micro_batch, part.value.index) for part in parts_of(program, action)]
    found: list[Boundary] = []
    if action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
        chunk = program.chunks[stage]
        is_forward = action.kind is Kind.FORWARD
        for value in chunk.received:
            source = program.source_of[stage, value.index]
            found.append((Role.INPUT, stage, micro_batch, value.index))
            if source in program.chunks and is_forward:
                found.append((Role.RESULT, source, micro_batch, value.index))
            elif source in program.chunks and value.gradient:
                found.append((Role.GRADIENT, source, micro_batch, value.index))
            elif not is_forward and value.gradient:
                found.append((Role.RETURNED, stage, micro_batch, value.index))
        own = Role.RESULT if is_forward else Role.GRADIENT
        for value in chunk.sent:
            if is_forward or value.gradient:
                found.append((own, stage, micro_batch, value.index))
    return found


def parts_of(program: Program, action: Action) -> tuple[MessagePart, ...]:
    """What a send or receive of this rank carries, to or from all its peers."""
    return parts_of_action(program.bridges, action)
