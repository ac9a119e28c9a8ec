"""What an update of an optimizer launches, as data: part of a plan, so without torch."""

from __future__ import annotations

from dataclasses import dataclass

from whale.cluster.kinds import DeviceKind


@dataclass(frozen=True)
class UpdateWork:
    """What an update of an optimizer launches on an accelerator."""

    passes: float
    """bytes that it moves for each byte of trained parameters"""
    operations: float
    """operations for each parameter tensor"""
    fixed_operations: float
    """operations beside them, as one over many tensors is"""
    how: str
    """`fused`, `foreach` or `for-loop`"""

    def seconds(self, trained_bytes: float, num_parameters: int, kind: DeviceKind) -> float:
        """Seconds of an update of so many parameters on such a device."""
        number = num_parameters * self.operations + self.fixed_operations
        moved_s = self.passes * trained_bytes * kind.byte_s
        return moved_s + number * kind.efficiency.operation_s
