"""The devices, what each kind can do, and the links between them.

Sending n bytes over a link takes  latency + n / rate  seconds.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

GIGA = 10**9
TERA = 10**12


@dataclass(frozen=True)
class DeviceKind:
    """What one kind of device can do at best."""

    name: str
    flop_per_s: float
    """float32 multiply-adds on the ordinary cores (no tensor cores, no TF32), two FLOP each"""
    memory_bytes: int
    bytes_per_s: float
    """memory bandwidth"""


@dataclass(frozen=True)
class Device:
    """One accelerator, run by one process."""

    rank: int
    host: str
    local_rank: int
    kind: DeviceKind


@dataclass(frozen=True)
class Link:
    """What connects two devices."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


# Peak figures of the makers' data sheets, for the SXM form where there is one. "GB" is read as 10^9 bytes: a little less than
# the boards really have, which leaves room for the driver.
#   P100       "NVIDIA Tesla P100" data sheet (SXM2): 10.6 TFLOPS single precision, 16 GB HBM2, 732 GB/s
#   V100       "NVIDIA V100" data sheet, January 2020 (SXM2): 15.7 TFLOPS, 16 or 32 GB HBM2, 900 GB/s
#   T4         "NVIDIA T4" data sheet: 8.1 TFLOPS, 16 GB GDDR6; 320 GB/s (256 bit x 10 Gb/s)
#   A100       "NVIDIA A100" data sheet (SXM4): 19.5 TFLOPS FP32; 40 GB HBM2, 1,555 GB/s; 80 GB HBM2e, 2,039 GB/s
#   H100       "NVIDIA H100" data sheet (SXM5): 67 TFLOPS FP32, 80 GB HBM3, 3.35 TB/s
#   CPU        not a data sheet: one core with AVX2 at 3 GHz (2 units x 8 lanes x 2 FLOP x 3 GHz = 96 GFLOPS) with 4 GB and
#              10 GB/s, about what one rank has on a laptop
_KINDS = (
    DeviceKind("P100", 10.6 * TERA, 16 * GIGA, 732 * GIGA),
    DeviceKind("V100-16GB", 15.7 * TERA, 16 * GIGA, 900 * GIGA),
    DeviceKind("V100-32GB", 15.7 * TERA, 32 * GIGA, 900 * GIGA),
    DeviceKind("T4", 8.1 * TERA, 16 * GIGA, 320 * GIGA),
    DeviceKind("A100-40GB", 19.5 * TERA, 40 * GIGA, 1555 * GIGA),
    DeviceKind("A100-80GB", 19.5 * TERA, 80 * GIGA, 2039 * GIGA),
    DeviceKind("H100", 67 * TERA, 80 * GIGA, 3350 * GIGA),
    DeviceKind("CPU", 96 * GIGA, 4 * GIGA, 10 * GIGA),
)
DEVICE_KINDS = {kind.name: kind for kind in _KINDS}

# Assumptions for a cluster of which nothing is known; a measured value replaces them.
PCIE_3_X16 = Link(bytes_per_s=12 * GIGA, latency_s=10e-6)
"""15.75 GB/s by the standard, about 12 reached by large copies"""
ETHERNET_50G = Link(bytes_per_s=6.25 * GIGA, latency_s=30e-6)
"""the network of the Whale paper's cluster, 50 Gb/s"""
DEVICES_PER_HOST = 8


def device_kind(name: str) -> DeviceKind:
    """The built-in kind of that name, upper or lower case."""
    by_lower_name = {kind.name.lower(): kind for kind in _KINDS}
    kind = by_lower_name.get(name.lower())
    if kind is None:
        longer = [known for known in by_lower_name if known.startswith(name.lower())]  # `v100` means one of the V100s
        nearest = longer or difflib.get_close_matches(name.lower(), by_lower_name, n=2, cutoff=0.4)
        offer = " or ".join(repr(by_lower_name[near].name) for near in nearest)
        hint = f"did you mean {offer}?" if offer else f"known are {', '.join(DEVICE_KINDS)}"
        raise ValueError(f"unknown device kind {name!r}; {hint}")
    return kind


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, and two kinds of links."""

    devices: tuple[Device, ...]
    intra_host: Link
    inter_host: Link

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a cluster needs at least 1 device, got 0")
        places: dict[tuple[str, int], int] = {}
        for position, device in enumerate(self.devices):
            if device.rank != position:
                raise ValueError(f"device {position} of the cluster has rank {device.rank}; list the devices in rank order, from 0")
            other = places.setdefault((device.host, device.local_rank), device.rank)
            if other != device.rank:
                raise ValueError(f"ranks {other} and {device.rank} are both local rank {device.local_rank} of host {device.host!r}")

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        kind: DeviceKind | str = "V100-16GB",
        *,
        devices_per_host: int = DEVICES_PER_HOST,
        intra_host: Link = PCIE_3_X16,
        inter_host: Link = ETHERNET_50G,
    ) -> Cluster:
        """`num_devices` equal devices, filling hosts `host0`, `host1`, ... in order."""
        if num_devices < 1 or devices_per_host < 1:
            raise ValueError(f"need at least 1 device and 1 device per host, got {num_devices} and {devices_per_host}")
        same = device_kind(kind) if isinstance(kind, str) else kind
        devices = tuple(Device(rank, f"host{rank // devices_per_host}", rank % devices_per_host, same) for rank in range(num_devices))
        return cls(devices, intra_host, inter_host)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The link between two ranks."""
        same_host = self.devices[rank_a].host == self.devices[rank_b].host
        return self.intra_host if same_host else self.inter_host
