"""Moves that make an estimate better: one cut, one device, one number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whale.search.candidate import Candidate, ReplicaChoice
from whale.search.estimate import Estimator
from whale.search.outline import Outline
from whale.search.point import Estimate, Point, Shape, Stages
from whale.search.settings import COUNTS, OpenSettings

DISTANCES = (1, -1, 2, -2, 4, -4)
"""segments by which a cut is moved"""
SAME = 1e-9


def best_cuts(estimator: Estimator, estimate: Estimate, tries: int) -> Estimate:
    """The estimate from which no move of one cut is shorter, or what was found after so many
    tries.
    """
    best = estimate
    is_better = True
    while is_better:
        is_better = False
        for place in range(1, len(best.cuts)):
            for distance in DISTANCES:
                if not tries:
                    return best
                moved = [*best.cuts, estimator.outline.num_segments]
                moved[place] += distance
                if not moved[place - 1] < moved[place] < moved[place + 1]:
                    continue
                tries -= 1
                found = estimator.with_cuts(best.point, tuple(moved[:-1]))
                if found.step_s < best.step_s * (1 - SAME):
                    best = found
                    is_better = True
    return best


def neighbours(point: Point, settings: OpenSettings, outline: Outline) -> Iterator[Point]:
    """Points that differ in one number, one device or the order of two stages."""
    shape = point.shape
    most = outline.problem.batch_size // shape.widest
    if settings.num_micro_batch is None:
        place = COUNTS.index(point.num_micro_batch) if point.num_micro_batch in COUNTS else 0
        for count in COUNTS[max(0, place - 2) : place + 3]:
            if count != point.num_micro_batch and count <= most:
                yield Point(shape, count, point.num_chunks)
    for chunks in settings.chunk_counts(shape.num_stages):
        if chunks != point.num_chunks and chunks * shape.num_stages <= outline.num_segments:
            yield Point(shape, point.num_micro_batch, chunks)
    for changed in _other_shapes(shape):
        if point.num_micro_batch <= outline.problem.batch_size // changed.widest:
            yield Point(changed, point.num_micro_batch, point.num_chunks)


def _other_shapes(shape: Shape) -> Iterator[Shape]:
    """Two neighbouring stages change places, or a device goes from one to the other."""
    for left in range(shape.num_stages - 1):
        swapped: list[Stages] = []
        for stages in shape.replicas:
            changed = [*stages]
            changed[left], changed[left + 1] = changed[left + 1], changed[left]
            swapped.append(tuple(changed))
        yield Shape(tuple(swapped))
        for source, target in ((left, left + 1), (left + 1, left)):
            if any(len(stages[source]) < 2 for stages in shape.replicas):
                continue
            moved: list[Stages] = []
            for stages in shape.replicas:
                changed = [*stages]
                changed[target] = (*changed[target], changed[source][-1])
                changed[source] = changed[source][:-1]
                moved.append(tuple(changed))
            yield Shape(tuple(moved))


def nudged(candidate: Candidate, settings: OpenSettings, outline: Outline) -> Iterator[Candidate]:
    """Candidates that differ in one cut or in the number of micro-batches: of all replicas where
    they are alike, else of one of them, and there also in the order of two stages.
    """
    if candidate.are_alike:
        for changed in _other_replicas(candidate.replicas[0], settings, outline):
            fields = {"num_micro_batch": changed.num_micro_batch, "starts": changed.starts}
            yield candidate.with_all(**fields)
        return
    for place, replica in enumerate(candidate.replicas):
        for changed in (*_other_replicas(replica, settings, outline), *_swapped(replica)):
            replicas = (*candidate.replicas[:place], changed, *candidate.replicas[place + 1 :])
            yield replace(candidate, replicas=replicas)


def _other_replicas(
    replica: ReplicaChoice, settings: OpenSettings, outline: Outline
) -> Iterator[ReplicaChoice]:
    if settings.num_micro_batch is None and replica.num_micro_batch in COUNTS:
        place = COUNTS.index(replica.num_micro_batch)
        for count in COUNTS[max(0, place - 1) : place + 2]:
            if count != replica.num_micro_batch and count <= outline.problem.batch_size:
                yield replace(replica, num_micro_batch=count)
    if replica.starts is None:
        return
    place_of = {start: place for place, start in enumerate(outline.points.tolist())}
    if any(start not in place_of for start in replica.starts):
        return  # cut for another cluster, whose points differ
    places = [place_of[start] for start in replica.starts] + [outline.num_segments]
    for stage in range(1, len(places) - 1):
        for distance in (1, -1):
            moved = [*places]
            moved[stage] += distance
            if moved[stage - 1] < moved[stage] < moved[stage + 1]:
                yield replace(replica, starts=outline.starts(moved[:-1]))


def _swapped(replica: ReplicaChoice) -> Iterator[ReplicaChoice]:
    """Two neighbouring groups of devices change places."""
    for left in range(len(replica.groups) - 1):
        groups = [*replica.groups]
        groups[left], groups[left + 1] = groups[left + 1], groups[left]
        yield replace(replica, groups=tuple(groups))
