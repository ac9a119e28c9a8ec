"""The proof that a schedule may run: complete, in dependency order, free of deadlock; and how much it keeps in flight.

`check` goes from the small to the large, so that each error names one action on one device: first each action alone, then what is missing,
then the order on each device, then all devices together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whale.scheduling.action import Action, Kind, Schedule, StageGraph, backward, forward, receive, send


class ScheduleError(ValueError):
    """A schedule that must not run: names the action, the device and what is wrong."""


@dataclass(frozen=True)
class Proof:
    """What is known about a schedule that passed `check`."""

    peak_in_flight: tuple[int, ...]
    """per stage: most micro-batches whose forward is done and whose backward is not, at any time; 0 when there is no backward"""
    peak_in_flight_of_device: tuple[int, ...]
    """per device: the same, summed over its stages"""
    channels_in_order: bool
    """between any two devices, messages are received in the order in which they are sent: needed where messages have no tags (NCCL)"""


def check(schedule: Schedule, *, forward_only: bool = False) -> Proof:
    """Prove the schedule, or raise `ScheduleError`. `forward_only`: an evaluation, without backward, synchronise and update."""
    _check_complete(schedule, forward_only)
    for device, order in enumerate(schedule.orders):
        _check_order(schedule, device, order)
    start_times(schedule, {})
    in_flight = [_peaks(schedule, device) for device in range(schedule.stage_graph.num_devices)]
    peak_of_stage = {stage: peak for peaks, _ in in_flight for stage, peak in peaks.items()}
    return Proof(
        peak_in_flight=tuple(0 if forward_only else peak_of_stage[stage] for stage in range(schedule.stage_graph.num_stages)),
        peak_in_flight_of_device=tuple(0 if forward_only else total for _, total in in_flight),
        channels_in_order=_channels_in_order(schedule),
    )


# ---- complete: every action that there must be, once, on its device, and no other


def _check_complete(schedule: Schedule, forward_only: bool) -> None:
    for device, order in enumerate(schedule.orders):
        expected = dict.fromkeys(_expected(schedule, device, forward_only))
        counts = Counter(order)
        for action in order:
            if action not in expected:
                why = _why_foreign(schedule, device, action, forward_only)
                raise ScheduleError(f"`{action}` on device {device} does not belong there: {why}")
            if counts[action] > 1:
                raise ScheduleError(f"`{action}` stands {counts[action]} times on device {device}; it must stand there once")
        for action in expected:
            if action not in counts:
                raise ScheduleError(f"`{action}` is missing on device {device}")


def _expected(schedule: Schedule, device: int, forward_only: bool) -> Iterator[Action]:
    graph = schedule.stage_graph
    for stage in graph.stages_of(device):
        for micro_batch in range(schedule.num_micro_batch):
            yield forward(stage, micro_batch)
            if not forward_only:
                yield backward(stage, micro_batch)
        if not forward_only:
            yield Action(Kind.SYNCHRONISE, stage, schedule.num_micro_batch - 1)
    for edges, back in ((graph.edges, False), (graph.gradient_edges, True)):
        for edge in edges:
            source, destination = reversed(edge) if back else edge
            if not graph.crosses_devices(edge) or (back and forward_only):
                continue
            for micro_batch in range(schedule.num_micro_batch):
                if graph.device_of_stage[source] == device:
                    yield send(source, destination, micro_batch)
                if graph.device_of_stage[destination] == device:
                    yield receive(source, destination, micro_batch)
    if not forward_only:
        yield Action(Kind.UPDATE)


def _why_foreign(schedule: Schedule, device: int, action: Action, forward_only: bool) -> str:
    graph = schedule.stage_graph
    if forward_only and (action.gradient or action.kind in (Kind.BACKWARD, Kind.SYNCHRONISE, Kind.UPDATE)):
        return "the schedule is forward only"
    if action.kind is Kind.UPDATE:
        return "an update has no stage, micro-batch or peer"
    if not 0 <= action.stage < graph.num_stages:
        return f"the stages are 0..{graph.num_stages - 1}"
    if graph.device_of_stage[action.stage] != device:
        return f"stage {action.stage} is on device {graph.device_of_stage[action.stage]}"
    if not 0 <= action.micro_batch < schedule.num_micro_batch:
        return f"the micro-batches are 0..{schedule.num_micro_batch - 1}"
    if action.kind is Kind.SYNCHRONISE:
        return f"the last backward is that of micro-batch {schedule.num_micro_batch - 1}"
    if not action.is_message:
        return "a forward or backward has no peer"
    edge = (action.destination, action.source) if action.gradient else (action.source, action.destination)
    if edge not in (graph.gradient_edges if action.gradient else graph.edges):
        return f"there is no {'gradient edge' if action.gradient else 'edge'} {edge[0]} -> {edge[1]}"
    return f"stages {edge[0]} and {edge[1]} are both on device {device} and hand over without a message"


# ---- ordered: what one device alone can get wrong


def _check_order(schedule: Schedule, device: int, order: tuple[Action, ...]) -> None:
    position = {action: index for index, action in enumerate(order)}
    for action in order:
        for earlier, why in _needs(schedule, action):
            # what stands on another device is reached through a receive, which is checked by walking all devices together
            if earlier in position and position[earlier] > position[action]:
                raise ScheduleError(f"`{action}` on device {device} stands before `{earlier}`: {why}")
    update = position.get(Action(Kind.UPDATE))
    if update is not None and update != len(order) - 1:
        raise ScheduleError(f"`{order[update + 1]}` on device {device} stands after the update, which must be the last action")


def _needs(schedule: Schedule, action: Action) -> Iterator[tuple[Action, str]]:
    """Actions that must stand before this one if they are on the same device, each with the reason."""
    graph, stage, micro_batch = schedule.stage_graph, action.stage, action.micro_batch
    if action.is_compute and micro_batch > 0:
        yield Action(action.kind, stage, micro_batch - 1), "the micro-batches of a stage run in ascending order"
    if action.kind is Kind.FORWARD:
        for producer in graph.producers(stage):
            yield forward(producer, micro_batch), f"stage {stage} reads the activation of stage {producer}"
            yield receive(producer, stage, micro_batch), "the activation has not arrived"
    elif action.kind is Kind.BACKWARD:
        yield forward(stage, micro_batch), "a backward follows its forward"
        for consumer in graph.gradient_consumers(stage):
            yield backward(consumer, micro_batch), f"the gradient of stage {stage} comes from stage {consumer}"
            yield receive(consumer, stage, micro_batch), "the gradient has not arrived"
    elif action.kind is Kind.SEND:
        yield (backward if action.gradient else forward)(stage, micro_batch), "it sends what has not been computed"
    elif action.kind is Kind.SYNCHRONISE:
        yield backward(stage, micro_batch), "the gradients of the stage are not complete"


# ---- free of deadlock: all devices together


def start_times(schedule: Schedule, duration: Mapping[Kind, float]) -> tuple[tuple[float, ...], ...]:
    """When each action starts, for each device, if every device does its actions as soon as it can; kinds without a duration take no time.

    A receive waits until its send was issued; a send never waits. Raises `ScheduleError` when the devices wait for each other.
    Whether they do does not depend on the durations, so `check` calls this without any.
    """
    graph, orders = schedule.stage_graph, schedule.orders
    starts: list[list[float]] = [[] for _ in orders]
    clock = [0.0] * len(orders)
    sent_at: dict[Action, float] = {}
    ready = list(range(len(orders)))
    while ready:
        device = ready.pop()
        for action in orders[device][len(starts[device]) :]:
            if action.kind is Kind.RECEIVE:
                if action.counterpart not in sent_at:
                    break
                clock[device] = max(clock[device], sent_at[action.counterpart])
            starts[device].append(clock[device])
            clock[device] += duration.get(action.kind, 0.0)
            if action.kind is Kind.SEND:
                sent_at[action] = clock[device]
                receiver = graph.device_of_stage[action.destination]
                if _is_at(orders[receiver], len(starts[receiver]), action.counterpart):
                    ready.append(receiver)
    if any(len(done) < len(order) for done, order in zip(starts, orders, strict=True)):
        raise ScheduleError(_describe_deadlock(graph, orders, [len(done) for done in starts]))
    return tuple(tuple(row) for row in starts)


def _is_at(order: tuple[Action, ...], index: int, action: Action) -> bool:
    return index < len(order) and order[index] == action


def _describe_deadlock(graph: StageGraph, orders: tuple[tuple[Action, ...], ...], done: list[int]) -> str:
    """Follow who waits for whom until a device comes up again."""
    device = next(device for device, order in enumerate(orders) if done[device] < len(order))
    path: list[int] = []
    while device not in path:
        path.append(device)
        waiting = orders[device][done[device]]
        device = graph.device_of_stage[waiting.source]
        if waiting.counterpart not in orders[device]:
            return f"deadlock: device {path[-1]} waits at `{waiting}`, which device {device} never sends"
    circle = path[path.index(device) :]
    waits = [f"device {here} waits at `{orders[here][done[here]]}`" for here in circle]
    return f"deadlock: {', '.join(waits)}, and so on in a circle; each send stands behind the receive that its own device waits for"


def _channels_in_order(schedule: Schedule) -> bool:
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for order in schedule.orders:
        for action in order:
            if action.is_message:
                channel = (schedule.stage_graph.device_of_stage[action.source], schedule.stage_graph.device_of_stage[action.destination])
                if action.kind is Kind.SEND:
                    sent.setdefault(channel, []).append(action)
                else:
                    received.setdefault(channel, []).append(action.counterpart)
    return sent == received


def _peaks(schedule: Schedule, device: int) -> tuple[dict[int, int], int]:
    """Peak in flight for each stage of this device, and for the device; exact, because a stage runs on one device only."""
    in_flight = dict.fromkeys(schedule.stage_graph.stages_of(device), 0)
    peaks, total_peak = dict(in_flight), 0
    for action in schedule.orders[device]:
        if action.is_compute:
            in_flight[action.stage] += 1 if action.kind is Kind.FORWARD else -1
            peaks[action.stage] = max(peaks[action.stage], in_flight[action.stage])
            total_peak = max(total_peak, sum(in_flight.values()))
    return peaks, total_peak
