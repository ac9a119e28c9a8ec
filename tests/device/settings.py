"""The knobs of the test device. Every rank reads them from its environment when it installs it."""

from __future__ import annotations

import os
from dataclasses import dataclass

PREFIX = "TESTGPU_"


@dataclass
class Settings:
    """How the device behaves; changed by tests before the first tensor."""

    jitter_s: float = 0.0
    """longest random pause before an operation: shakes the order in which streams run"""
    cold_s: float = 0.0
    """seconds that the first call of each operation takes longer, as kernels are loaded lazily"""
    loading_waits: int = 0
    """1: the first call of each operation waits until all that was launched is over, as a driver may
    do to load its kernel
    """
    kernel_s: float = 0.0
    """seconds that every operation takes longer, other than copies and messages"""
    num_queues: int = 0
    """hardware queues that streams share (CUDA_DEVICE_MAX_CONNECTIONS); 0: one for each stream"""
    num_multiprocessors: int = 80
    """large random tensors depend on it, as on CUDA"""
    memory_bytes: int = 10**12
    """allocations beyond it raise `torch.OutOfMemoryError`"""
    occupied_bytes: int = 0
    """of the memory: the driver's context, communicators, other processes"""
    float32_precision: str = "highest"
    """what `torch.get_float32_matmul_precision` gives on this device's host"""

    @staticmethod
    def from_environment() -> Settings:
        """Reads `TESTGPU_JITTER_S`, `TESTGPU_NUM_QUEUES` and so on; absent ones keep defaults."""
        settings = Settings()
        for name, default in vars(settings).items():
            text = os.environ.get(PREFIX + name.upper())
            if text is not None:
                setattr(settings, name, type(default)(float(text)) if type(default) is int
                        else type(default)(text))  # fmt: skip
        return settings


settings = Settings.from_environment()
