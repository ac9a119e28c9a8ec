"""The cluster of the running ranks, where no file describes it: GPUs by their names, CPU ranks by
the memory of their host.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from whale.cluster.cluster import (
    ETHERNET_50G,
    GIGA,
    PCIE_3_X16,
    Cluster,
    Device,
    Disk,
    HostMemory,
    Memories,
)
from whale.cluster.kinds import DeviceKind, device_kind, recognise
from whale.cluster.matching import RankPlace, this_place
from whale.config import RUN_FOLDER_VARIABLE
from whale.devices import GpuProperties, LocalDevice, host_memory_bytes

logger = logging.getLogger("whale")

# FLOP/s of a GPU that the table does not know: multiprocessors x float32 lanes of each x 2 x clock.
# Lanes by compute capability, from the table of arithmetic instructions in NVIDIA's programming
# guide.
LANES = {(6, 0): 64, (6, 1): 128, (7, 0): 64, (7, 5): 64, (8, 0): 64}
LANES_OF_NEWER = 128
RESERVE = 0.05
"""part of a GPU's memory that no plan uses: communicators that are made later, workspaces of
libraries, and what the allocator cannot give out in one piece
"""


# Assumptions for memories beside the devices that nobody measured.
HOST_BYTES_PER_S = 60 * GIGA
"""half of what six channels of DDR4-2666 have by the standard"""
DISK_BYTES_PER_S = 1 * GIGA
"""a solid state disk behind other users"""


def kind_of_gpu(gpu: GpuProperties) -> DeviceKind:
    """The kind of the table, or one made from the properties."""
    known = recognise(gpu.name, gpu.memory_bytes)
    if known is not None:
        return known
    flop_per_s = (
        gpu.num_multiprocessors * LANES.get(gpu.capability, LANES_OF_NEWER) * 2 * gpu.clock_hz
    )
    return DeviceKind(gpu.name, flop_per_s, gpu.memory_bytes, gpu.memory_bytes_per_s, is_guess=True)


def this_kind(device: LocalDevice, num_local_ranks: int = 1) -> DeviceKind:
    """The kind of the device that this process runs on, with the memory that a plan may use. CPU
    ranks of one host share its memory.
    """
    gpu = device.gpu_properties()
    if gpu is not None:
        return replace(kind_of_gpu(gpu), memory_bytes=usable_memory_bytes(device, gpu))
    return replace(device_kind("CPU"), memory_bytes=host_memory_bytes() // num_local_ranks)


def usable_memory_bytes(device: LocalDevice, gpu: GpuProperties) -> int:
    """Bytes that a plan may use: those that are free after the start, less a reserve.

    The driver's context, communicators and other processes take theirs before. What torch holds
    already counts as free: the model that is there is the one to be planned.
    """
    free = device.free_memory_bytes() + device.reserved_memory_bytes()
    return max(0, free - round(RESERVE * gpu.memory_bytes))


def this_memories() -> Memories:
    """What this host has free beside its devices now; rates are assumed: nothing was measured."""
    free = LocalDevice().free_memory_bytes()
    memory = HostMemory(free, HOST_BYTES_PER_S, PCIE_3_X16.bytes_per_s)
    try:
        free_on_disk = shutil.disk_usage(os.environ.get(RUN_FOLDER_VARIABLE) or ".").free
    except OSError:  # the folder is made later, on a disk of which nothing is known
        return Memories(this_place().host, memory)
    disk = Disk(free_on_disk, DISK_BYTES_PER_S, DISK_BYTES_PER_S)
    return Memories(this_place().host, memory, disk)


def with_least_memory(kinds: Sequence[DeviceKind]) -> list[DeviceKind]:
    """Devices that are the same but for a little memory, as the free memory of equal GPUs is, all
    with the least of it: the planner then sees equal devices.
    """
    most: dict[DeviceKind, int] = {}
    for kind in kinds:
        alike = replace(kind, memory_bytes=0)
        most[alike] = max(most.get(alike, 0), kind.memory_bytes)

    def is_close(kind: DeviceKind) -> bool:
        return kind.memory_bytes >= (1 - RESERVE) * most[replace(kind, memory_bytes=0)]

    least = dict(most)
    for kind in kinds:
        if is_close(kind):
            alike = replace(kind, memory_bytes=0)
            least[alike] = min(least[alike], kind.memory_bytes)
    return [
        replace(kind, memory_bytes=least[replace(kind, memory_bytes=0)]) if is_close(kind) else kind
        for kind in kinds
    ]


def discovered(
    places: Sequence[RankPlace], kinds: Sequence[DeviceKind], memories: Sequence[Memories] = ()
) -> Cluster:
    """The cluster of ranks that run at these places on these kinds of devices. Links are assumed:
    nothing was measured. `memories`: what each rank found beside them on its host.
    """
    kinds = with_least_memory(kinds)
    unknown = Counter(kind.name for kind in kinds if not _is_built_in(kind))
    for name, number in unknown.items():
        logger.warning(
            "%d x %s: not in Whale's table of GPUs, so its speed is estimated from its clock; "
            "measure it with `whale profile`",
            number,
            name,
        )
    next_local: Counter[str] = Counter()
    devices = []
    for rank, (place, kind) in enumerate(zip(places, kinds, strict=True)):
        # counted: two launchers may share a host
        devices.append(Device(rank, place.host, next_local[place.host], kind))
        next_local[place.host] += 1
    # ranks of a host looked at its memory one after the other: the last word counts
    by_host = {each.host: each for each in memories}
    return Cluster(tuple(devices), PCIE_3_X16, ETHERNET_50G, memories=tuple(by_host.values()))


def _is_built_in(kind: DeviceKind) -> bool:
    try:
        return device_kind(kind.name).flop_per_s == kind.flop_per_s
    except ValueError:
        return False
