"""What a level of ZeRO changes in an estimate: bytes of a device, messages in every micro-batch,
and what is left to do at the end of a step (`planning/zero.py` has the exact figures). What is at
home elsewhere (`offload_terms.py`) is not held.

A stage with trained parameters of T bytes, on n ranks of which one holds the part f of all that is
cut, with s bytes of optimizer state for each byte of a parameter:

    level    held                          in every micro-batch                 at the end
    0        T (2 + 1 + s)                 -                                    all-reduce T
    1        T (2 + s f)                   -                                    all-reduce T
    2        T (1 + (1 + s) f)             reduce-scatter T                     gather T
    3        T (2 + s) f + pool            gather T twice, reduce-scatter T     -

with gradients of two blocks on their way from level 1 on, and a pool of two blocks at level 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.planning.offload import ON_DEVICES, Offload
from whale.planning.workload import INSIDE_OPERATIONS
from whale.plans.blocks import GRADIENTS_TOO, WEIGHTS_TOO
from whale.plans.figures import BLOCKS_ON_THEIR_WAY

POOLED_BLOCKS = 2
"""of weights at level 3, and of states that come and go"""


@dataclass(frozen=True)
class ZeroTerms:
    """One level, for one model."""

    level: int
    ratio: float
    """bytes of optimizer state for each byte of trained parameters"""
    block_bytes: float
    """of the largest block that is gathered at once"""
    overlaps: bool
    """messages go under compute"""
    offload: Offload = ON_DEVICES
    """what is at home elsewhere"""
    has_state_slots: bool = False
    """states that are at home elsewhere come to the device to be updated"""

    def held_bytes(self, trained_bytes: float, part: float) -> float:
        """Bytes of a rank with this part of what is cut."""
        weights = part if self.level >= WEIGHTS_TOO else 1.0
        gradients = part if self.level >= GRADIENTS_TOO else 1.0
        states = self.ratio * part
        blocks = float(BLOCKS_ON_THEIR_WAY)
        if self.level >= WEIGHTS_TOO:
            blocks += POOLED_BLOCKS
        if self.has_state_slots:
            blocks += POOLED_BLOCKS * states
        if self.offload.optimizer != "device":
            states = 0.0
        if self.offload.weights != "device":
            weights = 0.0
        if self.offload.gradients != "device":
            gradients = 0.0
        factor = (1 + INSIDE_OPERATIONS) * (weights + gradients + states)
        return factor * trained_bytes + blocks * self.block_bytes

    def forward_s(self, seconds: float, trained_bytes: float, byte_s: float) -> float:
        """Seconds of a forward with its messages. `byte_s`: of an all-reduce, which is a
        reduce-scatter and a gather.
        """
        gathered = trained_bytes if self.level >= WEIGHTS_TOO else 0.0
        return self._with(seconds, gathered * byte_s / 2, trained_bytes)

    def backward_s(self, seconds: float, trained_bytes: float, byte_s: float) -> float:
        """Seconds of a backward with its messages. `byte_s`: as in `forward_s`."""
        sent = trained_bytes if self.level >= GRADIENTS_TOO else 0.0
        sent += trained_bytes if self.level >= WEIGHTS_TOO else 0.0
        return self._with(seconds, sent * byte_s / 2, trained_bytes)

    def _with(self, seconds: float, message_s: float, trained_bytes: float) -> float:
        if not message_s or not self.overlaps:
            return seconds + message_s
        # all but one block come or go under the work on another one
        num_blocks = max(1.0, trained_bytes / max(1.0, self.block_bytes))
        return max(seconds, message_s) + message_s / num_blocks

    @property
    def left_to_reduce(self) -> float:
        """Part of an all-reduce of all gradients that is left for the end of the step."""
        if self.level >= WEIGHTS_TOO:
            return 0.0
        return 0.5 if self.level >= GRADIENTS_TOO else 1.0
