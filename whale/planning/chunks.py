"""More chunks than devices: the model is cut again, finer, and its chunks lie over the
VirtualDevices in waves or loops.

A pipeline of P VirtualDevices with C chunks on each fills in 1/C of the time. The annotations still
say how many devices there are and how many of them share each part; where the cuts are is decided
here. What the chunks and the messages between them cost goes to the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
from torch.fx import Node

from whale import scheduling
from whale.annotation import Strategy
from whale.capture.kinds import ValueKind
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.planning.chunk_memory import Capacity, ChunkMemory, Devices, moments_in_flight
from whale.planning.cuts import Floats
from whale.planning.pipeline_cuts import costs_of_cut, crossing_seconds, slowest_pair
from whale.planning.schedules import FIXED_ORDERS
from whale.planning.stages import state_behind
from whale.planning.task_graphs import CutMoves, TaskGraphs, from_cuts
from whale.planning.workload import Workload
from whale.plans.virtual_devices import DevicePlacement, VirtualDevice
from whale.scheduling.placement import loop, zigzag

AUTO_COUNTS = (1, 2, 4)
"""chunks on each device that "auto" compares: more of them fill the pipeline faster and cost more
messages
"""
UNEVEN = 1.05
LONG_MESSAGE = 0.5
"""of the mean work of the devices, and of the longest chunk: where a device has more, or a message
takes longer, cuts are moved
"""
MOVE_BUDGET = 20_000
"""visits of a chunk (of a micro-batch, where an order is simulated) while cuts are moved"""
SPREAD_PART = 1e-3
"""of the mean square work of the devices, as a part of the time of a cut"""


def chunk_counts(config: Config, num_virtual_devices: int) -> tuple[int, ...]:
    """Numbers of chunks on each VirtualDevice that the config allows."""
    if num_virtual_devices == 1:
        return (1,)
    if config.schedule in ("wave", "interleaved"):
        return (2 * (config.num_waves or 1),)
    if config.schedule in ("zero-bubble", "auto") and config.num_waves is not None:
        return (2 * config.num_waves,)
    return AUTO_COUNTS if config.schedule == "auto" else (1,)


@dataclass(frozen=True)
class ChunkCuts:
    """`count` chunks on each VirtualDevice, and what cutting them here or there costs on these
    devices.

    All seconds are of a whole mini-batch. The devices of a VirtualDevice, in all replicas, share
    it.
    """

    workload: Workload
    cluster: Cluster
    placement: DevicePlacement
    count: int
    config: Config

    @property
    def is_loop(self) -> bool:
        return self.config.schedule == "interleaved"

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The VirtualDevice of each chunk."""
        number = len(self.placement.virtual_devices)
        return loop(number, self.count) if self.is_loop else zigzag(number, self.count)

    def each(
        self, operations: Sequence[Node], kinds: Mapping[Node, ValueKind]
    ) -> Iterator[tuple[TaskGraphs, DevicePlacement]]:
        """Gives different cuts, to be tried while memory is short: moved for the shortest step;
        moved so that no device is over-full, then for the shortest step; not moved. Each chunk is a
        TaskGraph of its own. Raises ValueError where the model has too few points.
        """
        activations = [node for node in operations if kinds[node] is ValueKind.ACTIVATION]
        memory = cache(lambda: self._memory(activations, kinds))  # only where it is short
        ways = (
            (CutMoves(self.num_moves), ""),
            (
                CutMoves(self.most_moves, lambda starts: memory().over_full(starts)),
                "; so that no device is over-full, as far as that goes",
            ),
            (None, "; not moved: cuts with a shorter step do not fit into memory"),
        )
        found: list[dict[Node, int]] = []
        for moves, why in ways:
            task_graphs, placement = self._cut(operations, kinds, moves)
            if task_graphs.of_operation not in found:
                found.append(task_graphs.of_operation)
                yield replace(task_graphs, reason=task_graphs.reason + why), placement

    def _cut(
        self, operations: Sequence[Node], kinds: Mapping[Node, ValueKind], moves: CutMoves | None
    ) -> tuple[TaskGraphs, DevicePlacement]:
        config = self.config
        placement = self.placement
        count = self.count
        devices = self.devices
        try:
            cut = from_cuts(operations, kinds, len(devices), self, moves=moves)
        except ValueError as error:
            waves = f' with "num_waves": {config.num_waves}' if config.num_waves else ""
            raise ValueError(
                f'"schedule": "{config.schedule}"{waves} needs {count} chunks on each of '
                f"{len(placement.virtual_devices)} VirtualDevices, {len(devices)} in all: {error}"
            ) from None
        on = [placement.virtual_devices[device] for device in devices]
        strategies = tuple(
            Strategy("replicate" if device.grid is None else "split", device.num_devices)
            for device in on
        )
        shape = "a loop" if self.is_loop else f"{count // 2} wave{'s' * (count > 2)}"
        task_graphs = TaskGraphs(
            cut.of_operation,
            strategies,
            cut.labels,
            f"{count} chunks on each VirtualDevice; {cut.reason}",
        )
        return task_graphs, DevicePlacement(
            placement.virtual_devices,
            devices,
            placement.num_replicas,
            f"{placement.reason}; their chunks lie in {shape} over them",
        )

    def _memory(self, operations: Sequence[Node], kinds: Mapping[Node, ValueKind]) -> ChunkMemory:
        """What devices hold in the order of the schedule; one that is made for its costs is taken
        to hold what 1F1B does on these devices.
        """

        def names_behind(node: Node) -> list[str]:
            return [name for name, _ in state_behind(node, kinds)]

        graph = scheduling.StageGraph.chain(len(self.devices), self.devices)
        number = self.config.num_micro_batch
        orders = (
            scheduling.one_f_one_b(graph, number)
            if self.is_list_scheduled
            else self._published_orders(graph)
        )
        is_shared = any(
            len(device.ranks) * device.num_devices > 1 for device in self.placement.virtual_devices
        )
        devices = Devices(
            of_chunk=self.devices,
            moments=[
                moments_in_flight(order, graph.stages_of(device))
                for device, order in enumerate(orders)
            ],
            capacities=[self._capacity(device) for device in self.placement.virtual_devices],
        )
        static = self.workload.static_by_operation(operations, names_behind, is_shared)
        return ChunkMemory.of(self.workload, operations, static, devices)

    def _capacity(self, device: VirtualDevice) -> Capacity:
        """Devices get samples in proportion to their speed; the places of a grid run on all of
        their replica, each on its part.
        """
        micro_batch = -(-self.workload.batch_size // self.config.num_micro_batch)
        ranks = [rank for replica in device.ranks for rank in replica]
        kinds = [self.cluster.devices[rank].kind for rank in ranks]
        memory = [float(kind.memory_bytes or np.inf) - self.workload.batch_bytes for kind in kinds]
        if device.grid is not None:
            return Capacity(min(memory), micro_batch / len(device.ranks), 1.0 / device.num_devices)
        rates = np.array([kind.reached_flop_per_s(self.workload.dtype) for kind in kinds])
        samples = np.ceil(micro_batch * rates / rates.sum())
        return min(
            (Capacity(free, float(number)) for free, number in zip(memory, samples, strict=True)),
            key=Capacity.of_a_sample,
        )

    def times(self, operations: Sequence[Node]) -> Floats:
        """(chunks, operations). Devices that take t_i alone take 1 / sum(1 / t_i) together."""
        kinds = [device.kind for device in self.cluster.devices]
        rows = {}
        for index in set(self.devices):
            ranks = [
                rank for replica in self.placement.virtual_devices[index].ranks for rank in replica
            ]
            row = np.zeros(len(operations))
            for kind in {kinds[rank] for rank in ranks}:
                alone = np.array(self.workload.forward_seconds(operations, kind))
                number = sum(kinds[rank] == kind for rank in ranks)
                row += np.divide(
                    number, alone, out=np.full(len(operations), np.inf), where=alone > 0
                )
            rows[index] = 1.0 / row
        return np.array([rows[index] for index in self.devices])

    def crossing_seconds(self, node: Node) -> float:
        return crossing_seconds(self.workload, self.cluster, node)

    @cached_property
    def boundary_weights(self) -> tuple[float, ...]:
        """Times `crossing_seconds`: what a message takes between each chunk and the next. Nothing
        at the turn of a wave.
        """
        return tuple(
            0.0 if here == there else self._boundary_weight(here, there)
            for here, there in pairwise(self.devices)
        )

    def _boundary_weight(self, here: int, there: int) -> float:
        """Every replica, and every device of the narrower end, sends a part; parts that leave a
        host at once share its network card.
        """
        ends = [self.placement.virtual_devices[index] for index in (here, there)]
        parts = min(device.num_devices for device in ends)
        pairs = [
            (sources[part * len(sources) // parts], destinations[part * len(destinations) // parts])
            for sources, destinations in zip(ends[0].ranks, ends[1].ranks, strict=True)
            for part in range(parts)
        ]
        return slowest_pair(self.cluster, pairs) / len(pairs)

    @property
    def is_list_scheduled(self) -> bool:
        return self.config.schedule not in FIXED_ORDERS

    def step_seconds(self, stages: Floats, crossings: Floats) -> float:
        """Seconds of a step with these forwards and crossings.

        A published order is simulated. Made for its costs, an order comes near to the least time
        that there is, which is a formula. A little is added where devices have different work: a
        change that does not make the step shorter may be half of one that does.
        """
        graph = scheduling.StageGraph.chain(len(stages), self.devices)
        number = self.config.num_micro_batch
        costs = costs_of_cut(stages, crossings, number)
        spread = SPREAD_PART * float(np.sqrt(np.mean(np.square(self._work(stages)))))
        if self.is_list_scheduled:
            return scheduling.lower_bound(graph, costs, number) + spread
        return (
            scheduling.simulate(
                scheduling.Schedule("cut", graph, number, self._published_orders(graph)), costs
            ).step_s
            + spread
        )

    def _published_orders(self, graph: scheduling.StageGraph) -> scheduling.Orders:
        make = scheduling.interleaved_orders if self.is_loop else scheduling.wave_orders
        return make(graph, self.config.num_micro_batch)

    def num_moves(self, stages: Floats, crossings: Floats) -> int:
        """Moves of single cuts that are worth trying: none where equal chunks make equal devices
        and messages are short.
        """
        work = self._work(stages)
        if (
            work.max() <= UNEVEN * work.mean()
            and crossings.max(initial=0.0) <= LONG_MESSAGE * stages.max()
        ):
            return 0
        return self.most_moves(stages, crossings)

    def most_moves(self, stages: Floats, crossings: Floats) -> int:
        return MOVE_BUDGET // (
            len(stages) * (1 if self.is_list_scheduled else self.config.num_micro_batch)
        )

    def _work(self, stages: Floats) -> Floats:
        """(VirtualDevices,): seconds of all chunks of each."""
        return np.bincount(self.devices, weights=stages).astype(np.float64)
