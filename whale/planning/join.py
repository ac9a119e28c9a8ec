"""Plans of alike model replicas joined into one plan, each as a template of its own.

Every plan knows its own devices only, counted from 0. In the joined plan ranks are those of the
job, stages and VirtualDevices are counted through (`plans/templates.py`), and a weight is held by
stages of all templates: its gradient is summed over all of them, piece by piece where they cut it
differently (`plans/shards.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whale.capture.graph import CapturedGraph
from whale.cluster.cluster import Cluster, DeviceKind
from whale.planning.pricing import ShardedWeight, states_of, update_seconds
from whale.planning.problem import Problem
from whale.plans.figures import Figures, StateFigures
from whale.plans.plan import (
    Decision,
    DeviceMemory,
    Plan,
    PlannedDevice,
    Replica,
    ReplicaShare,
    ReplicaTemplate,
    TaskGraph,
)
from whale.plans.revise import different_devices
from whale.plans.shards import Shards
from whale.plans.templates import renumbered_task_graphs


def join(
    problem: Problem,
    plans: Sequence[Plan],
    ranks: Sequence[Sequence[int]],
    decisions: Sequence[Decision],
) -> Plan:
    """The plan in which the devices of `plans[i]` are `ranks[i]` of the job; ranks that none of
    them has take no part. `decisions` stand before those of the plans.
    """
    templates: list[ReplicaTemplate] = []
    task_graphs: list[TaskGraph] = []
    replicas: list[Replica] = []
    shares: list[ReplicaShare] = []
    devices: dict[int, PlannedDevice] = {}
    first_device = 0
    for number, (plan, own) in enumerate(zip(plans, ranks, strict=True)):
        for place, rank in enumerate(own):
            devices[rank] = plan.devices[plan.device_of_rank[place]]
        templates.append(_with_task_graphs(plan.template, len(task_graphs)))
        task_graphs += renumbered_task_graphs(plan.task_graphs, len(task_graphs), first_device)
        for replica in plan.replicas:
            replicas.append(
                Replica(
                    number,
                    tuple(tuple(own[rank] for rank in members) for members in replica.ranks),
                    tuple((len(shares) + index, times) for index, times in replica.shares),
                )
            )
        shares += plan.shares
        first_device += len(plan.template.grids)
    for rank, device in enumerate(problem.cluster.devices):
        devices.setdefault(rank, _left_out(device.kind, problem.dtype))
    joined = replace(
        plans[0],
        batch_size=sum(plan.batch_size for plan in plans),
        num_micro_batch=max(plan.num_micro_batch for plan in plans),
        **different_devices([devices[rank] for rank in sorted(devices)]),
        task_graphs=tuple(task_graphs),
        templates=tuple(templates),
        replicas=tuple(replicas),
        shares=tuple(shares),
        decisions=(*decisions, *_labelled(plans)),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        least_samples=max(plan.least_samples for plan in plans),
        figures=None,
    )
    known = [plan.figures for plan in plans if plan.figures is not None]
    figures = joined_figures(problem.captured, joined, known, problem.cluster)
    return replace(joined, figures=figures)


def _left_out(kind: DeviceKind, dtype: str) -> PlannedDevice:
    """A device that holds and does nothing."""
    memory = DeviceMemory(0, 0, 0, 0, 0, 0.0, kind.memory_bytes)
    return PlannedDevice(kind.name, 0.0, flop_per_s=kind.rate(dtype), memory=memory)


def _with_task_graphs(template: ReplicaTemplate, first: int) -> ReplicaTemplate:
    stages = tuple(
        replace(stage, task_graphs=tuple(first + index for index in stage.task_graphs))
        for stage in template.stages
    )
    return replace(template, stages=stages)


def _labelled(plans: Sequence[Plan]) -> list[Decision]:
    """The decisions of every plan; of several with the number of its replicas."""
    found = []
    first = 0
    for plan in plans:
        last = first + plan.num_replicas - 1
        which = f"replica {first}" if last == first else f"replicas {first} to {last}"
        for decision in plan.decisions:
            what = f"{which}: {decision.what}" if len(plans) > 1 else decision.what
            found.append(replace(decision, what=what))
        first = last + 1
    return found


def joined_figures(
    captured: CapturedGraph, joined: Plan, known: Sequence[Figures], cluster: Cluster
) -> Figures:
    """The figures of all templates, each with its own stages in `known`, and the weights that they
    hold together.
    """
    optimizer_ratio = known[0].optimizer_ratio
    work = known[0].update_work
    states = states_of(captured, joined.holders, _weights(captured, joined))
    update_s = []
    for rank, device in enumerate(cluster.devices):
        own = set(joined.of_rank(rank).stages_of_rank(rank))
        first = _first_stage(joined, rank)
        held = [
            state.on(rank) for state in states if {stage - first for stage in state.stages} & own
        ]
        trained = sum(state.trained_bytes for state in held)
        number = 0
        for name, stages in joined.holders.items():
            if captured.state[name].trainable and {stage - first for stage in stages} & own:
                number += 1
        update_s.append(
            update_seconds(
                trained, _shared(joined, held), number, optimizer_ratio, device.kind, work
            )
        )
    return Figures(
        stages=tuple(stage for figures in known for stage in figures.stages),
        states=states,
        network=cluster.network,
        update_s=tuple(update_s),
        memory_bytes=tuple(device.kind.memory_bytes for device in cluster.devices),
        optimizer_ratio=optimizer_ratio,
        batch_bytes=max(figures.batch_bytes for figures in known),
        overlaps=cluster.has_accelerators_only,
        update_work=work,
    )


def _first_stage(plan: Plan, rank: int) -> int:
    """Stages of the templates before that of this rank."""
    return sum(len(template.stages) for template in plan.templates[: plan.template_of_rank(rank)])


def _shared(plan: Plan, states: Sequence[StateFigures]) -> int:
    return sum(
        state.trained_bytes
        for state in states
        if any(len(group) > 1 for group in state.groups(plan.ranks_of_stage))
    )


def _weights(captured: CapturedGraph, plan: Plan) -> dict[str, ShardedWeight]:
    """Weights that some template cuts: their pieces, each with whoever holds it."""
    shards = Shards(plan)
    found: dict[str, ShardedWeight] = {}
    for name in plan.holders:
        if all(shard.ranges is None for shard in shards.held(name)):
            continue
        item_bytes = captured.state[name].dtype.itemsize
        sizes = []
        parts = []
        for piece, num_entries in shards.piece_sizes(name):
            sizes.append(num_entries * item_bytes)
            parts.append(piece.ranks)
        found[name] = ShardedWeight(tuple(sizes), tuple(parts))
    return found
