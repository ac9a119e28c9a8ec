"""Memory of an emulated device by accounting: what the plan puts there, action by action, against what the device has.

    weights, buffers     from the start; buffers are the model's own and those in which shared gradients are summed
    gradients            of a stage from its first backward of a step to the next step
    optimizer state      from the first update on, as many bytes for a byte of weights as the user's optimizer really makes
    activations          what a stage keeps of a micro-batch, from its forward to the end of its backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from whale.cluster.cluster import Device
from whale.emulation.load import Load, StateLoad
from whale.report.units import human_bytes
from whale.scheduling import Action, Kind

CLASSES = ("weights", "gradients", "optimizer state", "activations", "buffers")


class EmulatedOutOfMemory(torch.OutOfMemoryError):
    """An emulated device is over-full. The same type as a real one raises."""


@dataclass
class Memory:
    """One emulated device."""

    device: Device
    load: Load
    own_stages: Sequence[int]
    shared_bytes: int
    """gradients that this device sums with others"""
    used: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))
    peak: dict[str, float] = field(default_factory=dict)
    """of every class at the moment at which most was used in all"""
    _with_gradients: set[int] = field(default_factory=set)

    def place_weights(self) -> None:
        """What is there before the first step."""
        for state in self._held():
            self.take("weights", state.weight_bytes, "the start")
            self.take("buffers", state.buffer_bytes, "the start")
        self.take("buffers", self.shared_bytes, "the start")

    def _held(self) -> list[StateLoad]:
        return [state for state in self.load.states if set(state.stages) & set(self.own_stages)]

    def take(self, what: str, num_bytes: float, action: str) -> None:
        """Raises where it does not fit."""
        total, room = sum(self.used.values()), self.device.kind.memory_bytes
        if total + num_bytes > room:
            raise EmulatedOutOfMemory(self._refusal(what, num_bytes, action))
        self.used[what] += num_bytes
        if total + num_bytes > sum(self.peak.values()):
            self.peak = dict(self.used)

    def _refusal(self, what: str, num_bytes: float, action: str) -> str:
        room = self.device.kind.memory_bytes
        used = ", ".join(f"{name} {human_bytes(size)}" for name, size in self.used.items())
        return (
            f"rank {self.device.rank} (an emulated {self.device.kind.name} on {self.device.host}) is out of memory at {action}: "
            f"{what} need {human_bytes(num_bytes)} more, but only {human_bytes(room - sum(self.used.values()))} of {human_bytes(room)} "
            f"are free (used: {used}). Take more micro-batches or a smaller batch, cut the model over more devices, or recompute"
        )

    def begin_step(self) -> None:
        """Gradients and activations of the step before are gone."""
        self.used["gradients"] = self.used["activations"] = 0.0
        self._with_gradients = set()

    def note(self, action: Action, num_samples: int) -> None:
        """A compute action of this device on so many samples."""
        kept = self.load.stages[action.stage].kept
        num_bytes = kept.sample_bytes * num_samples + kept.fixed_bytes
        if action.kind is Kind.FORWARD:
            self.take("activations", num_bytes, str(action))
            return
        if action.stage not in self._with_gradients:
            for state in self._held():
                if action.stage in state.stages and not self._with_gradients & set(state.stages):
                    self.take("gradients", state.trained_bytes, str(action))
            self._with_gradients.add(action.stage)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            self.used["activations"] -= num_bytes

    def update(self, optimizer: torch.optim.Optimizer | None) -> None:
        """After the first update the optimizer has its state."""
        if optimizer is not None and not self.used["optimizer state"]:
            trained = sum(state.trained_bytes for state in self._held())
            self.take("optimizer state", trained * state_per_weight(optimizer), "update")


def state_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of optimizer state for one byte of weights; counters are left out."""
    weights = states = 0
    for parameter, state in optimizer.state.items():
        weights += parameter.numel() * parameter.element_size()
        tensors = (each for each in state.values() if isinstance(each, torch.Tensor) and each.ndim)
        states += sum(each.numel() * each.element_size() for each in tensors)
    return states / weights if weights else 0.0
