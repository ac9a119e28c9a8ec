"""The test device behind Whale's interface of devices (`whale/devices`)."""

from __future__ import annotations

import torch

from tests.device.collectives import BACKEND, install_collectives
from tests.device.memory import NAME
from tests.device.settings import PREFIX, settings
from whale import devices
from whale.devices import Accelerator, Backend, GpuProperties

TESTCCL = Backend(BACKEND, has_tags=False, has_even_collectives=True, runs_beside_compute=True)


class TestGpu(Accelerator):
    """The test device, as a rank uses it."""

    __test__ = False
    type = NAME
    backend = TESTCCL
    queues_variable = f"{PREFIX}NUM_QUEUES"

    def __init__(self, index: int | None = None) -> None:
        super().__init__(0)  # a process has one

    @property
    def num_queues(self) -> int | None:
        return settings.num_queues or None

    @property
    def bound_device(self) -> torch.device | None:
        return None

    def gpu_properties(self) -> GpuProperties | None:
        return GpuProperties(
            "Test GPU", settings.memory_bytes, (8, 0), settings.num_multiprocessors
        )


def use_test_device() -> None:
    """From here on `auto` finds the test device in this process and in those forked from it."""
    install_collectives()
    devices.BACKENDS[BACKEND] = TESTCCL
    if TestGpu not in devices.ACCELERATORS:
        devices.ACCELERATORS.insert(0, TestGpu)
