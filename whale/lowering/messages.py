"""Bridges on one rank: which slices of which values it sends to and receives from which ranks.

A message action of the schedule names two stages and a micro-batch. Here it becomes parts: one for
each crossing value and each pair of devices whose samples overlap (plans/slices.py). All parts
between two ranks travel in one message (runtime/messages.py). The gradient takes the same parts
backwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from whale.lowering.chunk import CrossingValue
from whale.planning.stages import Assignment
from whale.plans.plan import Plan
from whale.plans.samples import SampleMap
from whale.plans.slices import bridge, whole
from whale.scheduling import Action, Kind, Schedule
from whale.scheduling.queues import QueuedTransfer


@dataclass(frozen=True)
class MessagePart:
    """A slice of one value between this rank and another."""

    value: CrossingValue
    peer: int
    """the other rank"""
    start: int
    """first sample, counted from this rank's first sample of the micro-batch"""
    num_samples: int
    is_all: bool
    """covers everything that this rank holds of the value: no slicing needed"""


@dataclass(frozen=True)
class Bridges:
    """All parts of one rank, for one size of the mini-batch."""

    sending: Mapping[tuple[int, int, int], tuple[MessagePart, ...]]
    """(source stage, destination stage, micro-batch) -> parts of the activations that this rank, in
    the source, sends
    """
    receiving: Mapping[tuple[int, int, int], tuple[MessagePart, ...]]
    """the same for a rank in the destination"""
    number_of_edge: Mapping[tuple[int, int], int]
    """(source stage, destination stage) -> its place among all edges between the same two
    VirtualDevices, the same on all ranks
    """


def build_bridges(
    plan: Plan,
    assignment: Assignment,
    values: Mapping[Node, CrossingValue],
    samples: SampleMap,
    rank: int,
) -> Bridges:
    """Parts of every message that this rank takes part in; stages on the same VirtualDevice hand
    over locally.
    """
    device, replica, place = plan.place_of_rank(rank)
    device_of_stage = [stage.virtual_device for stage in plan.stages]
    sending: dict[tuple[int, int, int], list[MessagePart]] = {}
    receiving: dict[tuple[int, int, int], list[MessagePart]] = {}
    for node, source, destination in assignment.crossings:
        here = device_of_stage[source]
        there = device_of_stage[destination]
        if here == there or device not in (here, there):
            continue
        for micro_batch in range(samples.num_micro_batch):
            key = (source, destination, micro_batch)
            for sender, receiver, start, stop in _slices(
                values[node], samples, micro_batch, replica, here, there
            ):
                if device == here and sender == place:
                    own = samples.devices(micro_batch, replica, here)[place]
                    peer = plan.virtual_devices[there].ranks[replica][receiver]
                    sending.setdefault(key, []).append(_part(values[node], peer, start, stop, own))
                if device == there and receiver == place:
                    own = samples.devices(micro_batch, replica, there)[place]
                    peer = plan.virtual_devices[here].ranks[replica][sender]
                    receiving.setdefault(key, []).append(
                        _part(values[node], peer, start, stop, own)
                    )
    return Bridges(
        {key: tuple(parts) for key, parts in sending.items()},
        {key: tuple(parts) for key, parts in receiving.items()},
        _numbers(
            sorted({(source, destination) for _, source, destination in assignment.crossings}),
            device_of_stage,
        ),
    )


def parts_of_action(bridges: Bridges, action: Action) -> tuple[MessagePart, ...]:
    """What a send or receive of this rank carries, to or from all its peers."""
    is_receive = action.kind is Kind.RECEIVE
    if action.gradient:  # the gradient takes the way of its value backwards
        parts = (bridges.sending if is_receive else bridges.receiving).get(
            (action.destination, action.source, action.micro_batch), ()
        )
        return tuple(part for part in parts if part.value.gradient)
    return tuple(
        (bridges.receiving if is_receive else bridges.sending).get(
            (action.source, action.destination, action.micro_batch), ()
        )
    )


def transfers_of(bridges: Bridges, schedule: Schedule, device: int) -> list[QueuedTransfer]:
    """The sends and receives of a rank of this VirtualDevice, in its order."""
    found = []
    called: set[tuple[Kind, int]] = set()
    loads = False
    for action in schedule.orders[device]:
        if action.is_compute:
            # micro-batches of a stage call the same kernels
            loads = loads or (action.kind, action.stage) not in called
            called.add((action.kind, action.stage))
        elif action.is_message:
            peers = {part.peer for part in parts_of_action(bridges, action)}
            is_send = action.kind is Kind.SEND
            found.append(QueuedTransfer(is_send, tuple(sorted(peers)), loads))
            loads = False
    return found


def _numbers(
    edges: Sequence[tuple[int, int]], device_of_stage: Sequence[int]
) -> dict[tuple[int, int], int]:
    """Edges counted apart for each pair of VirtualDevices, whatever their direction: message
    numbers stay small with many stages.
    """
    counts: Counter[frozenset[int]] = Counter()
    numbers = {}
    for source, destination in edges:
        pair = frozenset((device_of_stage[source], device_of_stage[destination]))
        numbers[source, destination] = counts[pair]
        counts[pair] += 1
    return numbers


def _slices(
    value: CrossingValue, samples: SampleMap, micro_batch: int, replica: int, here: int, there: int
) -> list[tuple[int, int, int, int]]:
    """(place of the sender, place of the receiver, first sample, end) of everything that
    must move.
    """
    source = samples.devices(micro_batch, replica, here)
    destination = samples.devices(micro_batch, replica, there)
    if value.batch_dim is None:
        return [
            (sender, receiver, *destination[receiver])
            for sender, receiver in whole(len(source), len(destination))
        ]
    return [
        (part.source, part.destination, part.start, part.stop)
        for part in bridge(source, destination)
    ]


def _part(
    value: CrossingValue, peer: int, start: int, stop: int, own: tuple[int, int]
) -> MessagePart:
    is_all = value.batch_dim is None or (start, stop) == own
    return MessagePart(value, peer, start - own[0], stop - start, is_all)
