"""What `engine.step` and `engine.evaluate` give back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Timing:
    """Where the time of one step went on this rank, in seconds."""

    total_s: float
    compute_s: float
    """forward, backward and optimizer"""
    communication_s: float
    """waiting for gradient sums: communication that compute did not hide"""
    bubble_s: float
    """waiting for another stage's activations or gradients"""


class Totals:
    """Scalars summed over all ranks, on their way; `values()` waits once and is never a collective."""

    def __init__(self, parts: torch.Tensor, is_distributed: bool) -> None:
        self._tensor = parts
        self._work: dist.Work | None = None
        self._values: list[float] | None = None
        if is_distributed and parts.device.type == "cpu":
            # gloo sums in a ring of 2 (n - 1) hops, 20 ms for 8 ranks; one exchange of everything takes a hop
            num_ranks = dist.get_world_size()
            self._tensor = torch.empty(num_ranks, len(parts), dtype=parts.dtype)
            sent = parts.repeat(num_ranks, 1)
            self._work = dist.all_to_all_single(self._tensor.view(-1), sent.view(-1), async_op=True)
        elif is_distributed:
            self._work = dist.all_reduce(parts, async_op=True)

    def values(self) -> list[float]:
        if self._values is None:
            if self._work is not None:
                self._work.wait()
            total = self._tensor if self._tensor.ndim == 1 else self._tensor.sum(dim=0)
            self._values = total.tolist()
        return self._values


@dataclass(frozen=True)
class StepResult:
    """Outcome of one training step, the same on every rank except for `timing`."""

    totals: Totals
    timing: Timing
    learning_rate: float
    skipped: bool = False
    """the update was left out on all ranks: an overflow in fp16, or a number that is not finite while `on_nonfinite` says skip"""

    @property
    def loss(self) -> float:
        """What local training on the whole mini-batch would give."""
        return self.totals.values()[0]

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient of the whole model, before clipping."""
        return float(self.totals.values()[1] ** 0.5)

    def __repr__(self) -> str:
        return f"StepResult(loss={self.loss:.6g}, grad_norm={self.grad_norm:.4g}, total={self.timing.total_s:.3f} s)"


@dataclass(frozen=True)
class EvaluationResult:
    """Outcome of one evaluation."""

    totals: Totals | None
    outputs: Any
    """the model's outputs in sample order, on rank 0; None elsewhere or when not asked for"""

    @property
    def loss(self) -> float | None:
        """None when the batch has no labels."""
        return self.totals.values()[0] if self.totals is not None else None
