"""The search: shapes are bounded and estimated, the best are drafted, then polished
(docs/search.md).

    find_plan            the fastest plan that was found, with what was tried
      Search.estimated   shapes x micro-batches: guessed, bounded, estimated; the best first
      Search.draft_best  plans of the best estimates
      Search.polish      chunks, cuts, and the full search for the order of actions

Budgets are counts. Nothing here asks the clock, so every run gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whale.cluster.cluster import Cluster
from whale.planning.problem import Problem, check_loss_and_buffers
from whale.planning.schedules import FIXED_ORDERS
from whale.search.budget import Budget
from whale.search.candidate import Candidate, DeviceGroup, MemoryChoice, ReplicaChoice
from whale.search.device_moves import moved_devices
from whale.search.drafting import Drafted, Drafting
from whale.search.equal_stages import draft_equal
from whale.search.estimate import Estimator
from whale.search.first_fit import first_fit
from whale.search.memory_drafts import draft_offload, draft_zero
from whale.search.moves import best_cuts, neighbours, nudged
from whale.search.outline import Outline
from whale.search.partitions import Partitions
from whale.search.point import Estimate, Point, Shape
from whale.search.settings import OpenSettings
from whale.search.shapes import shapes, subsets
from whale.search.slices import draft_slices
from whale.search.split_drafts import draft_split, draft_split_of_parts, draft_tensor_groups
from whale.search.tries import SearchProgress, Tried, Tries

LOOKED_AT = 3
"""so many times more estimates get their best cuts than are drafted"""
NEARLY = 1.02
"""others than the best are drafted where their estimate is at most so many times the best"""
NEAR_POINT = 1.05
"""a point near to the best is drafted where its estimate is at most so many times that of the best:
both err alike
"""
FEW_ESTIMATES = 8
"""so many points are estimated at least of every kind of waves"""
MOST_REFUSED = 4
"""so many times more estimates and drafts where few fit"""


@dataclass
class Search(Tries):
    """One search for a model without annotations."""

    seeds: Sequence[Candidate] = ()
    """drafted before all others: what was found for a problem that is nearly the same"""
    least_short_s: float = math.inf
    """what the fastest of the points may take that memory keeps from fitting, or has recompute"""

    def __post_init__(self) -> None:
        self.outline = Outline(self.problem)
        self.measures = self.settings.memory_measures()
        self._estimators: dict[tuple[MemoryChoice, int | None], Estimator] = {}
        self.estimator = self.estimator_of(self.measures[0])
        self.drafting = Drafting(self.problem, self.outline)
        self._neighbours_left = self.budget.neighbours
        self.moved: dict[tuple[Estimate, MemoryChoice], Estimate] = {}
        """the same with its best cuts"""
        self.point_of: dict[Candidate, Point] = {}
        self.partitions = Partitions(self)
        self._all_shapes: list[Shape] = []
        self._families: set[object] = set()
        """of estimates that were drafted"""
        self._signatures: set[object] = set()

    def _draft_everything(self) -> None:
        """Seeds, then slices of a large cluster, or drafts of every kind."""
        for seed in self.seeds:
            self.draft(seed)
        if not draft_slices(self):
            self._draft_all()

    def _draft_all(self) -> None:
        """Drafts of every kind on the whole cluster."""
        self.draft_best(self.estimated(self.points(), self.estimator), self.budget.drafts)
        self.draft_waves()
        draft_equal(self)
        draft_split(self)
        draft_tensor_groups(self)
        draft_zero(self)
        draft_offload(self)
        self.draft_heterogeneous()
        self.draft_smaller()
        draft_split_of_parts(self)
        self.polish()

    def on(self, problem: Problem) -> Search:
        """A search with the same settings for another problem, which is to be run."""
        return Search(problem, self.settings, self.budget, self.progress)

    # ---- estimates

    def estimated(
        self,
        points: Iterable[Point],
        estimator: Estimator,
        most: int | None = None,
        below_s: float = math.inf,
    ) -> list[Estimate]:
        """Estimates that fit, the best first; at most so many. `below_s`: what cannot be faster
        than that is left out.
        """
        most = most or self.budget.estimates
        queue = sorted(((estimator.guess(point), point) for point in points), key=_first)
        tried = 0
        place = -1
        found: list[Estimate] = []
        least = below_s
        until_first = max(most, self.budget.estimates // 8)
        alone = MOST_REFUSED * until_first // 2  # so many that do not fit are tried in order

        def fits(place: int) -> bool:
            point = queue[place][1]
            self.num_estimates += 1
            return estimator.bound(point) <= below_s and estimator.estimate(point).fits

        while place + 1 < len(queue) and len(found) < most:
            if tried >= MOST_REFUSED * (most if found else until_first):
                break
            place += 1
            if not found and tried == alone:
                place = first_fit(fits, place, len(queue), alone)
                alone = -1
                tried = 0
                if place == len(queue):
                    break
            guess, point = queue[place]
            if estimator.bound(point) > least:
                continue
            estimate = estimator.estimate(point)
            tried += 1
            self.num_estimates += 1
            is_asked = self.settings.recompute is True
            if not estimate.fits or (any(estimate.recomputed) and not is_asked):
                self.least_short_s = min(self.least_short_s, guess)
            if estimate.fits:
                found.append(estimate)
                least = min(least, estimate.step_s)
            if self.num_estimates % 50 == 0:
                self.report("estimates", self.num_estimates, 0)
        return sorted(found, key=lambda each: each.step_s)

    def estimator_of(self, memory: MemoryChoice, num_samples: int | None = None) -> Estimator:
        """The estimator, and all it has computed, of candidates that do this about memory."""
        key = (memory, num_samples)
        if key not in self._estimators:
            self._estimators[key] = Estimator(
                self.outline, memory.recompute, num_samples, memory.zero, memory.offload
            )
        return self._estimators[key]

    def points(
        self,
        ranks: tuple[int, ...] | None = None,
        num_samples: int | None = None,
        estimator: Estimator | None = None,
        in_waves: bool = False,
    ) -> Iterator[Point]:
        """Points on all devices, or on these; for the whole mini-batch, or for so many samples.
        `in_waves`: with more stages on each group of devices than there must be, else with the
        fewest. Estimates think too well of waves, so they do not compete with other points.
        """
        most_wide = self.most_wide
        estimator = estimator or self.estimator
        batch_size = num_samples or self.problem.batch_size
        for shape in self._shapes(estimator.outline.problem.cluster, ranks):
            if shape.widest > most_wide:
                continue
            if not estimator.can_hold(shape):
                self._note_too_large(shape)
                continue
            counts = self.settings.chunk_counts(shape.num_stages)
            for chunks in counts[1:] if in_waves else counts[:1]:
                if shape.num_stages * chunks > self.outline.num_segments:
                    continue
                for count in self.settings.micro_batches(batch_size // shape.widest):
                    yield Point(shape, count, chunks)

    def _shapes(self, cluster: Cluster, ranks: tuple[int, ...] | None) -> Iterable[Shape]:
        """Those on all devices of the cluster are enumerated once."""
        if cluster is not self.problem.cluster or ranks is not None:
            return shapes(cluster, ranks)
        if not self._all_shapes:
            self._all_shapes = list(shapes(cluster))
        return self._all_shapes

    def _note_too_large(self, shape: Shape) -> None:
        """Notes a shape whose weights do not fit, for `least_short_s`."""
        counts = self.settings.micro_batches(self.problem.batch_size // shape.widest)
        if counts and shape.num_devices == self.problem.cluster.num_devices:
            guess = self.estimator.guess(Point(shape, counts[0]))
            self.least_short_s = min(self.least_short_s, guess)

    @property
    def is_short(self) -> bool:
        """Whether a candidate could be faster than the best if there were more memory."""
        best = self.best
        return (
            math.isfinite(self.least_short_s)
            if best is None
            else (self.least_short_s < best.score_s)
        )

    @cached_property
    def most_wide(self) -> int:
        """Over how many devices a micro-batch may be cut."""
        problem = self.problem
        try:
            check_loss_and_buffers(problem.captured, problem.not_additive, 2, 1)
        except ValueError:
            return 1
        return problem.batch_size

    # ---- drafts

    def candidate_of(self, estimate: Estimate, memory: MemoryChoice | None = None) -> Candidate:
        """The estimate with its cuts moved to where the step is shortest. `memory`: None for what
        all candidates are tried with.
        """
        memory = memory or self.measures[0]
        starts = self.outline.starts(self.with_best_cuts(estimate, memory).cuts)
        replicas = []
        point = estimate.point
        for stages in point.shape.replicas:
            groups = tuple(DeviceGroup(ranks) for ranks in stages)
            schedule = self.settings.schedule_of(len(groups))
            replicas.append(
                ReplicaChoice(groups, point.num_micro_batch, schedule, point.num_chunks, starts)
            )
        made = Candidate(tuple(replicas), memory)
        if point.shape.num_devices == self.problem.cluster.num_devices:
            self.point_of[made] = point
        return made

    def with_best_cuts(self, estimate: Estimate, memory: MemoryChoice | None = None) -> Estimate:
        """The estimate with its cuts moved to where the step is shortest; looked up the second
        time.
        """
        memory = memory or self.measures[0]
        key = (estimate, memory)
        if key not in self.moved:
            better = best_cuts(self.estimator_of(memory), estimate, self.budget.cut_moves)
            self.moved[key] = self.moved[better, memory] = better
        return self.moved[key]

    def draft_best(self, estimates: list[Estimate], most: int) -> None:
        """Drafts the best estimates, not twice the same shape with nearly as many micro-batches."""
        number_moved = LOOKED_AT * most
        estimates = self._different(estimates)
        moved = [self.with_best_cuts(each) for each in estimates[:number_moved]]
        ordered = sorted(moved, key=lambda each: each.step_s) + estimates[number_moved:]
        ordered = self._different(ordered)
        for number, estimate in enumerate(ordered, start=1):
            best = self.best
            if best is not None:
                is_slower = estimate.step_s > self.budget.slower * best.score_s
                is_late = number > most or (is_slower and len(self.drafted) >= self.budget.sure)
                if is_late or self._is_hopeless(estimate, best):
                    break
            elif number > MOST_REFUSED * most:
                break
            self.report("plans", number, most)
            self._families.add(self._family(estimate))
            self.draft(self.candidate_of(estimate))

    def _different(self, estimates: Iterable[Estimate]) -> list[Estimate]:
        """The estimates without those that only call by another name what is the same, or was
        drafted before.
        """
        found: dict[object, Estimate] = {}
        for estimate in estimates:
            key = self._family(estimate)
            if key not in self._families:
                found.setdefault(key, estimate)
        return list(found.values())

    def _family(self, estimate: Estimate) -> object:
        """Equal for points with the same step on the same kinds of devices at every stage, each of
        one kind, or in one stage: as several narrow replicas, as one wide one, on other hosts.
        """
        point = estimate.point
        kinds = self.problem.cluster.devices
        stages = []
        for groups in zip(*point.shape.replicas, strict=True):
            names = [kinds[rank].kind.name for ranks in groups for rank in ranks]
            if len(point.shape.replicas[0]) > 1 and len(set(names)) > 1:
                return point
            stages.append(tuple(sorted(names)))
        seconds = f"{estimate.step_s:.6g}"
        return tuple(stages), point.num_micro_batch, point.num_chunks, seconds

    def draft_waves(self) -> None:
        """Several stages on each group of devices. How good they are depends on the order of
        actions more than an estimate can say, so the best of every number of groups and of stages
        on a group are drafted.
        """
        most = self.budget.waves
        below_s = math.inf if self.best is None else NEAR_POINT * self.best.score_s
        families: dict[tuple[int, int], list[Point]] = {}
        for point in self.points(in_waves=True) if most else ():
            if self.estimator.guess(point) <= below_s:
                families.setdefault((point.shape.num_stages, point.num_chunks), []).append(point)
        found: list[Estimate] = []
        for points in families.values():
            few = max(FEW_ESTIMATES, self.budget.estimates // len(families))
            best = self._different(self.estimated(points, self.estimator, few))[:LOOKED_AT]
            moved = [self.with_best_cuts(each) for each in best]
            found += sorted(moved, key=lambda each: each.step_s)[:1]
        self.draft_best(sorted(found, key=lambda each: each.step_s), most)

    def _is_hopeless(self, estimate: Estimate, best: Drafted) -> bool:
        """Even the bound is no better than the best plan."""
        return self.estimator.bound(estimate.point) >= best.score_s

    def draft(self, candidate: Candidate, tries: int | None = 60) -> Drafted | None:
        """Makes and notes the plan of a candidate; None: there is none, or it was tried before."""
        candidate = candidate.in_fewest_replicas()
        if self.settings.zero is None:
            candidate = candidate.without_lone_zero()
        key = (candidate.signature(self.labels), tries)
        if key in self._signatures:
            return None
        self._signatures.add(key)
        try:
            drafted = self.drafting.draft(candidate, tries)
        except ValueError as error:
            self.tried.append(Tried(candidate, math.inf, str(error)))
            return None
        self.drafted.append(drafted)
        self.tried.append(Tried(candidate, drafted.step_s))
        return drafted

    @cached_property
    def labels(self) -> list[str]:
        """What distinguishes devices: kind and host."""
        return [f"{each.kind.name} {each.host}" for each in self.problem.cluster.devices]

    # ---- replicas that are not alike, and fewer devices

    def draft_heterogeneous(self) -> None:
        """Devices in parts, each part with a model replica, or alike ones, of its own shape."""
        for number, (estimate_s, candidate) in enumerate(self.partitions.candidates(), start=1):
            best = self.best
            limit_s = math.inf if best is None else self.budget.heterogeneous_slower * best.score_s
            if number > self.budget.heterogeneous or estimate_s > limit_s:
                break
            self.report("heterogeneous replicas", number, self.budget.heterogeneous)
            self.draft(candidate)

    def draft_smaller(self) -> None:
        """Drafts candidates on fewer devices: some make the step longer."""
        if self.measures[0].zero or not self.budget.smaller:
            return  # what ranks hold in parts needs all of them
        found: list[Estimate] = []
        for ranks in subsets(self.problem.cluster):
            best = self.best
            below_s = math.inf if best is None else NEARLY * best.score_s
            bound_s = self.estimator.bound(Point(Shape(((ranks,),)), 1))
            if bound_s > below_s or not self._could_hold(ranks):
                continue  # too few devices, whatever they do
            points = self.points(ranks)
            few = self.budget.estimates // 8
            found += self.estimated(points, self.estimator, few, below_s)[:1]
        found.sort(key=lambda each: each.step_s)
        for number, estimate in enumerate(found[: self.budget.smaller], start=1):
            best = self.best
            if best is not None and estimate.step_s > NEARLY * best.score_s:
                break
            self.report("fewer devices", number, self.budget.smaller)
            self.draft(self.candidate_of(estimate))

    def _could_hold(self, ranks: Sequence[int]) -> bool:
        """Whether weights, gradients and optimizer state fit on these devices together."""
        devices = self.problem.cluster.devices
        memories = [devices[rank].kind.memory_bytes for rank in ranks]
        return not all(memories) or self._static_bytes <= sum(memories)

    @cached_property
    def _static_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer state, each held once."""
        return float(self.outline.static_bytes(False).sum())

    # ---- polish

    def polish(self) -> None:
        """Points near to the best, then the full search for the order of actions."""
        while self._draft_neighbours():
            pass
        self._nudge()
        for drafted in sorted(self.drafted, key=lambda each: each.score_s)[: self.budget.polished]:
            first = drafted.candidate.replicas[0]
            if len(first.groups) > 1 and first.schedule not in FIXED_ORDERS:
                self.report("order of actions", 1, 1)
                self.draft(drafted.candidate, None)

    def _draft_neighbours(self) -> bool:
        """Drafts points near to the best that are not estimated to be much slower; whether one of
        them is the best now.
        """
        best = self.best
        if best is None or best.candidate not in self.point_of:
            return False
        memory = best.candidate.memory
        known = {point for made, point in self.point_of.items() if made.memory == memory}
        found = []
        estimator = self.estimator_of(memory)
        here = self.point_of[best.candidate]
        best_s = self.with_best_cuts(estimator.estimate(here), memory).step_s
        for point in neighbours(here, self.settings, self.outline):
            if point.num_chunks > here.num_chunks and not self.budget.waves:
                continue
            if point not in known and self._neighbours_left > 0:
                self._neighbours_left -= 1
                estimate = estimator.estimate(point)
                if estimate.step_s <= max(NEAR_POINT * best_s, NEARLY * best.score_s):
                    found.append(self.with_best_cuts(estimate, memory))
        ordered = self._different(sorted(found, key=lambda each: each.step_s))
        for number, estimate in enumerate(ordered, start=1):
            self.report("neighbours", number, len(found))
            self._families.add(self._family(estimate))
            self.draft(self.candidate_of(estimate, memory))
        return self.best is not best

    def _nudge(self) -> None:
        """Drafts what differs from one of the best in one cut, one number or one device, and
        continues from what is faster; then from the next best, as long as the budget lasts.
        """
        left = self.budget.nudges
        different = {each.score_s: each for each in reversed(self.drafted)}
        starts = [different[score_s] for score_s in sorted(different)[: self.budget.nudged]]
        tried: set[int] = set()
        while left and len(tried) < len(self.drafted):
            others = [each for each in self.drafted if id(each) not in tried]
            here = starts.pop(0) if starts else min(others, key=lambda each: each.score_s)
            if id(here) in tried:
                continue
            tried.add(id(here))
            near = self._near(here.candidate)
            while left and (candidate := next(near, None)) is not None:
                made = self.draft(candidate)
                left -= made is not None
                self.report("nudges", self.budget.nudges - left, self.budget.nudges)
                if made is not None and made.score_s < here.score_s:
                    here = made
                    near = self._near(here.candidate)
                    tried.add(id(here))

    def _near(self, candidate: Candidate) -> Iterator[Candidate]:
        """What differs from a candidate in one cut, one number or one device."""
        yield from nudged(candidate, self.settings, self.outline)
        if self.partitions.are_allowed:
            yield from moved_devices(candidate, self.outline)


def _first(guessed: tuple[float, Point]) -> float:
    """The guess: points that are guessed alike stay in the order in which they were enumerated."""
    return guessed[0]


def new_search(
    problem: Problem,
    settings: OpenSettings,
    budget: Budget | None = None,
    progress: Callable[[SearchProgress], None] = lambda _: None,
    seeds: Sequence[Candidate] = (),
) -> Search:
    """A search that is to be run. `seeds`: candidates that are drafted first."""
    number = sum(1 for _ in problem.captured.compute_nodes())
    chosen = budget or Budget.for_problem(number, problem.cluster.num_devices)
    return Search(replace(problem), settings, chosen, progress, seeds=seeds)


def search(
    problem: Problem,
    settings: OpenSettings,
    budget: Budget | None = None,
    progress: Callable[[SearchProgress], None] = lambda _: None,
    seeds: Sequence[Candidate] = (),
) -> Search:
    """A finished search. `seeds`: candidates that are drafted first. An interrupt is raised again:
    what half a search did not find says nothing.
    """
    made = new_search(problem, settings, budget, progress, seeds)
    made.run()
    if made.is_interrupted:
        raise KeyboardInterrupt
    return made
