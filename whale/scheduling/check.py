"""The proof that a schedule may run: complete, in dependency order, free of deadlock, within
memory; and how much it has in flight.

`check` goes from the small to the large, so that each error names one action on one device: first
each action alone, then what is missing, then the order on each device, then all devices together.

Deadlock. A send is over when its receive was posted, but no device waits for that before its
update. So sends never block, devices can only wait for each other at receives, and walking all
devices together finds out whether they do. Where a channel has no tags (between GPUs), a message
also waits for those before it in its channel: `require_channel_order` asks that both ends list them
in the same order, so that the ones before were received before, and nothing new is waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whale.scheduling.action import (
    ENDS_BACKWARD,
    GIVES_GRADIENT,
    NONE,
    Action,
    Kind,
    Schedule,
    forward,
    receive,
    send,
)
from whale.scheduling.costs import Costs
from whale.scheduling.event_loop import Jobs, StuckError, run_in_order
from whale.scheduling.memory import fits, in_flight, peak_memory


class ScheduleError(ValueError):
    """A schedule that must not run: names the action, the device and what is wrong."""


@dataclass(frozen=True)
class Proof:
    """What is known about a schedule that passed `check`."""

    peak_in_flight: tuple[int, ...]
    """per stage: most micro-batches whose forward is done and whose backward (of a split one:
    weight gradient) is not, at any time; 0 when there is no backward"""
    peak_memory: tuple[float, ...]
    """per device: most activation memory at any time, in the unit of the costs (without costs:
    micro-batches in flight, as above, summed over its stages)
    """
    channels_in_order: bool
    """between any two devices, messages are received in the order in which they are sent: needed
    where messages have no tags (between GPUs)
    """


def check(
    schedule: Schedule,
    *,
    forward_only: bool = False,
    costs: Costs | None = None,
    require_channel_order: bool = False,
) -> Proof:
    """Prove the schedule, or raise `ScheduleError`. `forward_only`: an evaluation, without
    backward, synchronise and update.

    With costs that have a memory cap, also that no device exceeds it.
    """
    _check_complete(schedule, forward_only)
    for device, order in enumerate(schedule.orders):
        _check_order(schedule, device, order)
    _check_deadlock(schedule)
    late = _first_out_of_channel_order(schedule)
    if late is not None and require_channel_order:
        raise ScheduleError(late)
    num_devices = schedule.stage_graph.num_devices
    if forward_only:  # nothing waits for a backward
        return Proof(
            peak_in_flight=(0,) * schedule.stage_graph.num_stages,
            peak_memory=(0.0,) * num_devices,
            channels_in_order=late is None,
        )
    of_device = []
    for device, order in enumerate(schedule.orders):
        stages = schedule.stage_graph.stages_of(device)
        of_device.append(max(map(sum, in_flight(order, stages))))
    memory = tuple(map(float, of_device))
    if costs is not None:
        memory = device_peaks(schedule, costs)
        _check_memory(memory, costs)
    return Proof(
        peak_in_flight=peaks_in_flight(schedule),
        peak_memory=memory,
        channels_in_order=late is None,
    )


def _check_memory(memory: tuple[float, ...], costs: Costs) -> None:
    for device, (peak, cap) in enumerate(zip(memory, costs.memory_cap or (), strict=False)):
        if not fits(peak, cap):
            raise ScheduleError(
                f"out of memory: device {device} holds activations of {peak:g} at its peak, but "
                f"its memory cap is {cap:g}. Try: more micro-batches (smaller ones), or the "
                "schedule 'auto', which is made for the cap"
            )


# ---- complete: every action that there must be, once, on its device, and no other


def _check_complete(schedule: Schedule, forward_only: bool) -> None:
    for device, order in enumerate(schedule.orders):
        there = set(order)
        compute = list(_expected_compute(schedule, device, there, forward_only))
        expected = dict.fromkeys([*compute, *_expected_rest(schedule, device, order, forward_only)])
        if len(there) == len(order) and there == expected.keys():
            continue
        counts = Counter(order)
        # what is computed comes first: which synchronise belongs there follows from it
        for action in compute:
            if action not in counts:
                raise ScheduleError(f"`{action}` is missing on device {device}")
        for action in order:
            if action not in expected:
                why = _why_foreign(schedule, device, action, forward_only)
                raise ScheduleError(f"`{action}` on device {device} does not belong there: {why}")
            if counts[action] > 1:
                raise ScheduleError(
                    f"`{action}` stands {counts[action]} times on device {device}; it must stand "
                    "there once"
                )
        for action in expected:
            if action not in counts:
                raise ScheduleError(f"`{action}` is missing on device {device}")


def _expected_compute(
    schedule: Schedule, device: int, there: set[Action], forward_only: bool
) -> Iterator[Action]:
    for stage in schedule.stage_graph.stages_of(device):
        for micro_batch in range(schedule.num_micro_batch):
            yield forward(stage, micro_batch)
            if not forward_only:
                whole, first, second = (
                    Action(kind, stage, micro_batch)
                    for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
                )
                is_split = whole not in there and (first in there or second in there)
                yield from (first, second) if is_split else (whole,)


def _expected_rest(
    schedule: Schedule, device: int, order: tuple[Action, ...], forward_only: bool
) -> Iterator[Action]:
    graph = schedule.stage_graph
    for edges, back in ((graph.edges, False), (graph.gradient_edges, True)):
        for edge in edges:
            source, destination = reversed(edge) if back else edge
            sends, receives = (
                graph.device_of_stage[stage] == device for stage in (source, destination)
            )
            if sends == receives or (back and forward_only):
                continue  # not of this device, or handed over without a message
            for micro_batch in range(schedule.num_micro_batch):
                yield (
                    send(source, destination, micro_batch)
                    if sends
                    else receive(source, destination, micro_batch)
                )
    if not forward_only:
        for stage, micro_batch in _last_backwards(order).items():
            yield Action(Kind.SYNCHRONISE, stage, micro_batch)
        yield Action(Kind.UPDATE)


def _last_backwards(order: tuple[Action, ...]) -> dict[int, int]:
    """Stage -> micro-batch of the action that completes its gradients."""
    return {action.stage: action.micro_batch for action in order if action.kind in ENDS_BACKWARD}


def _why_foreign(schedule: Schedule, device: int, action: Action, forward_only: bool) -> str:
    graph = schedule.stage_graph
    if forward_only and (
        action.gradient
        or action.kind in (*GIVES_GRADIENT, *ENDS_BACKWARD, Kind.SYNCHRONISE, Kind.UPDATE)
    ):
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
        return (
            "the last backward is that of micro-batch "
            f"{_last_backwards(schedule.orders[device])[action.stage]}"
        )
    if action.kind in (Kind.INPUT, Kind.WEIGHT) and action.peer == NONE:
        return (
            f"`{Action(Kind.BACKWARD, action.stage, action.micro_batch)}`, the whole backward, is "
            "there too"
        )
    if not action.is_message:
        return "a forward or backward has no peer"
    edge = action.edge
    if edge not in (graph.gradient_edges if action.gradient else graph.edges):
        return (
            f"there is no {'gradient edge' if action.gradient else 'edge'} {edge[0]} -> {edge[1]}"
        )
    return (
        f"stages {edge[0]} and {edge[1]} are both on device {device} and hand over without a "
        "message"
    )


# ---- ordered: what one device alone can get wrong


def _check_order(schedule: Schedule, device: int, order: tuple[Action, ...]) -> None:
    position = {action: index for index, action in enumerate(order)}
    for index, action in enumerate(order):
        for earlier, why in _needs(schedule, action):
            # what stands on another device is reached through a receive, which is checked by
            # walking all devices together
            if position.get(earlier, -1) > index:
                raise ScheduleError(
                    f"`{action}` on device {device} stands before `{earlier}`: {why}"
                )
    update = position.get(Action(Kind.UPDATE))
    if update is not None and update != len(order) - 1:
        raise ScheduleError(
            f"`{order[update + 1]}` on device {device} stands after the update, which must be the "
            "last action"
        )


def _needs(schedule: Schedule, action: Action) -> Iterator[tuple[Action, str]]:
    """Actions that must stand before this one if they are on the same device, each with
    the reason.
    """
    graph = schedule.stage_graph
    stage = action.stage
    micro_batch = action.micro_batch
    if action.kind is Kind.FORWARD:
        if micro_batch > 0:
            yield (
                forward(stage, micro_batch - 1),
                "the micro-batches of a stage run in ascending order",
            )
        for producer in graph.producers(stage):
            if graph.crosses_devices((producer, stage)):
                yield receive(producer, stage, micro_batch), "the activation has not arrived"
            else:
                yield (
                    forward(producer, micro_batch),
                    f"stage {stage} reads the activation of stage {producer}",
                )
    elif action.kind in GIVES_GRADIENT:
        yield forward(stage, micro_batch), "a backward follows its forward"
        for consumer in graph.gradient_consumers(stage):
            if graph.crosses_devices((stage, consumer)):
                yield receive(consumer, stage, micro_batch), "the gradient has not arrived"
                continue
            for kind in GIVES_GRADIENT:
                yield (
                    Action(kind, consumer, micro_batch),
                    f"the gradient of stage {stage} comes from stage {consumer}",
                )
    elif action.kind is Kind.WEIGHT:
        yield (
            Action(Kind.INPUT, stage, micro_batch),
            "the weight gradient follows the input gradient",
        )
    elif action.kind is Kind.SEND:
        for kind in GIVES_GRADIENT if action.gradient else (Kind.FORWARD,):
            yield Action(kind, stage, micro_batch), "it sends what has not been computed"
    elif action.kind is Kind.SYNCHRONISE:
        for kind in ENDS_BACKWARD:
            yield Action(kind, stage, micro_batch), "the gradients of the stage are not complete"


# ---- free of deadlock: all devices together


def _check_deadlock(schedule: Schedule) -> None:
    """Raises `ScheduleError` when devices wait for each other. Whether they do does not depend on
    how long actions take.
    """
    start_times(schedule, {})


def start_times(
    schedule: Schedule, duration: Mapping[Kind, float]
) -> tuple[tuple[float, ...], ...]:
    """When each action starts, for each device, if every device does its actions as soon as it can;
    kinds without a duration take no time.

    A receive waits until its send was issued; a send never waits. Raises `ScheduleError` when the
    devices wait for each other.
    """
    jobs: Jobs = []
    durations: list[float] = []
    job_of_send: dict[Action, int] = {}
    receives: list[tuple[int, Action]] = []
    for order in schedule.orders:
        jobs.append(list(range(len(durations), len(durations) + len(order))))
        for job, action in zip(jobs[-1], order, strict=True):
            durations.append(duration.get(action.kind, 0.0))
            if action.kind is Kind.SEND:
                job_of_send[action] = job
            elif action.kind is Kind.RECEIVE:
                receives.append((job, action))
    # one more job, which no device ever does, stands for sends that are missing
    never = len(durations)
    durations.append(0.0)
    needs: list[tuple[tuple[int, float], ...]] = [()] * len(durations)
    for job, action in receives:
        needs[job] = ((job_of_send.get(action.counterpart, never), 0.0),)
    try:
        ends, _ = run_in_order(jobs, durations, needs)
    except StuckError as stuck:
        raise ScheduleError(_describe_deadlock(schedule, stuck.positions)) from None
    return tuple(tuple(ends[job] - durations[job] for job in row) for row in jobs)


def _describe_deadlock(schedule: Schedule, positions: Sequence[int]) -> str:
    """Follows who waits for whom until a device comes up again."""
    orders = schedule.orders
    device_of_stage = schedule.stage_graph.device_of_stage
    device = next(device for device, order in enumerate(orders) if positions[device] < len(order))
    path: list[int] = []
    waits: list[str] = []
    while device not in path:
        index = positions[device]
        waiting = orders[device][index]
        sender = device_of_stage[waiting.source]
        path.append(device)
        waits.append(
            f"device {device} never passes action {index} ({waiting} from device {sender})"
        )
        if waiting.counterpart not in orders[sender]:
            return (
                f"deadlock: {waits[-1]}, because device {sender} has no `{waiting.counterpart}`. "
                "Try: add the send to its order"
            )
        device = sender
    circle = waits[path.index(device) :]
    return (
        f"deadlock: {', '.join(circle)}, in a circle: each send stands behind the receive that its "
        "own device waits for. Try: move one of the sends before that receive"
    )


def _first_out_of_channel_order(schedule: Schedule) -> str | None:
    """Sentence about the first message that the ends of a channel do not list at the same place;
    None when there is none.
    """
    place = schedule.stage_graph.device_of_stage
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for order in schedule.orders:
        for action in order:
            if action.is_message:
                messages = sent if action.kind is Kind.SEND else received
                messages.setdefault((place[action.source], place[action.destination]), []).append(
                    action
                )
    for channel, sends in sent.items():
        for index, (one, other) in enumerate(zip(sends, received[channel], strict=True)):
            if one.counterpart != other:
                source, destination = channel
                return (
                    f"message {index} from device {source} to device {destination} is sent as "
                    f"`{one}` but received as `{other}`; "
                    "both ends of a channel must list its messages in the same order"
                )
    return None


def peaks_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """`Proof.peak_in_flight` of a training schedule that is known to hold."""
    of_stage = [0] * schedule.stage_graph.num_stages
    for device, order in enumerate(schedule.orders):
        stages = schedule.stage_graph.stages_of(device)
        # exact for each stage by itself, because a stage runs on one device only
        for stage, counts in zip(stages, zip(*in_flight(order, stages)), strict=True):
            of_stage[stage] = max(counts)
    return tuple(of_stage)


def device_peaks(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Most activation memory of each device, from its order alone, in the unit of the costs."""
    peaks = []
    for device, order in enumerate(schedule.orders):
        stages = schedule.stage_graph.stages_of(device)
        memory = {stage: costs.memory(stage) for stage in stages}
        peaks.append(peak_memory(order, memory).fixed_bytes)
    return tuple(peaks)
