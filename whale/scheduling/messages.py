"""From compute orders to a whole schedule: messages, synchronise and update are added by a pass, then the result is checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from whale.scheduling.action import Action, Kind, Orders, Schedule, StageGraph, receive, send
from whale.scheduling.check import check
from whale.scheduling.orders import forward_only, gpipe, one_f_one_b

ORDERS: dict[str, Callable[[StageGraph, int], Orders]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""the training schedules by the name that a user gives"""

FORWARD_ONLY = "forward only"
"""name of the schedule of an evaluation"""


def build(name: str, stage_graph: StageGraph, num_micro_batch: int) -> Schedule:
    """The training schedule of this name (`gpipe` or `1f1b`), with messages, checked."""
    if name not in ORDERS:
        nearest = difflib.get_close_matches(name.lower(), ORDERS, n=1, cutoff=0.0)[0]
        raise ValueError(f"there is no schedule {name!r}; did you mean {nearest!r}? There are: {', '.join(ORDERS)}")
    orders = add_messages(stage_graph, num_micro_batch, ORDERS[name](stage_graph, num_micro_batch))
    schedule = Schedule(name, stage_graph, num_micro_batch, orders)
    check(schedule)
    return schedule


def build_forward_only(stage_graph: StageGraph, num_micro_batch: int) -> Schedule:
    """The schedule of an evaluation, with messages, checked."""
    orders = add_messages(stage_graph, num_micro_batch, forward_only(stage_graph, num_micro_batch))
    schedule = Schedule(FORWARD_ONLY, stage_graph, num_micro_batch, orders)
    check(schedule, forward_only=True)
    return schedule


def add_messages(stage_graph: StageGraph, num_micro_batch: int, orders: Orders) -> Orders:
    """Compute orders with everything else that devices do.

    - a send right after the compute action that makes its tensor;
    - a receive before the compute action that needs it;
    - a synchronise after the last backward of each stage, behind its sends, for which another device may be waiting;
    - one update at the end, where there was a backward.

    A receive stands right before its compute action, or further ahead when the same device sends something later that is needed earlier:
    so both ends of every channel see the messages in the same order. This never adds waiting: when the later message was sent, the
    earlier one was too.
    """
    with_sends = tuple(_add_sends(stage_graph, num_micro_batch, order) for order in orders)
    arriving = _arriving(stage_graph, with_sends)
    return tuple(_add_receives(stage_graph, order, arriving[device]) for device, order in enumerate(with_sends))


def _add_sends(stage_graph: StageGraph, num_micro_batch: int, order: tuple[Action, ...]) -> tuple[Action, ...]:
    result: list[Action] = []
    for action in order:
        result.append(action)
        for other in _destinations(stage_graph, action):
            if stage_graph.crosses_devices((action.stage, other)):
                result.append(send(action.stage, other, action.micro_batch))
        if action.kind is Kind.BACKWARD and action.micro_batch == num_micro_batch - 1:
            result.append(Action(Kind.SYNCHRONISE, action.stage, action.micro_batch))
    if any(action.kind is Kind.BACKWARD for action in order):
        result.append(Action(Kind.UPDATE))
    return tuple(result)


def _destinations(stage_graph: StageGraph, action: Action) -> tuple[int, ...]:
    """Stages that need the result of this compute action."""
    if action.kind is Kind.FORWARD:
        return stage_graph.consumers(action.stage)
    if action.kind is Kind.BACKWARD:
        return stage_graph.gradient_producers(action.stage)
    return ()


def _sources(stage_graph: StageGraph, action: Action) -> tuple[int, ...]:
    """Stages whose results this compute action needs."""
    if action.kind is Kind.FORWARD:
        return stage_graph.producers(action.stage)
    if action.kind is Kind.BACKWARD:
        return stage_graph.gradient_consumers(action.stage)
    return ()


def _arriving(stage_graph: StageGraph, orders: Orders) -> list[dict[int, list[Action]]]:
    """For each device: sender device -> the receives of its messages, in the order in which they are sent."""
    arriving: list[dict[int, list[Action]]] = [{} for _ in orders]
    for sender, order in enumerate(orders):
        for action in order:
            if action.kind is Kind.SEND:
                receiver = stage_graph.device_of_stage[action.destination]
                arriving[receiver].setdefault(sender, []).append(action.counterpart)
    return arriving


def _add_receives(stage_graph: StageGraph, order: tuple[Action, ...], arriving: dict[int, list[Action]]) -> tuple[Action, ...]:
    needed_at: dict[Action, int] = {}
    for index, action in enumerate(order):
        for other in _sources(stage_graph, action):
            if stage_graph.crosses_devices((other, action.stage)):
                needed_at[receive(other, action.stage, action.micro_batch)] = index
    before: list[list[Action]] = [[] for _ in order]
    for sent in arriving.values():
        # without its compute action a message has no place; `check` then names the missing action
        messages = [message for message in sent if message in needed_at]
        # going back from the last message: none is received after one that was sent later
        places, place = [], len(order)
        for message in reversed(messages):
            place = min(place, needed_at[message])
            places.append(place)
        for message, place in zip(messages, reversed(places), strict=True):
            before[place].append(message)
    result: list[Action] = []
    for receives, action in zip(before, order, strict=True):
        result += [*receives, action]
    return tuple(result)
