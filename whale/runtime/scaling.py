"""Dynamic loss scaling for fp16: the loss is multiplied so that small gradients do not vanish, and
steps that overflow are skipped.

The rule is that of `torch.amp.GradScaler`: halve after a step with an infinite gradient, double
after `growth_interval` good steps. Whether a step overflowed is read from the gradient norm of the
whole model, which all ranks know alike: a step is skipped on all or on none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INITIAL_SCALE = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000


@dataclass
class LossScale:
    """The factor and how it moves."""

    scale: float = INITIAL_SCALE
    growth_interval: int = GROWTH_INTERVAL
    good_steps: int = 0
    num_skipped: int = 0

    def update(self, is_finite: bool) -> None:
        """After a step."""
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
