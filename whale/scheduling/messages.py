"""A pass that makes compute orders complete: it adds messages, synchronise and update."""

from __future__ import annotations

from whale.scheduling.action import (
    ENDS_BACKWARD,
    GIVES_GRADIENT,
    Action,
    Kind,
    Orders,
    StageGraph,
    receive,
    send,
)


def add_messages(stage_graph: StageGraph, orders: Orders) -> Orders:
    """Compute orders with everything else that devices do.

    - a send right after the compute action that makes its tensor;
    - a receive before the compute action that needs it;
    - a synchronise after the last backward (whole or weight gradient) of each stage, behind its
      sends, for which another device may be waiting; it names the micro-batch of that backward,
      which need not be the highest one;
    - one update at the end, where there was a backward.

    A receive stands right before its compute action, or further ahead when the same device sends
    something later that is needed earlier: so both ends of every channel see the messages in the
    same order, whatever the compute orders are. This never adds waiting: when the later message was
    sent, the earlier one was too.
    """
    with_sends = tuple(_add_sends(stage_graph, order) for order in orders)
    arriving = _arriving(stage_graph, with_sends)
    return tuple(
        _add_receives(stage_graph, order, arriving[device])
        for device, order in enumerate(with_sends)
    )


def _add_sends(stage_graph: StageGraph, order: tuple[Action, ...]) -> tuple[Action, ...]:
    last_backward = {action.stage: action for action in order if action.kind in ENDS_BACKWARD}
    result: list[Action] = []
    for action in order:
        result.append(action)
        for other in _destinations(stage_graph, action):
            if stage_graph.crosses_devices((action.stage, other)):
                result.append(send(action.stage, other, action.micro_batch))
        if action.kind in ENDS_BACKWARD and action is last_backward[action.stage]:
            result.append(Action(Kind.SYNCHRONISE, action.stage, action.micro_batch))
    if last_backward:
        result.append(Action(Kind.UPDATE))
    return tuple(result)


def _destinations(stage_graph: StageGraph, action: Action) -> tuple[int, ...]:
    """Stages that need the result of this compute action."""
    if action.kind is Kind.FORWARD:
        return stage_graph.consumers(action.stage)
    if action.kind in GIVES_GRADIENT:
        return stage_graph.gradient_producers(action.stage)
    return ()


def _sources(stage_graph: StageGraph, action: Action) -> tuple[int, ...]:
    """Stages whose results this compute action needs."""
    if action.kind is Kind.FORWARD:
        return stage_graph.producers(action.stage)
    if action.kind in GIVES_GRADIENT:
        return stage_graph.gradient_consumers(action.stage)
    return ()


def _arriving(stage_graph: StageGraph, orders: Orders) -> list[dict[int, list[Action]]]:
    """Receives of every device, by the device that sends, in the order in which they are sent."""
    arriving: list[dict[int, list[Action]]] = [{} for _ in orders]
    for sender, order in enumerate(orders):
        for action in order:
            if action.kind is Kind.SEND:
                receiver = stage_graph.device_of_stage[action.destination]
                arriving[receiver].setdefault(sender, []).append(action.counterpart)
    return arriving


def _add_receives(
    stage_graph: StageGraph, order: tuple[Action, ...], arriving: dict[int, list[Action]]
) -> tuple[Action, ...]:
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
        places = []
        place = len(order)
        for message in reversed(messages):
            place = min(place, needed_at[message])
            places.append(place)
        for message, place in zip(messages, reversed(places), strict=True):
            before[place].append(message)
    result: list[Action] = []
    for receives, action in zip(before, order, strict=True):
        result += [*receives, action]
    return tuple(result)


def arrived_by(
    stage_graph: StageGraph, orders: Orders, device: int
) -> dict[Action, tuple[Action, ...]]:
    """Receive of a device -> its own sends that must have arrived before this message was sent, and
    were not named earlier.

    A device that sends something has done all receives that stand before. So a sender knows from
    the schedule alone when it may free what it sent, without asking: gloo cannot tell.
    """
    found: dict[Action, tuple[Action, ...]] = {}
    holder = stage_graph.device_of_stage
    for other in {holder[action.peer] for action in orders[device] if action.is_message}:
        arrived: list[Action] = []
        for action in orders[other]:
            if not action.is_message or holder[action.peer] != device:
                continue
            if action.kind is Kind.RECEIVE:
                arrived.append(action.counterpart)
            else:
                found[action.counterpart] = tuple(arrived)
                arrived = []
    return found
