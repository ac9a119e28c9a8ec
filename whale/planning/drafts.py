"""Stages, schedule and shares of one order of the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch.fx import Node

from whale import scheduling
from whale.costs.costs import value_bytes
from whale.planning.balance import DeviceLoads, Order
from whale.planning.drafter import Drafter, Priced
from whale.planning.grids import GridProblem
from whale.planning.problem import Problem
from whale.planning.recompute import Regions
from whale.planning.recompute_choice import Choice
from whale.planning.split import Split
from whale.planning.stages import Assignment, assign_stages, make_assignment, move_free_operations
from whale.planning.task_graphs import TaskGraphs
from whale.planning.workload import Workload
from whale.plans.plan import Crossing, Stage
from whale.plans.shares import those_that_fit
from whale.plans.virtual_devices import Placement


@dataclass(frozen=True)
class Draft:
    """Everything that follows from one order of the devices."""

    order: Order
    task_graphs: TaskGraphs
    why_task_graphs: str
    split: Split
    assignment: Assignment
    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...]
    schedule: scheduling.Schedule
    costs: scheduling.Costs
    """that the schedule was made for"""
    situation: DeviceLoads
    slowest_s: float
    """of the device that takes longest for the largest micro-batch"""
    without_recompute: DeviceLoads
    """what it would be if the planner had nothing computed again"""
    lost_s: float
    """how much longer the slowest device takes because memory keeps samples from faster ones"""
    is_short_of_memory: bool
    """with more of it the step would be shorter"""
    regions: tuple[Regions, ...] = ()
    """of every stage: what is computed again in backward"""
    why_chunks: str = ""

    @cached_property
    def predicted_s(self) -> float:
        """Of forwards and backwards."""
        return scheduling.simulate(self.schedule, self.costs).step_s + self.lost_s

    @property
    def placement(self) -> Placement:
        return self.split.placement

    @property
    def num_actions(self) -> int:
        """Of all devices in a step."""
        devices = self.placement.virtual_devices
        return sum(
            len(order) * device.num_devices * len(device.ranks)
            for order, device in zip(self.schedule.orders, devices, strict=True)
        )

    @property
    def choice(self) -> Choice:
        return tuple((stage.num_regions, stage.num_recomputed) for stage in self.stages)


def draft_stages(
    problem: Problem,
    workload: Workload,
    operations: list[Node],
    order: Order,
    task_graphs: TaskGraphs,
    why: str,
    placement: Placement,
    is_chunked: bool,
) -> Draft:
    """Stages, schedule and shares for these TaskGraphs. `is_chunked`: every TaskGraph is a stage of
    its own.
    """
    captured = problem.captured
    config = problem.config
    if is_chunked:
        stage_of = dict(task_graphs.of_operation)
        device_of_stage = list(placement.of_task_graph)
    else:
        virtual_device_of = {
            node: placement.of_task_graph[tg] for node, tg in task_graphs.of_operation.items()
        }
        stage_of, device_of_stage = assign_stages(operations, problem.kinds, virtual_device_of)
    move_free_operations(
        operations, stage_of, lambda node: value_bytes(node, captured.batch_symbol, 1)
    )
    assignment = make_assignment(
        captured, problem.kinds, stage_of, len(device_of_stage), config.num_micro_batch
    )
    split = _split(problem, workload, task_graphs, placement, assignment, device_of_stage)
    drafter, nothing, best = _choose(
        Drafter(problem, workload, task_graphs, split, assignment, tuple(device_of_stage))
    )
    slowest_s = best.situation.divide(problem.largest_micro_batch).slowest_s
    costs = drafter.costs(best.stages, config.num_micro_batch)
    return Draft(
        order, task_graphs, why, drafter.split, assignment, best.stages, drafter.crossings, best.schedule, costs, best.situation,
        slowest_s, nothing.situation, drafter.lost_seconds(best), drafter.is_short(nothing), drafter.regions(best.stages),
    )  # fmt: skip


def _choose(drafter: Drafter) -> tuple[Drafter, Priced, Priced]:
    """The draft with what its grids gather kept, or gathered again in backward where that is asked
    for, or memory makes it faster: (draft, nothing computed again, the best)."""
    wanted = drafter.problem.config.keep_gathered
    again = (
        replace(drafter, split=drafter.split.gathering_again())
        if drafter.split.shardings and wanted is not True
        else None
    )
    if again is not None and wanted is False:
        return again, *again.choose()
    if again is None:
        return drafter, *drafter.choose()
    found: list[tuple[Drafter, Priced, Priced]] = []
    for chosen in those_that_fit(partial(_chosen, each) for each in (drafter, again)):
        found.append(chosen)
        nothing_recomputed = chosen[1]
        if not chosen[0].is_short(nothing_recomputed):
            break  # memory is no reason to gather again
    return min(found, key=lambda each: each[0].step_seconds(each[2]))


def _chosen(drafter: Drafter) -> tuple[Drafter, Priced, Priced]:
    return drafter, *drafter.choose()


def _split(
    problem: Problem,
    workload: Workload,
    task_graphs: TaskGraphs,
    placement: Placement,
    assignment: Assignment,
    device_of_stage: Sequence[int],
) -> Split:
    """Grids and layouts of the stages that are sharded, for the largest part of a micro-batch that
    a replica gets.
    """
    return GridProblem(
        captured=problem.captured,
        kinds=problem.kinds,
        assignment=assignment,
        device_of_stage=device_of_stage,
        placement=placement,
        task_graphs=task_graphs,
        cluster=problem.cluster,
        dtype=problem.config.dtype,
        num_samples=-(-problem.largest_micro_batch // placement.num_replicas),
        num_micro_batch=problem.config.num_micro_batch,
        state_per_weight=2.0 + workload.optimizer_ratio,
    ).solve()
