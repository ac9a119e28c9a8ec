"""Moves of whole devices between the model replicas of a candidate: to another stage, to a stage or
a replica of its own, or a whole replica apart into several.

Estimates of replicas that are not alike are rough, since the all-reduce of what some of them finish
early runs under the work of the others. For tiny models these moves are drafted instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from whale.search.candidate import Candidate, DeviceGroup, ReplicaChoice
from whale.search.outline import Outline

MOST_APART = 32
"""ways to take a replica apart that are tried"""


def moved_devices(candidate: Candidate, outline: Outline) -> Iterator[Candidate]:
    """Candidates that differ in the place of one device, in a replica that is taken apart, or in
    two devices that have changed places.
    """
    if candidate.memory.text or any(_is_special(replica) for replica in candidate.replicas):
        return  # replicas that are not alike have neither ZeRO nor offload
    candidate = replace(candidate, replicas=tuple(_one_by_one(candidate.replicas)))
    for rank in candidate.left_out(outline.problem.cluster.num_devices):
        yield from _placed(candidate, candidate.replicas, rank, outline)
    for place, replica in enumerate(candidate.replicas):
        others = (*candidate.replicas[:place], *candidate.replicas[place + 1 :])
        apart = itertools.chain(_pipelines(replica), _halves(replica))
        for replicas in itertools.islice(apart, MOST_APART):
            yield replace(candidate, replicas=(*others, *replicas))
        for stage, group in enumerate(replica.groups):
            for rank in group.ranks:
                rest = _without(replica, stage, rank)
                left = others if rest is None else (*others, rest)
                yield from _placed(candidate, left, rank, outline)
    yield from _exchanged(candidate, outline.problem.cluster.num_devices)


def _exchanged(candidate: Candidate, num_devices: int) -> Iterator[Candidate]:
    """Two devices of different groups change places, or one that is left out takes the place of
    another. With tight memory neither may move alone.
    """
    group_of: dict[int, tuple[int, int]] = {}
    for place, replica in enumerate(candidate.replicas):
        for stage, group in enumerate(replica.groups):
            group_of.update(dict.fromkeys(group.ranks, (place, stage)))
    for one, other in itertools.combinations(range(num_devices), 2):
        if group_of.get(one) == group_of.get(other):
            continue
        renamed = {one: other, other: one}
        replicas = []
        for replica in candidate.replicas:
            groups = []
            for group in replica.groups:
                groups.append(DeviceGroup(tuple(renamed.get(rank, rank) for rank in group.ranks)))
            replicas.append(replace(replica, groups=tuple(groups), num_samples=None))
        yield replace(candidate, replicas=tuple(replicas))


def _one_by_one(replicas: tuple[ReplicaChoice, ...]) -> Iterator[ReplicaChoice]:
    """The replicas, where devices that each run the whole model have a replica each."""
    for replica in replicas:
        if replica.is_whole and replica.num_micro_batch == 1:
            yield from (_alone(rank, replica) for rank in replica.ranks)
        else:
            yield replica


def _alone(rank: int, replica: ReplicaChoice) -> ReplicaChoice:
    return ReplicaChoice((DeviceGroup((rank,)),), schedule=replica.schedule)


def _placed(
    candidate: Candidate, replicas: tuple[ReplicaChoice, ...], rank: int, outline: Outline
) -> Iterator[Candidate]:
    """These replicas with one more device: as a replica of its own, or in any of them."""
    yield replace(candidate, replicas=(*replicas, _alone(rank, candidate.replicas[0])))
    for target, own in enumerate(replicas):
        for changed in _with_device(own, rank, outline):
            yield replace(
                candidate, replicas=(*replicas[:target], changed, *replicas[target + 1 :])
            )


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
    """The replica with one more device: in every stage, with its cuts as they are or moved, and as
    a stage of its own that takes the first or the last operations of another. Cuts are where both
    stages take about equally long.
    """
    groups = replica.groups
    places = _places(replica, outline)
    for stage, group in enumerate(groups):
        wider = DeviceGroup((*group.ranks, rank))
        changed = (*groups[:stage], wider, *groups[stage + 1 :])
        yield replace(replica, groups=changed, num_samples=None)
        # a stage that is wider is worth it where it takes more operations, too
        for cut in range(max(1, stage), min(stage + 2, len(groups))) if places else ():
            start = places[cut - 1]
            even = start + _even_cut(outline, changed[cut - 1 : cut + 1], start, places[cut + 1])
            if start < even < places[cut + 1] and even != places[cut]:
                moved = outline.starts((*places[:cut], even, *places[cut + 1 : -1]))
                yield replace(replica, groups=changed, starts=moved, num_samples=None)
    if not places:
        return
    for stage in range(len(groups)):
        start = places[stage]
        end = places[stage + 1]
        alone = DeviceGroup((rank,))
        here = groups[stage]
        for pair in ((alone, here), (here, alone)):
            changed = (*groups[:stage], *pair, *groups[stage + 1 :])
            even = start + _even_cut(outline, pair, start, end)
            for middle in (even, even - 1, even + 1):
                if start < middle < end:
                    cuts = outline.starts((*places[: stage + 1], middle, *places[stage + 1 : -1]))
                    yield replace(replica, groups=changed, starts=cuts, num_samples=None)


def _places(replica: ReplicaChoice, outline: Outline) -> list[int]:
    """Which segment is the first of every stage, and behind them the number of segments; nothing
    where the cuts are not known.
    """
    place_of = {start: place for place, start in enumerate(outline.points.tolist())}
    starts = (0,) if len(replica.groups) == 1 else replica.starts
    if starts is None or any(start not in place_of for start in starts):
        return []
    return [*(place_of[start] for start in starts), outline.num_segments]


def _even_cut(outline: Outline, pair: tuple[DeviceGroup, ...], start: int, end: int) -> int:
    """How many of these segments the first of two groups takes so that both take about equally
    long.
    """
    elapsed = []
    for group in pair:
        kinds = [outline.problem.cluster.devices[rank].kind for rank in group.ranks]
        times = [outline.times(kind, 1) for kind in kinds]
        speed = sum(1 / (each.forward + each.backward)[start:end].clip(1e-12) for each in times)
        elapsed.append(np.concatenate([[0.0], np.cumsum(1 / speed)]))
    first, second = elapsed
    return int(np.argmin(np.maximum(first, second[-1] - second)))


def _pipelines(replica: ReplicaChoice) -> Iterator[tuple[ReplicaChoice, ...]]:
    """The replica as pipelines of one device for every stage, and one replica for each device that
    is left over.
    """
    number = min(replica.widths)
    if len(replica.groups) == 1 or max(replica.widths) == 1:
        return
    first, *behind = sorted(range(len(replica.groups)), key=lambda each: replica.widths[each])
    orders = [itertools.permutations(replica.groups[stage].ranks, number) for stage in behind]
    for taken in itertools.product(*orders):
        ranks_of = {first: replica.groups[first].ranks} | dict(zip(behind, taken, strict=True))
        pipelines = [
            replace(
                replica,
                groups=tuple(DeviceGroup((ranks_of[s][each],)) for s in range(len(ranks_of))),
                num_samples=None,
            )
            for each in range(number)
        ]
        used = {rank for ranks in ranks_of.values() for rank in ranks}
        alone = [_alone(rank, replica) for rank in replica.ranks if rank not in used]
        yield (*pipelines, *alone)


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
