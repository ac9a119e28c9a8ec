"""The cost model applied to the stages of a plan: `Figures`, and the times that cuts and schedules
are made for.

Devices that share the samples of a stage by their speed take, together,

    1 / sum_i(1 / t_i)                                                                           (1)

where t_i is the time of device i if it did everything in micro-batches of the usual size.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.cluster.cluster import Cluster, DeviceKind
from whale.cluster.network import Network
from whale.costs.measured import measured_seconds, update_costs
from whale.costs.update_work import UpdateWork
from whale.operations.nodes import sums_over_devices, trains_batch_norm
from whale.planning.describe import holders as holders_of
from whale.planning.recompute import Recompute, counts_of
from whale.planning.recompute_choice import Choice, Stages
from whale.planning.stages import Assignment, StageSlice, carries_gradient
from whale.planning.workload import Workload
from whale.planning.zero import with_zero_figures
from whale.plans.figures import Figures, Seconds, StageFigures, StageTimes, StateFigures
from whale.plans.layout import Layout
from whale.plans.plan import Plan
from whale.plans.virtual_devices import VirtualDevice
from whale.scheduling.memory import ActionMemory, Bytes
from whale.simulation.communication import all_reduce_seconds

UPDATE_PASSES = 3
"""an optimizer reads weights and gradients and writes weights; it reads and writes its own state
besides
"""

UNFUSED_PASSES = 3
UNFUSED_STATE_PASSES = 8
"""the same on a CPU that was not measured, where torch's optimizers run operation by operation"""

OWN_CALLS = 60
"""small operations of the runtime itself in a step, about: it reads the batch, sums the loss and
all-reduces it
"""

MiniBatchSeconds = tuple[float, float, float]
"""forward, input gradient and weight gradient of the backward"""
Parts = tuple[tuple[int, ...], ...]
"""for each part of a tensor the ranks that hold it"""


@dataclass(frozen=True)
class ShardedWeight:
    """A parameter that a grid cuts."""

    part_bytes: tuple[int, ...]
    """of each part; equal parts are one"""
    parts: Parts


@dataclass(frozen=True)
class OnGrids:
    """What a grid changes."""

    stages: Mapping[int, Callable[[StageFigures], StageFigures]] = field(default_factory=dict)
    """figures of a stage, from those that it would have on devices which share its samples"""
    weights: Mapping[str, ShardedWeight] = field(default_factory=dict)
    """of parameters that are cut"""


def typical_share(batch_size: int, num_micro_batch: int, num_replicas: int) -> int:
    """Samples of a micro-batch on a device, evenly shared."""
    return max(1, batch_size // (num_micro_batch * max(1, num_replicas)))


def stage_seconds(
    workload: Workload,
    operations: Sequence[Node],
    kinds: Sequence[DeviceKind],
    num_micro_batch: int,
    again: Container[Node] = (),
) -> MiniBatchSeconds:
    """Seconds by line (1) of a mini-batch that devices of these kinds share. An operation that none
    of them times takes no time.

    `again`: operations whose forward is run once more in backward.
    """
    number = {kind: kinds.count(kind) for kind in kinds}
    share = max(1.0, workload.batch_size / num_micro_batch / len(kinds))
    speeds = [0.0, 0.0, 0.0]
    for kind, count in number.items():
        times = workload.times(operations, kind, again)
        for place, part in enumerate((times.forward, times.input_backward, times.weight_backward)):
            alone = part.of(share) * workload.batch_size / share
            speeds[place] += count / alone if alone else float("inf")
    forward, inputs, weights = (1.0 / speed for speed in speeds)
    return forward, inputs, weights


def figures_of(
    workload: Workload,
    assignment: Assignment,
    holders: Mapping[str, tuple[int, ...]],
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    choice: Choice,
    wanted: Recompute,
    on_grids: OnGrids,
) -> Figures:
    """What the simulation of a plan computes on. `ranks[i]`: all ranks that run stage i; `choice`,
    `wanted`: what is recomputed in backward; `on_grids`: what grids change.
    """
    stages = []
    described = Stages(workload, assignment, wanted)
    for index, part in enumerate(assignment.slices):
        memory = described.memory_of(index, choice[index])
        again = described.again(index, choice[index])
        kinds = {cluster.devices[rank].kind for rank in ranks[index]}
        times: dict[str, StageTimes] = {}
        for kind in kinds:
            alone = workload.times(part.operations, kind, again) + all_reduces_inside(
                workload, part, ranks[index], cluster.network, kind, again
            )
            times[kind.name] = replace(alone, accumulate=workload.accumulate_seconds(part, kind))
        gradient_workspace = workload.gradient_workspace(part)
        figures = StageFigures(
            times=dict(sorted(times.items())),
            memory=ActionMemory(
                saved=memory.saved,
                weight_gradient=Bytes(memory.weight_gradient.sample_bytes),
                workspace=Bytes(memory.workspace.sample_bytes, gradient_workspace),
            ),
            gradient_workspace_bytes=gradient_workspace,
        )
        stages.append(on_grids.stages[index](figures) if index in on_grids.stages else figures)
    states = states_of(workload.captured, holders, on_grids.weights)
    return Figures(
        stages=tuple(stages),
        states=states,
        network=cluster.network,
        update_s=_update_seconds_of_ranks(workload, assignment, cluster, ranks, states),
        memory_bytes=tuple(device.kind.memory_bytes for device in cluster.devices),
        optimizer_ratio=workload.optimizer_ratio,
        batch_bytes=workload.batch_bytes,
        overlaps=cluster.has_accelerators_only,
        update_work=workload.update_work,
    )


def _update_seconds_of_ranks(
    workload: Workload,
    assignment: Assignment,
    cluster: Cluster,
    ranks: Sequence[Sequence[int]],
    states: Sequence[StateFigures],
) -> tuple[float, ...]:
    """Seconds that the update takes on every rank. Ranks of one kind with the same stages take the
    same.
    """
    known: dict[tuple[tuple[int, ...], DeviceKind], float] = {}
    found = []
    for rank, device in enumerate(cluster.devices):
        own = tuple(stage for stage, members in enumerate(ranks) if rank in members)
        if (own, device.kind) not in known:
            held = [state for state in states if set(state.stages) & set(own)]
            shared = 0
            for state in held:
                if any(len(group) > 1 for group in state.groups(ranks.__getitem__)):
                    shared += state.trained_bytes
            known[own, device.kind] = update_seconds(
                sum(state.trained_bytes for state in held),
                shared,
                sum(len(workload.trained_bytes(assignment.slices[stage])) for stage in own),
                workload.optimizer_ratio,
                device.kind,
                workload.update_work,
            )
        found.append(known[own, device.kind])
    return tuple(found)


def all_reduces_inside(
    workload: Workload,
    part: StageSlice,
    ranks: Sequence[int],
    network: Network,
    kind: DeviceKind,
    again: Container[Node],
) -> StageTimes:
    """Times of the small all-reduces inside forward and backward of a stage: two and one for a
    batch norm, one and one for a loss that is not additive.

    Only where an all-reduce was measured: what is known of links says little of so short messages.
    These are all-gathered in one hop, where an all-reduce takes two. A batch norm over devices also
    computes in another way than torch's own.
    """
    found = StageTimes(Seconds(0.0), Seconds(0.0), Seconds(0.0))
    if network.all_reduce is None or len(ranks) < 2:
        return found
    one_s = all_reduce_seconds(0.0, 1, ranks, network)[0] / 2
    for node in part.operations:
        is_batch_norm = trains_batch_norm(node)
        number = 2 if is_batch_norm else int(sums_over_devices(node))
        more = StageTimes(
            Seconds(0.0, number * one_s), Seconds(0.0, min(number, 1) * one_s), Seconds(0.0)
        )
        if is_batch_norm:
            more = more + workload.over_devices(node, kind)
        repeated = more.forward if node in again else Seconds(0.0)
        found = found + replace(more, input_backward=more.input_backward + repeated)
    return found


def update_seconds(
    trained_bytes: int,
    shared_bytes: int,
    num_parameters: int,
    optimizer_ratio: float,
    kind: DeviceKind,
    work: UpdateWork | None = None,
) -> float:
    """Seconds of the optimizer: as measured, by the number of its parameters and their bytes; else
    by what it launches (`work`), or where that is not known as one kernel that reads and writes
    everything once.

    On a CPU nothing hides what is around it: the norm reads the gradients, those that are summed
    were copied into their buckets one by one, and the runtime itself makes some small calls in
    every step.
    """
    if not kind.is_cpu and work is not None:
        return work.seconds(trained_bytes, num_parameters, kind) if trained_bytes else 0.0
    if not kind.is_cpu:
        return trained_bytes * (UPDATE_PASSES + 2 * optimizer_ratio) * kind.byte_s
    num_copied = num_parameters * shared_bytes / trained_bytes if trained_bytes else 0.0
    call_s = measured_seconds(kind, "aten.add", 0.0, 1.0, False) or 0.0
    copied_s = (trained_bytes + 2 * shared_bytes) / kind.bytes_per_s + (
        num_copied + OWN_CALLS
    ) * call_s
    costs = update_costs(kind, optimizer_ratio)
    if costs is None:
        return (
            copied_s
            + trained_bytes
            * (UNFUSED_PASSES + UNFUSED_STATE_PASSES * optimizer_ratio)
            / kind.bytes_per_s
        )
    parameter_s, byte_s = costs
    return copied_s + num_parameters * parameter_s + trained_bytes * byte_s


def price(
    plan: Plan,
    captured: CapturedGraph,
    assignment: Assignment,
    cluster: Cluster,
    optimizer_ratio: float,
    dtype: str,
) -> Plan:
    """A plan of one template with the figures of another cluster of as many devices. Stages on
    grids keep theirs: their layouts were chosen with them.
    """
    # as the planner counts them
    num_sharing = plan.num_devices if plan.settings.colocate else plan.num_replicas
    share = typical_share(plan.batch_size, plan.num_micro_batch, num_sharing)
    workload = Workload(
        captured,
        plan.batch_size,
        carries_gradient(captured),
        optimizer_ratio,
        dtype,
        share,
        plan.mini_batch_size,
        plan.figures.update_work if plan.figures is not None else None,
        cluster.layer_times,
    )
    ranks = [plan.ranks_of_stage(stage.index) for stage in plan.stages]
    choice = tuple(map(counts_of, plan.stages))
    held = holders_of(captured, assignment)
    wanted = plan.settings.recompute
    grids = _grids_of(plan, captured, held)
    figures = figures_of(workload, assignment, held, cluster, ranks, choice, wanted, grids)
    if plan.figures is not None and plan.figures.zero:
        figures = with_zero_figures(figures, plan.figures.zero)
    if plan.figures is not None and plan.figures.away:
        described = Stages(workload, assignment, wanted)
        figures = _with_away(plan, figures, described)
    return replace(plan, figures=figures)


def _with_away(plan: Plan, figures: Figures, described: Stages) -> Figures:
    """The figures with what the plan has elsewhere; stages on grids have kept theirs."""
    assert plan.figures is not None
    on_grid = {sharding.stage for sharding in plan.shardings}
    stages = []
    for stage, known in zip(plan.stages, figures.stages, strict=True):
        if stage.activations != "device" and stage.index not in on_grid:
            activations = described.activations_of(stage.index, counts_of(stage))
            known = replace(known, memory=activations.resident(known.memory))
        stages.append(known)
    return replace(figures, stages=tuple(stages), away=plan.figures.away)


def _grids_of(
    plan: Plan, captured: CapturedGraph, holders: Mapping[str, tuple[int, ...]]
) -> OnGrids:
    """What a finished plan says of its grids."""
    if plan.figures is None or not plan.shardings:
        return OnGrids()
    known = plan.figures.stages
    stages = {
        sharding.stage: partial(_as_before, known[sharding.stage]) for sharding in plan.shardings
    }
    layouts = {
        name: stored.layout()
        for sharding in plan.shardings
        for name, stored in sharding.stored.items()
    }
    devices = {stage.index: plan.virtual_devices[stage.virtual_device] for stage in plan.stages}
    return OnGrids(stages, sharded_weights(captured, layouts, holders, devices))


def _as_before(known: StageFigures, _: StageFigures) -> StageFigures:
    return known


def sharded_weights(
    captured: CapturedGraph,
    layouts: Mapping[str, Layout],
    holders: Mapping[str, tuple[int, ...]],
    devices: Mapping[int, VirtualDevice],
) -> dict[str, ShardedWeight]:
    """Parameters that a grid cuts, by name. `layouts`: of all parameters on grids; `devices`: the
    VirtualDevice of each stage.
    """
    found: dict[str, ShardedWeight] = {}
    known: dict[tuple[Layout, int], tuple[list[tuple[int, ...]], list[int]]] = {}
    for name, layout in layouts.items():
        device = devices[holders[name][0]]
        grid = device.grid
        key = (layout, device.index)
        if grid is None or not layout.sharded:
            continue  # whole everywhere
        if key not in known:
            same = list(
                dict.fromkeys(layout.same_places(grid, place) for place in range(grid.num_devices))
            )
            known[key] = same, [layout.local_count(grid, places[0]) for places in same]
        same, counts = known[key]
        members = [ranks for stage in holders[name] for ranks in devices[stage].ranks]
        parts = tuple(
            tuple(sorted({ranks[place] for ranks in members for place in places}))
            for places in same
        )
        found[name] = ShardedWeight(
            tuple(count * captured.state[name].dtype.itemsize for count in counts), parts
        )
    return found


def states_of(
    captured: CapturedGraph,
    holders: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, ShardedWeight],
) -> tuple[StateFigures, ...]:
    """Parameters and buffers by who holds them. `holders`: stages of each; `weights`: those that
    are cut.
    """
    states: dict[tuple[tuple[int, ...], Parts], StateFigures] = {}
    for name, stages in holders.items():
        tensor = captured.state[name]
        held = weights.get(name, ShardedWeight((tensor.num_bytes,), ()))
        key = (stages, held.parts)
        known = states.get(
            key, StateFigures(stages, parts=held.parts, part_bytes=((0, 0),) * len(held.parts))
        )
        if tensor.kind == "parameter":
            most = max(held.part_bytes)
            trained = int(tensor.trainable)
            added = zip(known.part_bytes, held.part_bytes)
            states[key] = replace(
                known,
                weight_bytes=known.weight_bytes + most,
                trained_bytes=known.trained_bytes + most * trained,
                part_bytes=tuple(
                    (before + more, before_trained + more * trained)
                    for (before, before_trained), more in added
                ),
            )
        else:
            states[key] = replace(known, buffer_bytes=known.buffer_bytes + tensor.num_bytes)
    return tuple(states.values())
