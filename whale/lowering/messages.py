"""Bridges on one rank: which slices of which values it sends to and receives from which ranks.

A message action of the schedule names two stages and a micro-batch. Here it becomes parts: one for each crossing value and each pair
of devices whose samples overlap (planning/slices.py). The gradient takes the same parts backwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from whale.lowering.chunk import Value
from whale.planning.plan import Plan
from whale.planning.planner import Assignment
from whale.planning.samples import SampleMap
from whale.planning.slices import bridge, whole


@dataclass(frozen=True)
class Part:
    """A slice of one value between this rank and another."""

    value: Value
    peer: int
    """the other rank"""
    start: int
    """first sample, counted from this rank's first sample of the micro-batch"""
    num_samples: int
    is_all: bool
    """covers everything that this rank holds of the value: no slicing needed"""
    tag: int


@dataclass(frozen=True)
class Bridges:
    """All parts of one rank, for one size of the mini-batch."""

    sending: Mapping[tuple[int, int, int], tuple[Part, ...]]
    """(source stage, destination stage, micro-batch) -> parts of the activations that this rank, in the source, sends"""
    receiving: Mapping[tuple[int, int, int], tuple[Part, ...]]
    """the same for a rank in the destination"""


def build_bridges(plan: Plan, assignment: Assignment, values: Mapping[Node, Value], samples: SampleMap, rank: int) -> Bridges:
    """Parts of every message that this rank takes part in; stages on the same VirtualDevice hand over locally."""
    device, replica, place = plan.place_of_rank(rank)
    device_of_stage = [stage.virtual_device for stage in plan.stages]
    sending: dict[tuple[int, int, int], list[Part]] = {}
    receiving: dict[tuple[int, int, int], list[Part]] = {}
    for node, source, destination in assignment.crossings:
        here, there = device_of_stage[source], device_of_stage[destination]
        if here == there or device not in (here, there):
            continue
        for micro_batch in range(samples.num_micro_batch):
            key = (source, destination, micro_batch)
            tag = (values[node].index * len(plan.stages) + destination) * samples.num_micro_batch + micro_batch
            for sender, receiver, start, stop in _slices(values[node], samples, micro_batch, replica, here, there):
                if device == here and sender == place:
                    own = samples.devices(micro_batch, replica, here)[place]
                    peer = plan.virtual_devices[there].ranks[replica][receiver]
                    sending.setdefault(key, []).append(_part(values[node], peer, start, stop, own, 2 * tag))
                if device == there and receiver == place:
                    own = samples.devices(micro_batch, replica, there)[place]
                    peer = plan.virtual_devices[here].ranks[replica][sender]
                    receiving.setdefault(key, []).append(_part(values[node], peer, start, stop, own, 2 * tag))
    return Bridges({key: tuple(parts) for key, parts in sending.items()}, {key: tuple(parts) for key, parts in receiving.items()})


def _slices(value: Value, samples: SampleMap, micro_batch: int, replica: int, here: int, there: int) -> list[tuple[int, int, int, int]]:
    """(place of the sender, place of the receiver, first sample, end) of everything that must move."""
    source, destination = samples.devices(micro_batch, replica, here), samples.devices(micro_batch, replica, there)
    if value.batch_dim is None:
        return [(sender, receiver, *destination[receiver]) for sender, receiver in whole(len(source), len(destination))]
    return [(part.source, part.destination, part.start, part.stop) for part in bridge(source, destination)]


def _part(value: Value, peer: int, start: int, stop: int, own: tuple[int, int], tag: int) -> Part:
    is_all = value.batch_dim is None or (start, stop) == own
    return Part(value, peer, start - own[0], stop - start, is_all, tag)
