"""A step in parts: gradients of several batches summed, then one update.

`engine.step` runs forward, backward and update of one mini-batch at once. Trainers of others
(`whale/integrations`) call them one by one: several batches, each with its own factor, a norm, a
clip, an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whale.devices import Moment
from whale.lowering.program import Lowered
from whale.runtime.executor import Executor, StepInput, StepOutcome
from whale.runtime.gradient_norm import scale_gradients
from whale.runtime.held import HeldParameter
from whale.runtime.masked_update import CLIP_EPSILON
from whale.runtime.result import StepResult, Totals

if TYPE_CHECKING:
    from whale.runtime.training import Training

DRAW_SHIFT = 40
"""above any number of steps: the batches of one update draw different random numbers"""


@dataclass(frozen=True)
class BatchPass:
    """Forward and backward of one batch, done on this rank."""

    lowered: Lowered
    given: StepInput
    batch_size: int
    executor: Executor
    outcome: StepOutcome
    bubble_s: float
    moments: tuple[Moment, Moment, Moment]
    """start, end of backward, all gradients reduced"""


@dataclass(frozen=True)
class PassResult:
    """Outcome of `engine.forward_backward`, the same on every rank."""

    totals: Totals

    @property
    def loss(self) -> float:
        """What local training on the whole batch would give."""
        return self.totals.values()[0]


class GradientSum:
    """Gradients of the batches of one update, on this rank, each multiplied by its factor.

    The gradient of the latest batch stays where backward left it: with one batch an update, which
    is the usual case, nothing is copied.
    """

    def __init__(self, held: Sequence[HeldParameter]) -> None:
        self._held = held
        self._sum: dict[str, Tensor] = {}
        self._factor: float | None = None
        """of the latest batch, whose gradient is in `.grad`; None: it counts for nothing (yet)"""
        self.num_batches = 0
        """batches that count since the last update"""

    def add(self, factor: float) -> None:
        """Counts the gradient of the latest batch, times `factor`."""
        if self._factor is None:
            self.num_batches += 1
        self._factor = factor + (self._factor or 0.0)

    def set_aside(self) -> None:
        """Copies what counts of `.grad`, before another backward overwrites it."""
        if self._factor is not None:
            with torch.no_grad():
                for parameter in self._held:
                    self._take(parameter)
        self._factor = None

    def finish(self) -> None:
        """Makes `.grad` of every parameter the sum of all batches."""
        if self._sum:
            self.set_aside()
            for parameter in self._held:
                parameter.tensor.grad = self._sum.get(parameter.name)
            self._sum = {}
        elif self._factor is None:
            self._no_gradients()  # the latest batch counts for nothing
        elif self._factor != 1.0:
            scale_gradients(self._held, self._factor)
        self._factor = 1.0

    def clear(self) -> None:
        """Forgets all batches; parameters have no gradients then."""
        self._sum = {}
        self._factor = None
        self.num_batches = 0
        self._no_gradients()

    def drop_counted(self) -> bool:
        """Forgets all batches that count; whether `.grad` is that of one that does not, yet."""
        self._sum = {}
        self.num_batches = 0
        return self._factor is None

    def _take(self, parameter: HeldParameter) -> None:
        gradient = parameter.tensor.grad
        assert self._factor is not None
        if gradient is None:
            return
        known = self._sum.get(parameter.name)
        if known is None:
            # a new tensor: `.grad` is a view of the bucket that the next all-reduce fills
            self._sum[parameter.name] = gradient * self._factor
        elif known.is_sparse:
            self._sum[parameter.name] = known + gradient * self._factor
        else:
            known.add_(gradient, alpha=self._factor)

    def _no_gradients(self) -> None:
        for parameter in self._held:
            parameter.tensor.grad = None


class StepInParts:
    """The step of an engine that is made in parts: where it stands, and what each part does."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._sum = GradientSum(training.held)
        self._latest: BatchPass | None = None
        self._loss: Tensor | float = 0.0
        """this rank's part of the losses that count, each times its factor"""
        self._num_samples = 0
        self._trained: frozenset[str] = frozenset()
        """parameters that the loss of a batch that counts reaches: another shape may reach others
        """
        self._totals: Totals | None = None
        """loss and squared norm of the gradients, from when they are all in `.grad`"""
        self._clipped = 1.0
        """what these gradients were multiplied by since"""

    def forward_backward(self, batch: Any) -> PassResult:
        training = self._training
        self._sum.set_aside()
        draw = training.step_count + (self._sum.num_batches << DRAW_SHIFT)
        self._latest = training.run(batch, draw, updates_by_stage=False)
        loss = torch.stack([self._latest.outcome.loss])
        transport = training.shapes.transport
        return PassResult(Totals(loss, training.job.ranks, transport))

    def accumulate(self, factor: float) -> None:
        if self._latest is None:
            raise ValueError(
                "engine.accumulate: there is no gradient. Try: engine.forward_backward first"
            )
        # a scale that only the device knows (fp16) is waited for here
        self._sum.add(factor / float(self._latest.given.loss_scale))
        self._loss = self._loss + factor * self._latest.outcome.loss
        self._num_samples += self._latest.batch_size
        self._trained |= self._latest.lowered.trained
        self._totals = None

    def clip(self, max_norm: float) -> float:
        norm = float(self._finished().values()[1] ** 0.5) * self._clipped
        factor = max_norm / (norm + CLIP_EPSILON)
        if factor < 1.0:
            scale_gradients(self._training.held, factor)
            self._clipped *= factor
        return norm

    def update(self) -> StepResult:
        training = self._training
        training.need_optimizer("engine.update")
        updating = training.job.ranks.device.event()
        totals = self._finished()
        latest = self._latest
        assert latest is not None
        training.finish_ahead()
        # owners of whole parameters and holders of parts ask which gradients there are
        training.updater.trained = self._trained
        update = training.updater.apply(
            training.held,
            totals,
            training.step_count,
            lambda: latest.lowered.num_empty(latest.given.tensors),
            is_scaled=False,
        )
        done = replace(latest, batch_size=self._num_samples)
        self.clear()
        return training.end_step(done, totals, update, updating)

    def clear(self) -> None:
        self._sum.clear()
        self._latest = None
        self._loss = 0.0
        self._num_samples = 0
        self._trained = frozenset()
        self._totals = None

    def zero(self) -> None:
        """Forgets what counts; some loops call it between forward and backward."""
        latest = self._latest
        if latest is None or not self._sum.drop_counted():
            self.clear()
            return
        self._loss = 0.0
        self._num_samples = 0
        self._trained = frozenset()
        self._totals = None

    def refuse_unfinished(self) -> None:
        """`engine.step` would overwrite gradients that wait for their update."""
        if self._sum.num_batches:
            raise ValueError(
                f"engine.step: gradients of {self._sum.num_batches} batches of "
                "engine.forward_backward wait for their update. "
                "Try: engine.update() or engine.zero_gradients() first"
            )

    def _finished(self) -> Totals:
        """Loss and squared gradient norm of all batches of this update, whose gradients are in
        `.grad` from here on; exchanged once an update.
        """
        if not self._sum.num_batches:
            raise ValueError(
                "no gradient was accumulated since the last update. "
                "Try: engine.forward_backward(batch) and engine.accumulate() first"
            )
        if self._totals is None:
            self._sum.finish()
            assert isinstance(self._loss, Tensor) and self._latest is not None
            self._clipped = 1.0
            self._totals = self._training.totals(self._loss, self._latest, is_scaled=False)
        return self._totals
