"""Many hosts that are alike: the search looks at one slice of the cluster and repeats what it
finds.

Hosts with the same devices, links and memories are alike. Where the number of each sort of them
divides by k, a plan for 1/k of the hosts with 1/k of the samples, k times, is a plan of everything:
k times as many model replicas, each as in the slice. Only the all-reduces at the end of a step go
over more ranks, so the best plans of the slice are drafted on all devices, and the fastest of these
counts; and one slice alone, for models so small that the others only hold it up. Where the hosts of
a sort do not divide, k is the number that leaves fewest devices over; they take no part, and the
plan says so. The search takes as long for ten thousand devices as for a thousand; what grows is the
draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from whale.cluster.cluster import Cluster
from whale.search.candidate import Candidate
from whale.search.drafting import DRAFT_TRIES, Drafted
from whale.search.point import Point, Shape
from whale.search.shapes import hosts_alike

if TYPE_CHECKING:
    from whale.search.search import Search

MOST_DEVICES = 1024
"""of a cluster that is searched as a whole; those with more are sliced"""
SLICE_PARTS = (4, 2, 1, 0.5)
"""slices have at most `MOST_DEVICES` divided by this: small ones first, since what a search
enumerates grows with the devices of a slice, larger ones for models that do not fit on those
"""
NEAR = 1.05
"""plans of a slice that take at most so many times the best are repeated as well, where a draft
takes long: all-reduces over more ranks may change which is the best
"""
LEAST_USED = 0.95
"""of the devices must be in slices; with more left over, the whole cluster is searched"""


@dataclass(frozen=True)
class Slices:
    """Parts of a cluster that are alike."""

    cluster: Cluster
    """the first of them, as a cluster of its own"""
    ranks: tuple[tuple[int, ...], ...]
    """by slice: rank in the whole cluster of every rank of a slice"""
    left_over: tuple[int, ...] = ()
    """ranks of hosts that are in no slice, since those of their sort do not divide"""

    @staticmethod
    def of(cluster: Cluster, number: int) -> Slices:
        """Cuts a cluster into so many slices, with the same hosts of every sort in each."""
        places: list[tuple[int, ...]] = []
        for hosts in hosts_alike(cluster):
            per_slice = len(hosts) // number
            for first in range(per_slice):
                # the same host of every slice, device by device
                own = [hosts[each * per_slice + first] for each in range(number)]
                places.extend(zip(*own, strict=True))
        places.sort()  # in the order of the ranks of the first slice
        devices = []
        for rank, (source, *_) in enumerate(places):
            devices.append(replace(cluster.devices[source], rank=rank))
        hosts_here = {device.host for device in devices}
        part = replace(
            cluster,
            devices=tuple(devices),
            host_links=tuple(each for each in cluster.host_links if each.host in hosts_here),
            memories=tuple(each for each in cluster.memories if each.host in hosts_here),
        )
        used = {rank for own in places for rank in own}
        left_over = tuple(each.rank for each in cluster.devices if each.rank not in used)
        return Slices(part, tuple(zip(*places, strict=True)), left_over)

    @property
    def text(self) -> str:
        """What was searched, in words."""
        number = len(self.ranks)
        return (
            f"searched on one of {number} slices of {self.cluster.num_devices} devices that are "
            "alike, and repeated"
        )

    def repeated(self, candidate: Candidate, number: int | None = None) -> Candidate:
        """What a candidate does on one slice, on so many of them; None: on all."""
        replicas = []
        for ranks in self.ranks[:number]:
            for replica in candidate.replicas:
                groups = []
                for group in replica.groups:
                    own = tuple(ranks[rank] for rank in group.ranks)
                    groups.append(replace(group, ranks=own))
                replicas.append(replace(replica, groups=tuple(groups)))
        return replace(candidate, replicas=tuple(replicas))


def slice_numbers(cluster: Cluster, batch_size: int) -> list[int]:
    """Into how many slices a cluster may be cut: into small ones first, then into larger ones, for
    models that do not fit on those. Empty: the cluster is small, or its hosts are not alike.
    """
    if cluster.num_devices <= MOST_DEVICES or cluster.pair_links:
        return []
    sorts = [(len(hosts), len(hosts[0])) for hosts in hosts_alike(cluster)]

    def used(number: int) -> int:
        """Devices in so many slices."""
        return sum(hosts // number * number * devices for hosts, devices in sorts)

    found: list[int] = []
    for part in SLICE_PARTS:
        fewest = math.ceil(cluster.num_devices * part / MOST_DEVICES)
        own = [number for number in range(fewest, 2 * fewest) if 1 < number <= batch_size]
        best = max(own, key=lambda each: (used(each), batch_size % each == 0, -each), default=0)
        if best and best not in found and used(best) >= LEAST_USED * cluster.num_devices:
            found.append(best)
    return found


def draft_slices(search: Search) -> bool:
    """Drafts what is best on a slice of the cluster for all of it; whether a plan was found."""
    problem = search.problem
    numbers = slice_numbers(problem.cluster, problem.batch_size)
    if not numbers or search.most_wide == 1:  # 1: there may be one model replica only
        return False
    is_vast = not search.budget.polished
    tries = DRAFT_TRIES if is_vast else None
    for number in numbers:
        slices = Slices.of(problem.cluster, number)
        part = replace(problem, cluster=slices.cluster, batch_size=problem.batch_size // number)
        search.slices = slices  # an interrupt may end it here
        # the fastest plan of a slice may fill few of its devices, so that no memory is left for
        # all-reduces with other slices: it is searched again for plans that take all devices
        for may_leave_out in (True, False):
            inner = search.on(part)
            if not may_leave_out:
                inner.budget = replace(inner.budget, smaller=0)
            if _draft_repeated(search, slices, inner, tries) or inner.best is None:
                break
        _draft_one_slice(search, slices, inner)
        if search.best is not None:
            return True
        search.slices = None
    return False


def _draft_repeated(search: Search, slices: Slices, inner: Search, tries: int | None) -> bool:
    """Searches a slice and drafts its best plans on all slices; whether one of them could be."""
    is_vast = tries is not None
    inner.run()
    search.num_estimates += inner.num_estimates
    has_fitted = False
    for drafted in _best_first(inner):
        is_near = inner.best is not None and drafted.score_s <= NEAR * inner.best.score_s
        if is_vast and has_fitted and not is_near:
            break
        search.report("slices", len(search.drafted), search.budget.drafts)
        has_fitted |= search.draft(slices.repeated(drafted.candidate), tries) is not None
        if inner.is_interrupted and search.best is not None:
            raise KeyboardInterrupt
        if len(search.drafted) >= search.budget.drafts:
            break
    if inner.is_interrupted:
        raise KeyboardInterrupt
    return has_fitted


def _draft_one_slice(search: Search, slices: Slices, inner: Search) -> None:
    """Drafts the best plan of a slice for the whole mini-batch, where that could be faster than on
    all slices.
    """
    found = inner.best
    if found is None:
        return
    alone = slices.repeated(found.candidate, 1)
    is_drafted = not _is_too_slow(search, alone) and search.draft(alone) is not None
    if is_drafted or search.settings.num_micro_batch is not None:
        return
    # micro-batches as large as they were
    number = len(slices.ranks)
    replicas = []
    for each in alone.replicas:
        replicas.append(replace(each, num_micro_batch=number * each.num_micro_batch))
    small = replace(alone, replicas=tuple(replicas))
    if not _is_too_slow(search, small):
        search.draft(small)


def _is_too_slow(search: Search, alone: Candidate) -> bool:
    """Whether a draft does not pay: its devices, those that it leaves out not counted, would take
    longer than the best plan if all were busy all the time; or it does by its estimate, where
    there is one.
    """
    best = search.best
    if best is None:
        return False
    fewest = min(replica.num_micro_batch for replica in alone.replicas)
    busy = Point(Shape(((alone.ranks,),)), fewest)
    if search.estimator.bound(busy) > best.score_s:
        return True
    first = alone.replicas[0]
    groups = [group for replica in alone.replicas for group in replica.groups]
    if not alone.are_alike or any(group.grid is not None for group in groups):
        return False
    stages = [tuple(group.ranks for group in replica.groups) for replica in alone.replicas]
    point = Point(Shape(tuple(stages)), first.num_micro_batch, first.num_chunks)
    estimate = search.estimator_of(alone.memory).estimate(point)
    return estimate.step_s > search.budget.slower * best.score_s


def _best_first(inner: Search) -> Iterator[Drafted]:
    """Plans of a search, each candidate once though it may be drafted with several orders."""
    seen = set()
    for drafted in sorted(inner.drafted, key=lambda each: each.score_s):
        if drafted.candidate not in seen:
            seen.add(drafted.candidate)
            yield drafted
