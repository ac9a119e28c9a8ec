"""An emulated device that is out of memory raises what a real one does. What is counted when:
`simulation/memory.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from whale.cluster.cluster import Device
from whale.plans.figures import Figures
from whale.simulation.memory import OPTIMIZER, Account
from whale.units import human_bytes


class EmulatedOutOfMemory(torch.OutOfMemoryError):
    """An emulated device is out of memory. The same type as a real one raises."""


class EmulatedMemory(Account):
    """One emulated device."""

    def __init__(
        self,
        device: Device,
        figures: Figures,
        own_stages: Sequence[int],
        shared_bytes: int,
        bucket_bytes: int,
    ) -> None:
        super().__init__(figures, own_stages, shared_bytes, bucket_bytes)
        self.device = device

    def take(self, what: str, num_bytes: float, action: str) -> None:
        """Raises where it does not fit."""
        if self.total + num_bytes > self.device.kind.memory_bytes:
            raise EmulatedOutOfMemory(self._refusal(what, num_bytes, action))
        super().take(what, num_bytes, action)

    def _refusal(self, what: str, num_bytes: float, action: str) -> str:
        capacity = self.device.kind.memory_bytes
        used = ", ".join(f"{name} {human_bytes(size)}" for name, size in self.used.items())
        return (
            f"rank {self.device.rank} (an emulated {self.device.kind.name} on {self.device.host}) "
            f"is out of memory at {action}: {what} need {human_bytes(num_bytes)} more, but only "
            f"{human_bytes(capacity - self.total)} of {human_bytes(capacity)} are free (used: "
            f"{used}). Try: more micro-batches or a smaller batch, the model cut over more "
            "devices, or recompute"
        )

    def update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """The optimizer has its state after its first update."""
        if optimizer is not None and not self.used[OPTIMIZER]:
            self.place_optimizer(state_per_weight(optimizer))
        self.begin_update()


def state_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of optimizer state for one byte of weights; counters are left out."""
    weights = states = 0
    for parameter, state in optimizer.state.items():
        weights += parameter.numel() * parameter.element_size()
        for each in state.values():
            if isinstance(each, torch.Tensor) and each.ndim:
                states += each.numel() * each.element_size()
    return states / weights if weights else 0.0
