"""Captured graph, cluster and config in, `Plan` out. Every choice leaves a `Decision` with its
numbers.

Order: TaskGraphs -> VirtualDevices -> chunks -> stages -> what crosses -> schedule -> shares. Pure:
no process group, no weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch.fx import Node

from whale import scheduling
from whale.capture.graph import CapturedGraph, user_line
from whale.capture.losses import NotAdditive
from whale.names import count
from whale.operations.nodes import named_args, op_name, trains_batch_norm
from whale.planning.balance import Order, device_orders, explain_shares
from whale.planning.chunks import ChunkCuts, chunk_counts
from whale.planning.describe import describe_task_graphs, holders, tie_decisions, update_decisions
from whale.planning.drafts import Draft, draft_stages
from whale.planning.grids import with_grids
from whale.planning.idle_devices import idle_decision
from whale.planning.pipeline_cuts import PipelineCuts
from whale.planning.pricing import figures_of, typical_share
from whale.planning.problem import Problem
from whale.planning.recompute import Regions, check_names
from whale.planning.recompute_choice import explain
from whale.planning.schedules import ACTION_S
from whale.planning.split_memory import on_grids
from whale.planning.stages import (
    RECOMPUTED,
    Assignment,
    apply_plan,
    carries_gradient,
    follow_plan,
    live_operations,
    slice_stage,
)
from whale.planning.task_graphs import TaskGraphs, from_marks
from whale.planning.ways_out import ways_out
from whale.planning.workload import Workload
from whale.plans.figures import Figures
from whale.plans.plan import (
    PLAN_FORMAT,
    Decision,
    Holding,
    LossTerm,
    Plan,
    PlannedDevice,
    ReplicaTemplate,
    Settings,
)
from whale.plans.revise import different_devices, replicas_on, with_boxes
from whale.plans.samples import with_samples
from whale.plans.shares import DoesNotFit, NoRoom, check_batch, those_that_fit
from whale.plans.virtual_devices import Placement, place
from whale.simulation.simulate import simulate
from whale.units import human_seconds

SAMPLES = "samples by rank"
"""what the decision on shares is called"""
MOST_ACTIONS = 10_000
"""orders of devices are compared by simulation if their steps have at most so many actions, else by
the slowest device
"""


def make_plan(problem: Problem) -> tuple[Plan, Assignment]:
    """The whole decision."""
    plan, assignment = _best_plan(problem)
    idle = idle_decision(plan)
    return _after_samples(plan, idle) if idle is not None else plan, assignment


def _best_plan(problem: Problem) -> tuple[Plan, Assignment]:
    """Of all orders of the devices."""
    captured = problem.captured
    config = problem.config
    check_names(captured, config.recompute)
    workload = _workload(problem)
    drafts = []
    errors = []
    for order in _orders(problem):
        try:
            drafts.append(_draft(problem, workload, order))
        except DoesNotFit as error:
            errors.append(error)
    if not drafts:
        raise _advised(errors[0], problem, workload)
    model = fingerprint(captured)
    if len(drafts) == 1:
        return _plan(problem, workload, drafts[0], model), drafts[0].assignment
    if max(draft.num_actions for draft in drafts) > MOST_ACTIONS:
        best = min(drafts, key=lambda draft: draft.slowest_s)
        times = ", ".join(
            f"{draft.order.name} {human_seconds(draft.slowest_s)}" for draft in drafts
        )
        why = f"the slowest device for one micro-batch: {times}"
        return _with_order(_plan(problem, workload, best, model), best, why), best.assignment
    plans = [_plan(problem, workload, draft, model) for draft in drafts]
    steps = [simulate(plan).gradients_s for plan in plans]
    fastest = steps.index(min(steps))
    times = ", ".join(
        f"{draft.order.name} {human_seconds(step_s)}"
        for draft, step_s in zip(drafts, steps, strict=True)
    )
    return _with_order(plans[fastest], drafts[fastest], f"a simulated step: {times}"), drafts[
        fastest
    ].assignment


def _with_order(plan: Plan, draft: Draft, why: str) -> Plan:
    """The plan with the reason for its order of devices, which stands before the samples that
    follow from it.
    """
    place = _place_of_samples(plan)
    decisions = (
        *plan.decisions[:place],
        Decision("order of devices", draft.order.name, why),
        *plan.decisions[place:],
    )
    return replace(plan, decisions=decisions)


def _after_samples(plan: Plan, decision: Decision) -> Plan:
    place = _place_of_samples(plan) + 1  # devices that are all alike have samples, all of them
    return replace(plan, decisions=(*plan.decisions[:place], decision, *plan.decisions[place:]))


def _place_of_samples(plan: Plan) -> int:
    return next(index for index, decision in enumerate(plan.decisions) if decision.what == SAMPLES)


def _workload(problem: Problem) -> Workload:
    captured = problem.captured
    config = problem.config
    share = typical_share(
        problem.batch_size, config.num_micro_batch, problem.cluster.num_devices // _width(problem)
    )
    return Workload(
        captured,
        problem.batch_size,
        carries_gradient(captured),
        problem.optimizer_ratio,
        config.dtype,
        share,
    )


def _orders(problem: Problem) -> tuple[Order, ...]:
    return device_orders(problem.cluster, _width(problem), problem.config.dtype)


def _advised(error: DoesNotFit, problem: Problem, workload: Workload) -> DoesNotFit:
    """The refusal with what would fit."""
    if not isinstance(error, NoRoom):
        return error  # it says so itself

    def fits(changed: Problem) -> bool:
        # the size of micro-batches makes no difference to what a sample takes
        known = workload if changed.batch_size == problem.batch_size else _workload(changed)
        for order in _orders(changed):
            try:
                _draft(changed, known, order)
            except ValueError:  # memory, or a number that does not go
                continue
            return True
        return False

    return DoesNotFit(f"{error}. {ways_out(problem, fits, error.is_over_full)}")


def _draft(problem: Problem, workload: Workload, order: Order) -> Draft:
    """The best number of chunks for this order of the devices; raises where memory is too small for
    every one.
    """
    captured = problem.captured
    config = problem.config
    cluster = problem.cluster
    operations = live_operations(captured)
    cutting = PipelineCuts(problem, workload, operations, order)
    placement = place(
        [s.num_devices for s in cutting.wanted.strategies],
        cluster.num_devices,
        colocate=config.colocate,
    )
    placement = with_grids(placement, cutting.wanted)
    widest = max(
        placement.num_replicas * device.num_sample_parts for device in placement.virtual_devices
    )
    check_batch(problem.batch_size, config.num_micro_batch, widest)
    check_loss_and_buffers(captured, problem.not_additive, widest, config.num_micro_batch)
    placement = replace(
        placement, virtual_devices=tuple(order.of(device) for device in placement.virtual_devices)
    )

    def draft_of(task_graphs: TaskGraphs, why: str, over: Placement, is_chunked: bool) -> Draft:
        return draft_stages(
            problem, workload, operations, order, task_graphs, why, over, is_chunked
        )

    def draft(num_chunks: int) -> Draft:
        if num_chunks == 1:
            return _fastest(
                (partial(draft_of, cut, why, placement, False) for cut, why in cutting.each()), 1
            )
        chunks = ChunkCuts(workload, cluster, placement, num_chunks, config).each(
            operations, problem.kinds
        )
        return _fastest(
            (partial(draft_of, cut, cut.reason, over, True) for cut, over in chunks),
            1 if problem.is_trial else 2,
        )

    drafts: dict[int, Draft] = {}
    refused: list[ValueError] = []
    counts = chunk_counts(config, len(placement.virtual_devices))
    for num_chunks in counts[:1] if problem.is_trial else counts:
        try:
            drafts[num_chunks] = draft(num_chunks)
        except DoesNotFit as error:  # "auto": other numbers of chunks lie otherwise in memory
            refused.append(error)
        except ValueError as error:  # "auto": more chunks than the model has points
            refused.append(error)
            break
    if not drafts:
        raise refused[0]
    if len(drafts) == 1:
        return next(iter(drafts.values()))
    best = min(drafts, key=lambda number: drafts[number].predicted_s)
    compared = ", ".join(
        f"{number}: {human_seconds(each.predicted_s)}" for number, each in drafts.items()
    )
    why = (
        f"; {best} chunks on each VirtualDevice take least time ({compared}; with "
        f"{ACTION_S * 1e3:g} ms for each action of the runtime)"
    )
    return replace(drafts[best], why_chunks=why)


def _fastest(drafts: Iterable[Callable[[], Draft]], number: int) -> Draft:
    """Of the first so many that fit, or of one where memory does not make its step longer. Raises
    what the last one lacks if none fits.
    """
    found: list[Draft] = []
    for draft in those_that_fit(drafts):
        found.append(draft)
        if len(found) == number or not draft.is_short_of_memory:
            break
    return min(found, key=lambda draft: draft.predicted_s) if len(found) > 1 else found[0]


def _plan(problem: Problem, workload: Workload, draft: Draft, model: str) -> Plan:
    """The draft as a plan, with the samples of every rank and the figures of its simulation."""
    config = problem.config
    placement = draft.placement
    plan = Plan(
        format=PLAN_FORMAT,
        model=model,
        settings=Settings(config.colocate, _as_stored(config.recompute), config.bucket_bytes),
        batch_size=problem.batch_size,
        num_micro_batch=config.num_micro_batch,
        **different_devices(_planned_devices(problem, draft)),
        task_graphs=describe_task_graphs(
            problem.captured, draft.task_graphs, placement, workload.costs
        ),
        templates=(with_boxes(_template(problem, draft)),),
        replicas=replicas_on(placement.virtual_devices),
        decisions=_decisions(problem, draft),
        notes=(
            *problem.captured.notes,
            *_batch_norm_notes(problem.captured, config.num_micro_batch),
            *draft.split.notes(),
        ),
        least_samples=draft.situation.least,
    )
    return with_samples(replace(plan, figures=_figures(problem, workload, draft)))


def _as_stored(recompute: bool | str | list[str]) -> bool | str | tuple[str, ...]:
    return tuple(recompute) if isinstance(recompute, list) else recompute


def _planned_devices(problem: Problem, draft: Draft) -> list[PlannedDevice]:
    """By rank."""
    found = []
    for rank, device in enumerate(problem.cluster.devices):
        load = draft.situation.loads[rank]
        found.append(
            PlannedDevice(
                kind=draft.situation.kinds[rank],
                sample_s=load.sample_s,
                fixed_s=load.fixed_s,
                flop_per_s=device.kind.rate(problem.config.dtype),
                memory=draft.situation.memory[rank],
            )
        )
    return found


def _template(problem: Problem, draft: Draft) -> ReplicaTemplate:
    """What every model replica of the draft runs."""
    captured = problem.captured
    assignment = draft.assignment
    place_of = {node: place for place, node in enumerate(captured.compute_nodes())}
    stages = []
    for stage, regions in zip(draft.stages, draft.regions, strict=True):
        stages.append(replace(stage, recomputed=_recomputed(regions, place_of)))
    terms = zip(captured.output.all_input_nodes, problem.term_texts, strict=True)
    return ReplicaTemplate(
        grids=tuple(device.grid for device in draft.placement.virtual_devices),
        stages=tuple(stages),
        stage_of_operation=tuple(assignment.stage_of.get(node, RECOMPUTED) for node in place_of),
        crossings=draft.crossings,
        tensors={
            name: Holding(stages_of) for name, stages_of in holders(captured, assignment).items()
        },
        schedule=draft.schedule,
        loss_terms=tuple(LossTerm(assignment.result_stage[node], text) for node, text in terms),
        shardings=draft.split.records(),
    )


def _recomputed(regions: Regions, place_of: Mapping[Node, int]) -> tuple[tuple[int, ...], ...]:
    """The regions of a stage as places of their operations in the graph."""
    members: dict[Hashable, list[int]] = {}
    for node, region in regions.items():
        members.setdefault(region, []).append(place_of[node])
    return tuple(tuple(sorted(places)) for places in members.values())


def _decisions(problem: Problem, draft: Draft) -> tuple[Decision, ...]:
    """Every choice with its reason, in the order in which they were made."""
    config = problem.config
    placement = draft.placement
    num_replicas = count(placement.num_replicas, "replica")
    why_schedule = _schedule_reason(draft.schedule, config.schedule) + draft.why_chunks
    return (
        Decision("TaskGraphs", f"{len(draft.task_graphs.strategies)}", draft.why_task_graphs),
        Decision(
            "VirtualDevices",
            f"{len(placement.virtual_devices)} x {num_replicas}",
            placement.reason,
        ),
        *draft.split.decisions,
        *_balance_decisions(problem, draft),
        *_recompute_decisions(problem, draft),
        *tie_decisions(problem.captured, draft.assignment),
        Decision("schedule", draft.schedule.name, why_schedule),
        *update_decisions(config, len(draft.stages)),
    )


def _figures(problem: Problem, workload: Workload, draft: Draft) -> Figures:
    """What the simulation computes on."""
    held = holders(problem.captured, draft.assignment)
    device_of_stage = [stage.virtual_device for stage in draft.stages]
    ranks_of = [device.all_ranks for device in draft.placement.virtual_devices]
    return figures_of(
        workload,
        draft.assignment,
        held,
        problem.cluster,
        [ranks_of[device] for device in device_of_stage],
        draft.choice,
        problem.config.recompute,
        on_grids(workload, draft.split, held, device_of_stage, draft.regions),
    )


def _balance_decisions(problem: Problem, draft: Draft) -> list[Decision]:
    """Why unlike devices do what they do."""
    return (
        []
        if problem.cluster.is_uniform
        else [Decision(SAMPLES, *explain_shares(draft.situation, problem.largest_micro_batch))]
    )


def _recompute_decisions(problem: Problem, draft: Draft) -> list[Decision]:
    """What the planner has computed again in backward, and what that costs."""
    before = draft.without_recompute
    now = draft.situation
    shares = now.samples_by_rank(problem.largest_micro_batch)
    ranks = range(len(shares))
    saved = max(
        shares[rank] * (before.memory[rank].sample_bytes - now.memory[rank].sample_bytes)
        for rank in ranks
    )
    work = [
        (now.loads[rank].seconds(shares[rank]), before.loads[rank].seconds(shares[rank]))
        for rank in ranks
        if shares[rank]
    ]
    more = (
        max(after / without - 1 for after, without in work if without)
        if any(without for _, without in work)
        else 0.0
    )
    told = explain(draft.choice, problem.config.recompute, more, saved)
    return [Decision("recompute", *told)] if told else []


def fingerprint(captured: CapturedGraph) -> str:
    """Hash of the graph (operations, arguments, shapes) and of the weights' names, shapes and
    types.
    """
    state = hashlib.blake2b(digest_size=16)
    for node in captured.graph.nodes:
        value = node.meta.get("val")
        shape = (
            (*(str(size) for size in value.shape), value.dtype)
            if isinstance(value, torch.Tensor)
            else ""
        )
        state.update(f"{node.op}|{node.target}|{node.args}|{node.kwargs}|{shape}\n".encode())
    for name in sorted(captured.state):
        tensor = captured.state[name]
        state.update(
            f"{name}|{tensor.kind}|{tensor.shape}|{tensor.dtype}|{tensor.trainable}|{tensor.aliases}\n".encode()
        )
    return state.hexdigest()


def _width(problem: Problem) -> int:
    """Devices of one model replica, as far as that is known before the TaskGraphs are: 1 where
    order makes no difference.
    """
    if problem.cluster.num_devices == 1 or problem.config.colocate:
        return 1
    if problem.config.num_task_graph is not None:
        return problem.config.num_task_graph
    strategies = from_marks(
        live_operations(problem.captured), problem.kinds, problem.marks, problem.default_strategy
    ).strategies
    return sum(strategy.num_devices for strategy in strategies)


def check_loss_and_buffers(
    captured: CapturedGraph, not_additive: NotAdditive | None, widest: int, num_micro_batch: int
) -> None:
    """Refuses what may not be cut: `widest` is over how many devices a micro-batch is cut
    at most.
    """
    if not_additive is not None and (widest > 1 or num_micro_batch > 1):
        raise ValueError(not_additive.message)
    if widest > 1:
        _refuse_sample_buffers(captured)


def _refuse_sample_buffers(captured: CapturedGraph) -> None:
    """Buffers computed from samples would drift apart on the devices that share a micro-batch
    (BatchNorm's are summed over all).
    """
    for node in captured.compute_nodes():
        args = named_args(node) if op_name(node) == "instance_norm" else {}
        if args.get("use_input_stats") and args.get("running_mean") is not None:
            raise ValueError(
                f"instance norm with running statistics ({user_line(node)}): each device would "
                "keep other statistics. "
                "Use track_running_stats=False, or put this part on one device with one model "
                "replica"
            )
    for name, value in captured.buffer_updates.items():
        if slice_stage([value], RECOMPUTED, {}).inputs:
            raise ValueError(
                f"buffer {name} is computed from the samples ({user_line(value)}), so each device "
                "would get another value: "
                f"put this part on one device with one model replica"
            )


def _batch_norm_notes(captured: CapturedGraph, num_micro_batch: int) -> list[str]:
    """Where training differs from one step on the whole mini-batch, by definition."""
    found = [node for node in captured.compute_nodes() if trains_batch_norm(node)]
    if not found or num_micro_batch == 1:
        return []
    return [
        f"{len(found)} batch norms (first: {user_line(found[0])}) take their statistics over each "
        f"of the {num_micro_batch} micro-batches, "
        'not over the whole mini-batch: the same as local training in such micro-batches. "num_micro_batch": 1 gives one whole-batch step'
    ]


def _schedule_reason(schedule: scheduling.Schedule, wanted: str) -> str:
    instead = (
        ""
        if schedule.name == wanted
        else f'no faster order of "{wanted}" was found within the memory of the devices; '
    )
    return (
        f"{instead}{count(schedule.num_micro_batch, 'micro-batch')} over "
        f"{count(schedule.stage_graph.num_stages, 'stage')}; "
        f"proved complete and free of deadlock; "
        f"at most {max(scheduling.peaks_in_flight(schedule))} in flight on a stage"
    )


__all__ = [
    "Assignment",
    "Problem",
    "apply_plan",
    "check_loss_and_buffers",
    "fingerprint",
    "follow_plan",
    "make_plan",
]
