"""What `engine.step` and `engine.evaluate` give back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.units import human_seconds

if TYPE_CHECKING:
    from whale.devices import HostCopy
    from whale.distributed.ranks import Ranks
    from whale.distributed.transport import Transport
    from whale.runtime.step_update import Update


@dataclass(frozen=True)
class Timing:
    """Where the time of one step went on this rank, in seconds."""

    total_s: float
    compute_s: float
    """forward, backward and optimizer"""
    communication_s: float
    """waiting for all-reduces of gradients: communication that compute did not hide"""
    bubble_s: float
    """waiting for another stage's activations or gradients"""


class Totals:
    """Scalars summed over all ranks, on their way; `values()` waits once and is never a
    collective.

    On an accelerator they also stay there (`on_device`), and a copy goes to the host beside
    compute: who looks waits for that copy and for nothing that was launched later.
    """

    def __init__(
        self, parts: Tensor, ranks: Ranks | None, transport: Transport | None = None
    ) -> None:
        """`ranks` None: the parts are those of all."""
        self._values: list[float] | None = None
        self._copy: HostCopy | None = None
        self._work: dist.Work | None = None
        self._total = parts
        self._finish: Callable[[], Tensor] = lambda: parts
        if ranks is None:
            return
        if parts.device.type != "cpu":
            self._begin_on_device(ranks)
        elif ranks.is_distributed:
            through_memory = transport.exchange(parts) if transport is not None else None
            self._finish = through_memory or _sum_by_group(parts, ranks)

    def _begin_on_device(self, ranks: Ranks) -> None:
        device = ranks.device
        if ranks.is_distributed:
            self._work = dist.all_reduce(self._total, group=ranks.world, async_op=True)
        with device.beside():
            if self._work is not None:
                self._work.wait()
            self._copy = device.to_host(self._total)

    def on_device(self) -> Tensor:
        """The sums, for work that is launched after this call."""
        if self._work is not None:
            self._work.wait()  # the stream does, not the host
        return self._total

    def values(self) -> list[float]:
        if self._values is None:
            total = self._copy.read() if self._copy is not None else self._finish()
            self._values = (total if total.ndim == 1 else total.sum(dim=0)).tolist()
        return self._values


def _sum_by_group(parts: Tensor, ranks: Ranks) -> Callable[[], Tensor]:
    """The sum over all ranks, or what each rank has: (ranks, parts).

    gloo sums in a ring of 2 (n - 1) hops, 20 ms for 8 ranks; one exchange of everything takes a
    hop. Beside accelerators, which sum, a CPU rank has to do the same as they do.
    """
    if ranks.is_mixed:
        total = parts
        work = dist.all_reduce(total, group=ranks.world, async_op=True)
    else:
        total = torch.empty(ranks.num_ranks, len(parts), dtype=parts.dtype)
        everyone = parts.repeat(ranks.num_ranks)
        work = dist.all_to_all_single(total.view(-1), everyone, group=ranks.world, async_op=True)
    assert work is not None

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


@dataclass(frozen=True)
class StepResult:
    """Outcome of one training step, the same on every rank except for `timing`.

    An accelerator may still be at work on the step: who looks waits.
    """

    totals: Totals
    read_timing: Callable[[], Timing]
    update: Update
    outputs: Any = None
    """of `engine.step(batch, outputs=True)`: the model's outputs in sample order, without
    gradients, on the CPU of every rank
    """

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step, after that of the LR scheduler."""
        return self.update.learning_rate

    @property
    def skipped(self) -> bool:
        """The update was left out on all ranks: an overflow in fp16, or a number that is not finite
        while `on_nonfinite` says skip.
        """
        return self.update.skipped

    @property
    def loss(self) -> float:
        """What local training on the whole mini-batch would give."""
        return self.totals.values()[0]

    @property
    def timing(self) -> Timing:
        """Where the time went on this rank. On an accelerator, reading it waits for the end of the
        step there.
        """
        return self.read_timing()

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient of the whole model, before clipping."""
        return float(self.totals.values()[1] ** 0.5)

    def __repr__(self) -> str:
        return (
            f"StepResult(loss={self.loss:.6g}, grad_norm={self.grad_norm:.4g}, "
            f"total={human_seconds(self.timing.total_s)})"
        )


@dataclass(frozen=True)
class EvaluationResult:
    """Outcome of one evaluation."""

    totals: Totals | None
    outputs: Any
    """the model's outputs in sample order, on rank 0; None elsewhere or when not asked for"""

    @property
    def loss(self) -> float | None:
        """Loss of the whole batch; None when it has no labels."""
        return self.totals.values()[0] if self.totals is not None else None
