"""Where tensors are at home that the device need not hold all the time (docs/memory.md): what the
config asks for, and which blocks and stages of a plan that makes.

What is at home elsewhere is cut first: no two ranks keep copies of the same on their hosts. So
optimizer states elsewhere take level 1 of ZeRO, gradients level 2, weights level 3; a rank that
shares with nobody has blocks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from whale.config import Config
from whale.plans.blocks import GRADIENTS_TOO, STATES, WEIGHTS_TOO, Block, Memory
from whale.plans.replica import Stage


@dataclass(frozen=True)
class Offload:
    """The home of every class of tensors."""

    optimizer: Memory = "device"
    weights: Memory = "device"
    gradients: Memory = "device"
    activations: Memory = "device"

    @staticmethod
    def of(config: Config) -> Offload:
        """What the config asks for; `auto` asks for nothing."""
        if not isinstance(config.offload, dict):
            return Offload()
        return Offload(**cast("dict[str, Memory]", config.offload))

    @property
    def level(self) -> int:
        """The level of ZeRO that this takes."""
        if self.weights != "device":
            return WEIGHTS_TOO
        if self.gradients != "device":
            return GRADIENTS_TOO
        return STATES if self.optimizer != "device" else 0

    @property
    def has_blocks(self) -> bool:
        """Whether parameters, their gradients or states are at home elsewhere."""
        return self.level > 0

    def block(self, block: Block) -> Block:
        """The block with its homes."""
        return replace(block, weights=self.weights, gradients=self.gradients, states=self.optimizer)

    def stages(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """The stages with the home of their activations."""
        return tuple(replace(stage, activations=self.activations) for stage in stages)
