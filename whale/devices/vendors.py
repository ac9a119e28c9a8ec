"""Accelerators by vendor: what differs from one to the other."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from whale.devices.backends import NCCL, RCCL, XCCL
from whale.devices.interface import CLOCK_HZ, MEMORY_BYTES_PER_S, Accelerator, GpuProperties

TRANSFERS_PER_CLOCK = 2
"""memory moves data twice in a clock"""
NUM_CONNECTIONS = 8
"""hardware queues of a GPU where nothing else is set"""
ROCM_NUM_QUEUES = 4
ROCM_ALLOWS_TF32 = "HIPBLASLT_ALLOW_TF32"
NO_CAPABILITY = (0, 0)
"""of GPUs that have no compute capability"""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""environment variables with which products give the same bits in every run, whatever the streams
"""
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""environment variables that hide accelerators from processes that are started later"""


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels of scaled dot-product attention torch may take: a graph holds the one taken."""
    settings = torch.backends.cuda  # they count for every device
    return (
        settings.flash_sdp_enabled(),
        settings.mem_efficient_sdp_enabled(),
        settings.math_sdp_enabled(),
    )


def float32_precision() -> str:
    """`torch.get_float32_matmul_precision()`, which raises where a script has allowed TF32 by the
    newer names (`torch.backends.cuda.matmul.fp32_precision`).
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


# Source: the table of CUDA versions and architectures in PyTorch's RELEASE.md. Builds for CUDA 12.6
# are the only ones since torch 2.11 with kernels for Volta and Pascal, and end with torch 2.14.
FIRST_OF_ALL_BUILDS = (7, 5)
"""compute capability of Turing: every build of torch has kernels for it"""
BUILD_FOR_OLDER = "a build of torch 2.13 for CUDA 12.6, which has kernels for V100 and P100"


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code compiled for these architectures (`sm_80`: for every later one of the same major
    number; `sm_90a`: for this one only; `compute_80`: for any later one) runs on a GPU.
    """
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)
        if match is None:
            return True  # a word that is not known here proves nothing
        built_for = (int(match[2]), int(match[3]))
        if built_for == capability:
            return True
        is_later = built_for < capability and not match[4]
        if is_later and (match[1] == "compute" or built_for[0] == capability[0]):
            return True
    return False


class CudaDevice(Accelerator):
    """A GPU of NVIDIA behind torch's `cuda` module, with NCCL between processes."""

    type = "cuda"
    backend = NCCL
    queues_variable = "CUDA_DEVICE_MAX_CONNECTIONS"
    loading_at_start = ("CUDA_MODULE_LOADING", "EAGER")

    @staticmethod
    def count() -> int:
        is_there = torch.cuda.is_available() and torch.version.hip is None
        return torch.cuda.device_count() if is_there else 0

    @property
    def num_queues(self) -> int | None:
        return int(os.environ.get(self.queues_variable, NUM_CONNECTIONS))

    def gpu_properties(self) -> GpuProperties | None:
        found = torch.cuda.get_device_properties(self.name)
        # the driver says kHz, and newer versions of torch pass it on
        clock_hz = float(getattr(found, "clock_rate", 0)) * 1e3
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

    def facts(self) -> dict[str, str]:
        found = {"built for": f"CUDA {torch.version.cuda}"}
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        return found | super().facts()

    @staticmethod
    def why_none() -> str | None:
        if torch.version.cuda is None:
            return "this build of torch has no CUDA. Try: a CUDA build of torch"
        return "torch has CUDA, but finds no GPU of NVIDIA. Try: nvidia-smi, CUDA_VISIBLE_DEVICES"

    def why_no_kernels(self) -> str | None:
        gpu = self.gpu_properties()
        architectures = torch.cuda.get_arch_list()
        if gpu is None or not architectures or has_kernels(gpu.capability, architectures):
            return None
        is_old = gpu.capability < FIRST_OF_ALL_BUILDS
        major, minor = gpu.capability
        return (
            f"this build of torch (CUDA {torch.version.cuda}) has no kernels for compute capability "
            f"{major}.{minor} ({gpu.name}), only for {', '.join(architectures)}. Try: "
            f"{BUILD_FOR_OLDER if is_old else 'a build of torch for a newer CUDA'}"
        )

    def forbid_tf32(self) -> None:
        super().forbid_tf32()
        torch.backends.cudnn.allow_tf32 = False  # convolutions, allowed by default
        # where `torch.backends.fp32_precision` allows it, the older names leave it so
        newer: Any = torch.backends  # torch's types do not have these names
        for kind in (newer.cuda.matmul, newer.cudnn.conv, newer.cudnn.rnn):
            kind.fp32_precision = "ieee"

    @contextlib.contextmanager
    def tf32(self, is_allowed: bool) -> Iterator[None]:
        before = float32_precision()
        torch.set_float32_matmul_precision("high" if is_allowed else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


class RocmDevice(CudaDevice):
    """A GPU of AMD. torch calls it `cuda`, too, and RCCL `nccl`; what differs is around it."""

    backend = RCCL
    queues_variable = "GPU_MAX_HW_QUEUES"
    loading_at_start = ("HIP_ENABLE_DEFERRED_LOADING", "0")

    @staticmethod
    def count() -> int:
        is_there = torch.cuda.is_available() and torch.version.hip is not None
        return torch.cuda.device_count() if is_there else 0

    @property
    def num_queues(self) -> int | None:
        return int(os.environ.get(self.queues_variable, ROCM_NUM_QUEUES))

    def why_no_kernels(self) -> str | None:
        return None  # torch names AMD's architectures in another way

    def facts(self) -> dict[str, str]:
        found = {"built for": f"ROCm {torch.version.hip}"}
        return found | Accelerator.facts(self)

    @staticmethod
    def why_none() -> str | None:
        return (
            None if torch.version.hip is None else "torch has ROCm, but finds no GPU. Try: rocminfo"
        )

    @property
    def has_tf32(self) -> bool:
        """Capabilities count otherwise here. Its xf32 is off unless hipBLASLt is set so."""
        return os.environ.get(ROCM_ALLOWS_TF32) == "1"


class XpuDevice(Accelerator):
    """A GPU of Intel behind torch's `xpu` module, with oneCCL between processes. Never tried."""

    type = "xpu"
    backend = XCCL

    @staticmethod
    def count() -> int:
        return torch.xpu.device_count() if torch.xpu.is_available() else 0

    def gpu_properties(self) -> GpuProperties | None:
        found = torch.xpu.get_device_properties(self.name)
        units = int(getattr(found, "max_compute_units", 1))
        return GpuProperties(found.name, found.total_memory, NO_CAPABILITY, units)
