"""Stages, costs and micro-batches as flat lists: what the simulation and the list scheduler compute
on.

S stages, M micro-batches, N = S M. Every compute action has a number, its job:

    forward of (s, m)                       s M + m
    backward, whole or its input part       N + s M + m
    weight part                             2 N + s M + m     (not used where the backward is whole)

A backward is whole where `whole[s M + m]` is set; this is the only thing here that changes while
schedules are searched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from whale.scheduling.action import Action, Kind, Orders, StageGraph, require_micro_batches
from whale.scheduling.costs import Costs

Jobs = list[list[int]]
"""for each device, its jobs in the order in which it does them"""
UNKNOWN = -1.0
"""an end that is not known yet"""


class StuckError(Exception):
    """The devices wait for each other."""


class Problem:
    def __init__(self, graph: StageGraph, costs: Costs, num_micro_batch: int) -> None:
        require_micro_batches(num_micro_batch)
        costs.require_fit(graph)
        self.graph = graph
        self.costs = costs
        self.num_micro_batch = num_micro_batch
        self.size = size = graph.num_stages * num_micro_batch
        stages = range(graph.num_stages)
        self.chunks = [graph.stages_of(device) for device in range(graph.num_devices)]
        self.forward_s = [costs.forward_s[s] + costs.action_s for s in stages]
        self.input_s = [costs.input_backward_s[s] + costs.action_s for s in stages]
        self.weight_s = [costs.weight_backward_s[s] + costs.action_s for s in stages]
        self.whole_s = [costs.backward_s(s) + costs.action_s for s in stages]
        self.activation = list(costs.activation)
        self.weight_part = list(costs.weight_part)
        self.caps = (
            [float("inf")] * graph.num_devices
            if costs.memory_cap is None
            else [cap * (1 + 1e-9) for cap in costs.memory_cap]
        )
        # (other stage, time on the way)
        self.producers = [
            [(p, costs.transfer_s(graph, (p, s))) for p in graph.producers(s)] for s in stages
        ]
        self.consumers = [
            [(c, costs.transfer_s(graph, (s, c))) for c in graph.consumers(s)] for s in stages
        ]
        self.gradient_producers = [
            [(p, costs.transfer_s(graph, (p, s), True)) for p in graph.gradient_producers(s)]
            for s in stages
        ]
        self.gradient_consumers = [
            [(c, costs.transfer_s(graph, (s, c), True)) for c in graph.gradient_consumers(s)]
            for s in stages
        ]
        self.device_of_place = [
            device for device in graph.device_of_stage for _ in range(num_micro_batch)
        ]
        """of every (s, m)"""
        self.all_whole = bytearray(b"\x01") * size
        self.as_split_as_possible = bytearray(
            b"".join((b"\x01" if s in costs.unsplit else b"\x00") * num_micro_batch for s in stages)
        )

    def jobs(self, orders: Orders) -> tuple[Jobs, bytearray]:
        """The compute actions of these orders as jobs, and which backwards are whole."""
        offset = {
            Kind.FORWARD: 0,
            Kind.BACKWARD: self.size,
            Kind.INPUT: self.size,
            Kind.WEIGHT: 2 * self.size,
        }
        whole = bytearray(self.size)
        result: Jobs = []
        for order in orders:
            row = []
            for action in order:
                if action.kind in offset:
                    place = action.stage * self.num_micro_batch + action.micro_batch
                    row.append(offset[action.kind] + place)
                    if action.kind is Kind.BACKWARD:
                        whole[place] = 1
            result.append(row)
        return result, whole

    def orders(self, jobs: Iterable[Sequence[int]], whole: bytearray) -> Orders:
        """The jobs as actions."""
        result = []
        for row in jobs:
            actions = []
            for job in row:
                lane, place = divmod(job, self.size)
                stage, micro_batch = divmod(place, self.num_micro_batch)
                kind = (
                    Kind.FORWARD
                    if lane == 0
                    else Kind.WEIGHT
                    if lane == 2
                    else Kind.BACKWARD
                    if whole[place]
                    else Kind.INPUT
                )
                actions.append(Action(kind, stage, micro_batch))
            result.append(tuple(actions))
        return tuple(result)

    def durations(self, whole: bytearray) -> list[float]:
        """Of every job."""
        many = range(self.num_micro_batch)
        stages = range(self.graph.num_stages)
        result = [self.forward_s[s] for s in stages for _ in many]
        backwards = [(self.whole_s[s], self.input_s[s]) for s in stages for _ in many]
        result += [
            both if is_whole else first
            for (both, first), is_whole in zip(backwards, whole, strict=True)
        ]
        result += [self.weight_s[s] for s in stages for _ in many]
        return result

    def needs(self) -> list[tuple[tuple[int, float], ...]]:
        """For every job: (job that must be over, time on the way) without what is given by the
        order of a device.
        """
        result: list[tuple[tuple[int, float], ...]] = []
        count = self.num_micro_batch
        size = self.size
        for s in range(self.graph.num_stages):
            for m in range(count):
                result.append(tuple((p * count + m, time) for p, time in self.producers[s]))
        for s in range(self.graph.num_stages):
            for m in range(count):
                after = tuple(
                    (size + c * count + m, time) for c, time in self.gradient_consumers[s]
                )
                result.append(((s * count + m, 0.0), *after))
        result += [((size + place, 0.0),) for place in range(size)]
        return result

    def run(
        self,
        jobs: Jobs,
        durations: Sequence[float],
        needs: Sequence[tuple[tuple[int, float], ...]],
        before: tuple[list[float], list[int]] | None = None,
    ) -> tuple[list[float], list[int]]:
        """End of every job when each device does its jobs in this order as soon as it can, and the
        jobs in an order that all this respects.

        Raises `StuckError` when the devices wait for each other. `before`: the same two lists with
        the beginning of a run, to go on from.
        """
        ends, sequence = before or ([UNKNOWN] * (3 * self.size), [])
        place = [0] * len(jobs)
        clocks = [0.0] * len(jobs)
        if sequence:
            for device, row in enumerate(jobs):
                place[device] = done = bisect_left(row, True, key=lambda job: ends[job] < 0.0)
                clocks[device] = ends[row[done - 1]] if done else 0.0
        waiting: dict[int, list[int]] = {}
        ready = list(range(len(jobs)))
        while ready:
            device = ready.pop()
            row = jobs[device]
            clock = clocks[device]
            at = place[device]
            last = len(row)
            while at < last:
                job = row[at]
                start = clock
                for need, time in needs[job]:
                    end = ends[need]
                    if end < 0.0:
                        break
                    if end + time > start:
                        start = end + time
                else:
                    clock = start + durations[job]
                    ends[job] = clock
                    sequence.append(job)
                    at += 1
                    if job in waiting:
                        ready += waiting.pop(job)
                    continue
                waiting.setdefault(need, []).append(device)
                break
            place[device] = at
            clocks[device] = clock
        if len(sequence) < sum(map(len, jobs)):
            raise StuckError
        return ends, sequence

    def peak(self, row: Sequence[int], whole: bytearray) -> float:
        """Most activation memory of a device that does its jobs in this order."""
        total = peak = 0.0
        size = self.size
        count = self.num_micro_batch
        for job in row:
            if job < size:
                total += self.activation[job // count]
            elif job < 2 * size:
                stage = (job - size) // count
                total += (0.0 if whole[job - size] else self.weight_part[stage]) - self.activation[
                    stage
                ]
            else:
                total -= self.weight_part[(job - 2 * size) // count]
            if total > peak:
                peak = total
        return peak
