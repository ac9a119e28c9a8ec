"""The test device behind Whale's interface of devices (`whale/devices.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests.device.collectives import BACKEND, install_collectives
from tests.device.memory import NAME
from tests.device.settings import settings
from whale import devices
from whale.devices import Accelerator, Backend, GpuProperties

TESTCCL = Backend(BACKEND, has_tags=False, has_even_collectives=True, runs_beside_compute=True)


class TestGpu(Accelerator):
    """The test device, as a rank uses it."""

    __test__ = False
    type = NAME
    backend = TESTCCL

    def __init__(self, index: int | None = None) -> None:
        super().__init__(0)  # a process has one

    @property
    def module(self) -> object:
        return torch.get_device_module(NAME)

    def synchronise(self) -> None:
        torch.get_device_module(NAME).synchronize()

    @property
    def num_queues(self) -> int | None:
        return settings.num_queues or None

    def free_memory_bytes(self) -> int:
        return int(torch.get_device_module(NAME).mem_get_info()[0])

    def reserved_memory_bytes(self) -> int:
        return int(torch.get_device_module(NAME).memory_allocated())

    def peak_memory_bytes(self) -> int:
        return int(torch.get_device_module(NAME).max_memory_allocated())

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def gpu_properties(self) -> GpuProperties | None:
        return GpuProperties(
            "Test GPU", settings.memory_bytes, (8, 0), settings.num_multiprocessors
        )

    def random_states(self) -> list[Tensor]:
        return [torch.random.get_rng_state(), torch.get_device_module(NAME).get_rng_state()]

    def set_random_states(self, states: Sequence[Tensor]) -> None:
        torch.random.set_rng_state(states[0])
        torch.get_device_module(NAME).set_rng_state(states[1])

    @contextlib.contextmanager
    def fork_random(self) -> Iterator[None]:
        before = self.random_states()
        try:
            yield
        finally:
            self.set_random_states(before)


def use_test_device() -> None:
    """From here on `auto` finds the test device in this process and in those forked from it."""
    install_collectives()
    devices.BACKENDS[BACKEND] = TESTCCL
    if TestGpu not in devices.ACCELERATORS:
        devices.ACCELERATORS.insert(0, TestGpu)
