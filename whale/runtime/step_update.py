"""What became of the update of one step, and what undoes the LR scheduler's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from whale.runtime.result import Totals

if TYPE_CHECKING:
    from whale.runtime.update import Updater


class NonFiniteError(ValueError):
    """A loss or gradient is not a finite number. Raised on every rank alike."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
        """the step that has it: on an accelerator it is found while the next one runs"""


@dataclass
class Update:
    """What became of one step."""

    updater: Updater
    step: int
    totals: Totals
    seconds: float = 0.0
    waited_s: float = 0.0
    """seconds until loss and gradient norm of all ranks were there"""
    is_left_out: bool | None = None
    """None: only the device knows yet"""
    rate: float | None = None
    schedule_before: ScheduleState | None = None
    """what the LR scheduler's step changed, where it did not wait for the numbers"""

    @property
    def skipped(self) -> bool:
        """Whether the update was left out on all ranks."""
        if self.is_left_out is None:
            loss, squared_norm = self.totals.values()[:2]
            return self.updater.leaves_out(loss, squared_norm)
        return self.is_left_out

    @property
    def learning_rate(self) -> float:
        """Learning rate of the step that follows."""
        if self.rate is None:
            self.updater.settle()
        assert self.rate is not None
        return self.rate


@dataclass(frozen=True)
class ScheduleState:
    """An LR scheduler and the options of its optimizer's groups at one moment."""

    scheduler: dict[str, Any]
    options: list[dict[str, Any]]

    @staticmethod
    def of(scheduler: Any, optimizer: torch.optim.Optimizer) -> ScheduleState:
        options = []
        for group in optimizer.param_groups:
            options.append({key: value for key, value in group.items() if key != "params"})
        return ScheduleState(dict(scheduler.state_dict()), options)

    def put_back(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        scheduler.load_state_dict(self.scheduler)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)
