"""The search: shapes are bounded and estimated, the best are drafted, then polished (docs/search.md).

    find_plan            the fastest plan that was found, with what was tried
      Search.estimated   shapes x micro-batches: guessed, bounded, estimated; the best first
      Search.draft_best  plans of the best estimates
      Search.polish      chunks, cuts, and the full search for the order of actions

Budgets are counts. Nothing here asks the clock, so every run gives the same plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from whale.planning.problem import Problem, check_loss_and_buffers
from whale.planning.schedules import FIXED_ORDERS
from whale.search.candidate import Candidate, DeviceGroup, MemoryChoice, ReplicaChoice
from whale.search.drafting import Drafted, Drafting
from whale.search.estimate import Estimate, Estimator, Point
from whale.search.moves import best_cuts
from whale.search.outline import Outline
from whale.search.settings import OpenSettings
from whale.search.shapes import shapes

MOST_REFUSED = 4
"""so many times more estimates and drafts where few fit"""


@dataclass(frozen=True)
class Budget:
    """How much is tried."""

    estimates: int = 400
    cut_moves: int = 200
    """estimates of moved cuts, for each candidate that is drafted"""
    drafts: int = 8
    polished: int = 2
    """candidates that are drafted with several chunks, and with a full search for their order"""

    @staticmethod
    def for_problem(num_operations: int, num_devices: int) -> Budget:
        """Less for large models, whose drafts take longer; less for large clusters, whose estimates
        do.
        """
        estimates = max(60, 400 * 8 // max(8, num_devices))
        drafts = 4 if num_operations * num_devices > 100_000 else 8
        return Budget(estimates=estimates, drafts=drafts)


@dataclass(frozen=True)
class Tried:
    """A candidate that was drafted, for the record."""

    candidate: Candidate
    step_s: float
    """infinite: it could not be"""
    problem: str = ""


@dataclass(frozen=True)
class Progress:
    """What the search tells about itself on the way."""

    what: str
    done: int
    of: int
    best: Drafted | None


@dataclass
class Search:
    """One search."""

    problem: Problem
    settings: OpenSettings
    budget: Budget
    progress: Callable[[Progress], None] = lambda _: None
    drafted: list[Drafted] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    num_estimates: int = 0
    is_interrupted: bool = False

    def __post_init__(self) -> None:
        self.outline = Outline(self.problem)
        self.estimator = Estimator(self.outline, self.settings.recompute)
        self.drafting = Drafting(self.problem, self.outline)

    @property
    def best(self) -> Drafted | None:
        return min(self.drafted, key=lambda each: each.score_s, default=None)

    def run(self) -> None:
        """Fills `drafted`; an interrupt ends it with what is there."""
        try:
            self.draft_best(self.estimated())
            self.polish()
        except KeyboardInterrupt:
            self.is_interrupted = True

    # ---- estimates

    def estimated(self) -> list[Estimate]:
        """Estimates that fit, the best first."""
        queue = []
        for place, point in enumerate(self._points()):
            queue.append((self.estimator.guess(point), place, point))
        heapq.heapify(queue)
        found: list[Estimate] = []
        least = math.inf
        most = self.budget.estimates
        while queue and len(found) < most and self.num_estimates < MOST_REFUSED * most:
            _, _, point = heapq.heappop(queue)
            if self.estimator.bound(point) > least:
                continue
            estimate = self.estimator.estimate(point)
            self.num_estimates += 1
            if estimate.fits:
                found.append(estimate)
                least = min(least, estimate.step_s)
            if self.num_estimates % 50 == 0:
                self._report("estimates", self.num_estimates, self.budget.estimates)
        return sorted(found, key=lambda each: each.step_s)

    def _points(self) -> Iterator[Point]:
        most_wide = self._most_wide()
        for shape in shapes(self.problem.cluster):
            if shape.widest > most_wide or not self.estimator.can_hold(shape):
                continue
            for chunks in self.settings.chunk_counts(shape.num_stages):
                if shape.num_stages * chunks > self.outline.num_segments:
                    continue
                for count in self.settings.micro_batches(self.problem.batch_size // shape.widest):
                    yield Point(shape, count, chunks)

    def _most_wide(self) -> int:
        """Over how many devices a micro-batch may be cut."""
        problem = self.problem
        try:
            check_loss_and_buffers(problem.captured, problem.not_additive, 2, 1)
        except ValueError:
            return 1
        return problem.batch_size

    # ---- drafts

    def candidate_of(self, estimate: Estimate) -> Candidate:
        """The estimate with its cuts moved to where the step is shortest."""
        better = best_cuts(self.estimator, estimate, self.budget.cut_moves)
        starts = self.outline.starts(better.cuts)
        replicas = []
        point = better.point
        for stages in point.shape.replicas:
            groups = tuple(DeviceGroup(ranks) for ranks in stages)
            schedule = self.settings.schedule_of(len(groups))
            replicas.append(
                ReplicaChoice(groups, point.num_micro_batch, schedule, point.num_chunks, starts)
            )
        return Candidate(tuple(replicas), MemoryChoice(self.settings.recompute))

    def draft_best(self, estimates: list[Estimate]) -> None:
        """Drafts the best estimates, not twice the same shape with nearly as many micro-batches."""
        for number, estimate in enumerate(estimates, start=1):
            best = self.best
            if best is not None:
                if number > self.budget.drafts or self._is_hopeless(estimate, best):
                    break
            elif number > MOST_REFUSED * self.budget.drafts:
                break
            self._report("plans", number, self.budget.drafts)
            self.draft(self.candidate_of(estimate))

    def _is_hopeless(self, estimate: Estimate, best: Drafted) -> bool:
        """Even the bound is no better than the best plan."""
        return self.estimator.bound(estimate.point) >= best.score_s

    def draft(self, candidate: Candidate, tries: int | None = 60) -> Drafted | None:
        """The plan of a candidate, kept; None where it cannot be."""
        try:
            drafted = self.drafting.draft(candidate, tries)
        except ValueError as error:
            self.tried.append(Tried(candidate, math.inf, str(error)))
            return None
        self.drafted.append(drafted)
        self.tried.append(Tried(candidate, drafted.step_s))
        return drafted

    # ---- polish

    def polish(self) -> None:
        """The full search for the order of actions of the best."""
        for drafted in sorted(self.drafted, key=lambda each: each.score_s)[: self.budget.polished]:
            first = drafted.candidate.replicas[0]
            if len(first.groups) > 1 and first.schedule not in FIXED_ORDERS:
                self._report("order of actions", 1, 1)
                self.draft(drafted.candidate, None)

    def _report(self, what: str, done: int, of: int) -> None:
        self.progress(Progress(what, done, of, self.best))


def search(
    problem: Problem,
    settings: OpenSettings,
    budget: Budget | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Search:
    """A finished search."""
    number = sum(1 for _ in problem.captured.compute_nodes())
    chosen = budget or Budget.for_problem(number, problem.cluster.num_devices)
    made = Search(replace(problem), settings, chosen, progress)
    made.run()
    return made
