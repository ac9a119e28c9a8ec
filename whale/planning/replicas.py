"""A plan of model replicas that are given one by one and need not be alike.

    plan_of_replicas        replicas in groups of alike ones; samples of each group
      plan of a group       as any plan, for the devices and the samples of the group alone
                            (`replica_drafts.py`): cuts, recomputation, schedule, shares
    join                    the groups as the templates of one plan: ranks and stages counted
                            through, gradients over whoever holds the same weights

Samples that nobody gave are shared by speed: first by the rates of the devices, then by what the
simulation says of each group, until the slowest does not get faster. Devices take whole samples:
where each has few of them, single ones are moved then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from whale.names import count
from whale.operations.nodes import trains_batch_norm
from whale.planning.join import join
from whale.planning.problem import Problem, check_loss_and_buffers, precision_decision
from whale.planning.replica_drafts import GroupDraft, GroupDrafts, ranks_of_group
from whale.planning.replica_specs import ReplicaSpec, alike, check_specs
from whale.planning.stages import Assignment
from whale.plans.plan import Decision, Plan
from whale.plans.shares import DoesNotFit, Load, best_shares
from whale.units import human_seconds

ROUNDS = 4
"""how often samples are shared again by what the simulation says"""
FEW_SAMPLES = 3
"""so many on a device of a group: one more or less is a step in its time, which no rate shows"""


def plan_of_replicas(
    made: GroupDrafts, specs: Sequence[ReplicaSpec], may_leave_out: bool = False
) -> tuple[Plan, Assignment]:
    """The plan of these model replicas, and where every operation runs in the first of them.
    `may_leave_out`: ranks that no replica has take no part.
    """
    problem = made.problem
    _refuse_annotations(problem)
    check_specs(specs, problem.cluster.num_devices, problem.batch_size, may_leave_out)
    groups = alike(specs, problem.cluster)
    if len(groups) > 1:
        refuse_heterogeneous(problem)
    drafts = _shared_again(made, groups, _first_drafts(made, groups))
    drafts = _moved_one_by_one(made, groups, drafts)
    plans = [draft.plan for draft in drafts]
    assignment = drafts[0].draft.assignment
    if len(plans) == 1:
        return with_precision(problem, _on_ranks(problem, plans[0], groups[0])), assignment
    ranks = [ranks_of_group(group) for group in groups]
    joined = join(problem, plans, ranks, _decisions(drafts))
    return with_precision(problem, joined), assignment


def with_precision(problem: Problem, plan: Plan) -> Plan:
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


def _first_drafts(made: GroupDrafts, groups: Sequence[Sequence[ReplicaSpec]]) -> list[GroupDraft]:
    """A draft of every group: with the samples given, the others by the rates of the devices, and
    where these do not fit into memory, with as many as do.
    """
    problem = made.problem
    loads = []
    for group in groups:
        devices = [problem.cluster.devices[rank] for rank in ranks_of_group(group)]
        rates = [device.kind.reached_flop_per_s(problem.dtype) for device in devices]
        loads.append(Load(1.0 / sum(rates)))
    while True:
        sizes = _sizes(problem, groups, loads)
        drafts: list[GroupDraft] = []
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            try:
                drafts.append(made.of(group, size))
            except DoesNotFit:
                most = _most_samples(made, group, size)
                is_given = all(spec.num_samples is not None for spec in group)
                if is_given or not most:
                    raise
                loads[number] = replace(loads[number], most=most)
                break
        if len(drafts) == len(groups):
            return drafts


def _most_samples(made: GroupDrafts, group: Sequence[ReplicaSpec], too_many: int) -> int:
    """The largest number of samples below `too_many` that these replicas have memory for, by
    bisection; 0 where not even the least fit.
    """
    low = _least(group) - 1
    high = too_many
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            made.of(group, middle, is_trial=True)
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
    made: GroupDrafts, groups: Sequence[Sequence[ReplicaSpec]], drafts: list[GroupDraft]
) -> list[GroupDraft]:
    """The drafts with samples that follow the simulated time of each group."""
    is_free = [any(spec.num_samples is None for spec in group) for group in groups]
    if sum(is_free) < 2:
        return drafts
    best = drafts
    best_s = float("inf")
    for _ in range(ROUNDS):
        times = [draft.gradients_s for draft in drafts]
        if max(times) >= best_s:
            break
        best = drafts
        best_s = max(times)
        sizes = [draft.problem.batch_size for draft in drafts]
        loads = [Load(time / size) for time, size in zip(times, sizes, strict=True)]
        new = _sizes(made.problem, groups, loads)
        if new == sizes:
            break
        try:
            drafts = [
                draft if size == before else made.of(group, size)
                for draft, group, size, before in zip(drafts, groups, new, sizes, strict=True)
            ]
        except DoesNotFit:
            break  # a faster group has no memory for more
    return best


def _moved_one_by_one(
    made: GroupDrafts, groups: Sequence[Sequence[ReplicaSpec]], drafts: list[GroupDraft]
) -> list[GroupDraft]:
    """The drafts after single samples of the slowest group went to others, as long as the slowest
    gets faster. Three devices take as long for 5 samples as for 6.
    """
    is_free = [any(spec.num_samples is None for spec in group) for group in groups]
    while True:
        slowest = max(range(len(drafts)), key=lambda number: drafts[number].gradients_s)
        size = drafts[slowest].problem.batch_size
        few = FEW_SAMPLES * len(ranks_of_group(groups[slowest]))
        if not is_free[slowest] or not _least(groups[slowest]) < size <= few:
            return drafts
        best = drafts
        for other in range(len(drafts)):
            if other == slowest or not is_free[other]:
                continue
            moved = list(drafts)
            try:
                moved[slowest] = made.of(groups[slowest], size - 1)
                moved[other] = made.of(groups[other], drafts[other].problem.batch_size + 1)
            except DoesNotFit:
                continue
            best = min(best, moved, key=_slowest_s)
        if best is drafts:
            return drafts
        drafts = best


def _slowest_s(drafts: Sequence[GroupDraft]) -> float:
    return max(draft.gradients_s for draft in drafts)


def _on_ranks(problem: Problem, plan: Plan, group: Sequence[ReplicaSpec]) -> Plan:
    """The plan of alike replicas on the ranks that they were given."""
    ranks = ranks_of_group(group)
    if ranks == list(range(problem.cluster.num_devices)):
        return plan
    return join(problem, [plan], [ranks], ())


def _decisions(drafts: Sequence[GroupDraft]) -> tuple[Decision, ...]:
    """Why each group of replicas has its samples."""
    times = []
    sizes = []
    for draft in drafts:
        sizes.append(str(draft.plan.batch_size))
        times.append(human_seconds(draft.gradients_s))
    return (
        Decision(
            "model replicas",
            f"{count(sum(draft.plan.num_replicas for draft in drafts), 'replica')} of "
            f"{count(len(drafts), 'kind')}",
            "replicas that are not alike have their own stages, micro-batches and schedule; "
            f"samples {' + '.join(sizes)} of a mini-batch, simulated alone {', '.join(times)}",
        ),
    )
