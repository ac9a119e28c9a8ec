"""Memories beside those of the devices: of the host, and its disk. The ranks of a host share both.

A device reaches the memory of its host over a link of its own (PCIe), and all devices of the host
together no more than the links above it carry. What k of its ranks move at the same time, each gets

    min(link, all links / k, memory / k)   bytes per second, each way                            (1)

of the host's memory, and 1 / k of the disk's rate, over the same link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class HostMemory:
    """The memory of a host, as far as a job may have it."""

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
    """What one host has beside its devices; None: nothing is known of it, so nothing is put there."""

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


def known(memories: tuple[Memories, ...], memory: str) -> Iterator[Memories]:
    """Hosts that have such a memory."""
    for each in memories:
        if each.size(memory):
            yield each
