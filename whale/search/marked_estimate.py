"""How long a step of an annotated model may take, before it is drafted: for an order among the ways
to place it, not for a promise.

With b samples in each of M micro-batches, devices i of a VirtualDevice that take f_i + n s_i for n
samples, forward and backward, and values of c bytes a sample that cross between two VirtualDevices
over p links of rate r,

    VirtualDevice   e = (b + sum f_i / s_i) / sum (1 / s_i)       its devices share by speed
      split over d  e + sum over products of min(2 b i, 3 w) (d - 1) / (d r)
    messages        e = 2 b c / (p r)                             there and back
    step            sum of e + (M - 1) max e + the longest all-reduce + actions                  (1)

A product that reads i bytes a sample and w bytes of weights, and is split, gathers the former in
forward and sums as much in backward, or gathers its weights twice and sums their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch.fx import Node

from whale.annotation import Mark
from whale.cluster.cluster import Cluster, DeviceKind
from whale.costs.backward_workspace import live_between
from whale.planning.balance import device_orders
from whale.planning.cuts import Floats
from whale.planning.pricing import typical_share
from whale.planning.schedules import ACTION_S
from whale.planning.task_graphs import TaskGraphs, from_marks
from whale.plans.virtual_devices import DevicePlacement, VirtualDevice, place
from whale.search.outline import Outline
from whale.search.split_parts import parameter_readers

LEAST_S = 1e-15
"""of a sample: what takes no time takes this"""


@dataclass(frozen=True)
class MarkedEstimator:
    """Estimates of one model on any devices."""

    outline: Outline
    """of a problem whose number of micro-batches is a usual one"""
    _times: dict[DeviceKind, tuple[Floats, Floats]] = field(default_factory=dict)

    def seconds(
        self, marks: Mapping[Node, Mark], cluster: Cluster, counts: Sequence[int]
    ) -> list[float]:
        """Seconds of a step with each number of micro-batches, with the best order of the devices;
        infinite where the marks do not fit these devices.
        """
        try:
            placement = self.placement(marks, cluster)
        except ValueError:
            return [math.inf] * len(counts)
        task_graphs = self._task_graphs(marks)
        width = sum(strategy.num_devices for strategy in task_graphs.strategies)
        best = [math.inf] * len(counts)
        for order in device_orders(cluster, width, self.outline.problem.dtype):
            devices = [order.of(device) for device in placement.virtual_devices]
            found = _Placed(self, task_graphs, placement, devices, cluster).seconds(counts)
            best = [min(pair) for pair in zip(best, found, strict=True)]
        return best

    def placement(self, marks: Mapping[Node, Mark], cluster: Cluster) -> DevicePlacement:
        """The VirtualDevices of these marks; raises ValueError where they do not fit so many
        devices. One device alone runs everything, but others are not left out for that.
        """
        wanted = [strategy.num_devices for strategy in self._task_graphs(marks).strategies]
        problem = self.outline.problem
        if cluster.num_devices == 1 < min(sum(wanted), problem.cluster.num_devices):
            raise ValueError("one device does not have what marks ask for")
        return place(wanted, cluster.num_devices, colocate=problem.config.colocate)

    def _task_graphs(self, marks: Mapping[Node, Mark]) -> TaskGraphs:
        problem = self.outline.problem
        return from_marks(self.outline.operations, problem.kinds, marks, problem.default_strategy)

    def times(self, kind: DeviceKind) -> tuple[Floats, Floats]:
        """(operations,) each: seconds of a micro-batch, and of each of its samples."""
        if kind not in self._times:
            problem = self.outline.problem
            number = problem.cluster.num_devices
            share = typical_share(problem.batch_size, problem.config.num_micro_batch, number)
            rows = self.outline.workload(share).times_by_operation(self.outline.activations, kind)
            parts = [(row.forward, row.input_backward, row.weight_backward) for row in rows]
            fixed = np.array([sum(part.fixed_s for part in row) for row in parts])
            sample = np.array([sum(part.sample_s for part in row) for row in parts])
            self._times[kind] = fixed, sample
        return self._times[kind]

    @cached_property
    def alive(self) -> list[float]:
        """Bytes a sample that cross in front of every operation."""
        costs = self.outline.costs
        size = self.outline.problem.batch_size
        return live_between(self.outline.activations, lambda node: costs[node].output_bytes / size)

    @cached_property
    def trained(self) -> dict[str, tuple[int, list[Node]]]:
        """Trained parameter -> its bytes and the operations that read it."""
        state = self.outline.problem.captured.state
        found = parameter_readers(self.outline)
        return {
            name: (state[name].num_bytes, nodes)
            for name, nodes in found.items()
            if state[name].trainable
        }

    @cached_property
    def products(self) -> tuple[Floats, Floats]:
        """(operations,) each: bytes a sample that it reads, and bytes of its trained parameters; 0
        where it has none.
        """
        places = self.outline.places
        costs = self.outline.costs
        read = np.zeros(len(places))
        weights = np.zeros(len(places))
        for num_bytes, nodes in self.trained.values():
            for node in nodes:
                weights[places[node]] += num_bytes
                sources = [each for each in node.all_input_nodes if each in places]
                largest = max((costs[each].output_bytes for each in sources), default=0.0)
                read[places[node]] = largest / self.outline.problem.batch_size
        return read, weights


@dataclass(frozen=True)
class _Placed:
    """TaskGraphs with the devices that run them in one order."""

    estimator: MarkedEstimator
    task_graphs: TaskGraphs
    placement: DevicePlacement
    devices: Sequence[VirtualDevice]
    """in the order of the devices that is looked at"""
    cluster: Cluster

    def seconds(self, counts: Sequence[int]) -> list[float]:
        """Seconds of a step with each of these numbers of micro-batches, line (1)."""
        size = self.estimator.outline.problem.batch_size
        sample_s, fixed = self._compute
        message_s = self._message_s
        found = []
        for number in counts:
            if number * self._widest > size:
                found.append(math.inf)
                continue
            samples = size / number
            computed = (samples + fixed) * sample_s + self._split_seconds(samples)
            each = np.concatenate([computed, samples * message_s])
            total = each.sum() + (number - 1) * each.max() + self._all_reduce_s
            found.append(float(total) + 2 * number * ACTION_S)
        return found

    @cached_property
    def _split(self) -> dict[int, list[int]]:
        """VirtualDevice -> places of the operations that are split over it."""
        found: dict[int, list[int]] = {}
        for position, node in enumerate(self.estimator.outline.activations):
            index = self.task_graphs.of_operation[node]
            device = self.placement.of_task_graph[index]
            is_alone = self.devices[device].num_devices == 1
            if self.task_graphs.strategies[index].kind == "split" and not is_alone:
                found.setdefault(device, []).append(position)
        return found

    @property
    def _widest(self) -> int:
        """Over how many devices a micro-batch is cut at most."""
        return max(
            len(device.ranks) * (1 if device.index in self._split else device.num_devices)
            for device in self.devices
        )

    def _split_seconds(self, num_samples: float) -> Floats:
        """(VirtualDevices,): what the products that are split send for a micro-batch."""
        found = np.zeros(len(self.devices))
        for index, positions in self._split.items():
            device = self.devices[index]
            read, weights = self.estimator.products
            own = 2 * num_samples / len(device.ranks) * read[positions]
            sent = np.minimum(own, 3 * weights[positions]).sum()
            rate = min(self.cluster.ring_bytes_per_s(ranks) for ranks in device.ranks)
            found[index] = sent * (device.num_devices - 1) / device.num_devices / rate
        return found

    @cached_property
    def _device_of(self) -> list[int]:
        """The VirtualDevice of every operation."""
        of_operation = self.task_graphs.of_operation
        of_task_graph = self.placement.of_task_graph
        return [of_task_graph[of_operation[node]] for node in self.estimator.outline.activations]

    @property
    def _compute(self) -> tuple[Floats, Floats]:
        """(VirtualDevices,) each: 1 / sum (1 / s_i), and sum f_i / s_i."""
        number = len(self.devices)
        sums = {}
        for kind in {device.kind for device in self.cluster.devices}:
            fixed_s, sample_s = self.estimator.times(kind)
            own = np.bincount(self._device_of, sample_s, number)
            speeds = 1 / np.maximum(own, LEAST_S)
            sums[kind] = speeds, np.bincount(self._device_of, fixed_s, number) * speeds
        speed = np.zeros(number)
        fixed = np.zeros(number)
        for device in self.devices:
            for rank in device.all_ranks:
                speeds, own_fixed = sums[self.cluster.devices[rank].kind]
                speed[device.index] += speeds[device.index]
                fixed[device.index] += own_fixed[device.index]
        return 1 / speed, fixed

    @property
    def _message_s(self) -> Floats:
        """(crossings,): seconds of the messages of a sample, there and back."""
        found = []
        alive = self.estimator.alive
        for position, (here, there) in enumerate(pairwise(self._device_of), start=1):
            if here != there:
                ends = self.devices[here], self.devices[there]
                links = len(ends[0].ranks) * min(end.num_devices for end in ends)
                rate = min(
                    self.cluster.link(a[0], b[0]).bytes_per_s
                    for a, b in zip(ends[0].ranks, ends[1].ranks, strict=True)
                )
                found.append(2 * alive[position] / (links * rate))
        return np.array(found)

    @cached_property
    def _all_reduce_s(self) -> float:
        """Seconds of the VirtualDevice that sums most gradients."""
        sizes = [0] * len(self.task_graphs.strategies)
        for num_bytes, nodes in self.estimator.trained.values():
            for index in {self.task_graphs.of_operation[node] for node in nodes}:
                sizes[index] += num_bytes
        seconds = [0.0] * len(self.devices)
        for index, strategy in enumerate(self.task_graphs.strategies):
            device = self.devices[self.placement.of_task_graph[index]]
            if strategy.kind == "split":  # each device of a replica has other parts
                ranks: Sequence[int] = [members[0] for members in device.ranks]
                size = sizes[index] / device.num_devices
            else:
                ranks = device.all_ranks
                size = sizes[index]
            seconds[device.index] += self._ring_seconds(size, ranks)
        return max(seconds)

    def _ring_seconds(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of an all-reduce."""
        if len(ranks) == 1 or not num_bytes:
            return 0.0
        rate = self.cluster.ring_bytes_per_s(ranks)
        return 2 * (len(ranks) - 1) / len(ranks) * num_bytes / rate
