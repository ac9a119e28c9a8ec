"""Captured graph, cluster and config in, `Plan` out. Every choice leaves a `Decision` with its numbers.

Order: TaskGraphs -> VirtualDevices -> chunks -> stages -> what crosses -> schedule -> shares. Pure: no process group, no weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.fx import Node

from whale import scheduling
from whale.annotation import Mark, Strategy
from whale.capture.graph import CapturedGraph, user_line
from whale.capture.kinds import Kind, named_args, op_name
from whale.capture.losses import NotAdditive
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.planning.assignment import Assignment, apply_plan, carries_gradient, follow_plan, make_assignment, state_behind
from whale.planning.balance import Order, Situation, device_orders, explain_shares, refuse_unless_it_fits
from whale.planning.chunks import chunk_counts, cut_into_chunks, schedule_costs
from whale.planning.cuts import Floats, NoRoom
from whale.planning.describe import crossings, describe_stages, describe_task_graphs, holders, tie_decisions
from whale.planning.pipeline_cuts import CutProblem
from whale.planning.plan import PLAN_FORMAT, Crossing, Decision, LossTerm, Plan, Stage
from whale.planning.pricing import figures_of, stage_seconds, typical_share
from whale.planning.shares import DoesNotFit, check_batch, micro_batch_sizes
from whale.planning.situations import make_situation
from whale.planning.split_memory import on_grids
from whale.planning.split_stages import Split, SplitProblem, together_seconds, with_grids
from whale.planning.stages import RECOMPUTED, assign_stages, live_operations, move_free_operations, slice_stage
from whale.planning.task_graphs import TaskGraphs, from_cuts, from_marks
from whale.planning.virtual_devices import Placement, place
from whale.planning.workload import ADAM_STATE, Workload
from whale.profiling.costs import value_bytes


@dataclass(frozen=True)
class Problem:
    """What is to be planned."""

    captured: CapturedGraph
    """with the loss already split into terms"""
    kinds: Mapping[Node, Kind]
    marks: Mapping[Node, Mark]
    default_strategy: Strategy | None
    term_texts: tuple[str, ...]
    only_whole: NotAdditive | None
    """why the loss may not be cut over micro-batches or devices, if so"""
    cluster: Cluster
    config: Config
    batch_size: int
    optimizer_ratio: float = ADAM_STATE
    """bytes of optimizer state for each byte of trainable parameters"""


@dataclass(frozen=True)
class _Draft:
    """Everything that follows from one order of the devices."""

    order: Order
    task_graphs: TaskGraphs
    why_task_graphs: str
    split: Split
    assignment: Assignment
    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...]
    schedule: scheduling.Schedule
    predicted_s: float
    """of forwards and backwards, by the costs that the schedule was made for"""
    situation: Situation
    slowest_s: float
    """of the device that takes longest for the largest micro-batch"""
    why_chunks: str = ""

    @property
    def placement(self) -> Placement:
        return self.split.placement


def make_plan(problem: Problem) -> tuple[Plan, Assignment]:
    """The whole decision."""
    captured, config = problem.captured, problem.config
    width = _width(problem)
    share = typical_share(problem.batch_size, config.num_micro_batch, problem.cluster.num_devices // width)
    workload = Workload(captured, problem.batch_size, carries_gradient(captured), problem.optimizer_ratio, config.dtype, share)
    drafts, errors = [], []
    for order in device_orders(problem.cluster, width, config.dtype):
        try:
            drafts.append(_draft(problem, workload, order))
        except (DoesNotFit, NoRoom) as error:
            errors.append(error)
    if not drafts:
        raise errors[0]
    best = min(drafts, key=lambda draft: draft.slowest_s)
    return _plan(problem, workload, best, drafts), best.assignment


def _draft(problem: Problem, workload: Workload, order: Order) -> _Draft:
    """The best number of chunks for this order of the devices; raises where memory is too small."""
    captured, config, cluster = problem.captured, problem.config, problem.cluster
    operations = live_operations(captured)
    task_graphs, why = _task_graphs(problem, workload, operations, order)
    placement = place([s.num_devices for s in task_graphs.strategies], cluster.num_devices, colocate=config.colocate)
    placement = with_grids(placement, task_graphs)
    widest = max(placement.num_replicas * device.num_sample_parts for device in placement.virtual_devices)
    check_batch(problem.batch_size, config.num_micro_batch, widest)
    check_loss_and_buffers(captured, problem.only_whole, widest, config.num_micro_batch)
    placement = replace(placement, virtual_devices=tuple(order.of(device) for device in placement.virtual_devices))
    drafts: dict[int, _Draft] = {}
    for count in chunk_counts(config, len(placement.virtual_devices)):
        try:
            if count == 1:
                drafts[count] = _draft_stages(problem, workload, operations, order, task_graphs, why, placement, False)
            else:
                times, crossing_s = _stage_times(problem, workload, placement), _crossing_seconds(problem)
                chunks, over = cut_into_chunks(operations, problem.kinds, placement, count, config, times, crossing_s)
                drafts[count] = _draft_stages(problem, workload, operations, order, chunks, chunks.reason, over, True)
        except ValueError:
            if not drafts:
                raise
            break  # "auto": more chunks than the model has points, or than memory has room for
    best = min(drafts, key=lambda count: drafts[count].predicted_s)
    if len(drafts) == 1:
        return drafts[best]
    compared = ", ".join(f"{count}: {each.predicted_s:.4g} s" for count, each in drafts.items())
    return replace(drafts[best], why_chunks=f"; {best} chunks on each VirtualDevice take least time ({compared})")


def _draft_stages(
    problem: Problem,
    workload: Workload,
    operations: list[Node],
    order: Order,
    task_graphs: TaskGraphs,
    why: str,
    placement: Placement,
    is_chunked: bool,
) -> _Draft:
    """Stages, schedule and shares for these TaskGraphs. `is_chunked`: every TaskGraph is a stage of its own."""
    captured, config = problem.captured, problem.config
    if is_chunked:
        stage_of, device_of_stage = dict(task_graphs.of_operation), list(placement.of_task_graph)
    else:
        virtual_device_of = {node: placement.of_task_graph[tg] for node, tg in task_graphs.of_operation.items()}
        stage_of, device_of_stage = assign_stages(operations, problem.kinds, virtual_device_of)
    move_free_operations(operations, stage_of, lambda node: value_bytes(node, captured.batch_symbol, 1))
    assignment = make_assignment(captured, problem.kinds, stage_of, len(device_of_stage), config.num_micro_batch)
    split = _split(problem, workload, task_graphs, placement, assignment, device_of_stage)
    placement = split.placement
    micro_batch = problem.batch_size / config.num_micro_batch
    found = crossings(captured, assignment, placement, device_of_stage, problem.cluster, micro_batch)
    edges = tuple(sorted({(c.source, c.destination) for c in found}))
    gradient_edges = tuple(sorted({(c.source, c.destination) for c in found if c.gradient}))
    stage_graph = scheduling.StageGraph(tuple(device_of_stage), edges, gradient_edges)
    kinds = [[problem.cluster.devices[rank].kind for replica in device.ranks for rank in replica] for device in placement.virtual_devices]
    times = [
        stage_seconds(workload, part.operations, kinds[device], config.num_micro_batch)
        for part, device in zip(assignment.slices, device_of_stage, strict=True)
    ]
    for stage, sharding in split.shardings.items():
        times[stage] = together_seconds(sharding, config.num_micro_batch)
    stages = describe_stages(captured, task_graphs, assignment, device_of_stage, workload.costs, times)

    def schedule_with(num_micro_batch: int) -> scheduling.Schedule:
        costs = schedule_costs(stage_graph, stages, found, num_micro_batch)
        return scheduling.build(config.schedule, stage_graph, num_micro_batch, costs)

    def situation_of(schedule: scheduling.Schedule) -> Situation:
        peaks = scheduling.peaks_in_flight(schedule)
        return make_situation(problem.cluster, workload, split, assignment, device_of_stage, peaks)

    def situation_with(num_micro_batch: int) -> Situation:
        return situation_of(schedule_with(num_micro_batch))

    schedule = schedule_with(config.num_micro_batch)
    situation = situation_of(schedule)
    refuse_unless_it_fits(situation, problem.batch_size, config.num_micro_batch, situation_with)
    slowest_s = situation.divide(max(micro_batch_sizes(problem.batch_size, config.num_micro_batch))).slowest_s
    predicted_s = scheduling.simulate(schedule, schedule_costs(stage_graph, stages, found, config.num_micro_batch)).step_s
    return _Draft(order, task_graphs, why, split, assignment, stages, found, schedule, predicted_s, situation, slowest_s)


def _split(
    problem: Problem,
    workload: Workload,
    task_graphs: TaskGraphs,
    placement: Placement,
    assignment: Assignment,
    device_of_stage: Sequence[int],
) -> Split:
    """Grids and layouts of the stages that are sharded, for the largest part of a micro-batch that a replica gets."""
    size = max(micro_batch_sizes(problem.batch_size, problem.config.num_micro_batch))
    return SplitProblem(
        captured=problem.captured,
        kinds=problem.kinds,
        assignment=assignment,
        device_of_stage=device_of_stage,
        placement=placement,
        task_graphs=task_graphs,
        cluster=problem.cluster,
        dtype=problem.config.dtype,
        num_samples=-(-size // placement.num_replicas),
        num_micro_batch=problem.config.num_micro_batch,
        state_per_weight=2.0 + workload.optimizer_ratio,
    ).solve()


def _plan(problem: Problem, workload: Workload, draft: _Draft, tried: Sequence[_Draft]) -> Plan:
    captured, config, cluster, assignment = problem.captured, problem.config, problem.cluster, draft.assignment
    kinds = [device.kind for device in cluster.devices]
    placement, situation = draft.placement, draft.situation
    held = holders(captured, assignment)
    ranks_of = [[rank for replica in device.ranks for rank in replica] for device in placement.virtual_devices]
    return Plan(
        format=PLAN_FORMAT,
        model=fingerprint(captured),
        config=config.to_dict(),
        num_devices=cluster.num_devices,
        device_kinds=situation.kinds,
        batch_size=problem.batch_size,
        num_micro_batch=config.num_micro_batch,
        task_graphs=describe_task_graphs(captured, draft.task_graphs, placement, workload.costs),
        virtual_devices=placement.virtual_devices,
        num_replicas=placement.num_replicas,
        device_seconds=tuple(load.sample_s for load in situation.loads),
        stages=draft.stages,
        stage_of_operation=tuple(assignment.stage_of.get(node, RECOMPUTED) for node in captured.compute_nodes()),
        crossings=draft.crossings,
        holders=held,
        schedule=draft.schedule.to_json(),
        loss_terms=tuple(
            LossTerm(assignment.result_stage[node], text)
            for node, text in zip(captured.output.all_input_nodes, problem.term_texts, strict=True)
        ),
        decisions=(
            Decision("TaskGraphs", f"{len(draft.task_graphs.strategies)}", draft.why_task_graphs),
            Decision("VirtualDevices", f"{len(placement.virtual_devices)} x {placement.num_replicas} replicas", placement.reason),
            *draft.split.decisions,
            *_balance_decisions(problem, draft, tried),
            *tie_decisions(captured, assignment),
            Decision("schedule", config.schedule, _schedule_reason(draft.schedule) + draft.why_chunks),
        ),
        notes=(*captured.notes, *draft.split.notes()),
        device_fixed_seconds=tuple(load.fixed_s for load in situation.loads),
        device_flop_per_s=tuple(kind.rate(config.dtype) for kind in kinds),
        memory=situation.memory,
        least_samples=situation.least,
        shardings=draft.split.records(),
        figures=figures_of(
            workload,
            assignment,
            held,
            cluster,
            [ranks_of[stage.virtual_device] for stage in draft.stages],
            on_grids(workload, draft.split, held, [stage.virtual_device for stage in draft.stages]),
        ),
    )


def _stage_times(problem: Problem, workload: Workload, placement: Placement) -> Callable[[Sequence[Node], Sequence[int]], Floats]:
    """Seconds of operations for a mini-batch, (VirtualDevices, operations). Devices that take t_i alone take 1 / sum(1 / t_i) together."""
    kinds = [device.kind for device in problem.cluster.devices]

    def times(operations: Sequence[Node], virtual_devices: Sequence[int]) -> Floats:
        rows = {}
        for index in set(virtual_devices):
            ranks = [rank for replica in placement.virtual_devices[index].ranks for rank in replica]
            row = np.zeros(len(operations))
            for kind in {kinds[rank] for rank in ranks}:
                alone = np.array(workload.forward_seconds(operations, kind))
                number = sum(kinds[rank] == kind for rank in ranks)
                row += np.divide(number, alone, out=np.full(len(operations), np.inf), where=alone > 0)
            rows[index] = 1.0 / row
        return np.array([rows[index] for index in virtual_devices])

    return times


def _crossing_seconds(problem: Problem) -> Callable[[Node], float]:
    """Of sending a value for a mini-batch over the slower kind of link that the cluster has."""
    cluster, symbol = problem.cluster, problem.captured.batch_symbol
    link = cluster.intra_host if len(cluster.hosts) == 1 else cluster.inter_host
    return lambda node: value_bytes(node, symbol, problem.batch_size) / link.bytes_per_s


def _balance_decisions(problem: Problem, draft: _Draft, tried: Sequence[_Draft]) -> list[Decision]:
    """Why unlike devices do what they do."""
    found = []
    if len(tried) > 1:
        times = ", ".join(f"{other.order.name} {other.slowest_s:.4g} s" for other in tried)
        found.append(Decision("order of devices", draft.order.name, f"the slowest device for one micro-batch: {times}"))
    if not problem.cluster.is_uniform:
        size = max(micro_batch_sizes(problem.batch_size, problem.config.num_micro_batch))
        choice, why = explain_shares(draft.situation, size)
        found.append(Decision("samples by rank", choice, why))
    return found


def fingerprint(captured: CapturedGraph) -> str:
    """Hash of the graph (operations, arguments, shapes) and of the weights' names, shapes and types."""
    state = hashlib.blake2b(digest_size=16)
    for node in captured.graph.nodes:
        value = node.meta.get("val")
        shape = (*(str(size) for size in value.shape), value.dtype) if isinstance(value, torch.Tensor) else ""
        state.update(f"{node.op}|{node.target}|{node.args}|{node.kwargs}|{shape}\n".encode())
    for name in sorted(captured.state):
        tensor = captured.state[name]
        state.update(f"{name}|{tensor.kind}|{tensor.shape}|{tensor.dtype}|{tensor.trainable}|{tensor.aliases}\n".encode())
    return state.hexdigest()


def _width(problem: Problem) -> int:
    """Devices of one model replica, as far as that is known before the TaskGraphs are: 1 where order makes no difference."""
    if problem.cluster.num_devices == 1 or problem.config.colocate:
        return 1
    if problem.config.num_task_graph is not None:
        return problem.config.num_task_graph
    strategies = from_marks(live_operations(problem.captured), problem.kinds, problem.marks, problem.default_strategy).strategies
    return sum(strategy.num_devices for strategy in strategies)


def _task_graphs(problem: Problem, workload: Workload, operations: list[Node], order: Order) -> tuple[TaskGraphs, str]:
    config, wanted = problem.config, problem.config.num_task_graph
    if wanted is None or problem.cluster.num_devices == 1:
        found = from_marks(operations, problem.kinds, problem.marks, problem.default_strategy)
        return found, found.reason
    if problem.marks or problem.default_strategy:
        raise ValueError(
            f'"num_task_graph": {wanted} cuts a model without annotations, but this one is annotated: leave one of the two out'
        )
    if problem.cluster.num_devices % wanted:
        place([1] * wanted, problem.cluster.num_devices, colocate=config.colocate)  # says what would fit
    cuts = CutProblem(workload, problem.cluster, order, wanted, config.num_micro_batch, config.schedule, config.dtype)

    def names_behind(node: Node) -> list[str]:
        return [name for name, _ in state_behind(node, problem.kinds)]

    try:
        found = from_cuts(
            operations, problem.kinds, wanted, cuts.times, cuts.crossing_seconds, lambda nodes: cuts.memory(nodes, names_behind)
        )
    except NoRoom:
        raise
    except ValueError as error:
        raise ValueError(f'"num_task_graph": {wanted}: {error}') from None
    return found, f'"num_task_graph": {wanted}; {found.reason}'


def check_loss_and_buffers(captured: CapturedGraph, only_whole: NotAdditive | None, widest: int, num_micro_batch: int) -> None:
    """Refuses what may not be cut: `widest` is over how many devices a micro-batch is cut at most."""
    if only_whole is not None and (widest > 1 or num_micro_batch > 1):
        raise ValueError(only_whole.message)
    if widest > 1:
        _refuse_sample_buffers(captured)


def _refuse_sample_buffers(captured: CapturedGraph) -> None:
    """Buffers computed from samples would drift apart on the devices that share a micro-batch (BatchNorm's are summed over all)."""
    for node in captured.compute_nodes():
        args = named_args(node) if op_name(node) == "instance_norm" else {}
        if args.get("use_input_stats") and args.get("running_mean") is not None:
            raise ValueError(
                f"instance norm with running statistics ({user_line(node)}): each device would keep other statistics. "
                f"Use track_running_stats=False, or put this part on one device with one model replica"
            )
    for name, value in captured.buffer_updates.items():
        if slice_stage([value], RECOMPUTED, {}).inputs:
            raise ValueError(
                f"buffer {name} is computed from the samples ({user_line(value)}), so each device would get another value: "
                f"put this part on one device with one model replica"
            )


def _schedule_reason(schedule: scheduling.Schedule) -> str:
    return (
        f"{schedule.num_micro_batch} micro-batches over {schedule.stage_graph.num_stages} stages; proved complete and free of deadlock; "
        f"at most {max(scheduling.peaks_in_flight(schedule))} in flight on a stage"
    )


__all__ = ["Assignment", "Problem", "apply_plan", "check_loss_and_buffers", "fingerprint", "follow_plan", "make_plan"]
