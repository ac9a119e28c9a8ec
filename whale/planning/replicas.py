"""A plan of model replicas that are given one by one and need not be alike.

    plan_of_replicas        replicas in groups of alike ones; samples of each group
      plan of a group       as any plan, for the devices and the samples of the group alone
                            (`ReplicaDrafts`): cuts, recomputation, schedule, shares, under memory
    join                    the groups as the templates of one plan: ranks and stages counted
                            through, gradients over whoever holds the same weights

Samples that nobody gave are shared by speed: first by the rates of the devices, then by what the
simulation says of each group, until the slowest does not get faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import Node

from whale.capture.kinds import ValueKind
from whale.names import count
from whale.operations.nodes import trains_batch_norm
from whale.planning.assemble import assemble
from whale.planning.balance import Order
from whale.planning.drafts import Draft, OrderDrafts, StageCut
from whale.planning.grids import with_grids
from whale.planning.join import join
from whale.planning.pipeline_cuts import PipelineCuts
from whale.planning.pricing import typical_share
from whale.planning.problem import Problem, check_loss_and_buffers, precision_decision
from whale.planning.replica_specs import ReplicaSpec, activations, alike, check_specs
from whale.planning.stages import Assignment
from whale.planning.task_graphs import TaskGraphs, label_of
from whale.planning.workload import Workload
from whale.plans.plan import Decision, Plan
from whale.plans.shares import DoesNotFit, Load, best_shares, check_batch
from whale.plans.virtual_devices import DevicePlacement, VirtualDevice
from whale.simulation.simulate import step_seconds
from whale.units import human_seconds

ROUNDS = 4
"""how often samples are shared again by what the simulation says"""


def plan_of_replicas(
    problem: Problem, specs: Sequence[ReplicaSpec], model: str, may_leave_out: bool = False
) -> tuple[Plan, Assignment]:
    """The plan of these model replicas, and where every operation runs in the first of them.
    `model`: fingerprint of the graph. `may_leave_out`: ranks that no replica has take no part.
    """
    _refuse_annotations(problem)
    check_specs(specs, problem.cluster.num_devices, problem.batch_size, may_leave_out)
    groups = alike(specs, problem.cluster)
    if len(groups) > 1:
        refuse_heterogeneous(problem)
    drafts = _shared_again(problem, groups, _first_drafts(problem, groups), model)
    plans = [draft.plan(model) for draft in drafts]
    assignment = drafts[0].draft.assignment
    if len(plans) == 1:
        return _with_precision(problem, _on_ranks(problem, plans[0], groups[0])), assignment
    ranks = [_ranks(group) for group in groups]
    joined = join(problem, plans, ranks, _decisions(plans))
    return _with_precision(problem, joined), assignment


def _with_precision(problem: Problem, plan: Plan) -> Plan:
    """The plan with what it says of float32 products where a device without TF32, of another
    replica or left out, keeps those that have it from using it: all ranks round alike.
    """
    decision = precision_decision(problem)
    if decision is None or problem.dtype == "tf32":
        return plan  # nothing to say, or every replica says it
    settings = replace(plan.settings, float32_precision=problem.float32_precision)
    return replace(plan, settings=settings, decisions=(*plan.decisions, decision))


def _refuse_annotations(problem: Problem) -> None:
    """Refuses replicas that are given one by one for a model that is annotated."""
    if problem.marks or problem.default_strategy:
        raise ValueError(
            '"replicas" says which stages every model replica has, but the model is annotated: '
            "leave one of the two out"
        )


def refuse_heterogeneous(problem: Problem) -> None:
    """Refuses model replicas that are not alike where results depend on the micro-batches."""
    captured = problem.captured
    if problem.not_additive is not None:
        raise ValueError(problem.not_additive.message)
    advice = 'Try: alike replicas, without "replicas"'
    if isinstance(problem.config.zero, int) and problem.config.zero:
        raise ValueError(
            f'"zero": {problem.config.zero} shares weights between ranks that use them at the same '
            f"time, which model replicas that are not alike do not. {advice}"
        )
    if problem.config.loss_per_micro_batch:
        raise ValueError(
            '"loss_per_micro_batch" takes the loss of every micro-batch alone, and model replicas '
            f"that are not alike have micro-batches of their own. {advice}"
        )
    for node in captured.compute_nodes():
        if trains_batch_norm(node):
            raise ValueError(
                "a batch norm takes the statistics of a micro-batch over all devices, and model "
                f"replicas that are not alike have micro-batches of their own. {advice}, or a "
                "group norm"
            )
        if "all_reduce" in node.meta:
            raise ValueError(
                "the loss is not a sum over samples: its batch sums are taken over all devices at "
                f"once, and model replicas that are not alike are not at one place. {advice}"
            )
    # over two replicas at least: buffers of samples would drift apart
    check_loss_and_buffers(captured, None, 2, 1)
    if captured.buffer_updates:
        name = next(iter(captured.buffer_updates))
        raise ValueError(
            f"buffer {name} changes with every micro-batch, and model replicas that are not alike "
            f"may have different numbers of them. {advice}"
        )


@dataclass(frozen=True)
class GroupDraft:
    """Alike replicas with the samples that they get, on devices that are counted from 0."""

    problem: Problem
    workload: Workload
    draft: Draft

    def plan(self, model: str) -> Plan:
        return assemble(self.problem, self.workload, self.draft, model)


def _draft(problem: Problem, group: Sequence[ReplicaSpec], num_samples: int) -> GroupDraft:
    """The best draft for these replicas; raises where memory is too small."""
    spec = group[0]
    config = problem.config.replace(
        replicas=None,
        num_task_graph=None,
        num_micro_batch=spec.num_micro_batch,
        schedule=spec.schedule,
        num_waves=spec.num_waves,
        recompute=list(spec.recompute) if isinstance(spec.recompute, tuple) else spec.recompute,
    )
    devices = [problem.cluster.devices[rank] for rank in _ranks(group)]
    own = replace(
        problem,
        cluster=problem.cluster.in_order(devices),
        config=config,
        batch_size=num_samples,
        mini_batch_size=problem.batch_size if num_samples < problem.batch_size else 0,
        # devices of other replicas have a say in it
        float32_precision=problem.float32_precision if problem.dtype == "tf32" else "highest",
    )
    workload = Workload(
        own.captured,
        num_samples,
        own.facts.gradients,
        own.optimizer_ratio,
        own.dtype,
        typical_share(num_samples, spec.num_micro_batch, len(group)),
        own.mini_batch_size,
        own.update_work,
        own.cluster.layer_times,
        facts=own.facts,
    )
    order = Order("as given", tuple(range(len(devices))))
    names = ", ".join(str(rank) for rank in group[0].ranks)
    try:
        return GroupDraft(own, workload, ReplicaDrafts(own, workload, order, spec.local()).best())
    except DoesNotFit as error:
        raise DoesNotFit(f"the model replica on ranks {names}: {error}") from None
    except ValueError as error:
        raise ValueError(f"the model replica on ranks {names}: {error}") from None


def _ranks(group: Sequence[ReplicaSpec]) -> list[int]:
    """The ranks of alike replicas, one replica after the other."""
    return [rank for spec in group for rank in spec.ranks]


@dataclass(frozen=True)
class ReplicaDrafts(OrderDrafts):
    """The drafts of alike replicas whose stages are given."""

    spec: ReplicaSpec
    """with its devices counted from 0"""

    def best(self) -> Draft:
        starts = self.spec.starts
        if starts is None:
            return super().best()
        task_graphs = self._given_cut(starts)
        devices = self.spec.devices
        of_stage = tuple(devices.index(stage.ranks) for stage in self.spec.stages)
        placement = replace(self._placement, of_task_graph=of_stage)
        return self._draft(StageCut(task_graphs, "as given", placement, is_chunked=True))

    def _given_cut(self, starts: Sequence[int]) -> TaskGraphs:
        """Every stage from its first operation to that of the next."""
        nodes = activations(self.problem.captured, self.problem.kinds)
        of_operation: dict[Node, int] = {}
        labels = []
        for stage, start in enumerate(starts):
            stop = starts[stage + 1] if stage + 1 < len(starts) else len(nodes)
            own = nodes[start:stop]
            if not own:
                raise ValueError(
                    f"stage {stage} from operation {start} to {stop} of the graph does nothing. "
                    f"Try: starts between 1 and {len(nodes) - 1} that rise from stage to stage"
                )
            of_operation |= dict.fromkeys(own, stage)
            labels.append(label_of(own))
        strategies = tuple(stage.strategy for stage in self.spec.stages)
        return TaskGraphs(of_operation, strategies, tuple(labels), "cuts as given")

    @cached_property
    def _cuts(self) -> PipelineCuts:
        return ReplicaCuts(self.problem, self.workload, self._operations, self.order, self.spec)

    @cached_property
    def _placement(self) -> DevicePlacement:
        problem = self.problem
        spec = self.spec
        width = len(spec.ranks)
        num_replicas = problem.cluster.num_devices // width
        devices = []
        for index, members in enumerate(spec.devices):
            ranks = tuple(
                tuple(replica * width + rank for rank in members) for replica in range(num_replicas)
            )
            devices.append(VirtualDevice(index, ranks))
        strategies = tuple(
            next(stage.strategy for stage in spec.stages if stage.ranks == members)
            for members in spec.devices
        )
        wanted = TaskGraphs({}, strategies, ("a part of the model",) * len(devices), "")
        placement = DevicePlacement(
            tuple(devices), tuple(range(len(devices))), num_replicas, "as given"
        )
        placement = with_grids(placement, wanted)
        widest = max(num_replicas * each.num_sample_parts for each in placement.virtual_devices)
        check_batch(problem.batch_size, spec.num_micro_batch, widest)
        check_loss_and_buffers(problem.captured, problem.not_additive, widest, spec.num_micro_batch)
        return placement


@dataclass(frozen=True)
class ReplicaCuts(PipelineCuts):
    """Cuts into stages whose devices are given: of any width, and `split` or not."""

    spec: ReplicaSpec

    @property
    def annotated(self) -> TaskGraphs | None:
        """One stage needs no cut; several are cut by time."""
        if len(self.spec.devices) > 1:
            return None
        activations = [
            node for node in self.operations if self.problem.kinds[node] is ValueKind.ACTIVATION
        ]
        of_operation = dict.fromkeys(activations, 0)
        strategies = (self.spec.stages[0].strategy,)
        return TaskGraphs(of_operation, strategies, ("the whole model",), "one stage, as given")

    @property
    def wanted(self) -> TaskGraphs:
        strategies = tuple(stage.strategy for stage in self.spec.stages)
        return TaskGraphs({}, strategies, ("a part of the model",) * len(strategies), "")

    @property
    def num_stages(self) -> int:
        return len(self.spec.devices)

    @cached_property
    def ranks(self) -> list[list[tuple[int, ...]]]:
        width = len(self.spec.ranks)
        num_replicas = self.problem.cluster.num_devices // width
        return [
            [tuple(replica * width + rank for rank in members) for replica in range(num_replicas)]
            for members in self.spec.devices
        ]

    def each(self) -> Iterator[tuple[TaskGraphs, str]]:
        for task_graphs, _ in super().each():
            strategies = tuple(stage.strategy for stage in self.spec.stages)
            yield replace(task_graphs, strategies=strategies), task_graphs.reason


def _first_drafts(problem: Problem, groups: Sequence[Sequence[ReplicaSpec]]) -> list[GroupDraft]:
    """A draft of every group: with the samples given, the others by the rates of the devices, and
    where these do not fit into memory, with as many as do.
    """
    loads = []
    for group in groups:
        devices = [problem.cluster.devices[rank] for rank in _ranks(group)]
        rates = [device.kind.reached_flop_per_s(problem.dtype) for device in devices]
        loads.append(Load(1.0 / sum(rates)))
    while True:
        sizes = _sizes(problem, groups, loads)
        drafts: list[GroupDraft] = []
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            try:
                drafts.append(_draft(problem, group, size))
            except DoesNotFit:
                most = _most_samples(problem, group, size)
                is_given = all(spec.num_samples is not None for spec in group)
                if is_given or not most:
                    raise
                loads[number] = replace(loads[number], most=most)
                break
        if len(drafts) == len(groups):
            return drafts


def _most_samples(problem: Problem, group: Sequence[ReplicaSpec], too_many: int) -> int:
    """The largest number of samples below `too_many` that these replicas have memory for, by
    bisection; 0 where not even the least fit.
    """
    trial = replace(problem, is_trial=True)
    low = _least(group) - 1
    high = too_many
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            _draft(trial, group, middle)
            low = middle
        except DoesNotFit:
            high = middle
    return low if low >= _least(group) else 0


def _least(group: Sequence[ReplicaSpec]) -> int:
    """Samples that these replicas need at least: one for each micro-batch and device of a stage."""
    widest = max(1 if stage.split is not None else len(stage.ranks) for stage in group[0].stages)
    return group[0].num_micro_batch * widest * len(group)


def _sizes(
    problem: Problem, groups: Sequence[Sequence[ReplicaSpec]], loads: Sequence[Load]
) -> list[int]:
    """Samples of every group: those given, and the rest so that the slowest is fastest."""
    given: dict[int, int] = {}
    least: dict[int, int] = {}
    for number, group in enumerate(groups):
        samples = [spec.num_samples for spec in group if spec.num_samples is not None]
        if len(samples) == len(group):
            given[number] = sum(samples)
            continue
        least[number] = _least(group)
    free = problem.batch_size - sum(given.values())
    if least and free < sum(least.values()):
        raise ValueError(
            f'"replicas": {free} of {problem.batch_size} samples are left for replicas that need '
            f"{' + '.join(map(str, least.values()))}: one for each micro-batch and device that "
            "shares it. Try: fewer micro-batches, or a larger mini-batch"
        )
    chosen: Mapping[int, int] = {}
    if least:
        own = [loads[number] for number in least]
        beyond = [
            replace(load, most=max(0, load.most - fewest))
            for load, fewest in zip(own, least.values(), strict=True)
        ]
        more = best_shares(free - sum(least.values()), beyond)
        chosen = {
            number: fewest + extra
            for (number, fewest), extra in zip(least.items(), more, strict=True)
        }
        chosen = _evened(chosen, least, own, free)
    return [given.get(number, chosen.get(number, 0)) for number in range(len(groups))]


def _evened(
    chosen: Mapping[int, int], least: Mapping[int, int], loads: Sequence[Load], total: int
) -> dict[int, int]:
    """The best shares of all samples where they leave everyone its least, else `chosen`."""
    best = dict(zip(least, best_shares(total, loads), strict=True))
    if all(best[number] >= fewest for number, fewest in least.items()):
        return best
    return dict(chosen)


def _shared_again(
    problem: Problem,
    groups: Sequence[Sequence[ReplicaSpec]],
    drafts: list[GroupDraft],
    model: str,
) -> list[GroupDraft]:
    """The drafts with samples that follow the simulated time of each group."""
    is_free = [any(spec.num_samples is None for spec in group) for group in groups]
    if sum(is_free) < 2:
        return drafts
    best = drafts
    best_s = float("inf")
    for _ in range(ROUNDS):
        times = [step_seconds(draft.plan(model)).gradients_s for draft in drafts]
        if max(times) >= best_s:
            break
        best = drafts
        best_s = max(times)
        sizes = [draft.problem.batch_size for draft in drafts]
        loads = [Load(time / size) for time, size in zip(times, sizes, strict=True)]
        new = _sizes(problem, groups, loads)
        if new == sizes:
            break
        try:
            drafts = [
                draft if size == before else _draft(problem, group, size)
                for draft, group, size, before in zip(drafts, groups, new, sizes, strict=True)
            ]
        except DoesNotFit:
            break  # a faster group has no memory for more
    return best


def _on_ranks(problem: Problem, plan: Plan, group: Sequence[ReplicaSpec]) -> Plan:
    """The plan of alike replicas on the ranks that they were given."""
    ranks = _ranks(group)
    if ranks == list(range(problem.cluster.num_devices)):
        return plan
    return join(problem, [plan], [ranks], ())


def _decisions(plans: Sequence[Plan]) -> tuple[Decision, ...]:
    """Why each group of replicas has its samples."""
    times = []
    sizes = []
    for plan in plans:
        sizes.append(str(plan.batch_size))
        times.append(human_seconds(step_seconds(plan).gradients_s))
    return (
        Decision(
            "model replicas",
            f"{count(sum(plan.num_replicas for plan in plans), 'replica')} of "
            f"{count(len(plans), 'kind')}",
            "replicas that are not alike have their own stages, micro-batches and schedule; "
            f"samples {' + '.join(sizes)} of a mini-batch, simulated alone {', '.join(times)}",
        ),
    )


__all__ = ["ReplicaSpec", "plan_of_replicas", "refuse_heterogeneous"]
