"""TaskGraphs of a model for one order of the devices: as it is annotated, or cut into
`num_task_graph` stages under the memory of heterogeneous devices.

Stage k runs on one device of each of R model replicas, or on several that share its samples or its
weights (`replicas.py`). Replica r is taken to get the share x_r of the samples, in proportion to
the summed speed of its devices (the shares that are planned later are exact). With t_i(D) the
seconds of operation i for a mini-batch on devices D together, the dynamic programme (cuts.py) is
given

    seconds of operation i on stage k   max over r of  R x_r t_i(devices of stage k in replica r)
    bytes of operation i on stage k     weights, gradients and optimizer state of which it is the
                                        first reader
                                        + micro-batches in flight on stage k * largest x_r
                                          * micro-batch * bytes saved for backward a sample

The factor R leaves equal devices with the seconds of the whole mini-batch, whatever R.

How many micro-batches are in flight is known only once the schedule exists. So cuts are made one
after the other for less and less memory, until one of them can be drafted:

 1. the micro-batches that 1F1B has in flight (all of them for gpipe)
 2. the same with everything recomputed in backward, where the config lets the planner do so
 3. as many in flight as fit, half of these, ... one, where the schedule is made for the memory
    that there is; with everything recomputed, then without
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from torch.fx import Node

from whale import scheduling
from whale.annotation import Strategy
from whale.capture.sample_states import batch_dim
from whale.cluster.cluster import Cluster
from whale.costs.backward_workspace import live_between
from whale.planning.balance import Order
from whale.planning.cuts import Floats, StageMemory
from whale.planning.problem import Problem
from whale.planning.schedules import FIXED_ORDERS
from whale.planning.stages import state_behind
from whale.planning.task_graphs import TaskGraphs, from_cuts, from_marks
from whale.planning.workload import Workload
from whale.plans.shares import NotEnoughMemory, those_that_fit


@dataclass(frozen=True)
class PipelineCuts:
    """One order of the devices, and the ways to cut the model for it."""

    problem: Problem
    workload: Workload
    operations: list[Node]
    order: Order

    @cached_property
    def annotated(self) -> TaskGraphs | None:
        """The TaskGraphs that the user annotated; None where the model is to be cut."""
        problem = self.problem
        wanted = problem.config.num_task_graph
        if wanted is None or problem.cluster.num_devices == 1:
            return from_marks(
                self.operations, problem.kinds, problem.marks, problem.default_strategy
            )
        if problem.marks or problem.default_strategy:
            raise ValueError(
                f'"num_task_graph": {wanted} cuts a model without annotations, but this one is '
                "annotated: leave one of the two out"
            )
        return None

    @property
    def wanted(self) -> TaskGraphs:
        """Strategy and label of each TaskGraph, before operations are given to them."""
        if self.annotated is not None:
            return self.annotated
        number = self.num_stages
        strategies = (Strategy("replicate", 1),) * number
        return TaskGraphs({}, strategies, ("a part of the model",) * number, "")

    def each(self) -> Iterator[tuple[TaskGraphs, str]]:
        """Gives (TaskGraphs, reason), each for less memory than the one before; raises
        `NotEnoughMemory` where none fits.
        """
        if self.annotated is not None:
            yield self.annotated, self.annotated.reason
            return
        found: list[TaskGraphs] = []
        for cut, why in those_that_fit(partial(self._cut_for, *each) for each in self._memories()):
            if all(cut.of_operation != other.of_operation for other in found):
                found.append(cut)
                yield cut, f'"num_task_graph": {len(cut.strategies)}; {cut.reason}{why}'

    def _cut_for(self, most_in_flight: int, recompute: bool, why: str) -> tuple[TaskGraphs, str]:
        return self._cut(most_in_flight, recompute), why

    def _memories(self) -> Iterator[tuple[int, bool, str]]:
        """Gives (most micro-batches in flight on a stage, whether everything is recomputed, what
        the reason says of it), in the order of the numbered list above.
        """
        config = self.problem.config
        yield config.num_micro_batch, config.recompute is True, ""
        if config.recompute == "auto":
            yield config.num_micro_batch, True, ""
        if config.schedule in FIXED_ORDERS:
            return
        for recompute in (True, False) if config.recompute == "auto" else (config.recompute,):
            most = self._most_in_flight(recompute is True)
            while most:
                why = f"; cut for at most {most} in flight on a stage, as memory is short"
                yield most, recompute is True, why
                most //= 2

    def _most_in_flight(self, recompute: bool) -> int:
        """The largest number of micro-batches in flight for which there is a cut, by bisection; 1
        where there is none.
        """
        low = 1
        high = min(self.num_stages, self.problem.config.num_micro_batch)
        while low < high:
            middle = (low + high + 1) // 2
            try:
                self._cut(middle, recompute)
                low = middle
            except NotEnoughMemory:
                high = middle - 1
        return low

    def _cut(self, most_in_flight: int, recompute: bool) -> TaskGraphs:
        try:
            return from_cuts(
                self.operations,
                self.problem.kinds,
                self.num_stages,
                self,
                memory_of=lambda nodes: self._memory(nodes, most_in_flight, recompute),
                only_thin=recompute,
                barred=self.behind_sums if self._is_wide else None,
            )
        except NotEnoughMemory:
            raise
        except ValueError as error:
            raise ValueError(f'"num_task_graph": {self.num_stages}: {error}') from None

    # ---- seconds: what `from_cuts` asks of its `CutCosts`

    @property
    def num_stages(self) -> int:
        return self.problem.config.num_task_graph or 1

    @cached_property
    def ranks(self) -> list[list[tuple[int, ...]]]:
        """Ranks by [stage][replica], one each."""
        return [
            [(rank,) for rank in self.order.ranks[stage :: self.num_stages]]
            for stage in range(self.num_stages)
        ]

    @property
    def _is_wide(self) -> bool:
        """Some stage of a replica has several devices."""
        return any(len(members) > 1 for stage in self.ranks for members in stage)

    def behind_sums(self, operations: Sequence[Node]) -> set[int]:
        """Places in front of which a sum over samples is live. Devices that share a stage each have
        the sum of their own samples, so no stage may start there.
        """
        symbol = self.problem.captured.batch_symbol
        place_of = {node: place for place, node in enumerate(operations)}
        found: set[int] = set()
        for node, place in place_of.items():
            if batch_dim(node, symbol) is None:
                last = max((place_of[user] for user in node.users if user in place_of), default=0)
                found.update(range(place + 1, last + 1))
        return found

    @property
    def is_shared(self) -> bool:
        """Gradients are summed over model replicas, in buffers of their size."""
        return len(self.shares) > 1 or self.problem.has_other_replicas

    @cached_property
    def shares(self) -> Floats:
        """(replicas,): the part x_r of the samples that each replica gets."""
        dtype = self.problem.dtype
        devices = self.problem.cluster.devices
        rates = np.array(
            [
                [
                    sum(devices[rank].kind.reached_flop_per_s(dtype) for rank in members)
                    for members in stage
                ]
                for stage in self.ranks
            ]
        )
        of_replica: Floats = rates.sum(axis=0)
        shares: Floats = of_replica / of_replica.sum()
        return shares

    def times(self, operations: Sequence[Node]) -> Floats:
        """(stages, operations): seconds, as in the first line above."""
        devices = self.problem.cluster.devices
        alone = {}
        for kind in {device.kind for device in devices}:
            alone[kind] = np.array(self.workload.forward_seconds(operations, kind))
        rows = []
        for stage in self.ranks:
            by_replica = []
            for share, members in zip(self.shares, stage, strict=True):
                times = np.array([alone[devices[rank].kind] for rank in members])
                together = times[0]
                if len(members) > 1:  # they share the work by their speed; no work takes no time
                    speeds = np.divide(1.0, times, out=np.full_like(times, np.inf), where=times > 0)
                    together = 1.0 / speeds.sum(axis=0)
                by_replica.append(len(self.shares) * share * together)
            rows.append(np.max(by_replica, axis=0))
        return np.array(rows)

    def crossing_seconds(self, node: Node) -> float:
        return crossing_seconds(self.workload, self.problem.cluster, node)

    @cached_property
    def boundary_weights(self) -> tuple[float, ...]:
        """Factor on `crossing_seconds` between each stage and the next, in the replica where the
        message takes longest. All messages that leave a host at one boundary share its network
        card.
        """
        found = []
        for here, there in pairwise(self.ranks):
            pairs: list[tuple[int, int]] = []
            for sources, destinations in zip(here, there, strict=True):
                pairs += even_pairs(sources, destinations)
            narrowest = min(len(members) for members in (*here, *there))
            found.append(slowest_pair(self.problem.cluster, pairs) / narrowest)
        return tuple(found)

    def step_seconds(self, stages: Floats, crossings: Floats) -> float:
        """Seconds of a step with these forwards and crossings of a mini-batch, by simulation of one
        replica.
        """
        config = self.problem.config
        graph = scheduling.StageGraph.chain(self.num_stages)
        count = config.num_micro_batch
        make = scheduling.gpipe if config.schedule == "gpipe" else scheduling.one_f_one_b
        schedule = scheduling.Schedule("cut", graph, count, make(graph, count))
        return scheduling.simulate(schedule, costs_of_cut(stages, crossings, count)).step_s

    # ---- memory

    def _memory(
        self, operations: Sequence[Node], most_in_flight: int, recompute: bool
    ) -> StageMemory:
        """Bytes of every operation on every stage, and what a stage may hold. `most_in_flight`: no
        stage has more micro-batches at once. `recompute`: stages recompute everything in backward,
        so they save what enters them and work on one micro-batch at a time.
        """
        config = self.problem.config
        saved = self.workload.saved_by_operation(operations)
        fixed = np.array([each.fixed_bytes for each in saved])
        per_sample = np.array([each.sample_bytes for each in saved])
        static = np.array(
            self.workload.static_by_operation(operations, self._names_behind, self.is_shared)
        )
        micro_batch = -(-self.workload.batch_size // config.num_micro_batch)
        widths = np.array([[len(members) for members in stage] for stage in self.ranks])
        samples = np.ceil(self.shares[np.newaxis, :] * micro_batch / widths)  # (stages, replicas)
        flying = np.array(
            [
                in_flight(config.schedule, stage, self.num_stages, config.num_micro_batch)
                for stage in range(self.num_stages)
            ]
        ).clip(max=most_in_flight)
        rows = [
            static + (1 if recompute else number) * (fixed + own.max() * per_sample)
            for number, own in zip(flying, samples, strict=True)
        ]
        devices = self.problem.cluster.devices
        # memory of 0 bytes means that it is not known: no limit
        capacities = np.array(
            [
                [
                    min(devices[rank].kind.memory_bytes or np.inf for rank in members)
                    for members in stage
                ]
                for stage in self.ranks
            ]
        )
        if recompute:  # what enters and leaves a stage is saved, too: (stages, replicas)
            crossing = 2 * self._least_alive(operations)
            capacities = capacities - crossing * flying[:, np.newaxis] * samples
        return StageMemory(np.array(rows), capacities.min(axis=1) - self.workload.batch_bytes)

    def _names_behind(self, node: Node) -> list[str]:
        return [name for name, _ in state_behind(node, self.problem.kinds)]

    def _least_alive(self, operations: Sequence[Node]) -> float:
        """Bytes a sample that cross where least crosses, in the middle half of the model: at both
        its ends little does.
        """
        batch_size = self.workload.batch_size
        costs = self.workload.costs
        alive = live_between(operations, lambda node: costs[node].output_bytes / batch_size)
        quarter = len(operations) // 4
        middle = np.array(alive[quarter + 1 : len(operations) - quarter])
        return float(middle.min(initial=np.inf, where=middle > 0)) if (middle > 0).any() else 0.0


def crossing_seconds(workload: Workload, cluster: Cluster, node: Node) -> float:
    """Seconds to send a value of the whole mini-batch over a link of the kind inside a host."""
    return workload.costs[node].output_bytes / cluster.intra_host.bytes_per_s


def costs_of_cut(stages: Floats, crossings: Floats, num_micro_batch: int) -> scheduling.Costs:
    """Costs of a chain of stages with these forwards of a mini-batch and these crossings between
    them. A backward takes as long as two forwards.
    """
    forward = tuple(float(seconds) / num_micro_batch for seconds in stages)
    messages = {(k, k + 1): float(seconds) / num_micro_batch for k, seconds in enumerate(crossings)}
    return scheduling.Costs(forward, forward, forward, messages)


def even_pairs(sources: Sequence[int], destinations: Sequence[int]) -> list[tuple[int, int]]:
    """(rank, rank) of the messages between two stages of a replica whose samples are cut evenly."""
    number = max(len(sources), len(destinations))
    return [
        (sources[place * len(sources) // number], destinations[place * len(destinations) // number])
        for place in range(number)
    ]


def slowest_pair(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> float:
    """Time of the slowest message when all these pairs of ranks send one at once, in units of one
    message alone over a link inside a host.
    """
    devices = cluster.devices
    leaving = Counter(devices[a].host for a, b in pairs if devices[a].host != devices[b].host)
    weights = []
    for a, b in pairs:
        # messages that leave a host share its network card
        sharing = leaving[devices[a].host] if devices[a].host != devices[b].host else 1
        link = cluster.link(a, b)
        card_s = sharing / (link.card_bytes_per_s or link.bytes_per_s)
        weights.append(cluster.intra_host.bytes_per_s * max(1 / link.bytes_per_s, card_s))
    return max(weights)


def in_flight(schedule: str, stage: int, num_stages: int, num_micro_batch: int) -> int:
    """Micro-batches that a stage is first taken to have in flight, before the schedule is made.

    1F1B has as many as there are stages from this one on. Schedules that are made for their costs
    can do with as few, and with fewer (line 3 above); what they really have is checked once the
    schedule exists. Only gpipe always has all.
    """
    return num_micro_batch if schedule == "gpipe" else min(num_stages - stage, num_micro_batch)
