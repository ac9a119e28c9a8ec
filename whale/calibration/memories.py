"""Measures what hosts have beside their devices: `whale profile` writes it into the cluster file.

memory     a copy on the host reads and writes every byte
link       a copy from the host to the device; on one rank of the host alone, then on all at once:
           together they have what the links above them carry
disk       a file of the run folder, written through to the disk, and read back without what
           the system still holds of it in memory
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import torch

from whale.cluster.cluster import Disk, HostMemory, Memories
from whale.cluster.discovery import this_memories
from whale.cluster.matching import this_place
from whale.distributed.ranks import Ranks

COPIED_BYTES = 64 * 2**20
"""larger than any cache"""
WRITTEN_BYTES = 64 * 2**20
TIMES = 3
"""the fastest of so many counts"""


def measure_memories(ranks: Ranks) -> tuple[Memories, ...]:
    """Memory and disk of every host. All ranks call it and get the same."""
    place = this_place()
    places = ranks.gather(place)
    first_of_host = {each.host: rank for rank, each in reversed(list(enumerate(places)))}
    is_first = first_of_host[place.host] == ranks.rank
    found = this_memories()
    memory_bytes_per_s = 2 * COPIED_BYTES / _fastest(_host_copy()) if is_first else 0.0
    copy = _link_copy(ranks)
    ranks.gather(None)  # the others are silent
    alone = COPIED_BYTES / _fastest(copy) if is_first else 0.0
    ranks.gather(None)
    together = COPIED_BYTES / _fastest(copy)
    disk = _disk(found.disk) if is_first and found.disk is not None else found.disk
    figures = ranks.gather((place.host, found, memory_bytes_per_s, alone, together, disk))
    result = []
    for host, first in first_of_host.items():
        _, free, own_rate, link, _, own_disk = figures[first]
        all_links = sum(each[4] for each in figures if each[0] == host)
        memory = HostMemory(free.size("host"), own_rate, link, max(link, all_links))
        result.append(Memories(host, memory, own_disk))
    order = {host: number for number, host in enumerate(each.host for each in places)}
    return tuple(sorted(result, key=lambda each: order[each.host]))


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few times, after one that makes ready."""
    work()
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _host_copy() -> Callable[[], object]:
    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _link_copy(ranks: Ranks) -> Callable[[], object]:
    """A copy from the memory of the host to the device of this rank."""
    device = ranks.device
    source = device.empty_on_host((COPIED_BYTES // 4,), torch.float32)
    source.fill_(1.0)
    target = torch.empty(COPIED_BYTES // 4, device=device.name)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        device.synchronise()

    return copy


def _disk(found: Disk) -> Disk | None:
    """The disk with its rates; None where the folder cannot be written."""
    data = bytes(WRITTEN_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=found.folder or ".", prefix="whale-profile-") as file:
            start = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            written_s = time.perf_counter() - start
            if hasattr(os, "posix_fadvise"):  # not everywhere: then memory is read
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            file.read()
            read_s = time.perf_counter() - start
    except OSError:
        return None
    return Disk(found.memory_bytes, WRITTEN_BYTES / read_s, WRITTEN_BYTES / written_s, found.folder)
