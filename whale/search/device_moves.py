"""Moves of whole devices between the model replicas of a candidate: to another stage, to a stage or a
replica of its own, or half of every stage to a second replica.

Estimates of replicas that are not alike are rough, since the all-reduce of what some of them finish
early runs under the work of the others. For tiny models these moves are drafted instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from whale.search.candidate import Candidate, DeviceGroup, ReplicaChoice
from whale.search.outline import Outline

MOST_HALVES = 32
"""ways to take a replica apart that are tried"""


def moved_devices(candidate: Candidate, outline: Outline) -> Iterator[Candidate]:
    """Candidates that differ in the place of one device, then those with a replica in two halves."""
    if any(_is_special(replica) for replica in candidate.replicas):
        return
    for place, replica in enumerate(candidate.replicas):
        others = (*candidate.replicas[:place], *candidate.replicas[place + 1 :])
        for stage, group in enumerate(replica.groups):
            for rank in group.ranks:
                rest = _without(replica, stage, rank)
                left = others if rest is None else (*others, rest)
                alone = ReplicaChoice((DeviceGroup((rank,)),), schedule=replica.schedule)
                yield replace(candidate, replicas=(*left, alone))
                for target, own in enumerate(left):
                    for changed in _with_device(own, rank, outline):
                        replicas = (*left[:target], changed, *left[target + 1 :])
                        yield replace(candidate, replicas=replicas)
        for halves in itertools.islice(_halves(replica), MOST_HALVES):
            yield replace(candidate, replicas=(*others, *halves))


def _is_special(replica: ReplicaChoice) -> bool:
    """Whether its groups are more than devices that share samples, one stage each."""
    return replica.num_chunks > 1 or any(group.grid is not None for group in replica.groups)


def _without(replica: ReplicaChoice, stage: int, rank: int) -> ReplicaChoice | None:
    """The replica without one device; a stage that is left without any joins the one before it.
    None where the replica had no other.
    """
    groups = list(replica.groups)
    own = tuple(each for each in groups[stage].ranks if each != rank)
    if own:
        groups[stage] = DeviceGroup(own)
        return replace(replica, groups=tuple(groups), num_samples=None)
    del groups[stage]
    if not groups:
        return None
    starts = replica.starts
    if starts is not None:
        starts = (0, *starts[1:stage], *starts[stage + 1 :]) if stage else (0, *starts[2:])
    return replace(replica, groups=tuple(groups), starts=starts, num_samples=None)


def _with_device(replica: ReplicaChoice, rank: int, outline: Outline) -> Iterator[ReplicaChoice]:
    """The replica with one more device: in every stage, and as a stage of its own that takes half
    the operations of the stage before it, or of the one behind it.
    """
    groups = replica.groups
    for stage, group in enumerate(groups):
        wider = DeviceGroup((*group.ranks, rank))
        changed = (*groups[:stage], wider, *groups[stage + 1 :])
        yield replace(replica, groups=changed, num_samples=None)
    place_of = {start: place for place, start in enumerate(outline.points.tolist())}
    starts = (0,) if len(groups) == 1 else replica.starts
    if starts is None or any(start not in place_of for start in starts):
        return
    places = [place_of[start] for start in starts] + [outline.num_segments]
    for stage in range(len(groups)):
        start, end = places[stage], places[stage + 1]
        for middle in sorted({(start + end) // 2, (start + end + 1) // 2} - {start, end}):
            cut = outline.starts((*places[: stage + 1], middle, *places[stage + 1 : -1]))
            for first in (stage, stage + 1):  # the new device before those of the stage, or behind
                changed = (*groups[:first], DeviceGroup((rank,)), *groups[first:])
                yield replace(replica, groups=changed, starts=cut, num_samples=None)


def _halves(replica: ReplicaChoice) -> Iterator[tuple[ReplicaChoice, ReplicaChoice]]:
    """The replica as two with the same stages, each with some devices of every one."""
    choices = []
    for group in replica.groups:
        own: list[tuple[int, ...]] = []
        for number in range(1, group.num_devices):
            own.extend(itertools.combinations(group.ranks, number))
        choices.append(own)
    for taken in itertools.product(*choices):
        left = tuple(
            DeviceGroup(tuple(rank for rank in group.ranks if rank not in own))
            for group, own in zip(replica.groups, taken, strict=True)
        )
        first = replace(replica, groups=tuple(map(DeviceGroup, taken)), num_samples=None)
        yield first, replace(replica, groups=left, num_samples=None)
