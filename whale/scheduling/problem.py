"""Stages, costs and micro-batches as flat lists: what the simulation and the list scheduler compute
on.

S stages, M micro-batches, N = S M. Every compute action has a number, its job:

    forward of (s, m)                       s M + m
    backward, whole or input gradient       N + s M + m
    weight gradient                         2 N + s M + m     (not used where the backward is whole)

A backward is whole where `whole[s M + m]` is set; this is the only thing here that changes while
schedules are searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whale.scheduling.action import (
    COMPUTE,
    Action,
    Kind,
    Orders,
    StageGraph,
    require_micro_batches,
)
from whale.scheduling.costs import Costs
from whale.scheduling.event_loop import Jobs
from whale.scheduling.memory import ROUNDING, memory_changes


class OrderProblem:
    """The input of a search in the form in which it is fastest to compute on."""

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
        self.saved = list(costs.saved)
        self.weight_gradient = list(costs.weight_gradient)
        self.caps = (
            [float("inf")] * graph.num_devices
            if costs.memory_cap is None
            else [cap * (1 + ROUNDING) for cap in costs.memory_cap]
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
                if lane == 0:
                    kind = Kind.FORWARD
                elif lane == 2:
                    kind = Kind.WEIGHT
                else:
                    kind = Kind.BACKWARD if whole[place] else Kind.INPUT
                actions.append(Action(kind, stage, micro_batch))
            result.append(tuple(actions))
        return tuple(result)

    def durations(self, whole: bytearray) -> list[float]:
        """Seconds of every job."""
        count = self.num_micro_batch
        forwards: list[float] = []
        backwards: list[float] = []
        weights: list[float] = []
        for stage in range(self.graph.num_stages):
            forwards += [self.forward_s[stage]] * count
            weights += [self.weight_s[stage]] * count
            both = self.whole_s[stage]
            first = self.input_s[stage]
            for is_whole in whole[stage * count : (stage + 1) * count]:
                backwards.append(both if is_whole else first)
        return forwards + backwards + weights

    def needs(self) -> list[tuple[tuple[int, float], ...]]:
        """Needs of every job: (job that must be over, time on the way), without what is given by
        the order of a device.
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

    def memory_changes(self, whole: bytearray) -> list[float]:
        """Change of activation memory by every job. Workspaces are not counted here: the caps leave
        place for them.
        """
        forwards: list[float] = []
        backwards: list[float] = []
        weights: list[float] = []
        for stage in range(self.graph.num_stages):
            saved = self.saved[stage]
            later = self.weight_gradient[stage]
            by_kind = {
                kind: sum(memory_changes(kind, saved, later, workspace=0.0)) for kind in COMPUTE
            }
            first = stage * self.num_micro_batch
            forwards += [by_kind[Kind.FORWARD]] * self.num_micro_batch
            weights += [by_kind[Kind.WEIGHT]] * self.num_micro_batch
            for is_whole in whole[first : first + self.num_micro_batch]:
                backwards.append(by_kind[Kind.BACKWARD if is_whole else Kind.INPUT])
        return forwards + backwards + weights
