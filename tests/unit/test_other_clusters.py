"""The clusters that `whale advise` asks about: which devices stand for which others, and what becomes
faster with faster links.
"""

from __future__ import annotations

import pytest

from whale.cluster.cluster import Cluster, Device, Link, device_kind
from whale.search.other_clusters import (
    devices_alike,
    faster_links,
    one_of_each,
    one_of_each_kind,
)

FAST = Link(1e10, 1e-6)
SLOW = Link(1e9, 1e-5)


def cluster_of(*hosts: tuple[str, ...]) -> Cluster:
    """The kinds of the devices of every host."""
    devices = []
    for host, kinds in enumerate(hosts):
        for place, kind in enumerate(kinds):
            devices.append(Device(len(devices), f"host{host}", place, device_kind(kind)))
    return Cluster(tuple(devices), FAST, SLOW)


@pytest.mark.parametrize(
    ("hosts", "alike"),
    [
        ((("V100-16GB",) * 3, ("T4",)), [(0, 1, 2), (3,)]),
        ((("V100-16GB",) * 2,) * 3, [(0, 1), (2, 3), (4, 5)]),
        ((("V100-16GB",) * 4, *(("V100-16GB",),) * 4), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ((("V100-16GB", "T4"),) * 5, [(0, 2, 4, 6, 8), (1, 3, 5, 7, 9)]),
    ],
)
def test_devices_that_contribute_the_same(
    hosts: tuple[tuple[str, ...], ...], alike: list[tuple[int, ...]]
) -> None:
    """One of four V100 of a host is not missed as the only one of another host."""
    assert devices_alike(cluster_of(*hosts)) == alike


def test_one_more_card_of_every_kind_is_asked_first() -> None:
    cluster = cluster_of(*(("V100-16GB",),) * 5, ("T4",))
    asked = [(device.kind.name, device.host) for device in one_of_each(cluster)]
    assert asked[:2] == [("V100-16GB", "host0"), ("T4", "host5")] and len(asked) == 4


def test_the_fastest_and_the_largest_card_are_asked_alone() -> None:
    kinds = ("T4", "P100", "V100-16GB", "RTX-3090", "A100-40GB", "H100")
    asked = {device.kind.name for device in one_of_each_kind(cluster_of(kinds))}
    largest = max(map(device_kind, kinds), key=lambda kind: kind.memory_bytes)
    fastest = max(map(device_kind, kinds), key=lambda kind: kind.flop_per_s)
    assert {largest.name, fastest.name} <= asked and len(asked) <= 5


def test_faster_links_make_a_measured_all_reduce_faster() -> None:
    """It was measured over all devices, so over the links between hosts."""
    measured = Cluster(cluster_of(("T4",), ("T4",)).devices, FAST, SLOW, all_reduce=Link(8e8, 1e-4))
    changed = faster_links(measured)
    assert changed.inter_host.bytes_per_s == 2e9 and changed.intra_host == FAST
    assert changed.all_reduce == Link(16e8, 1e-4)
