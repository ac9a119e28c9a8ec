"""The device that this process runs on, behind one interface: memory, random state, synchronisation
and the backend of its process groups.

No module outside of this package asks whether a device is a GPU of some vendor. A new kind of
device is a subclass of `Accelerator`, listed in `ACCELERATORS`, and a `Backend`. Both are plain
facts about hardware; what an emulated job adds to them stands in `distributed/platform.py`.

    backends.py    what carries tensors between processes
    copies.py      tensors on their way between a device and the host
    interface.py   the interface: the CPU, and what accelerators have in common
    vendors.py     NVIDIA, AMD, Intel
"""

from __future__ import annotations

import os

import torch

from whale.devices.backends import BACKENDS, GLOO, HOST, NCCL, RCCL, XCCL, Backend, backend_of
from whale.devices.copies import DeviceCopy, HostCopy
from whale.devices.interface import (
    Accelerator,
    GpuProperties,
    LocalDevice,
    Moment,
    host_memory_bytes,
)
from whale.devices.vendors import (
    DETERMINISTIC,
    VISIBLE_DEVICES,
    CudaDevice,
    RocmDevice,
    XpuDevice,
    float32_precision,
)

__all__ = [
    "ACCELERATORS",
    "BACKENDS",
    "DETERMINISTIC",
    "GLOO",
    "HOST",
    "NCCL",
    "RCCL",
    "XCCL",
    "Accelerator",
    "Backend",
    "CudaDevice",
    "DeviceCopy",
    "GpuProperties",
    "HostCopy",
    "LocalDevice",
    "Moment",
    "RocmDevice",
    "XpuDevice",
    "backend_of",
    "device_of",
    "device_types",
    "find_device",
    "float32_precision",
    "hide_accelerators",
    "host_memory_bytes",
    "num_accelerators",
    "used_accelerator",
]

ACCELERATORS: list[type[LocalDevice]] = [CudaDevice, RocmDevice, XpuDevice]
"""kinds of accelerator, in the order in which `auto` looks for them"""


def device_types() -> list[str]:
    """What "device" in a config may be."""
    return list(dict.fromkeys(["auto", LocalDevice.type, *(kind.type for kind in ACCELERATORS)]))


def device_of(device: torch.device) -> LocalDevice:
    """The interface of a tensor's device."""
    kinds = [kind for kind in ACCELERATORS if kind.type == device.type]
    for kind in kinds:
        if kind.count() > 0:
            return kind(device.index)
    return kinds[0](device.index) if kinds else LocalDevice()


def find_device(wanted: str = "auto", index: int = 0) -> LocalDevice:
    """The device of this process: of the type that is wanted, or with `auto` an accelerator where
    there is one.

    `index`: this process's number on its host. A launcher may show every process all accelerators
    of the host, or each only its own; the index counts among those that it sees. Raises where the
    wanted type is not there.
    """
    kinds = [kind for kind in ACCELERATORS if wanted in ("auto", kind.type)]
    for kind in kinds:
        if kind.count() > 0:
            return kind(index % kind.count())
    if wanted not in ("auto", LocalDevice.type):
        raise ValueError(
            f'"device": "{wanted}" was asked for, but torch sees no {wanted.upper()} device here'
        )
    return LocalDevice()


def used_accelerator() -> LocalDevice | None:
    """The accelerator that this process has begun to use: the current one; None before the first
    use, and on CPUs.
    """
    for kind in ACCELERATORS:
        module = getattr(torch, kind.type)
        if kind.count() > 0 and module.is_initialized():
            return kind(module.current_device())
    return None


def num_accelerators() -> int:
    """Number of accelerators that this process sees; 0 where there is only the CPU."""
    return max((kind.count() for kind in ACCELERATORS), default=0)


def hide_accelerators() -> None:
    """Processes that are started from here on see only the CPU."""
    for variable in VISIBLE_DEVICES:
        os.environ[variable] = ""
