"""Model replicas that are not alike: devices in parts, each part with the shape that is best for
its devices and its part of the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from whale.planning.replicas import FEW_SAMPLES
from whale.plans.shares import shares_of_series
from whale.search.candidate import Candidate, ReplicaChoice
from whale.search.moves import best_cuts
from whale.search.point import Estimate, Point, Shape
from whale.search.shapes import partitions_of

if TYPE_CHECKING:
    from whale.search.search import Search

SHARINGS = 2
"""rounds in which samples are shared"""


@dataclass
class Partitions:
    """Estimates of one search for parts of the devices that have replicas of their own shape."""

    search: Search
    _best: dict[tuple[tuple[str, ...], int], list[Estimate]] = field(
        default_factory=dict, repr=False
    )

    @property
    def are_allowed(self) -> bool:
        """Whether model replicas need not be alike."""
        search = self.search
        has_stages = search.settings.num_stages is not None
        return search.most_wide > 1 and not has_stages and not search.measures[0].zero

    def candidates(self) -> list[tuple[float, Candidate]]:
        """(estimated seconds, candidate) of model replicas that are not alike, the best first."""
        if not self.are_allowed:
            return []
        found: list[tuple[float, Candidate]] = []
        best = self.search.best
        for parts in partitions_of(self.search.problem.cluster):
            everyone = tuple(sorted(rank for ranks in parts for rank in ranks))
            least_s = self.search.estimator.bound(Point(Shape(((everyone,),)), 1))
            if best is not None and least_s > best.score_s:
                continue  # too few devices, whatever they do
            for estimated in self._of_partition(parts):
                if not estimated[1].are_alike:
                    found.append(estimated)
        return sorted(found, key=lambda each: each[0])

    def _of_partition(self, parts: Sequence[tuple[int, ...]]) -> list[tuple[float, Candidate]]:
        """(estimated seconds, candidate) with the best shapes of every part for its samples: first
        by the speed of its devices, then by that of its best shape.
        """
        speeds = []
        for ranks in parts:
            speeds.append(
                sum(1.0 / self.search.estimator.sample_seconds(rank, 1) for rank in ranks)
            )
        chosen: list[Estimate] = []
        others: list[list[Estimate]] = []
        sharing: tuple[int, ...] = ()
        for _ in range(SHARINGS):
            shares = self._shares(speeds)
            shapes = [
                self._best_of_part(ranks, share) if share else []
                for ranks, share in zip(parts, shares, strict=True)
            ]
            if not all(shapes):
                break
            found = [each[0] for each in shapes]
            if not chosen or _slowest(found) < _slowest(chosen):
                chosen = found
                others = [each[1:] for each in shapes]
                sharing = shares
            speeds = [share / each.step_s for share, each in zip(shares, found, strict=True)]
        if not chosen:
            return []
        chosen, others = self._moved_one_by_one(parts, sharing, chosen, others)
        made = [self._candidate(parts, chosen)]
        for place, shapes_of_part in enumerate(others):
            for other in shapes_of_part:
                changed = [*chosen[:place], other, *chosen[place + 1 :]]
                made.append(self._candidate(parts, changed))
        return made

    def _moved_one_by_one(
        self,
        parts: Sequence[tuple[int, ...]],
        shares: tuple[int, ...],
        chosen: list[Estimate],
        others: list[list[Estimate]],
    ) -> tuple[list[Estimate], list[list[Estimate]]]:
        """The shapes after single samples of the slowest part went to others, as long as that makes
        it faster: where devices have few samples each, their times are steps.
        """
        while True:
            slowest = max(range(len(parts)), key=lambda place: chosen[place].step_s)
            if not 1 < shares[slowest] <= FEW_SAMPLES * len(parts[slowest]):
                return chosen, others
            best = (_slowest(chosen), shares, chosen, others)
            for other in range(len(parts)):
                changed = list(shares)
                changed[slowest] -= 1
                changed[other] += 1
                shapes = [
                    self._best_of_part(ranks, share)
                    for ranks, share in zip(parts, changed, strict=True)
                ]
                if other == slowest or not all(shapes):
                    continue
                found = [each[0] for each in shapes]
                if _slowest(found) < best[0]:
                    rest = [each[1:] for each in shapes]
                    best = (_slowest(found), tuple(changed), found, rest)
            if best[2] is chosen:
                return chosen, others
            _, shares, chosen, others = best

    def _candidate(
        self, parts: Sequence[tuple[int, ...]], chosen: Sequence[Estimate]
    ) -> tuple[float, Candidate]:
        """(estimated seconds, candidate) with these shapes of the parts."""
        replicas: list[ReplicaChoice] = []
        for ranks, best in zip(parts, chosen, strict=True):
            replicas.extend(self._on_ranks(best, ranks))
        everyone = tuple(sorted(rank for ranks in parts for rank in ranks))
        fewest = min(each.point.shape.num_stages for each in chosen)
        reduced_s = self.search.estimator.messages.whole_reduced_seconds(everyone) / fewest
        made = Candidate(tuple(replicas), self.search.measures[0])
        return _slowest(chosen) + reduced_s, made

    def _shares(self, speeds: Sequence[float]) -> tuple[int, ...]:
        """Samples of every part, by samples per second."""
        batch_size = self.search.problem.batch_size
        series = [[samples / speed for samples in range(batch_size + 1)] for speed in speeds]
        return shares_of_series(batch_size, series)

    def _best_of_part(self, ranks: tuple[int, ...], share: int) -> list[Estimate]:
        """The best shapes of a part for so many samples, the best first."""
        key = (tuple(sorted(self.search.labels[rank] for rank in ranks)), share)
        if key not in self._best:
            memory = self.search.measures[0]
            estimator = self.search.estimator_of(memory, share)
            points = self.search.points(ranks, share)
            found = self.search.estimated(
                points, estimator, max(4, self.search.budget.estimates // 24)
            )
            shapes: dict[object, Estimate] = {}
            for each in found:
                stages = self._devices_of_stages(each.point.shape)
                if len(shapes) < self.search.budget.part_shapes and stages not in shapes:
                    best = best_cuts(estimator, each, self.search.budget.cut_moves)
                    shapes[stages] = best
                    # by the samples of the part, not by all
                    self.search.moved[best, memory] = best
            self._best[key] = list(shapes.values())
        return self._best[key]

    def _devices_of_stages(self, shape: Shape) -> object:
        """Kinds and hosts of every stage, whichever replica they are in."""
        found = []
        for groups in zip(*shape.replicas, strict=True):
            found.append(tuple(sorted(self.search.labels[rank] for own in groups for rank in own)))
        return tuple(found)

    def _on_ranks(self, estimate: Estimate, ranks: tuple[int, ...]) -> list[ReplicaChoice]:
        """The replicas of a part's estimate, which may have been made for other devices of the
        same kinds on the same hosts.
        """
        made = self.search.candidate_of(estimate).replicas
        free: dict[str, list[int]] = {}
        for rank in ranks:
            free.setdefault(self.search.labels[rank], []).append(rank)
        found = []
        for replica in made:
            groups = []
            for group in replica.groups:
                own = [free[self.search.labels[rank]].pop(0) for rank in group.ranks]
                groups.append(replace(group, ranks=tuple(own)))
            found.append(replace(replica, groups=tuple(groups)))
        return found


def _slowest(estimates: Sequence[Estimate]) -> float:
    return max(each.step_s for each in estimates)
