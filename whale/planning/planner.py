"""Captured graph, cluster and config in, `Plan` out. Every choice leaves a `Decision` with its numbers.

Order: TaskGraphs -> VirtualDevices -> chunks -> stages -> what crosses -> schedule. Pure: no process group, no weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from whale import scheduling
from whale.annotation import Mark, Strategy
from whale.capture.graph import CapturedGraph, user_line
from whale.capture.kinds import Kind, named_args, op_name
from whale.capture.losses import NotAdditive
from whale.capture.sample_states import batch_dim
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.planning.chunks import chunk_counts, cut_into_chunks, schedule_costs
from whale.planning.plan import PLAN_FORMAT, Crossing, Decision, LossTerm, Plan, Stage, TaskGraph
from whale.planning.shares import check_batch
from whale.planning.stages import (
    RECOMPUTED,
    StageSlice,
    assign_stages,
    live_operations,
    move_free_operations,
    place_weights,
    slice_stage,
    slice_stages,
)
from whale.planning.task_graphs import TaskGraphs, from_cuts, from_marks
from whale.planning.virtual_devices import Placement, place
from whale.profiling.costs import NodeCost, node_costs, seconds, value_bytes


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


@dataclass(frozen=True)
class Assignment:
    """A plan applied to one captured graph: what lowering needs beside the plan itself."""

    stage_of: Mapping[Node, int]
    result_stage: Mapping[Node, int]
    """stage of every result (loss term, output, buffer update)"""
    slices: tuple[StageSlice, ...]
    crossings: tuple[tuple[Node, int, int], ...]
    """(value, stage that has it, stage that needs it)"""
    gradients: frozenset[Node]
    """values that carry a gradient"""


@dataclass(frozen=True)
class _Candidate:
    """A model cut and placed in one way, with its schedule."""

    task_graphs: TaskGraphs
    why_task_graphs: str
    placement: Placement
    assignment: Assignment
    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...]
    schedule: scheduling.Schedule
    predicted_s: float
    """of forwards and backwards, by the schedule's own costs"""


def make_plan(problem: Problem) -> tuple[Plan, Assignment]:
    """The whole decision."""
    captured, config, cluster = problem.captured, problem.config, problem.cluster
    costs = node_costs(captured, problem.batch_size)
    operations = live_operations(captured)
    task_graphs, why_task_graphs = _task_graphs(problem, operations, costs)
    placement = place([s.num_devices for s in task_graphs.strategies], cluster.num_devices, colocate=config.colocate)
    _refuse_split(task_graphs, cluster.num_devices)
    widest = max(placement.num_replicas * device.num_devices for device in placement.virtual_devices)
    check_batch(problem.batch_size, config.num_micro_batch, widest)
    check_loss_and_buffers(captured, problem.only_whole, widest, config.num_micro_batch)
    chosen, why_chunks = _best_candidate(problem, operations, costs, task_graphs, why_task_graphs, placement)
    task_graphs, placement, assignment = chosen.task_graphs, chosen.placement, chosen.assignment
    decisions = (
        Decision("TaskGraphs", f"{len(task_graphs.strategies)}", chosen.why_task_graphs),
        Decision("VirtualDevices", f"{len(placement.virtual_devices)} x {placement.num_replicas} replicas", placement.reason),
        *_tie_decisions(captured, assignment),
        Decision("schedule", config.schedule, "; ".join(filter(None, (_schedule_reason(chosen.schedule), why_chunks)))),
    )
    kinds_by_rank = [device.kind for device in cluster.devices]
    plan = Plan(
        format=PLAN_FORMAT,
        model=fingerprint(captured),
        config=config.to_dict(),
        num_devices=cluster.num_devices,
        device_kinds=tuple(kind.name for kind in kinds_by_rank),
        batch_size=problem.batch_size,
        num_micro_batch=config.num_micro_batch,
        task_graphs=_describe_task_graphs(problem, task_graphs, placement, costs),
        virtual_devices=placement.virtual_devices,
        num_replicas=placement.num_replicas,
        device_seconds=tuple(max(kind.flop_per_s for kind in kinds_by_rank) / kind.flop_per_s for kind in kinds_by_rank),
        stages=chosen.stages,
        stage_of_operation=tuple(assignment.stage_of.get(node, RECOMPUTED) for node in captured.compute_nodes()),
        crossings=chosen.crossings,
        holders=_holders(captured, assignment),
        schedule=chosen.schedule.to_json(),
        loss_terms=tuple(
            LossTerm(assignment.result_stage[node], text)
            for node, text in zip(captured.output.all_input_nodes, problem.term_texts, strict=True)
        ),
        decisions=decisions,
        notes=tuple(captured.notes),
    )
    return plan, assignment


def _best_candidate(
    problem: Problem,
    operations: list[Node],
    costs: Mapping[Node, NodeCost],
    task_graphs: TaskGraphs,
    why: str,
    placement: Placement,
) -> tuple[_Candidate, str]:
    """The number of chunks on each VirtualDevice that takes least time, and why."""
    node_seconds, crossing_seconds = _clock(problem, costs)
    candidates: dict[int, _Candidate] = {}
    counts = chunk_counts(problem.config, len(placement.virtual_devices))
    for count in counts:
        try:
            parts, where = (
                (task_graphs, placement)
                if count == 1
                else cut_into_chunks(operations, problem.kinds, placement, count, problem.config, node_seconds, crossing_seconds)
            )
        except ValueError:
            if candidates:
                break  # "auto" asked for more chunks than the model has points
            raise
        candidates[count] = _candidate(problem, operations, costs, parts, why if count == 1 else parts.reason, where, count > 1)
    best = min(candidates, key=lambda count: candidates[count].predicted_s)
    if len(candidates) == 1:
        return candidates[best], ""
    times = ", ".join(f"{count}: {each.predicted_s:.4g} s" for count, each in candidates.items())
    return candidates[best], f"{best} chunks on each VirtualDevice take least time ({times})"


def _candidate(
    problem: Problem,
    operations: list[Node],
    costs: Mapping[Node, NodeCost],
    task_graphs: TaskGraphs,
    why: str,
    placement: Placement,
    is_chunked: bool,
) -> _Candidate:
    captured, config = problem.captured, problem.config
    if is_chunked:
        stage_of, device_of_stage = dict(task_graphs.of_operation), list(placement.of_task_graph)
    else:
        virtual_device_of = {node: placement.of_task_graph[tg] for node, tg in task_graphs.of_operation.items()}
        stage_of, device_of_stage = assign_stages(operations, problem.kinds, virtual_device_of)
    move_free_operations(operations, stage_of, lambda node: value_bytes(node, captured.batch_symbol, 1))
    assignment = _assignment(captured, problem.kinds, stage_of, len(device_of_stage), config.num_micro_batch)
    stages = _describe_stages(problem, task_graphs, assignment, device_of_stage, placement, costs)
    crossings = _crossings(problem, assignment, stages, placement)
    edges = tuple(sorted({(c.source, c.destination) for c in crossings}))
    gradient_edges = tuple(sorted({(c.source, c.destination) for c in crossings if c.gradient}))
    stage_graph = scheduling.StageGraph(tuple(device_of_stage), edges, gradient_edges)
    schedule_cost = schedule_costs(stage_graph, stages, crossings, config.num_micro_batch)
    schedule = scheduling.build(config.schedule, stage_graph, config.num_micro_batch, schedule_cost)
    predicted_s = scheduling.simulate(schedule, schedule_cost).step_s
    return _Candidate(task_graphs, why, placement, assignment, stages, crossings, schedule, predicted_s)


def _clock(problem: Problem, costs: Mapping[Node, NodeCost]) -> tuple[Callable[[Node], float], Callable[[Node], float]]:
    """Seconds of an operation, and of sending its result, for one mini-batch."""
    kind, link = problem.cluster.devices[0].kind, problem.cluster.intra_host
    symbol, batch_size = problem.captured.batch_symbol, problem.batch_size

    def crossing_seconds(node: Node) -> float:
        return value_bytes(node, symbol, batch_size) / link.bytes_per_s

    return lambda node: seconds(costs[node], kind), crossing_seconds


def apply_plan(plan: Plan, captured: CapturedGraph, kinds: Mapping[Node, Kind]) -> Assignment:
    """The assignment of a plan that was made for this very graph."""
    nodes = list(captured.compute_nodes())
    if len(nodes) != len(plan.stage_of_operation):
        raise ValueError(f"the plan places {len(plan.stage_of_operation)} operations, the model has {len(nodes)}: make the plan again")
    stage_of = {node: stage for node, stage in zip(nodes, plan.stage_of_operation, strict=True) if stage != RECOMPUTED}
    results = dict(zip(captured.output.all_input_nodes, (term.stage for term in plan.loss_terms), strict=True))
    return _finish(captured, stage_of, results, len(plan.stages))


def follow_plan(plan: Plan, captured: CapturedGraph, kinds: Mapping[Node, Kind]) -> Assignment:
    """An assignment for another graph of the same model (evaluation, another sequence length): operations go where their weights are."""
    stage_of: dict[Node, int] = {}
    for node in live_operations(captured):
        if kinds[node] is not Kind.ACTIVATION:
            continue
        latest = max((stage_of[p] for p in node.all_input_nodes if p in stage_of), default=0)
        for name, is_direct in _state_behind(node, kinds):
            holders = [stage for stage in plan.holders.get(name, ()) if stage >= latest]
            if not holders and is_direct and name in plan.holders:
                raise ValueError(
                    f"{name} is on stage {plan.holders[name]}, but this graph uses it after stage {latest} ({user_line(node)}): "
                    f"the model calls its parts in another order here than in training"
                )
            latest = min(holders, default=latest)
        stage_of[node] = latest
    return _assignment(captured, kinds, stage_of, len(plan.stages), plan.num_micro_batch, plan.holders)


def _state_behind(node: Node, kinds: Mapping[Node, Kind]) -> list[tuple[str, bool]]:
    """(parameter or buffer, whether it must be on the same stage) that an operation reads, also through values that are not ACTIVATION.

    A parameter behind a WEIGHT value need not be there: the value may be sent.
    """
    names: dict[str, bool] = {}
    waiting = [(source, True) for source in node.all_input_nodes]
    seen: set[Node] = set()
    while waiting:
        source, is_direct = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.op == "get_attr":
            names[str(source.target)] = names.get(str(source.target), False) or is_direct
        elif source.op == "call_function" and kinds[source] is not Kind.ACTIVATION:
            waiting.extend((each, is_direct and kinds[source] is not Kind.WEIGHT) for each in source.all_input_nodes)
    return sorted(names.items())


def _assignment(
    captured: CapturedGraph,
    kinds: Mapping[Node, Kind],
    stage_of: dict[Node, int],
    num_stages: int,
    num_micro_batch: int,
    holders: Mapping[str, tuple[int, ...]] | None = None,
) -> Assignment:
    def micro_batch_bytes(node: Node) -> int:
        return value_bytes(node, captured.batch_symbol, captured.batch_size)

    results = place_weights(captured, kinds, stage_of, micro_batch_bytes, num_micro_batch, holders)
    return _finish(captured, stage_of, results, num_stages)


def _finish(captured: CapturedGraph, stage_of: dict[Node, int], results: dict[Node, int], num_stages: int) -> Assignment:
    for value in captured.buffer_updates.values():
        results.setdefault(value, stage_of.get(value, 0))
    slices = slice_stages(num_stages, results, stage_of)
    crossings = tuple((node, stage_of[node], stage) for stage, part in enumerate(slices) for node in part.received)
    return Assignment(stage_of, results, slices, crossings, carries_gradient(captured))


def carries_gradient(captured: CapturedGraph) -> frozenset[Node]:
    """Floating-point values that depend on a trainable parameter other than through `detach`."""
    found: set[Node] = set()
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            if captured.state[str(node.target)].trainable:
                found.add(node)
        elif node.op == "call_function" and node.target is not torch.ops.aten.detach.default:
            value = node.meta.get("val")
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(first, torch.Tensor) and first.is_floating_point() and any(a in found for a in node.all_input_nodes):
                found.add(node)
    return frozenset(found)


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


def _task_graphs(problem: Problem, operations: list[Node], costs: Mapping[Node, NodeCost]) -> tuple[TaskGraphs, str]:
    wanted = problem.config.num_task_graph
    if wanted is None or problem.cluster.num_devices == 1:
        found = from_marks(operations, problem.kinds, problem.marks, problem.default_strategy)
        return found, found.reason
    if problem.marks or problem.default_strategy:
        raise ValueError(
            f'"num_task_graph": {wanted} cuts a model without annotations, but this one is annotated: leave one of the two out'
        )
    try:
        found = from_cuts(operations, problem.kinds, wanted, *_clock(problem, costs))
    except ValueError as error:
        raise ValueError(f'"num_task_graph": {wanted}: {error}') from None
    return found, f'"num_task_graph": {wanted}; {found.reason}'


def _refuse_split(task_graphs: TaskGraphs, num_devices: int) -> None:
    for strategy, label in zip(task_graphs.strategies, task_graphs.labels, strict=True):
        if strategy.kind == "split" and strategy.num_devices > 1 and num_devices > 1:
            raise ValueError(
                f"wh.{strategy} on {label}: sharded TaskGraphs are not built yet. Use wh.replicate({strategy.num_devices}) for now, "
                f"or run on one device, where annotations change nothing"
            )


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


def _crossings(problem: Problem, assignment: Assignment, stages: Sequence[Stage], placement: Placement) -> tuple[Crossing, ...]:
    captured, cluster = problem.captured, problem.cluster
    samples = problem.batch_size / problem.config.num_micro_batch / placement.num_replicas
    crossings = []
    for node, source, destination in assignment.crossings:
        batched = batch_dim(node, captured.batch_symbol) is not None
        sample_bytes = value_bytes(node, captured.batch_symbol, 1)
        ends = [placement.virtual_devices[stages[stage].virtual_device] for stage in (source, destination)]
        narrowest = min(device.num_devices for device in ends)  # its devices send or receive the largest part each
        link = cluster.link(ends[0].ranks[0][0], ends[1].ranks[0][0])
        crossings.append(
            Crossing(
                value=node.name,
                source=source,
                destination=destination,
                sample_bytes=sample_bytes,
                batched=batched,
                gradient=node in assignment.gradients,
                message_s=link.seconds(sample_bytes * samples / narrowest if batched else sample_bytes),
                line=user_line(node),
            )
        )
    return tuple(crossings)


def _holders(captured: CapturedGraph, assignment: Assignment) -> dict[str, tuple[int, ...]]:
    """Stages that hold each parameter and buffer. What nothing uses stays on stage 0, so that checkpoints are complete."""
    holders: dict[str, list[int]] = {name: [] for name, tensor in captured.state.items() if tensor.kind != "constant"}
    for stage, part in enumerate(assignment.slices):
        for node in part.state:
            if str(node.target) in holders:
                holders[str(node.target)].append(stage)
    for name, value in captured.buffer_updates.items():
        stage = assignment.result_stage[value]
        if stage not in holders[name]:
            holders[name].append(stage)
    return {name: tuple(sorted(stages)) or (0,) for name, stages in holders.items()}


def _describe_task_graphs(
    problem: Problem, task_graphs: TaskGraphs, placement: Placement, costs: Mapping[Node, NodeCost]
) -> tuple[TaskGraph, ...]:
    described = []
    for index, (strategy, label) in enumerate(zip(task_graphs.strategies, task_graphs.labels, strict=True)):
        own = [node for node, tg in task_graphs.of_operation.items() if tg == index]
        weights = {str(a.target) for node in own for a in node.all_input_nodes if a.op == "get_attr"}
        described.append(
            TaskGraph(
                index=index,
                label=label,
                strategy=str(strategy),
                num_devices=placement.virtual_devices[placement.of_task_graph[index]].num_devices,
                virtual_device=placement.of_task_graph[index],
                num_operations=len(own),
                forward_flop=float(sum(costs[node].flop for node in own)),
                parameter_bytes=_parameter_bytes(problem.captured, weights),
            )
        )
    return tuple(described)


def _describe_stages(
    problem: Problem,
    task_graphs: TaskGraphs,
    assignment: Assignment,
    device_of_stage: list[int],
    placement: Placement,
    costs: Mapping[Node, NodeCost],
) -> tuple[Stage, ...]:
    described = []
    for index, part in enumerate(assignment.slices):
        device = placement.virtual_devices[device_of_stage[index]]
        kind = problem.cluster.devices[device.ranks[0][0]].kind
        share = placement.num_replicas * device.num_devices
        names = sorted(str(node.target) for node in part.state if problem.captured.state[str(node.target)].kind == "parameter")
        own = {task_graphs.of_operation[node] for node in part.operations if node in task_graphs.of_operation}
        described.append(
            Stage(
                index=index,
                virtual_device=device_of_stage[index],
                task_graphs=tuple(sorted(own)),
                num_operations=len(part.operations),
                forward_flop=float(sum(costs[node].flop for node in part.operations)),
                forward_s=sum(seconds(costs[node], kind) for node in part.operations) / share,
                parameters=tuple(names),
                parameter_bytes=_parameter_bytes(problem.captured, names),
            )
        )
    return tuple(described)


def _parameter_bytes(captured: CapturedGraph, names: set[str] | list[str]) -> int:
    return sum(captured.state[name].num_bytes for name in names if captured.state[name].kind == "parameter")


def _tie_decisions(captured: CapturedGraph, assignment: Assignment) -> list[Decision]:
    tied = {name: stages for name, stages in _holders(captured, assignment).items() if len(stages) > 1}
    return [
        Decision(
            f"tied {name}",
            f"held by stages {', '.join(map(str, stages))}",
            f"these stages use it; its gradient is summed over them ({captured.state[name].num_bytes} bytes)",
        )
        for name, stages in tied.items()
        if captured.state[name].kind == "parameter"
    ]


def _schedule_reason(schedule: scheduling.Schedule) -> str:
    proof = scheduling.check(schedule)
    return (
        f"{schedule.num_micro_batch} micro-batches over {schedule.stage_graph.num_stages} stages; proved complete and free of deadlock; "
        f"at most {max(proof.peak_in_flight)} in flight on a stage"
    )
