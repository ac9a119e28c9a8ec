"""The cluster of the running ranks, where no file describes it: CUDA devices by their names, CPU
ranks by the memory of their host.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Cluster, Device
from whale.cluster.kinds import DeviceKind, device_kind, recognise
from whale.cluster.matching import Place

logger = logging.getLogger("whale")

# FLOP/s of a GPU that the table does not know: multiprocessors x float32 lanes of each x 2 x clock.
# Lanes by compute capability, from the
# table of arithmetic instructions in NVIDIA's CUDA programming guide.
LANES = {(6, 0): 64, (6, 1): 128, (7, 0): 64, (7, 5): 64, (8, 0): 64}
LANES_OF_NEWER = 128
TRANSFERS_PER_CLOCK = 2
"""memory moves data twice in a clock"""
CLOCK_HZ = 1.4e9
MEMORY_BYTES_PER_S = 300e9
"""where the driver does not tell: the low end of today's GPUs"""


@dataclass(frozen=True)
class GpuProperties:
    """What the driver tells of a GPU."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    num_multiprocessors: int
    clock_hz: float = CLOCK_HZ
    memory_bytes_per_s: float = MEMORY_BYTES_PER_S


def kind_of_gpu(gpu: GpuProperties) -> DeviceKind:
    """The kind of the table, or one made from the properties."""
    known = recognise(gpu.name, gpu.memory_bytes)
    if known is not None:
        return known
    flop_per_s = (
        gpu.num_multiprocessors * LANES.get(gpu.capability, LANES_OF_NEWER) * 2 * gpu.clock_hz
    )
    return DeviceKind(gpu.name, flop_per_s, gpu.memory_bytes, gpu.memory_bytes_per_s)


def this_kind(device: str, num_local_ranks: int = 1) -> DeviceKind:
    """The kind of the device that this process runs on: `cpu` or `cuda:1`. CPU ranks of one host
    share its memory.
    """
    if torch.device(device).type == "cuda":
        return kind_of_gpu(_properties(device))
    return replace(device_kind("CPU"), memory_bytes=host_memory_bytes() // num_local_ranks)


def host_memory_bytes() -> int:
    """Physical memory of this host, within the limit of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                memory = min(memory, int(file.read()))  # `max`: no limit
        except (OSError, ValueError):
            continue
    return memory


def free_memory_bytes(device: str) -> int:
    """What is free now on the device, or on the host of a CPU rank."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            figures = dict(line.split(":") for line in file)
        return min(int(figures["MemAvailable"].split()[0]) * 1024, host_memory_bytes())
    except (OSError, KeyError, ValueError):
        return host_memory_bytes()  # not Linux


def _properties(device: str) -> GpuProperties:
    found = torch.cuda.get_device_properties(device)
    clock_hz = (
        float(getattr(found, "clock_rate", 0)) * 1e3
    )  # the driver tells kHz, and newer versions of torch pass it on
    memory_hz = float(getattr(found, "memory_clock_rate", 0)) * 1e3
    bus_bits = float(getattr(found, "memory_bus_width", 0))
    return GpuProperties(
        found.name,
        found.total_memory,
        (found.major, found.minor),
        found.multi_processor_count,
        clock_hz or CLOCK_HZ,
        memory_hz * TRANSFERS_PER_CLOCK * bus_bits / 8 or MEMORY_BYTES_PER_S,
    )


def discovered(places: Sequence[Place], kinds: Sequence[DeviceKind]) -> Cluster:
    """The cluster of ranks that run at these places on these kinds of devices. Links are assumed:
    nothing was measured.
    """
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
        devices.append(
            Device(rank, place.host, next_local[place.host], kind)
        )  # counted: two launchers may share a host
        next_local[place.host] += 1
    return Cluster(tuple(devices), PCIE_3_X16, ETHERNET_50G)


def _is_built_in(kind: DeviceKind) -> bool:
    try:
        return device_kind(kind.name).flop_per_s == kind.flop_per_s
    except ValueError:
        return False
