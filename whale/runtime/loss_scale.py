"""Dynamic loss scaling for fp16: the loss is multiplied so that small gradients do not vanish, and
steps that overflow are skipped.

The rule is that of `torch.amp.GradScaler`: halve after a step with an infinite gradient, double
after `growth_interval` good steps. Whether a step overflowed is read from the gradient norm of the
whole model, which all ranks know alike: a step is skipped on all or on none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INITIAL_SCALE = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000


@dataclass
class LossScale:
    """The scale as numbers of the host."""

    scale: float = INITIAL_SCALE
    growth_interval: int = GROWTH_INTERVAL
    good_steps: int = 0
    num_skipped: int = 0

    def update(self, is_finite: bool) -> None:
        """Counts a step whose gradient norm was finite or not."""
        if not is_finite:
            self.scale *= BACKOFF
            self.good_steps = 0
            self.num_skipped += 1
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= GROWTH
            self.good_steps = 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps, "num_skipped": self.num_skipped}

    def restore(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.num_skipped = int(state["num_skipped"])


class DeviceLossScale:
    """The loss scale as numbers of an accelerator, which no step waits for."""

    def __init__(self, device: str, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.growth_interval = growth_interval
        self._device = device
        start = LossScale()
        self.scale = self._number(start.scale)
        self.good_steps = self._number(start.good_steps)
        self.num_skipped = self._number(start.num_skipped)

    def update(self, is_finite: Tensor) -> None:
        """Counts a step. Tensors are new ones: the step that is under way may still read them."""
        good_steps = self.good_steps + 1
        grows = good_steps == self.growth_interval
        grown = torch.where(grows, self.scale * GROWTH, self.scale)
        self.scale = torch.where(is_finite, grown, self.scale * BACKOFF)
        self.good_steps = torch.where(is_finite & ~grows, good_steps, 0.0)
        self.num_skipped = self.num_skipped + ~is_finite

    def state(self) -> dict[str, Any]:
        """The numbers; waits for the device."""
        numbers = torch.stack([self.scale, self.good_steps, self.num_skipped]).tolist()
        return {
            "scale": numbers[0],
            "good_steps": int(numbers[1]),
            "num_skipped": int(numbers[2]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.scale = self._number(state["scale"])
        self.good_steps = self._number(state["good_steps"])
        self.num_skipped = self._number(state["num_skipped"])

    def _number(self, value: float) -> Tensor:
        return torch.full((), float(value), dtype=torch.float64, device=self._device)
