"""What the devices of a pipeline with several chunks hold, for any cut, before its stages and its
schedule are there.

Chunk k of a device saves saved_k bytes of each of the f_k(t) micro-batches that it has in flight at
moment t of the order; beside that lie weights, gradients and optimizer state of all chunks, and the
backward of one of them works:

    held(device) = static + max over t of (sum over its chunks k of f_k(t) * saved_k)
                   + largest workspace
    over-full    = sum over devices of the square of (held / memory - 1), where above 0          (1)

A square, so that bytes that go from a full device to the next one, which passes them on, count as a
gain on the way. Cuts are moved by this; whether a plan fits is decided later, by what its stages
really save (`priced_cut.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch.fx import Node

from whale.costs.backward_workspace import COPIES, live_between
from whale.planning.cuts import Floats
from whale.planning.workload import Workload
from whale.scheduling import Action
from whale.scheduling.memory import in_flight


@dataclass(frozen=True)
class Capacity:
    """The rank of a VirtualDevice with least memory for its samples."""

    memory_bytes: float
    num_samples: float
    """samples of a micro-batch on it"""
    part: float = 1.0
    """its part of everything, on a grid"""

    def of_a_sample(self) -> float:
        """Bytes that there are for each sample."""
        return self.memory_bytes / self.num_samples


@dataclass(frozen=True)
class Devices:
    """The VirtualDevices of a pipeline."""

    of_chunk: Sequence[int]
    moments: Sequence[Floats]
    """for every VirtualDevice: (moments, its chunks), micro-batches in flight"""
    capacities: Sequence[Capacity]
    """for every VirtualDevice"""


@dataclass(frozen=True)
class ChunkMemory:
    """All chunks of a pipeline; arrays have an entry for each operation, in order."""

    static: Floats
    """weights that an operation is the first to read, with gradients and optimizer state"""
    saved: Floats
    """saved for backward, for each sample"""
    alive: Floats
    """what crosses a cut in front of the operation, for each sample; one entry more, at the end"""
    workspace: Floats
    """while the backward of the operation runs, for each sample"""
    devices: Devices

    @staticmethod
    def of(
        workload: Workload,
        operations: Sequence[Node],
        static: Sequence[float],
        devices: Devices,
    ) -> ChunkMemory:
        """The bytes of these operations. `static`: what `Workload.static_by_operation` gives."""

        def size_of(node: Node) -> float:
            return workload.costs[node].output_bytes / workload.batch_size

        saved = [
            each.sample_bytes + each.fixed_bytes / workload.share
            for each in workload.saved_by_operation(operations)
        ]
        return ChunkMemory(
            static=np.array(static),
            saved=np.array(saved),
            alive=np.array(live_between(operations, size_of)),
            workspace=COPIES * np.array([size_of(node) for node in operations]),
            devices=devices,
        )

    def over_full(self, starts: Sequence[int]) -> float:
        """How over-full devices are by line (1), where chunks start at these operations."""
        found = 0.0
        bounds = list(pairwise((*starts, len(self.saved))))
        for device, (moments, capacity) in enumerate(
            zip(self.devices.moments, self.devices.capacities, strict=True)
        ):
            static = 0.0
            saved = []
            workspace = 0.0
            for (start, stop), place in zip(bounds, self.devices.of_chunk, strict=True):
                if place != device:
                    continue
                static += float(self.static[start:stop].sum())
                saved.append(self.saved[start:stop].sum() + self.alive[stop])
                workspace = max(workspace, float(self.workspace[start:stop].max()))
            most_saved = float((moments @ np.array(saved)).max())
            held = capacity.part * (static + capacity.num_samples * (most_saved + workspace))
            found += max(0.0, held / capacity.memory_bytes - 1.0) ** 2
        return found


def moments_in_flight(order: Sequence[Action], stages: Sequence[int]) -> Floats:
    """(moments, stages): micro-batches that each of these stages of a device has in flight, all
    different combinations.
    """
    return np.array(sorted(set(in_flight(order, stages)[1:])), dtype=np.float64)
