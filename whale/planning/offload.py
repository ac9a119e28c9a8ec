"""Where tensors are at home that the device need not hold all the time (docs/memory.md): what the
config asks for, and which blocks and stages of a plan that makes.

What is at home elsewhere is cut first: no two ranks keep copies of the same on their hosts. So
optimizer states elsewhere take level 1 of ZeRO, gradients level 2, weights level 3; a rank that
shares with nobody has blocks of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from whale.config import Config
from whale.plans.blocks import GRADIENTS_TOO, STATES, WEIGHTS_TOO, Memory


@dataclass(frozen=True)
class Offload:
    """The home of every class of tensors."""

    optimizer: Memory = "device"
    weights: Memory = "device"
    gradients: Memory = "device"
    activations: Memory = "device"
    spills: bool = False
    """what the memory of a host does not hold goes to its disk, block by block"""

    @staticmethod
    def of(config: Config) -> Offload:
        """What the config asks for; `auto` asks for nothing."""
        if not isinstance(config.offload, dict):
            return Offload()
        return Offload(**cast("dict[str, Any]", config.offload))

    def as_run(self, on_accelerators: bool) -> Offload:
        """What the runtime makes of it. On accelerators torch has gradients and optimizer states
        where their parameter is: those of weights that are at home elsewhere are on the host.
        """
        if not on_accelerators or self.weights == "device":
            return self
        return replace(
            self,
            gradients="host" if self.gradients == "device" else self.gradients,
            optimizer="host" if self.optimizer == "device" else self.optimizer,
        )

    @property
    def level(self) -> int:
        """The level of ZeRO that this takes."""
        if self.weights != "device":
            return WEIGHTS_TOO
        if self.gradients != "device":
            return GRADIENTS_TOO
        return STATES if self.optimizer != "device" else 0

    @property
    def is_any(self) -> bool:
        return self.level > 0 or self.activations != "device"

    @property
    def memories(self) -> set[Memory]:
        """Memories that it takes, those of the devices apart."""
        found = {self.optimizer, self.weights, self.gradients, self.activations} - {"device"}
        return found | {"disk"} if self.spills and found else found

    @property
    def has_blocks(self) -> bool:
        """Whether parameters, their gradients or states are at home elsewhere."""
        return self.level > 0


ON_DEVICES = Offload()
"""nothing is at home elsewhere"""
