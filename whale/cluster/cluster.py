"""The devices, and the memories that their hosts have beside them; the links between them are in
`network.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from whale.cluster.kinds import DEVICE_KINDS, GIGA, TERA, DeviceKind, device_kind
from whale.cluster.layer_times import LayerTimes
from whale.cluster.network import HostLinks, Link, Network, PairLink
from whale.names import count


@dataclass(frozen=True)
class Device:
    """One accelerator, run by one process."""

    rank: int
    host: str
    local_rank: int
    kind: DeviceKind


@dataclass(frozen=True)
class HostMemory:
    """The memory of a host, as far as a job may have it.

    A device reaches it over a link of its own (PCIe), and all devices of the host together no more
    than the links above it carry. What k ranks of a host move at the same time, each gets

        min(link, all links / k, memory / k)   bytes per second, each way                        (1)

    of the host's memory, and 1 / k of the disk's rate, over the same link.
    """

    memory_bytes: int
    memory_bytes_per_s: float
    """what the host itself reads and writes: updates on the host run at this rate"""
    link_bytes_per_s: float
    """between one device and this memory, each way"""
    links_bytes_per_s: float | None = None
    """all devices of the host together; None: what one of them has"""

    def bytes_per_s(self, num_ranks: int) -> float:
        """Line (1) for so many ranks."""
        together = min(self.links_bytes_per_s or self.link_bytes_per_s, self.memory_bytes_per_s)
        return min(self.link_bytes_per_s, together / num_ranks)


@dataclass(frozen=True)
class Disk:
    """A folder on a disk of a host."""

    memory_bytes: int
    """that files of a job may take"""
    read_bytes_per_s: float
    write_bytes_per_s: float
    folder: str | None = None
    """None: the run folder"""


@dataclass(frozen=True)
class Memories:
    """What one host has beside its devices; None: not known, so nothing is put there."""

    host: str
    memory: HostMemory | None = None
    disk: Disk | None = None

    def size(self, memory: str) -> int:
        """Bytes of "host" or "disk"."""
        found = self.memory if memory == "host" else self.disk
        return found.memory_bytes if found is not None else 0

    def rates(self, memory: str, num_ranks: int) -> tuple[float, float]:
        """Bytes per second (to the device, from it) for each of so many ranks at the same time."""
        link = self.memory.bytes_per_s(num_ranks) if self.memory is not None else float("inf")
        if memory == "host":
            return link, link
        assert self.disk is not None, f"host {self.host} has no disk"
        read = min(link, self.disk.read_bytes_per_s / num_ranks)
        return read, min(link, self.disk.write_bytes_per_s / num_ranks)


# Assumptions for a cluster of which nothing is known; a measured value replaces them.
PCIE_3_X16 = Link(bytes_per_s=12 * GIGA, latency_s=10e-6)
"""15.75 GB/s by the standard, about 12 reached by large copies"""
ETHERNET_50G = Link(bytes_per_s=6.25 * GIGA, latency_s=30e-6)
"""the network of the Whale paper's cluster, 50 Gb/s"""
DEVICES_PER_HOST = 8


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, and two kinds of links."""

    devices: tuple[Device, ...]
    intra_host: Link
    inter_host: Link
    host_links: tuple[HostLinks, ...] = ()
    """hosts with links of their own"""
    all_reduce: Link | None = None
    """measured all-reduce over all devices: latency, and the bytes per second that each device
    sends; None: not measured
    """
    pair_links: tuple[PairLink, ...] = ()
    """links between certain hosts, by their names or patterns of them"""
    layer_times: LayerTimes | None = None
    """measured times of parts of a model, which the planner takes before all others"""
    memories: tuple[Memories, ...] = ()
    """what hosts have beside their devices, for `offload`; a host that is not here has nothing"""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("a cluster needs at least 1 device, got 0")
        places: dict[tuple[str, int], int] = {}
        for position, device in enumerate(self.devices):
            if device.rank != position:
                raise ValueError(
                    f"device {position} of the cluster has rank {device.rank}; list the devices "
                    "in rank order, from 0"
                )
            other = places.setdefault((device.host, device.local_rank), device.rank)
            if other != device.rank:
                raise ValueError(
                    f"ranks {other} and {device.rank} are both local rank {device.local_rank} of "
                    f"host {device.host!r}"
                )

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
            raise ValueError(
                f"need at least 1 device and 1 device per host, got {num_devices} and "
                f"{devices_per_host}"
            )
        same = device_kind(kind) if isinstance(kind, str) else kind
        devices = tuple(
            Device(rank, f"host{rank // devices_per_host}", rank % devices_per_host, same)
            for rank in range(num_devices)
        )
        return cls(devices, intra_host, inter_host)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Reads a cluster file; its devices get ranks in the order of the file
        (docs/cluster.md).
        """
        from whale.cluster.file import load

        return load(path)

    def save(self, path: str | Path) -> None:
        """Writes a cluster file that `load` reads."""
        from whale.cluster.file import save

        save(self, path)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, in the order of their first device."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    def memories_of(self, host: str) -> Memories:
        """What a host has beside its devices."""
        return self._memories.get(host) or Memories(host)

    @cached_property
    def _memories(self) -> dict[str, Memories]:
        return {each.host: each for each in self.memories}

    def with_memories(self, memory: HostMemory | None, disk: Disk | None = None) -> Cluster:
        """The cluster with the same memory and disk on every host."""
        return replace(self, memories=tuple(Memories(host, memory, disk) for host in self.hosts))

    @property
    def is_uniform(self) -> bool:
        """All devices are alike."""
        return len({device.kind for device in self.devices}) == 1

    @property
    def has_accelerators_only(self) -> bool:
        """No device is a CPU, whose memory is that of its host."""
        return not any(device.kind.is_cpu for device in self.devices)

    def first(self, num_devices: int) -> Cluster:
        """The first devices only: for planning and emulation, where no rank runs on a host of the
        file.
        """
        if not 1 <= num_devices <= self.num_devices:
            here = count(self.num_devices, "device")
            raise ValueError(
                f"the cluster has {here}, {num_devices} were asked for; add devices or ask for "
                "fewer"
            )
        return replace(self, devices=self.devices[:num_devices])

    def in_order(self, devices: Sequence[Device]) -> Cluster:
        """These devices of it, with ranks in the order given."""
        return replace(
            self, devices=tuple(replace(device, rank=rank) for rank, device in enumerate(devices))
        )

    @cached_property
    def network(self) -> Network:
        """Its links alone."""
        return Network(
            tuple(device.host for device in self.devices),
            self.intra_host,
            self.inter_host,
            self.host_links,
            self.all_reduce,
            self.pair_links,
        )

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The link between two ranks."""
        return self.network.link(rank_a, rank_b)

    def ring_bytes_per_s(self, ranks: Sequence[int]) -> float:
        """The rate of the slowest of the links from each of these ranks to the next, and from the
        last to the first.
        """
        return min(self.link(a, b).bytes_per_s for a, b in pairwise((*ranks, ranks[0])))


__all__ = [
    "DEVICE_KINDS",
    "GIGA",
    "TERA",
    "Cluster",
    "Device",
    "DeviceKind",
    "Disk",
    "HostLinks",
    "HostMemory",
    "Link",
    "Memories",
    "Network",
    "PairLink",
    "device_kind",
]
