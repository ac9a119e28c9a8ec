"""A draft as a plan: its replicas, the samples and boxes of every rank, its figures, and a
`Decision` with the numbers for every choice.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch
from torch.fx import Node

from whale import scheduling
from whale.capture.graph import CapturedGraph, user_line
from whale.names import count
from whale.operations.nodes import trains_batch_norm
from whale.planning.balance import explain_shares
from whale.planning.describe import describe_task_graphs, holders, tie_decisions, update_decisions
from whale.planning.drafts import Draft
from whale.planning.gradient_moments import with_moments
from whale.planning.offload_account import Homes, StepLoad, with_homes
from whale.planning.offload_figures import with_offload
from whale.planning.offload_text import offload_decisions
from whale.planning.pricing import figures_of
from whale.planning.problem import (
    Problem,
    buffers_of_micro_batches,
    layer_times_decision,
    precision_decision,
)
from whale.planning.recompute import Regions
from whale.planning.recompute_choice import explain
from whale.planning.split_memory import on_grids
from whale.planning.stages import RECOMPUTED
from whale.planning.updates_ahead import with_updates_ahead
from whale.planning.workload import Workload
from whale.planning.zero import with_zero_figures, zero_decision
from whale.planning.zero_blocks import blocks_of, grid_blocks
from whale.plans.blocks import GRADIENTS_TOO, Block
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

SAMPLES = "samples by rank"
"""what the decision on shares is called"""


def assemble(problem: Problem, workload: Workload, draft: Draft, model: str) -> Plan:
    """The draft as a plan, with the samples of every rank and the figures of its simulation."""
    config = problem.config
    placement = draft.placement
    plan = Plan(
        format=PLAN_FORMAT,
        model=model,
        settings=Settings(
            config.colocate,
            _as_stored(config.recompute),
            config.bucket_bytes,
            problem.float32_precision,
        ),
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
            *_buffer_notes(problem.captured, config.num_micro_batch),
            *draft.split.notes(),
        ),
        least_samples=draft.device_loads.least,
    )
    notes = (*plan.notes, *_narrow_sum_notes(problem.captured, plan))
    plan = replace(plan, notes=notes, figures=_figures(problem, workload, draft))
    return with_updates_ahead(with_samples(_with_homes(problem, draft, plan)), problem)


def _with_homes(problem: Problem, draft: Draft, plan: Plan) -> Plan:
    """The plan with its blocks, its figures, and where everything is at home."""
    account = draft.account
    sharing = draft.zero.sharing
    is_away = account.offload.is_any
    blocks: list[Block] = []
    level = 0
    if account.offload.has_blocks:
        blocks += grid_blocks(sharing, draft.split.cut_names)
    if draft.zero.level and draft.zero.groups:
        cut = blocks_of(sharing, draft.device_loads.fractions)
        level = draft.zero.level if cut else 0
        blocks += cut
    if not is_away:
        return replace(plan, zero=level, blocks=tuple(blocks))
    step = StepLoad(
        problem.config.num_micro_batch,
        scheduling.peaks_in_flight(draft.schedule),
        draft.device_loads.samples_by_rank(problem.largest_micro_batch),
        draft.activations,
    )
    assert plan.figures is not None
    activations = account.activation_bytes(step.activations, step.in_flight, step.shares)
    homes = account.homes(draft.device_loads, activations)
    template = replace(
        plan.template,
        stages=tuple(replace(stage, activations=homes.activations) for stage in plan.stages),
    )
    placed = with_homes(blocks, account, homes)
    return replace(
        plan,
        zero=level,
        blocks=tuple(placed),
        templates=(template,),
        folders=_folders(problem, homes),
        figures=with_offload(plan.figures, account, draft.device_loads, step),
    )


def _folders(problem: Problem, homes: Homes) -> dict[str, str]:
    """Where files of each host go, as far as the cluster file says so."""
    found = {}
    for host in problem.cluster.hosts:
        disk = problem.cluster.memories_of(host).disk
        if disk is not None and disk.folder is not None and homes.used.get((host, "disk")):
            found[host] = disk.folder
    return found


def _as_stored(recompute: bool | str | list[str]) -> bool | str | tuple[str, ...]:
    return tuple(recompute) if isinstance(recompute, list) else recompute


def _planned_devices(problem: Problem, draft: Draft) -> list[PlannedDevice]:
    """The device of every rank with what it has to do."""
    found = []
    for rank, device in enumerate(problem.cluster.devices):
        load = draft.device_loads.loads[rank]
        found.append(
            PlannedDevice(
                kind=draft.device_loads.kinds[rank],
                sample_s=load.sample_s,
                fixed_s=load.fixed_s,
                flop_per_s=device.kind.rate(problem.dtype),
                memory=draft.device_loads.memory[rank],
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
        *_zero_decisions(draft),
        *offload_decisions(draft.account, draft.device_loads, draft.loads_without_zero),
        *tie_decisions(problem.captured, draft.assignment),
        *filter(
            None,
            [
                precision_decision(problem),
                layer_times_decision(problem, draft.split.shardings.values()),
            ],
        ),
        Decision("schedule", draft.schedule.name, why_schedule),
        *update_decisions(config, len(draft.stages)),
    )


def _figures(problem: Problem, workload: Workload, draft: Draft) -> Figures:
    """What the simulation computes on."""
    held = holders(problem.captured, draft.assignment)
    device_of_stage = [stage.virtual_device for stage in draft.stages]
    ranks_of = [device.all_ranks for device in draft.placement.virtual_devices]
    figures = figures_of(
        workload,
        draft.assignment,
        held,
        problem.cluster,
        [ranks_of[device] for device in device_of_stage],
        draft.choice,
        problem.config.recompute,
        on_grids(workload, draft.split, held, device_of_stage, draft.regions),
    )
    if not draft.zero.level:
        return figures
    figures = with_zero_figures(figures, draft.zero.figures(draft.device_loads.fractions))
    return with_moments(figures, workload, draft) if draft.zero.level >= GRADIENTS_TOO else figures


def _balance_decisions(problem: Problem, draft: Draft) -> list[Decision]:
    """Why heterogeneous devices do what they do."""
    if problem.cluster.is_uniform:
        return []
    return [Decision(SAMPLES, *explain_shares(draft.device_loads, problem.largest_micro_batch))]


def _recompute_decisions(problem: Problem, draft: Draft) -> list[Decision]:
    """What is recomputed in backward, and what that costs."""
    plain = draft.loads_without_recompute
    chosen = draft.device_loads
    saved_bytes = 0.0
    extra_work = 0.0
    shares = chosen.samples_by_rank(problem.largest_micro_batch)
    for rank, samples in enumerate(shares):
        saved_per_sample = plain.memory[rank].sample_bytes - chosen.memory[rank].sample_bytes
        saved_bytes = max(saved_bytes, samples * saved_per_sample)
        plain_s = plain.loads[rank].seconds(samples)
        if plain_s > 0:  # a device without samples does no work either way
            extra_work = max(extra_work, chosen.loads[rank].seconds(samples) / plain_s - 1)
    explained = explain(draft.choice, problem.config.recompute, extra_work, saved_bytes)
    return [Decision("recompute", *explained)] if explained else []


def _zero_decisions(draft: Draft) -> list[Decision]:
    """What ranks share, and what that saves."""
    if not draft.zero.level:
        return []
    if not draft.zero.groups:
        why = "no two ranks would hold the same parameters"
        return [Decision("ZeRO", "nothing to cut", why)]
    return [zero_decision(draft.zero.level, draft.device_loads, draft.loads_without_zero)]


def _batch_norm_notes(captured: CapturedGraph, num_micro_batch: int) -> list[str]:
    """Notes on batch norms, which by definition differ from one step on the whole mini-batch."""
    found = [node for node in captured.compute_nodes() if trains_batch_norm(node)]
    if not found or num_micro_batch == 1:
        return []
    return [
        f"{len(found)} batch norms (first: {user_line(found[0])}) take their statistics over each "
        f"of the {num_micro_batch} micro-batches, not over the whole mini-batch: the same as local "
        'training in such micro-batches. "num_micro_batch": 1 gives one whole-batch step'
    ]


def _buffer_notes(captured: CapturedGraph, num_micro_batch: int) -> list[str]:
    """Notes on buffers that each micro-batch changes again. Running statistics belong to the batch
    norm that writes them.
    """
    found = buffers_of_micro_batches(captured)
    if not found or num_micro_batch == 1:
        return []
    return [
        f"{count(len(found), 'buffer')} (first: {found[0]}, "
        f"{user_line(captured.buffer_updates[found[0]])}) written by forward: {num_micro_batch} "
        "times in a step, once in each micro-batch, the same as local training in such "
        "micro-batches (a spectral norm iterates once in each, a counter counts them). "
        '"num_micro_batch": 1 writes once'
    ]


def _narrow_sum_notes(captured: CapturedGraph, plan: Plan) -> list[str]:
    """Notes on gradients that are summed over devices in 16 bits."""
    narrow = (torch.float16, torch.bfloat16)
    trained = [each for each in captured.state.values() if each.trainable]
    found = [each for each in trained if each.dtype in narrow]
    has_sums = any(len(plan.ranks_of_stage(stage.index)) > 1 for stage in plan.stages)
    if not found or not has_sums:
        return []
    return [
        f"gradients of {count(len(found), 'parameter')} in 16 bits are summed over devices in 16 "
        "bits, and round at every hop (CPU ranks of one host: once). Try: weights in float32 with "
        '"precision": "bf16", whose gradients are summed in float32'
    ]


def _schedule_reason(schedule: scheduling.Schedule, wanted: str) -> str:
    instead = (
        ""
        if schedule.name == wanted
        else f'no faster order of "{wanted}" was found within the memory of the devices; '
    )
    return (
        f"{instead}{count(schedule.num_micro_batch, 'micro-batch')} over "
        f"{count(schedule.stage_graph.num_stages, 'stage')}; proved complete and free of deadlock; "
        f"at most {max(scheduling.peaks_in_flight(schedule))} in flight on a stage"
    )
