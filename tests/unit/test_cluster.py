"""Clusters: ranks, hosts, links and names of kinds."""

from __future__ import annotations

import pytest

from whale.cluster.cluster import (
    DEVICE_KINDS,
    Cluster,
    Device,
    DeviceKind,
    HostLinks,
    Link,
    device_kind,
)
from whale.cluster.discovery import discovered, kind_of_gpu
from whale.cluster.kinds import recognise
from whale.cluster.matching import RankPlace
from whale.devices import GpuProperties


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
    assert device_kind("v100-32gb").flop_per_s / device_kind("T4").flop_per_s == pytest.approx(
        1.94, abs=0.01
    )
    assert device_kind("V100-32GB").memory_bytes == 2 * device_kind("V100-16GB").memory_bytes
    named = {
        "P100",
        "V100-16GB",
        "V100-32GB",
        "T4",
        "A10",
        "L4",
        "A100-40GB",
        "A100-80GB",
        "H100",
        "RTX-3090",
        "RTX-4090",
        "Titan-RTX",
        "RTX-2080-Ti",
        "A40",
        "L40S",
        "H200",
        "GH200",
        "RTX-3060",
        "RTX-3080",
        "RTX-4080",
        "RTX-5090",
        "MI250",
        "MI300X",
        "CPU",
    }
    assert set(DEVICE_KINDS) == named


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v100", "unknown device kind 'v100'; did you mean 'V100-16GB' or 'V100-32GB'?"),
        ("V100-16G", "did you mean 'V100-16GB'?"),
        ("A100-40G", "did you mean 'A100-40GB'"),
        ("RTX3090", "'RTX-3090'"),
        ("xyz", "known are P100, V100-16GB"),
    ],
)
def test_unknown_kinds_name_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Cluster.uniform(2, name)
    assert message in str(error.value)


def test_rates_by_dtype() -> None:
    """Without hardware for a dtype it runs as float32 does."""
    v100 = device_kind("V100-32GB")
    a100 = device_kind("A100-80GB")
    assert (v100.rate("fp16"), v100.rate("bf16"), v100.rate("tf32")) == (125e12, 15.7e12, 15.7e12)
    assert [a100.rate(dtype) / a100.rate("fp32") for dtype in ("tf32", "bf16", "fp16")] == [
        8,
        16,
        16,
    ]
    with pytest.raises(ValueError, match="no rate for 'int8'"):
        a100.rate("int8")


@pytest.mark.parametrize(
    ("driver_name", "memory_gib", "name"),
    [
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-16GB"),
        ("Tesla V100S-PCIE-32GB", 31.7, "V100-32GB"),
        ("Tesla P100-PCIE-16GB", 15.9, "P100"),
        ("Tesla T4", 14.6, "T4"),
        ("NVIDIA A10", 22.0, "A10"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 79.2, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA GeForce RTX 3090", 23.7, "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.7, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, None),
        ("NVIDIA A30", 23.5, None),
        ("NVIDIA L40S", 44.5, "L40S"),
        ("NVIDIA L40", 44.5, None),
        ("NVIDIA TITAN RTX", 23.6, "Titan-RTX"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.8, "RTX-2080-Ti"),
        ("NVIDIA GeForce RTX 2080", 7.8, None),
        ("NVIDIA GeForce RTX 3080", 9.8, "RTX-3080"),
        ("NVIDIA GeForce RTX 3080 Ti", 11.8, None),
        ("NVIDIA GeForce RTX 3060", 11.8, "RTX-3060"),
        ("NVIDIA GeForce RTX 4080 SUPER", 15.7, None),
        ("NVIDIA GeForce RTX 5090", 31.4, "RTX-5090"),
        ("NVIDIA A40", 44.5, "A40"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GH200 480GB", 94.5, "GH200"),
        ("AMD Instinct MI250X/MI250", 64.0, "MI250"),
        ("AMD Instinct MI300X", 191.7, "MI300X"),
    ],
)
def test_gpus_are_known_by_the_drivers_name(
    driver_name: str, memory_gib: float, name: str | None
) -> None:
    memory = int(memory_gib * 2**30)
    found = recognise(driver_name, memory)
    assert (found.name if found else None) == name
    assert found is None or found.memory_bytes == memory  # what is there, not what the sheet says


def test_an_unknown_gpu_is_estimated_from_its_clock() -> None:
    # A30: 56 multiprocessors x 64 lanes x 2 x 1.44 GHz = 10.3 TFLOPS, as its data sheet says
    kind = kind_of_gpu(GpuProperties("NVIDIA A30", 24 * 10**9, (8, 0), 56, 1.44e9, 933e9))
    assert kind.flop_per_s == pytest.approx(10.3e12, rel=0.01) and kind.name == "NVIDIA A30"


def test_discovered_ranks_keep_their_hosts_and_kinds(caplog: pytest.LogCaptureFixture) -> None:
    kinds = [device_kind("T4"), device_kind("T4"), DeviceKind("NVIDIA A30", 1e13, 10**10, 1e12)]
    cluster = discovered([RankPlace("a", 0), RankPlace("b", 0), RankPlace("a", 1)], kinds)
    assert [(device.host, device.local_rank, device.kind.name) for device in cluster.devices] == [
        ("a", 0, "T4"),
        ("b", 0, "T4"),
        ("a", 1, "NVIDIA A30"),
    ]
    assert "NVIDIA A30: not in Whale's table" in caplog.text and "T4:" not in caplog.text


def test_links_of_one_host() -> None:
    kind = device_kind("T4")
    usual = Link(1e9, 1e-5)
    own = Link(5e8, 3e-5)
    devices = tuple(Device(rank, "ab"[rank // 2], rank % 2, kind) for rank in range(4))
    cluster = Cluster(
        devices,
        usual,
        Link(8e8, 4e-5),
        (HostLinks("b", intra_host=own, inter_host=Link(9e8, 9e-5)),),
    )
    assert cluster.link(0, 1) == usual and cluster.link(2, 3) == own
    assert (
        cluster.link(0, 2) == cluster.link(3, 1) == Link(8e8, 9e-5)
    )  # the slower of both, in each respect


def test_the_first_devices_in_file_order() -> None:
    cluster = Cluster.uniform(5, "T4", devices_per_host=2)
    assert cluster.first(3).devices == cluster.devices[:3]
    with pytest.raises(ValueError, match="has 5 devices, 6 were asked for"):
        cluster.first(6)


def test_bad_clusters_are_refused() -> None:
    kind = device_kind("T4")
    link = Link(1e9, 1e-5)
    with pytest.raises(ValueError, match="rank 1; list the devices in rank order"):
        Cluster((Device(1, "a", 0, kind),), link, link)
    with pytest.raises(ValueError, match="ranks 0 and 1 are both local rank 0 of host 'a'"):
        Cluster((Device(0, "a", 0, kind), Device(1, "a", 0, kind)), link, link)
    with pytest.raises(ValueError, match="got 0"):
        Cluster.uniform(0)
