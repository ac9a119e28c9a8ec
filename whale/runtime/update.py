"""The end of a step: is everything finite, clip, optimizer, LR scheduler. The same decision on
every rank, from the same totals.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whale.config import Config
from whale.distributed.ranks import Ranks
from whale.runtime.gradients import Held, scale_gradients
from whale.runtime.result import Totals
from whale.runtime.stage_updates import StageUpdates

logger = logging.getLogger("whale")

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
INITIAL_SCALE = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000

OptimizerFactory = Callable[[Iterator[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


EMPTY_LIST = "empty parameter list"
"""part of what torch says of an optimizer without parameters"""


def _check_factories(optimizer: object, scheduler: object) -> None:
    """An optimizer that is already made holds the parameters of the whole model, and no rank keeps
    all of them.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer= is a {type(optimizer).__name__} that is already made: give a function "
            "that makes it for this rank's parameters, "
            f"such as optimizer=lambda params: torch.optim.{type(optimizer).__name__}(params, "
            "lr=...)"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise ValueError(
            f"scheduler= is a {type(scheduler).__name__} that is already made: give a function "
            "that makes it for this rank's optimizer, "
            "such as scheduler=lambda optimizer: "
            f"torch.optim.lr_scheduler.{type(scheduler).__name__}(optimizer, ...)"
        )


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16: the loss is multiplied so that small gradients do not vanish,
    and steps that overflow are skipped.

    The rule is that of `torch.amp.GradScaler`: halve after a step with an infinite gradient, double
    after `growth_interval` good steps. Whether a step overflowed is read from the gradient norm of
    the whole model, which all ranks know alike: a step is skipped on all or on none.
    """

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


class NonFiniteError(ValueError):
    """A loss or gradient is not a finite number. Raised on every rank alike."""


@dataclass(frozen=True)
class Update:
    """What became of one step."""

    seconds: float
    skipped: bool
    waited_s: float = 0.0
    """seconds until loss and gradient norm of all ranks were there"""


class Updater:
    """Owns the optimizer, the LR scheduler and the loss scale."""

    def __init__(
        self,
        trainable: Sequence[tuple[str, torch.nn.Parameter]],
        optimizer: OptimizerFactory | None,
        scheduler: SchedulerFactory | None,
        config: Config,
        ranks: Ranks,
    ) -> None:
        _check_factories(optimizer, scheduler)
        self.is_given = optimizer is not None
        self.optimizer = (
            self._made(optimizer, trainable, ranks) if optimizer is not None and trainable else None
        )
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ValueError(
                "torch.optim.LBFGS needs the loss several times in a step, which engine.step "
                "cannot do: use another optimizer"
            )
        self.scheduler = (
            scheduler(self.optimizer)
            if scheduler is not None and self.optimizer is not None
            else None
        )
        self.loss_scale = LossScale() if config.precision == "fp16" else None
        self._config = config
        self._ranks = ranks
        self._by_stage: StageUpdates | None = None

    def begin(self, held: Sequence[Held], lending: Collection[int]) -> StageUpdates | None:
        """Start of a step: what updates each stage as soon as it may be; None where all must be
        updated at the end.
        """
        if self.optimizer is None or not StageUpdates.possible(self.optimizer, self._config):
            self._by_stage = None
            return None
        if self._by_stage is None:
            self._by_stage = StageUpdates(self.optimizer, held)
        self._by_stage.begin(lending)
        return self._by_stage

    @staticmethod
    def _made(
        factory: OptimizerFactory, trainable: Sequence[tuple[str, torch.nn.Parameter]], ranks: Ranks
    ) -> torch.optim.Optimizer | None:
        """This rank's optimizer; None where a factory that picks parameters by name finds none of
        them on this rank.
        """
        try:
            made = factory(iter(trainable))
        except ValueError as error:
            if ranks.is_distributed and EMPTY_LIST in str(error):
                return None
            raise
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(
                f"the function given as optimizer= returned {type(made).__name__}: it must return "
                "a torch.optim.Optimizer"
            )
        return made

    @property
    def learning_rate(self) -> float:
        return (
            float(self.optimizer.param_groups[0]["lr"])
            if self.optimizer is not None and self.optimizer.param_groups
            else 0.0
        )

    def apply(
        self,
        held: Sequence[Held],
        totals: Totals,
        step: int,
        counts_nothing: Callable[[], bool] = lambda: False,
        is_scaled: bool = True,
    ) -> Update:
        """Steps the optimizer, unless this step is to be skipped. `counts_nothing`: whether a
        denominator of the loss is zero. `is_scaled`: gradients still have the loss scale in them.
        """
        config = self._config
        factor = 1.0
        waited_s = 0.0
        if config.needs_all_gradients is not None:
            start = time.perf_counter()
            loss = totals.values()[0]
            norm = totals.values()[1] ** 0.5
            waited_s = time.perf_counter() - start
            if self.loss_scale is not None:
                factor = 1.0 / self.loss_scale.scale if is_scaled else 1.0
                self.loss_scale.update(math.isfinite(norm))
                if not math.isfinite(norm) and math.isfinite(loss):
                    return Update(
                        0.0, True, waited_s
                    )  # an overflow, which the smaller scale will mend
            if not (math.isfinite(loss) and math.isfinite(norm)) and self._skips(
                held, loss, norm, step, counts_nothing
            ):
                return Update(0.0, True, waited_s)
            if config.clip_grad_norm is not None:
                factor *= min(1.0, config.clip_grad_norm / (norm + CLIP_EPSILON))
        start = time.perf_counter()
        if factor != 1.0:
            scale_gradients(held, factor)
        if self._by_stage is not None:
            self._by_stage.finish()
        elif self.optimizer is not None:
            self.optimizer.step()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(totals.values()[0])
        elif self.scheduler is not None:
            self.scheduler.step()
        return Update(time.perf_counter() - start, False, waited_s)

    def _skips(
        self,
        held: Sequence[Held],
        loss: float,
        norm: float,
        step: int,
        counts_nothing: Callable[[], bool],
    ) -> bool:
        """Whether a step with a non-finite number is left out; `stop` raises on every rank."""
        if self._config.on_nonfinite == "continue":
            return False
        bad = next(
            (
                p.name
                for p in held
                if p.tensor.grad is not None and not bool(p.tensor.grad.isfinite().all())
            ),
            None,
        )
        found = self._ranks.gather((bad, counts_nothing()))
        places = {rank: name for rank, (name, _) in enumerate(found) if name is not None}
        is_empty = any(empty for _, empty in found)
        where = (
            ", ".join(f"{name} on rank {rank}" for rank, name in list(places.items())[:4])
            or "no gradient, only the loss"
        )
        text = (
            f"step {step}: the loss is {loss:.6g} and the gradient norm {norm:.6g}; not finite: "
            f"{where}"
        )
        if self._config.on_nonfinite == "skip":
            logger.warning("%s. The step is skipped on all ranks", text)
            return True
        advice = (
            "The loss divides by the number of samples or labels that count, and none counts in "
            "this mini-batch (all labels ignored, or a "
            "mask of zeros): leave such batches out"
            if is_empty
            else 'Lower the learning rate, set "clip_grad_norm"'
        )
        raise NonFiniteError(
            f'{text}. The weights are unchanged. {advice}, or continue with "on_nonfinite": "skip"'
        )
