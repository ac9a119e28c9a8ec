"""What the devices of a pipeline with several chunks hold, for any cut, before its stages and its
schedule are there.

Chunk k of a device keeps kept_k bytes of each of the f_k(t) micro-batches that it has in flight at
moment t of the order; beside that lie weights, gradients and optimizer state of all chunks, and the
backward of one of them works:

    held(device) = static + max over t of (sum over its chunks k of f_k(t) * kept_k) + largest room to work
    over-full    = sum over devices of the square of (held / memory - 1), where that is above 0                          (1)

A square, so that bytes that go from a full device to the next one, which passes them on, count as a
gain on the way. Cuts are moved by this; whether a plan fits is decided later, by what its stages
really keep (`drafter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch.fx import Node

from whale.costs.backward_room import COPIES
from whale.planning.cuts import Floats
from whale.planning.workload import Workload
from whale.scheduling import Action, Kind
from whale.scheduling.action import ENDS_BACKWARD


@dataclass(frozen=True)
class DeviceRoom:
    """The rank of a VirtualDevice with least memory for its samples."""

    memory_bytes: float
    num_samples: float
    """of a micro-batch"""
    part: float = 1.0
    """of everything, on a grid"""

    def of_a_sample(self) -> float:
        return self.memory_bytes / self.num_samples


@dataclass(frozen=True)
class OperationBytes:
    """Of every operation, in order."""

    static: Floats
    """weights that it is the first to read, with gradients and optimizer state"""
    kept: Floats
    """for each sample"""
    alive: Floats
    """for each sample: what crosses a cut in front of it"""
    work: Floats
    """for each sample: while its backward runs"""

    @staticmethod
    def of(
        workload: Workload,
        operations: Sequence[Node],
        names_behind: Callable[[Node], Iterable[str]],
        is_shared: bool,
    ) -> OperationBytes:
        """`is_shared`: gradients are summed over replicas."""
        place = {node: index for index, node in enumerate(operations)}
        size = np.array(
            [workload.costs[node].output_bytes / workload.batch_size for node in operations]
        )
        change = np.zeros(len(operations) + 1)
        for node, index in place.items():
            change[index + 1] += size[index]
            change[
                max((place[user] for user in node.users if user in place), default=index) + 1
            ] -= size[index]
        kept = [
            each.sample_bytes + each.fixed_bytes / workload.share
            for each in workload.kept_by_operation(operations)
        ]
        static = workload.static_by_operation(operations, names_behind, is_shared)
        return OperationBytes(np.array(static), np.array(kept), np.cumsum(change), COPIES * size)


@dataclass(frozen=True)
class ChunkMemory:
    """All chunks of a pipeline."""

    operations: OperationBytes
    device_of_chunk: Sequence[int]
    in_flight: Sequence[Floats]
    """of every VirtualDevice: (moments, its chunks)"""
    rooms: Sequence[DeviceRoom]
    """of every VirtualDevice"""

    def over_full(self, starts: Sequence[int]) -> float:
        """Line (1) for chunks that start at these operations."""
        found = 0.0
        each = self.operations
        bounds = list(pairwise((*starts, len(each.kept))))
        for device, (moments, room) in enumerate(zip(self.in_flight, self.rooms, strict=True)):
            own = [
                bound
                for bound, place in zip(bounds, self.device_of_chunk, strict=True)
                if place == device
            ]
            static = sum(float(each.static[start:stop].sum()) for start, stop in own)
            kept = np.array([each.kept[start:stop].sum() + each.alive[stop] for start, stop in own])
            work = max(float(each.work[start:stop].max()) for start, stop in own)
            held = room.part * (static + room.num_samples * (float((moments @ kept).max()) + work))
            found += max(0.0, held / room.memory_bytes - 1.0) ** 2
        return found


def moments_in_flight(order: Sequence[Action], stages: Sequence[int]) -> Floats:
    """(moments, stages): micro-batches that each of these stages of a device has in flight, all
    different combinations.
    """
    place = {stage: index for index, stage in enumerate(stages)}
    now = [0] * len(stages)
    seen = set()
    for action in order:
        if action.kind is Kind.FORWARD or action.kind in ENDS_BACKWARD:
            now[place[action.stage]] += 1 if action.kind is Kind.FORWARD else -1
            seen.add(tuple(now))
    return np.array(sorted(seen), dtype=np.float64)
