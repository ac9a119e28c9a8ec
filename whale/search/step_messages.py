"""The messages of a point in an estimate: between stages in every micro-batch, and the all-reduces
at the end of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from whale.search.crossing import Boundary, GroupMessages, boundary_of, group_messages
from whale.search.outline import Outline
from whale.search.point import Point
from whale.search.stage_memory import OutlineMemory
from whale.search.stage_rows import PointStages, prefix_sums
from whale.simulation.communication import all_reduce_seconds


@dataclass
class StepMessages:
    """Seconds of what the devices of one cluster send."""

    outline: Outline
    memory: OutlineMemory
    zero: int
    """level of ZeRO"""
    _rings: dict[tuple[int, ...], tuple[float, float, list[tuple[str, float]]]] = field(
        default_factory=dict, repr=False
    )
    _crossings: dict[tuple[tuple[int, ...], tuple[int, ...]], GroupMessages] = field(
        default_factory=dict, repr=False
    )

    def messages(
        self, boundaries: Sequence[Boundary], bounds: Sequence[int]
    ) -> tuple[list[float], dict[str, float]]:
        """Seconds of a message behind every stage but the last, and for every host the seconds that
        its network card is taken by one micro-batch.
        """
        seconds = []
        cards: dict[str, float] = {}
        for index, boundary in enumerate(boundaries):
            crossing = self.memory.crossing[bounds[index + 1]]
            for host, taken in boundary.card_seconds.items():
                cards[host] = cards.get(host, 0.0) + taken * crossing
            seconds.append(boundary.seconds(crossing))
        return seconds, cards

    def busiest_link_seconds(
        self, point: Point, boundaries: Sequence[Boundary], bounds: Sequence[int]
    ) -> float:
        """Seconds of one micro-batch on the busiest of the links between two groups: activations
        that go one way and gradients that come back the other way between the same groups share it.
        """
        taken: dict[tuple[int, int], float] = {}
        ways = pairwise(point.group_of_stage)
        for index, ((source, destination), boundary) in enumerate(
            zip(ways, boundaries, strict=True)
        ):
            seconds = boundary.link_seconds(self.memory.crossing[bounds[index + 1]])
            for way in ((source, destination), (destination, source)):
                taken[way] = taken.get(way, 0.0) + seconds
        return max(taken.values(), default=0.0)

    def boundaries(self, point: Point, samples: Sequence[int]) -> list[Boundary]:
        """What is sent behind every stage but the last."""
        found: list[Boundary] = []
        for source, destination in pairwise(point.group_of_stage):
            crossings = []
            for stages, share in zip(point.shape.replicas, samples, strict=True):
                if source != destination:  # else the turn of a wave
                    crossings.append((self._between(stages[source], stages[destination]), share))
            found.append(boundary_of(crossings))
        return found

    def _between(self, here: tuple[int, ...], there: tuple[int, ...]) -> GroupMessages:
        key = (here, there)
        if key not in self._crossings:
            self._crossings[key] = group_messages(here, there, self.outline.problem.cluster.network)
        return self._crossings[key]

    def ring(self, ranks: tuple[int, ...]) -> tuple[float, float, list[tuple[str, float]]]:
        """(seconds of a byte, of a bucket, [(host, seconds of a byte on its card)])"""
        if ranks not in self._rings:
            network = self.outline.problem.cluster.network
            unit = 1e9
            fixed, _ = all_reduce_seconds(0.0, 1, ranks, network)
            both, leaving = all_reduce_seconds(unit, 1, ranks, network)
            cards = [(host, seconds / unit) for host, seconds in leaving]
            self._rings[ranks] = (both - fixed) / unit, fixed, cards
        return self._rings[ranks]

    def reduced(
        self,
        point: Point,
        ready: PointStages,
        bounds: Sequence[int],
        closes: Sequence[float],
        backward: Sequence[float],
    ) -> float:
        """When the last all-reduce has ended; the stages close from the last to the first."""
        sums = self.memory.trained if point.shape.num_replicas > 1 else self._whole_trained
        bucket_bytes = self.outline.problem.config.bucket_bytes
        free: dict[str, float] = {}
        end_s = max(closes)
        groups = point.group_of_stage
        all_ranks = ready.ranks
        wanted = [
            (index, all_ranks[groups[index]], sums[bounds[index + 1]] - sums[bounds[index]])
            for index in reversed(range(len(groups)))
        ]
        for tied in self.outline.tied:
            held = [
                index
                for index in range(len(groups))
                if any(bounds[index] <= segment < bounds[index + 1] for segment in tied.segments)
            ]
            owners = {groups[index] for index in held}
            if len(owners) > 1:
                members = tuple(sorted(rank for owner in owners for rank in all_ranks[owner]))
                wanted.append((held[0], members, float(tied.trained_bytes)))
        left = self.memory.zero_terms.left_to_reduce if self.zero else 1.0
        for index, ranks, num_bytes in wanted:
            if len(ranks) < 2 or not num_bytes or not left:
                continue
            byte_s, bucket_s, cards = self.ring(ranks)
            buckets = max(1, math.ceil(num_bytes / bucket_bytes)) if self.memory.overlaps else 1
            seconds = (num_bytes * byte_s + buckets * bucket_s) * left
            ready_s = closes[index] - backward[index] * (1 - 1 / buckets)
            start = max([ready_s, *(free.get(host, 0.0) for host, _ in cards)])
            end = max(start + seconds, closes[index] + seconds / buckets)
            for host, each in cards:
                free[host] = max(start, free.get(host, 0.0)) + left * num_bytes * each
                end = max(end, free[host])
            end_s = max(end_s, end)
        return end_s

    def whole_reduced_seconds(self, ranks: tuple[int, ...]) -> float:
        """Seconds of an all-reduce of all gradients over these ranks."""
        if len(ranks) < 2:
            return 0.0
        byte_s, bucket_s, _ = self.ring(ranks)
        return self.memory.trained[-1] * byte_s + bucket_s

    @cached_property
    def _whole_trained(self) -> list[float]:
        return prefix_sums(self.outline.whole_trained_bytes)
