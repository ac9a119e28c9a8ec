"""Numbers for cutting an unannotated model into stages on unlike devices: times, crossings and
memory of every operation on every stage.

Stage k runs on one device of each of R replicas. Replica r is taken to do the share x_r of the
samples, in proportion to the summed speed of its devices (the shares that are planned afterwards
are exact). With t_i(d) the time of operation i for a mini-batch on device d:

    time of operation i on stage k    max over r of  R * x_r * t_i(device of stage k in replica r)
    bytes of operation i on stage k   weights, gradients, optimizer state that it is the first to read
                                      + micro-batches in flight on stage k * largest x_r * micro-batch * bytes that it keeps a sample

The factor R leaves equal devices with the times of the whole mini-batch, whatever R.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch.fx import Node

from whale import scheduling
from whale.cluster.cluster import Cluster
from whale.planning.balance import Order
from whale.planning.cuts import Floats, StageMemory
from whale.planning.workload import Workload


@dataclass(frozen=True)
class CutProblem:
    """An order of the devices, and what is to be cut for it."""

    workload: Workload
    cluster: Cluster
    order: Order
    num_stages: int
    num_micro_batch: int
    schedule: str
    dtype: str

    @cached_property
    def ranks(self) -> list[list[int]]:
        """[stage][replica]"""
        return [
            list(self.order.ranks[stage :: self.num_stages]) for stage in range(self.num_stages)
        ]

    def shares(self) -> Floats:
        """x_r"""
        rates = np.array(
            [
                [self.cluster.devices[rank].kind.rate(self.dtype) for rank in stage]
                for stage in self.ranks
            ]
        ).sum(axis=0)
        shares: Floats = rates / rates.sum()
        return shares

    def times(self, operations: Sequence[Node]) -> Floats:
        """(stages, operations)"""
        shares = self.shares()
        known = {}
        for kind in {device.kind for device in self.cluster.devices}:
            known[kind] = np.array(self.workload.forward_seconds(operations, kind))
        rows = []
        for stage in self.ranks:
            by_replica = [
                len(shares) * x * known[self.cluster.devices[rank].kind]
                for x, rank in zip(shares, stage, strict=True)
            ]
            rows.append(np.max(by_replica, axis=0))
        return np.array(rows)

    def crossing_seconds(self, node: Node) -> float:
        return crossing_seconds(self.workload, self.cluster, node)

    @cached_property
    def boundary_weights(self) -> tuple[float, ...]:
        """How much longer a message takes than `crossing_seconds`, between each stage and the next,
        in the replica where it takes longest.

        All messages that leave a host at the same boundary share its network card.
        """
        return tuple(
            slowest_pair(self.cluster, list(zip(here, there, strict=True)))
            for here, there in pairwise(self.ranks)
        )

    def step_seconds(self, stages: Floats, crossings: Floats) -> float:
        """Of a step with these forwards and crossings of a mini-batch, by simulation of one
        replica.
        """
        graph = scheduling.StageGraph.chain(self.num_stages)
        count = self.num_micro_batch
        orders = (
            scheduling.gpipe(graph, count)
            if self.schedule == "gpipe"
            else scheduling.one_f_one_b(graph, count)
        )
        return scheduling.simulate(
            scheduling.Schedule("cut", graph, count, orders), costs_of_cut(stages, crossings, count)
        ).step_s

    def memory(
        self,
        operations: Sequence[Node],
        names_behind: Callable[[Node], Iterable[str]],
        most_in_flight: int,
        again: bool = False,
    ) -> StageMemory:
        """`most_in_flight`: no stage holds more micro-batches at once.

        `again`: the stages compute everything again in backward. They keep what enters them and
        work on one micro-batch at a time.
        """
        kept = self.workload.kept_by_operation(operations)
        static = np.array(
            self.workload.static_by_operation(operations, names_behind, len(self.ranks[0]) > 1)
        )
        fixed = np.array([each.fixed_bytes for each in kept])
        per_sample = np.array([each.sample_bytes for each in kept])
        micro_batch = -(-self.workload.batch_size // self.num_micro_batch)
        samples = np.ceil(self.shares() * micro_batch)  # of each replica
        stages = range(self.num_stages)
        flying = np.array(
            [
                min(
                    most_in_flight,
                    in_flight(self.schedule, k, self.num_stages, self.num_micro_batch),
                )
                for k in stages
            ]
        )
        rows = [
            static + (1 if again else number) * (fixed + samples.max() * per_sample)
            for number in flying
        ]
        # 0 is not known, so no limit
        capacities = np.array(
            [
                [self.cluster.devices[rank].kind.memory_bytes or np.inf for rank in stage]
                for stage in self.ranks
            ]
        )
        # what enters and leaves a stage is kept, too: (stages, replicas)
        edges = (
            2 * self._least_alive(operations) * flying[:, np.newaxis] * samples[np.newaxis, :]
            if again
            else 0.0
        )
        return StageMemory(
            np.array(rows), (capacities - edges).min(axis=1) - self.workload.batch_bytes
        )

    def _least_alive(self, operations: Sequence[Node]) -> float:
        """Bytes a sample that cross where least does, in the middle half of the model: both its
        ends are thin.
        """
        place = {node: index for index, node in enumerate(operations)}
        change = np.zeros(len(operations) + 1)
        for node, index in place.items():
            last = max((place[user] for user in node.users if user in place), default=index)
            sample_bytes = self.workload.costs[node].output_bytes / self.workload.batch_size
            change[index + 1] += sample_bytes
            change[last + 1] -= sample_bytes
        quarter = len(operations) // 4
        middle = np.cumsum(change)[quarter + 1 : len(operations) - quarter]
        return float(middle.min(initial=np.inf, where=middle > 0)) if (middle > 0).any() else 0.0


def crossing_seconds(workload: Workload, cluster: Cluster, node: Node) -> float:
    """Of a value of the whole mini-batch over a link of the kind that is inside a host."""
    return workload.costs[node].output_bytes / cluster.intra_host.bytes_per_s


def costs_of_cut(stages: Floats, crossings: Floats, num_micro_batch: int) -> scheduling.Costs:
    """Of a chain of stages with these forwards of a mini-batch and these crossings between them. A
    backward is two forwards.
    """
    forward = tuple(float(seconds) / num_micro_batch for seconds in stages)
    messages = {(k, k + 1): float(seconds) / num_micro_batch for k, seconds in enumerate(crossings)}
    return scheduling.Costs(forward, forward, forward, messages)


def slowest_pair(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> float:
    """Of ranks that all send one message at once: by what the slowest takes longer than one alone
    over a link inside a host.
    """
    devices = cluster.devices
    leaving = Counter(devices[a].host for a, b in pairs if devices[a].host != devices[b].host)
    weights = []
    for a, b in pairs:
        sharing = leaving[devices[a].host] if devices[a].host != devices[b].host else 1
        weights.append(sharing * cluster.intra_host.bytes_per_s / cluster.link(a, b).bytes_per_s)
    return max(weights)


def in_flight(schedule: str, stage: int, num_stages: int, num_micro_batch: int) -> int:
    """Micro-batches that a stage is first taken to keep, before the schedule is made.

    1f1b keeps as many as there are stages from it on. Schedules that are made for their costs can
    do with as few, and with fewer (`cutting.py`); what they really keep is checked when the
    schedule is there. Only gpipe always keeps all.
    """
    return num_micro_batch if schedule == "gpipe" else min(num_stages - stage, num_micro_batch)
