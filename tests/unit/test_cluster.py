"""Clusters: ranks, hosts, links and names of kinds."""

from __future__ import annotations

import pytest

from whale.cluster.cluster import DEVICE_KINDS, Cluster, Device, DeviceKind, Link, device_kind


def test_uniform_fills_hosts_in_order() -> None:
    cluster = Cluster.uniform(5, "T4", devices_per_host=2)
    assert [(device.rank, device.host, device.local_rank) for device in cluster.devices] == [
        (0, "host0", 0),
        (1, "host0", 1),
        (2, "host1", 0),
        (3, "host1", 1),
        (4, "host2", 0),
    ]
    assert {device.kind.name for device in cluster.devices} == {"T4"}
    assert cluster.num_devices == 5
    assert cluster.link(2, 3) is cluster.intra_host
    assert cluster.link(1, 2) is cluster.inter_host


def test_own_kind() -> None:
    kind = DeviceKind("mine", 1e12, 10**10, 1e11)
    assert Cluster.uniform(2, kind).devices[1].kind is kind


def test_a_message_takes_latency_and_bytes() -> None:
    assert Link(bytes_per_s=100.0, latency_s=0.5).seconds(200) == 2.5


def test_ratios_of_known_kinds() -> None:
    """Figures that the Whale paper leans on: a V100 has about twice the FLOP/s of a T4."""
    assert device_kind("v100-32gb").flop_per_s / device_kind("T4").flop_per_s == pytest.approx(1.94, abs=0.01)
    assert device_kind("V100-32GB").memory_bytes == 2 * device_kind("V100-16GB").memory_bytes
    assert set(DEVICE_KINDS) == {"P100", "V100-16GB", "V100-32GB", "T4", "A100-40GB", "A100-80GB", "H100", "CPU"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v100", "unknown device kind 'v100'; did you mean 'V100-16GB' or 'V100-32GB'?"),
        ("V100-16G", "did you mean 'V100-16GB'?"),
        ("A10-40GB", "'A100-40GB'"),
        ("xyz", "known are P100, V100-16GB"),
    ],
)
def test_unknown_kinds_name_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Cluster.uniform(2, name)
    assert message in str(error.value)


def test_bad_clusters_are_refused() -> None:
    kind, link = device_kind("T4"), Link(1e9, 1e-5)
    with pytest.raises(ValueError, match="rank 1; list the devices in rank order"):
        Cluster((Device(1, "a", 0, kind),), link, link)
    with pytest.raises(ValueError, match="ranks 0 and 1 are both local rank 0 of host 'a'"):
        Cluster((Device(0, "a", 0, kind), Device(1, "a", 0, kind)), link, link)
    with pytest.raises(ValueError, match="got 0"):
        Cluster.uniform(0)
