"""The cluster of the running ranks, where no file describes it: GPUs by their names, CPU ranks by
the memory of their host.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Cluster, Device
from whale.cluster.kinds import DeviceKind, device_kind, recognise
from whale.cluster.matching import Place
from whale.devices import GpuProperties, LocalDevice, host_memory_bytes

logger = logging.getLogger("whale")

# FLOP/s of a GPU that the table does not know: multiprocessors x float32 lanes of each x 2 x clock.
# Lanes by compute capability, from the
# table of arithmetic instructions in NVIDIA's CUDA programming guide.
LANES = {(6, 0): 64, (6, 1): 128, (7, 0): 64, (7, 5): 64, (8, 0): 64}
LANES_OF_NEWER = 128


def kind_of_gpu(gpu: GpuProperties) -> DeviceKind:
    """The kind of the table, or one made from the properties."""
    known = recognise(gpu.name, gpu.memory_bytes)
    if known is not None:
        return known
    flop_per_s = (
        gpu.num_multiprocessors * LANES.get(gpu.capability, LANES_OF_NEWER) * 2 * gpu.clock_hz
    )
    return DeviceKind(gpu.name, flop_per_s, gpu.memory_bytes, gpu.memory_bytes_per_s)


def this_kind(device: LocalDevice, num_local_ranks: int = 1) -> DeviceKind:
    """The kind of the device that this process runs on. CPU ranks of one host share its memory."""
    gpu = device.gpu_properties()
    if gpu is not None:
        return kind_of_gpu(gpu)
    return replace(device_kind("CPU"), memory_bytes=host_memory_bytes() // num_local_ranks)


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
