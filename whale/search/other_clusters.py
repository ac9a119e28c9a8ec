"""Clusters that are a little different from the one that there is, and candidates of the search
carried over to them and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whale.cluster.cluster import Cluster, Device, DeviceKind
from whale.cluster.network import Link
from whale.search.candidate import Candidate, DeviceGroup
from whale.search.shapes import MOST_CLASSES, device_classes, hosts_alike

FASTER_LINK = 2.0
"""how much faster the links between hosts are in the question of what that would give"""


def carried_over(candidate: Candidate, old_ranks: Sequence[int]) -> Candidate | None:
    """A candidate without the devices that are not among `old_ranks`, whose places are the ranks of
    the new cluster; stages that lost all their devices are gone. None where nothing is left.
    """
    new = {rank: place for place, rank in enumerate(old_ranks)}
    replicas = []
    for replica in candidate.replicas:
        groups = []
        for group in replica.groups:
            ranks = tuple(new[rank] for rank in group.ranks if rank in new)
            if ranks:
                is_whole = len(ranks) == len(group.ranks)
                groups.append(replace(group, ranks=ranks) if is_whole else DeviceGroup(ranks))
        if groups:
            is_same = len(groups) == len(replica.groups)
            starts = replica.starts if is_same else None
            replicas.append(replace(replica, groups=tuple(groups), starts=starts))
    return replace(candidate, replicas=tuple(replicas)) if replicas else None


def on_ranks(candidate: Candidate, ranks: Sequence[int]) -> Candidate:
    """The candidate on the devices of these ranks."""
    replicas = []
    for replica in candidate.replicas:
        groups = tuple(
            replace(group, ranks=tuple(ranks[rank] for rank in group.ranks))
            for group in replica.groups
        )
        replicas.append(replace(replica, groups=groups))
    return replace(candidate, replicas=tuple(replicas))


def with_card(candidate: Candidate, more: Cluster) -> Candidate:
    """The candidate with the last device of the cluster in the first stage that has devices of its
    kind; the model is cut anew.
    """
    new = more.devices[-1]
    kinds = [device.kind for device in more.devices]
    replicas = list(candidate.replicas)
    for place, replica in enumerate(replicas):
        for stage, group in enumerate(replica.groups):
            if group.grid is None and new.kind in (kinds[rank] for rank in group.ranks):
                groups = list(replica.groups)
                groups[stage] = replace(group, ranks=(*group.ranks, new.rank))
                replicas[place] = replace(replica, groups=tuple(groups), starts=None)
                return replace(candidate, replicas=tuple(replicas))
    return candidate


def faster_links(cluster: Cluster) -> Cluster:
    """The cluster with links between hosts that are faster, curves, cards and a measured all-reduce
    over all hosts with them.
    """

    def faster(link: Link) -> Link:
        curve = tuple((size, FASTER_LINK * rate) for size, rate in link.curve)
        card = link.card_bytes_per_s
        return replace(
            link,
            bytes_per_s=FASTER_LINK * link.bytes_per_s,
            curve=curve,
            card_bytes_per_s=None if card is None else FASTER_LINK * card,
        )

    hosts = tuple(
        each if each.inter_host is None else replace(each, inter_host=faster(each.inter_host))
        for each in cluster.host_links
    )
    pairs = tuple(replace(each, link=faster(each.link)) for each in cluster.pair_links)
    measured = cluster.all_reduce
    return replace(
        cluster,
        inter_host=faster(cluster.inter_host),
        host_links=hosts,
        pair_links=pairs,
        all_reduce=None if measured is None else faster(measured),
    )


def one_of_each(cluster: Cluster) -> list[Device]:
    """A device of every kind, then those of the same kinds on other hosts; the first few."""
    kinds: dict[DeviceKind, Device] = {}
    found: dict[tuple[DeviceKind, str], Device] = {}
    for device in cluster.devices:
        first = kinds.setdefault(device.kind, device)
        if device.host != first.host:
            found.setdefault((device.kind, device.host), device)
    return [*kinds.values(), *found.values()][:MOST_CLASSES]


def one_of_each_kind(cluster: Cluster) -> list[Device]:
    """A device of every kind, of many kinds the fastest few and the one with the most memory."""
    kinds: dict[DeviceKind, Device] = {}
    for device in cluster.devices:
        kinds.setdefault(device.kind, device)
    by_speed = sorted(kinds.values(), key=lambda device: -device.kind.flop_per_s)
    largest = max(by_speed, key=lambda device: device.kind.memory_bytes)
    few = by_speed[:MOST_CLASSES]
    return few if largest in few else [*few, largest]


def devices_alike(cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks that contribute the same, for every class; where a class is of many hosts, apart for
    hosts that differ.
    """
    sorts = {
        rank: number
        for number, hosts in enumerate(hosts_alike(cluster))
        for ranks in hosts
        for rank in ranks
    }
    found: dict[tuple[int, int], list[int]] = {}
    for number, each in enumerate(device_classes(cluster)):
        for rank in each.ranks:
            found.setdefault((number, sorts[rank]), []).append(rank)
    return list(map(tuple, found.values()))
