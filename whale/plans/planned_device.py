"""What one device of a plan has to do and to hold, by the cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from whale.plans.shares import UNLIMITED, Load


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device at the fullest moment of a step."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    """buffers of the model, those in which shared gradients are summed, and the mini-batch"""
    fixed_bytes: int
    """activations that do not depend on the samples, of all micro-batches in flight"""
    sample_bytes: float
    """activations for each sample of a micro-batch, of all micro-batches in flight, and the
    workspace for one of them
    """
    capacity_bytes: int
    """0: not known"""
    update_bytes: int = 0
    """what the optimizer makes for a moment, when no activations are there any more"""

    @property
    def static_bytes(self) -> int:
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.buffer_bytes
            + self.fixed_bytes
        )

    @property
    def least_bytes(self) -> int:
        """Bytes that are held without samples: before the first one, or in the update."""
        return self.static_bytes + max(0, self.update_bytes - self.fixed_bytes)

    def with_shared(self, num_bytes: int) -> DeviceMemory:
        """The memory with buckets for gradients of so many bytes, which are all-reduced with other
        devices; in the update they lie there alone.
        """
        return replace(
            self,
            buffer_bytes=self.buffer_bytes + num_bytes,
            update_bytes=max(0, self.update_bytes - num_bytes),
        )

    def total_bytes(self, num_samples: int) -> float:
        return max(self.least_bytes, self.static_bytes + num_samples * self.sample_bytes)

    def most_samples(self) -> int:
        """Samples of a micro-batch that fit; -1: not even the weights do."""
        if not self.capacity_bytes:
            return UNLIMITED
        if self.least_bytes > self.capacity_bytes:
            return -1
        free_bytes = self.capacity_bytes - self.static_bytes
        return int(free_bytes // self.sample_bytes) if self.sample_bytes else UNLIMITED


@dataclass(frozen=True)
class PlannedDevice:
    """One kind of device with what it has to do, by the cost model. Ranks that are alike in all of
    it share one.
    """

    kind: str
    sample_s: float
    """seconds of forward and backward for one sample of a micro-batch, all stages of the device"""
    fixed_s: float = 0.0
    """seconds of a micro-batch that do not depend on its samples"""
    flop_per_s: float = 0.0
    """in the precision of the job; 0: not known"""
    memory: DeviceMemory | None = None
    """None: no limit"""

    @property
    def load(self) -> Load:
        most = UNLIMITED if self.memory is None else self.memory.most_samples()
        return Load(self.sample_s, self.fixed_s, most)
