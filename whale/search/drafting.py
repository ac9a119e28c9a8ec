"""A candidate becomes a plan: cut, list-scheduled, proved and simulated as a hand-made plan is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whale.config import Config
from whale.planning.arrangement import Arrangement, GroupSplit
from whale.planning.assemble import assemble
from whale.planning.balance import Order
from whale.planning.drafts import OrderDrafts
from whale.planning.join import join
from whale.planning.planner import fingerprint
from whale.planning.pricing import typical_share
from whale.planning.problem import Problem
from whale.planning.replica_drafts import GroupDrafts
from whale.planning.replicas import with_precision
from whale.planning.schedules import ACTION_S
from whale.planning.stages import Assignment
from whale.plans.plan import Plan
from whale.plans.shares import DoesNotFit
from whale.scheduling.check import check
from whale.scheduling.memory import fits
from whale.search.candidate import ANY_GRID, CHOSEN, Candidate, DeviceGroup
from whale.search.candidate_plan import plan_of_candidate
from whale.search.other_clusters import carried_over
from whale.search.outline import Outline
from whale.search.split_parts import split_operations
from whale.simulation.simulate import figures_in, peak_bytes, step_seconds
from whale.units import human_bytes

DRAFT_TRIES = 60
"""size of the search for the order of actions of a draft; the best plan gets a full one"""


@dataclass(frozen=True)
class Drafted:
    """A candidate as a plan."""

    candidate: Candidate
    plan: Plan
    assignment: Assignment
    step_s: float
    """simulated"""

    @cached_property
    def score_s(self) -> float:
        """What the search makes small: the simulated step, and what the runtime adds to every
        action, which the simulation does not count.
        """
        return self.step_s + actions_seconds(self.plan)


def prove(plan: Plan) -> None:
    """Proves the orders of a plan, which drafts do not, since most of them are thrown away; and
    that no device is over-full at any action. Raises `DoesNotFit` where one is.
    """
    for template in plan.templates:
        check(template.schedule, require_channel_order=True)
    capacities = figures_in(plan).memory_bytes
    for rank, (peak, capacity) in enumerate(zip(peak_bytes(plan), capacities, strict=True)):
        if capacity and not fits(peak, capacity):
            raise DoesNotFit(
                f"rank {rank} ({plan.device_kinds[rank]}) holds {human_bytes(peak)} at its fullest "
                f"moment and has {human_bytes(capacity)}"
            )


def actions_seconds(plan: Plan) -> float:
    """Seconds that the runtime adds to the forwards and backwards of the busiest rank."""
    most = 0
    for template in plan.templates:
        for order in template.schedule.orders:
            most = max(most, sum(action.is_compute for action in order))
    return ACTION_S * most


@dataclass(frozen=True)
class Drafting:
    """Makes plans of candidates for one problem."""

    problem: Problem
    outline: Outline

    @cached_property
    def model(self) -> str:
        """The fingerprint of the captured model, computed once."""
        return fingerprint(self.problem.captured)

    @cached_property
    def _groups(self) -> GroupDrafts:
        """Drafts of replicas that candidates have in common."""
        return GroupDrafts(self.problem, self.model)

    def draft(self, candidate: Candidate, tries: int | None = DRAFT_TRIES) -> Drafted:
        """The plan of a candidate; raises ValueError where it cannot be: it does not fit, or the
        model may not be cut so.
        """
        offload = candidate.memory.offload
        problem = replace(
            self.problem,
            config=self.config_of(candidate),
            offload=offload if offload.is_any else self.problem.offload,
            schedule_tries=tries,
            is_proved=False,
        )
        is_whole = len(candidate.ranks) == problem.cluster.num_devices
        is_mixed = any(group.split for each in candidate.replicas for group in each.groups)
        if candidate.are_alike and is_mixed and not is_whole:
            return self._draft_part(problem, candidate)
        if not candidate.are_alike or not is_whole:
            return self._draft_replicas(problem, candidate)
        plan, assignment = self._draft_alike(problem, candidate)
        return Drafted(candidate, plan, assignment, step_seconds(plan).step_s)

    def _draft_alike(self, problem: Problem, candidate: Candidate) -> tuple[Plan, Assignment]:
        """Alike replicas on all devices of a problem."""
        first = candidate.replicas[0]
        width = max(first.widths)
        share = typical_share(
            problem.batch_size, first.num_micro_batch, len(candidate.replicas) * width
        )
        workload = self.outline.workload(share)
        order = Order(CHOSEN, tuple(range(problem.cluster.num_devices)))
        arrangement = arrangement_of(candidate, self.outline)
        drafts = OrderDrafts(problem, workload, order, arrangement=arrangement)
        draft = drafts.best()
        return assemble(problem, workload, draft, self.model), draft.assignment

    def _draft_part(self, problem: Problem, candidate: Candidate) -> Drafted:
        """Devices that split some of their operations, while others take no part."""
        ranks = candidate.ranks
        local = carried_over(candidate, ranks)
        assert local is not None
        plan, assignment = self._draft_alike(problem_on(problem, ranks), local)
        joined = with_precision(problem, join(problem, [plan], [ranks], ()))
        return Drafted(candidate, joined, assignment, step_seconds(joined).step_s)

    def _draft_replicas(self, problem: Problem, candidate: Candidate) -> Drafted:
        """Replicas that are not alike, or devices that are left out."""
        plan, assignment = plan_of_candidate(self._groups.with_problem(problem), candidate)
        return Drafted(candidate, plan, assignment, step_seconds(plan).step_s)

    def config_of(self, candidate: Candidate) -> Config:
        """The settings that a user would give for this candidate."""
        first = candidate.replicas[0]
        is_chunked = first.num_chunks > 1
        return self.problem.config.replace(
            num_task_graph=None,
            num_micro_batch=first.num_micro_batch,
            schedule=first.schedule,
            num_waves=first.num_chunks // 2 if is_chunked else None,
            recompute=_as_setting(candidate.memory.recompute),
            zero=candidate.memory.zero,
        )


def problem_on(problem: Problem, ranks: Sequence[int]) -> Problem:
    """The problem on these devices alone, counted from 0. Float32 products are rounded as with all
    devices, which start together.
    """
    if tuple(ranks) == tuple(range(problem.cluster.num_devices)):
        return problem
    devices = [problem.cluster.devices[rank] for rank in ranks]
    precision = problem.float32_precision if problem.dtype == "tf32" else "highest"
    cluster = problem.cluster.in_order(devices)
    return replace(problem, cluster=cluster, float32_precision=precision)


def _as_setting(recompute: bool | str | tuple[str, ...]) -> bool | str | list[str]:
    return list(recompute) if isinstance(recompute, tuple) else recompute


def arrangement_of(candidate: Candidate, outline: Outline) -> Arrangement:
    """What planning needs of a candidate whose replicas are alike."""
    first = candidate.replicas[0]
    ranks = []
    for stage in range(len(first.groups)):
        ranks.append(tuple(replica.groups[stage].ranks for replica in candidate.replicas))
    return Arrangement(
        ranks=tuple(ranks),
        starts=first.starts,
        num_chunks=first.num_chunks,
        is_loop=first.schedule == "interleaved",
        why_cuts=CHOSEN,
        splits=tuple(_split_of(group, outline) for group in first.groups),
    )


def _split_of(group: DeviceGroup, outline: Outline) -> GroupSplit | None:
    """How a group splits operations; None where its devices share samples."""
    if group.grid is None:
        return None
    grid = None if group.grid == ANY_GRID else group.grid
    return GroupSplit(grid, split_operations(outline, group.split) if group.split else None)
