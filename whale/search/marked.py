"""The search for an annotated model: what is marked stays, the rest is chosen.

    MarkedSearch.run    what unmarked operations become (`unmarked.py`), each with the best number
                        of micro-batches; where memory is short, with ZeRO and homes elsewhere; on
                        fewer devices; then the full search for the order of actions

Marks hold with their device counts, and so do settings that the user gave. Chunks, which are cut by
time alone, are made only where the user asks for them (`"schedule": "wave"`, `num_waves`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from whale.planning.join import join
from whale.planning.offload_auto import Try, too_many_bytes
from whale.planning.planner import make_plan
from whale.planning.problem import Problem
from whale.planning.replicas import with_precision
from whale.planning.schedules import FIXED_ORDERS
from whale.planning.stages import Assignment, state_behind
from whale.plans.plan import Plan
from whale.plans.shares import DoesNotFit, NotEnoughMemory
from whale.search.budget import Budget
from whale.search.candidate import Candidate, DeviceGroup, MemoryChoice, ReplicaChoice
from whale.search.drafting import DRAFT_TRIES, Drafted, problem_on
from whale.search.marked_estimate import MarkedEstimator
from whale.search.outline import Outline
from whale.search.settings import OpenSettings, settled
from whale.search.shapes import subsets
from whale.search.tries import SearchProgress, Tried, Tries
from whale.search.unmarked import Rest, Unmarked
from whale.simulation.simulate import step_seconds

LONGER = "with them a step takes longer: they would be waited for, or hold gradients up"
"""why devices are left out"""
PATIENCE = 2
"""so many numbers of micro-batches in a row that are slower end the comparison"""
DRAFTS_OF_A_REST = 4
"""about: so many times fewer rests are drafted than a search has drafts"""
SURE_RESTS = 2
"""so many are drafted whatever their estimates: those of grids are rough"""
CUT_MOVES_OF_A_REST = 5
"""so many times fewer cuts of unmarked operations are made than a search moves cuts"""
USUAL_COUNT = 8
"""micro-batches for which unmarked operations are cut where their number is open"""


@dataclass(frozen=True, eq=False)
class MarkedChoice:
    """One way to train an annotated model."""

    rest: Rest
    num_micro_batch: int
    memory: MemoryChoice
    ranks: tuple[int, ...]
    """of the devices that take part"""


@dataclass(frozen=True)
class MarkedDraft(Drafted):
    """A choice as a plan; its candidate says what became of it."""

    choice: MarkedChoice

    @property
    def is_short(self) -> bool:
        """Memory has it recompute what nobody asked for."""
        is_open = self.choice.memory.recompute == "auto"
        return is_open and any(stage.num_recomputed for stage in self.plan.stages)


@dataclass
class MarkedSearch(Tries):
    """One search for an annotated model."""

    refusals: list[ValueError] = field(default_factory=list)
    """why choices could not be"""
    short: list[Rest] = field(default_factory=list)
    """those that memory keeps from fitting, or has recompute"""

    def __post_init__(self) -> None:
        self.measures = self.settings.memory_measures()
        self.everything = tuple(range(self.problem.cluster.num_devices))
        counts = self.settings.micro_batches(self.problem.batch_size)
        # more than there are samples: the planner says so
        self.counts = counts or [self.settings.num_micro_batch or 1]
        usual = max(each for each in self.counts if each <= max(USUAL_COUNT, self.counts[0]))
        config = settled(self.problem.config).replace(num_micro_batch=usual)
        self.outline = Outline(replace(self.problem, config=config))
        self.estimator = MarkedEstimator(self.outline)
        cuts = self.budget.cut_moves // CUT_MOVES_OF_A_REST
        self.unmarked = Unmarked(self.outline.problem, self.outline, cuts)
        self._estimates: dict[tuple[Rest, tuple[int, ...]], tuple[float, int]] = {}

    @property
    def best(self) -> MarkedDraft | None:
        found = super().best
        assert found is None or isinstance(found, MarkedDraft)
        return found

    def _draft_everything(self) -> None:
        rests = self.ranked_rests()
        drafted = []
        for number, rest in enumerate(rests, start=1):
            if number > SURE_RESTS and self._is_slower(self._estimate(rest)[0]):
                break
            self.report("unmarked operations", number, len(rests))
            self._climb(rest, self.measures[0], self.everything)
            drafted.append(rest)
        self._draft_memory(drafted)
        self._draft_smaller(rests[0])
        self._polish()

    def _is_slower(self, estimate_s: float) -> bool:
        """Whether a draft does not pay, by its estimate."""
        best = self.best
        return best is not None and estimate_s > self.budget.slower * best.score_s

    @property
    def why(self) -> str:
        """What the best plan keeps of the annotations, and what it chose for the rest."""
        assert self.best is not None
        return self.unmarked.text(self.best.choice.rest)

    @property
    def refusal(self) -> ValueError:
        """Why there is no plan: what keeps the first choice from being one."""
        return next(iter(self.refusals), DoesNotFit(self.tried[-1].problem))

    @property
    def why_left_out(self) -> str:
        """Why the best plan leaves devices out."""
        is_whole = any(not each.plan.left_out for each in self.drafted)
        return LONGER if is_whole else str(self.refusal)

    # ---- estimates

    def ranked_rests(self) -> list[Rest]:
        """What unmarked operations may become: as the planner has it, then those that are estimated
        to be fastest.
        """
        first, *others = self.unmarked.rests()
        others.sort(key=lambda rest: self._estimate(rest)[0])
        return [first, *others[: max(1, self.budget.drafts // DRAFTS_OF_A_REST)]]

    def _estimate(self, rest: Rest, ranks: tuple[int, ...] = ()) -> tuple[float, int]:
        """(seconds of a step, place of the best number of micro-batches)"""
        key = (rest, ranks or self.everything)
        if key not in self._estimates:
            self.num_estimates += 1
            cluster = problem_on(self.problem, key[1]).cluster
            found = self.estimator.seconds(rest.marks, cluster, self.counts)
            best = min(found, default=math.inf)
            self._estimates[key] = best, found.index(best) if found else 0
        return self._estimates[key]

    # ---- drafts

    def _climb(
        self, rest: Rest, memory: MemoryChoice, ranks: tuple[int, ...]
    ) -> MarkedDraft | None:
        """The best plan of a rest: from the number of micro-batches that is estimated to be best
        upwards, since more of them take less memory, then downwards, while steps get shorter.
        """
        start = self._estimate(rest, ranks)[1]
        best: MarkedDraft | None = None
        for counts in (self.counts[start:], self.counts[:start][::-1]):
            worse = 0
            for number in counts:
                made = self.draft(MarkedChoice(rest, number, memory, ranks))
                if made is not None and (best is None or made.score_s < best.score_s):
                    best = made
                    worse = 0
                elif (best is not None and (worse := worse + 1) == PATIENCE) or (
                    best is None and not _may_be_smaller(self.refusals[-1])
                ):
                    break
            if best is None:
                return None
        if best is not None and best.is_short:
            self._note_short(rest)
        return best

    def _note_short(self, rest: Rest) -> None:
        if rest not in self.short:
            self.short.append(rest)

    def draft(self, choice: MarkedChoice, tries: int | None = DRAFT_TRIES) -> MarkedDraft | None:
        """Makes and notes the plan of a choice; None where there is none."""
        try:
            plan, assignment = self._plan(choice, tries)
        except ValueError as error:
            self.refusals.append(error)
            if isinstance(error, DoesNotFit):
                self._note_short(choice.rest)
            replica = ReplicaChoice((DeviceGroup(choice.ranks),), choice.num_micro_batch)
            self.tried.append(Tried(Candidate((replica,), choice.memory), math.inf, str(error)))
            return None
        candidate = candidate_of(self.problem, plan, choice)
        made = MarkedDraft(candidate, plan, assignment, step_seconds(plan).step_s, choice)
        self.drafted.append(made)
        self.tried.append(Tried(candidate, made.step_s))
        return made

    def _plan(self, choice: MarkedChoice, tries: int | None) -> tuple[Plan, Assignment]:
        own = problem_on(self.problem, choice.ranks)
        placement = self.estimator.placement(choice.rest.marks, own.cluster)
        config = settled(own.config).replace(
            num_micro_batch=choice.num_micro_batch,
            schedule=self.settings.schedule_of(len(placement.virtual_devices)),
            zero=choice.memory.zero,
        )
        plan, assignment = make_plan(
            replace(
                own,
                config=config,
                marks=choice.rest.marks,
                offload=choice.memory.offload,
                schedule_tries=tries,
                is_proved=False,
                is_advised=False,
                keeps_marks=True,
            )
        )
        if choice.ranks == self.everything:
            return plan, assignment
        joined = join(self.problem, [plan], [choice.ranks], ())
        return with_precision(self.problem, joined), assignment

    def _draft_memory(self, rests: list[Rest]) -> None:
        """Where memory is short: what ranks hold alike in parts, and homes elsewhere, cheapest
        first. What fits without recomputation is not tried with more beside it.
        """
        wanted = rests
        if not self.settings.zero_for_speed:
            wanted = [rest for rest in rests if rest in self.short]
        for rest in wanted[: self.budget.zero or int(self.best is None)]:
            fitting: list[Try] = []
            for number, memory in enumerate(self.measures[1:], start=1):
                own = Try(memory.zero, memory.offload)
                is_more = any(each.is_less_than(own) for each in fitting)
                if is_more or too_many_bytes(self.problem, memory.offload) is not None:
                    continue
                self.report("ZeRO and offload", number, len(self.measures) - 1)
                made = self._climb(rest, memory, self.everything)
                if made is not None and not made.is_short:
                    fitting.append(own)

    def _draft_smaller(self, first: Rest) -> None:
        """Fewer devices, where the marks leave some over: these make the step longer, or have no
        place. Gradients in parts, and homes elsewhere, need all of them.
        """
        best = self.best
        if self.measures[0].zero or (best is None and self.short):
            return
        rests = [first] if best is None else list(dict.fromkeys([best.choice.rest, first]))
        whole_s = math.inf if best is None else self._estimate(best.choice.rest)[0]
        found = []
        for ranks in subsets(self.problem.cluster):
            for rest in rests:
                seconds = self._estimate(rest, ranks)[0]
                if seconds < whole_s:
                    found.append((seconds, rest, ranks))
        found.sort(key=lambda each: each[0])
        for number, (seconds, rest, ranks) in enumerate(found[: self.budget.smaller], start=1):
            if self._is_slower(seconds):
                break
            self.report("fewer devices", number, self.budget.smaller)
            self._climb(rest, self.measures[0], ranks)

    def _polish(self) -> None:
        """The best with the full search for the order of actions."""
        best = self.best
        if best is not None and len(best.plan.virtual_devices) > 1:
            if best.plan.schedule.name not in FIXED_ORDERS:
                self.report("order of actions", 1, 1)
                self.draft(best.choice, None)


def _may_be_smaller(refusal: ValueError) -> bool:
    """Whether more micro-batches may make it fit: not where weights alone are too much."""
    is_over_full = isinstance(refusal, NotEnoughMemory) and refusal.is_over_full
    return isinstance(refusal, DoesNotFit) and not is_over_full


def candidate_of(problem: Problem, plan: Plan, choice: MarkedChoice) -> Candidate:
    """What became of a choice, as the candidates of other searches say it."""
    groups_of: dict[int, set[str]] = {}
    for task_graph in plan.task_graphs:
        groups_of.setdefault(task_graph.virtual_device, set()).add(task_graph.strategy)
    split = _split_parameters(problem, choice.rest)
    replicas = []
    for replica in plan.replicas:
        groups = []
        for index, (ranks, grid) in enumerate(zip(replica.ranks, plan.template.grids, strict=True)):
            shape = None if grid is None else (grid.gx, grid.gy, grid.gz)
            is_mixed = shape is not None and len(groups_of[index]) > 1
            groups.append(DeviceGroup(ranks, shape, split if is_mixed else ()))
        replicas.append(ReplicaChoice(tuple(groups), plan.num_micro_batch, plan.schedule.name))
    return Candidate(tuple(replicas), choice.memory)


def _split_parameters(problem: Problem, rest: Rest) -> tuple[str, ...]:
    """Parameters that operations read which are marked `split`."""
    state = problem.captured.state
    found: dict[str, None] = {}
    for node, mark in rest.marks.items():
        if mark.strategy.kind == "split":
            for name, _ in state_behind(node, problem.kinds):
                if state[name].kind == "parameter":
                    found[name] = None
    return tuple(found)


def new_marked_search(
    problem: Problem, progress: Callable[[SearchProgress], None] = lambda _: None
) -> MarkedSearch:
    """A search that is to be run."""
    number = sum(1 for _ in problem.captured.compute_nodes())
    budget = Budget.for_problem(number, problem.cluster.num_devices)
    return MarkedSearch(problem, OpenSettings.of(problem), budget, progress)
