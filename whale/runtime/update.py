"""The end of a step: is everything finite, clip, optimizer, LR scheduler. The same decision on
every rank, from the same totals.

On a CPU, and with optimizers that cannot skip a step on the device, the host waits for the totals
and decides. On accelerators the device decides (`runtime/masked_update.py`), and the host looks at
the totals one step late, or when the user does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from whale.costs.optimizer_factory import EMPTY_LIST, make_optimizer
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.lowering.program import Lowered
from whale.runtime.compressed_states import CompressedStates
from whale.runtime.gradient_norm import counted_gradients, scale_gradients, squared_norm
from whale.runtime.held import HeldParameter, by_backward_order
from whale.runtime.job import Job
from whale.runtime.loss_scale import DeviceLossScale, LossScale
from whale.runtime.masked_update import CLIP_EPSILON, NUM_EMPTY, MaskedUpdates, can_mask
from whale.runtime.offloaded_states import OffloadedStates, can_fuse, fused, offloaded_states
from whale.runtime.optimizer_groups import check_groups, settings_of_whole
from whale.runtime.result import Totals
from whale.runtime.stage_updates import StageUpdates
from whale.runtime.step_update import NonFiniteError, ScheduleState, Update
from whale.runtime.summed_norms import SummedNorms
from whale.runtime.untouched import refuse_steps_of_script
from whale.runtime.whole_updates import WholeUpdates

logger = logging.getLogger("whale")

OptimizerFactory = Callable[[Iterator[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
CountEmpty = Callable[[], "Tensor | None"]
"""gives the number of denominators of the loss that are zero; None where this rank knows of none"""
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


def check_factories(optimizer: object, scheduler: object) -> None:
    """An optimizer that is already made holds the parameters of the whole model, and no rank keeps
    all of them.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer= is an optimizer that is already made ({type(optimizer).__name__}): give a function "
            "that makes it for this rank's parameters, such as optimizer=lambda params: "
            f"torch.optim.{type(optimizer).__name__}(params, lr=...)"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise ValueError(
            f"scheduler= is a scheduler that is already made ({type(scheduler).__name__}): give a function "
            "that makes it for this rank's optimizer, such as scheduler=lambda optimizer: "
            f"torch.optim.lr_scheduler.{type(scheduler).__name__}(optimizer, ...)"
        )


class Updater:
    """Owns the optimizer, the LR scheduler and the loss scale."""

    def __init__(
        self,
        trainable: Sequence[tuple[str, torch.nn.Parameter]],
        optimizer: OptimizerFactory | None,
        scheduler: SchedulerFactory | None,
        job: Job,
        lowered: Lowered,
        whole: WholeUpdates | None = None,
    ) -> None:
        config = job.config
        ranks = job.ranks
        self.is_given = optimizer is not None
        self.optimizer = None
        if optimizer is not None and trainable:
            states = job.prepared.captured.state
            all_states = [states[name] for name in job.names if name in states]
            # first, since a script may take hold of the optimizer that is made last
            of_whole = settings_of_whole(optimizer, trainable, all_states)
            self.optimizer = self._made(optimizer, trainable, ranks)
            check_groups(self.optimizer, trainable, of_whole)
            refuse_steps_of_script(parameter for _, parameter in trainable)
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
        self._config = config
        self._ranks = ranks
        self._by_stage: StageUpdates | None = None
        self.compressed: CompressedStates | None = None
        """holds states in fewer bits between steps; None: they stay as they are"""
        if config.optimizer_state != "fp32" and self.optimizer is not None:
            self.compressed = CompressedStates(self.optimizer, config.optimizer_state)
        self.offloaded: OffloadedStates | None = None
        """brings states that live elsewhere, block by block; None: all are here"""
        if self.optimizer is not None:
            self.offloaded = offloaded_states(job, self.optimizer, dict(trainable))
        self._has_parts_on_cpu = job.zero is not None and not ranks.device.is_accelerator
        self.whole = whole
        """updates parameters whole that a grid cuts; None: each holder updates its part"""
        self.norms: SummedNorms | None = None
        """gives norms of the whole of parameters that are updated in parts; None: there are none"""
        self.trained: Collection[str] = ()
        """parameters that the loss of this step reaches"""
        self.masked = self._masked_updates(trainable, job, lowered)
        """None where the host waits for loss and norm, or where nothing depends on them"""
        self.loss_scale: LossScale | DeviceLossScale | None = None
        if self.masked is not None:
            self.loss_scale = self.masked.loss_scale
        elif config.precision == "fp16":
            self.loss_scale = LossScale()
        self._before_update: list[Callable[[], None]] = []
        """to be called before weights or states change"""
        self._pending: Update | None = None
        """the last step, whose totals the host has not looked at"""

    def _masked_updates(
        self, trainable: Sequence[tuple[str, torch.nn.Parameter]], job: Job, lowered: Lowered
    ) -> MaskedUpdates | None:
        """Updates that the device itself leaves out after a bad step, where all ranks can do so."""
        config = job.config
        ranks = job.ranks
        if config.needs_all_gradients is None:
            return None
        # these go by parts or through owners, which one fused kernel does not know of
        in_pieces = any((self.compressed, self.offloaded, self.whole, job.plan.summed_norms))
        on_device = all(each.device.type == ranks.device.type for _, each in trainable)
        can = on_device and not in_pieces and can_mask(self.optimizer, config, ranks.device)
        if not all(ranks.gather(can and not lowered.has_sparse_gradients)):  # all ranks alike
            return None
        names = by_backward_order(list(job.plan.holders), lowered.first_use)
        return MaskedUpdates(self.optimizer, config, ranks.device, names)

    def begin(self, held: Sequence[HeldParameter], lending: Collection[int]) -> StageUpdates | None:
        """Start of a step: what updates each stage as soon as it may be; None where all must be
        updated at the end.
        """
        is_possible = StageUpdates.possible(self.optimizer, self._config)
        in_pieces = any((self.compressed, self.offloaded, self.norms))
        if self.optimizer is None or in_pieces or not is_possible:
            self._by_stage = None
            return None
        if self._by_stage is None:
            self._by_stage = StageUpdates(self.optimizer, held)
        self.wait_for_copies()
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
            made = make_optimizer(factory, trainable)
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

    # ---- weights and states that are being copied

    def before_update(self, call: Callable[[], None]) -> None:
        """Has this called once, before weights or states of the optimizer change."""
        self._before_update.append(call)

    def wait_for_copies(self) -> None:
        """Weights and states may change after this call; the host does not wait."""
        for call in self._before_update:
            call()
        self._before_update.clear()

    @contextlib.contextmanager
    def states_at_hand(self) -> Iterator[None]:
        """Inside, the optimizer has all its states, to be read."""
        elsewhere = self.compressed or self.offloaded
        if elsewhere is not None:
            elsewhere.expand()
        try:
            yield
        finally:
            if elsewhere is not None:
                elsewhere.collapse()

    @property
    def away(self) -> Sequence[Tensor]:
        """Parameters whose states are not as the optimizer has them between steps: elsewhere, or
        in fewer bits.
        """
        elsewhere = self.compressed or self.offloaded
        return elsewhere.parameters if elsewhere is not None else ()

    def loaded_in_portions(self) -> Iterator[Sequence[Tensor]]:
        """The parameters of `away`, some at a time: what the optimizer has got of them from a
        checkpoint goes where it lives when the next are asked for.
        """
        elsewhere = self.compressed or self.offloaded
        if elsewhere is not None:
            yield from elsewhere.loaded_in_portions()

    def finish(self) -> None:
        """Returns when updates of this rank that run under the next forward are over, and raises
        what went wrong with one. No collective.
        """
        if self.offloaded is not None:
            self.offloaded.finish()

    def close(self) -> None:
        """Waits for states on their way."""
        if self.offloaded is not None:
            self.offloaded.close()

    # ---- the update of a step

    def totals(
        self,
        loss: Tensor,
        held: Sequence[HeldParameter],
        transport: Transport | None,
        num_empty: CountEmpty,
        is_scaled: bool,
    ) -> Totals:
        """Loss and squared gradient norm of the whole model, on their way. `loss`: this rank's
        part. `is_scaled`: gradients still have the loss scale in them.
        """
        ranks = self._ranks
        counted = counted_gradients(held, ranks.rank)
        if self.masked is not None:
            norms = self.masked.norms(counted, is_scaled)
            parts = self.masked.parts(loss, norms, num_empty(), (ranks.rank, ranks.num_ranks))
        else:
            norm = squared_norm(counted, ranks.device.name)
            if isinstance(self.loss_scale, LossScale) and is_scaled:
                norm = norm / self.loss_scale.scale**2
            parts = torch.stack([loss, norm.to(loss)])
        return Totals(parts, ranks, transport)

    def apply(
        self,
        held: Sequence[HeldParameter],
        totals: Totals,
        step: int,
        num_empty: CountEmpty,
        is_scaled: bool = True,
        ahead: bool = False,
    ) -> Update:
        """Steps the optimizer, unless this step is to be skipped. `is_scaled`: gradients still have
        the loss scale in them. `ahead`: what the plan updates under the next forward is only begun.
        """
        self.wait_for_copies()
        update = Update(self, step, totals)
        if self.masked is not None:
            self._apply_masked(self.masked, held, update, is_scaled)
            return update
        factor = 1.0
        if self._config.needs_all_gradients is not None:
            start = time.perf_counter()
            loss, squared = totals.values()
            update.waited_s = time.perf_counter() - start
            update.is_left_out = self.leaves_out(loss, squared)
            norm = squared**0.5
            if isinstance(self.loss_scale, LossScale):
                factor = 1.0 / self.loss_scale.scale if is_scaled else 1.0
                self.loss_scale.update(math.isfinite(norm))
            if self._is_wrong(loss, norm):
                self._report_nonfinite(update, *self._find_bad(held, num_empty))
            if self._config.clip_grad_norm is not None:
                factor *= min(1.0, self._config.clip_grad_norm / (norm + CLIP_EPSILON))
        start = time.perf_counter()
        if not update.is_left_out:
            self._step(held, factor, ahead)
            self._schedule(totals)
        update.is_left_out = bool(update.is_left_out)
        update.rate = self.learning_rate
        update.seconds = time.perf_counter() - start
        return update

    def _step(self, held: Sequence[HeldParameter], factor: float, ahead: bool) -> None:
        if factor != 1.0:
            scale_gradients(held, factor)
        if self.whole is not None:
            self.whole.collect(self.trained)
        norms = self.norms
        with norms.of_the_whole(self.trained) if norms is not None else nullcontext():
            self._step_optimizer(ahead)
        if self.whole is not None:
            self.whole.scatter(self.trained)

    def _step_optimizer(self, ahead: bool) -> None:
        if self._by_stage is not None:
            self._by_stage.finish()
        elif self.compressed is not None:
            self.compressed.step()
        elif self.offloaded is not None:
            self.offloaded.step(ahead)
        elif self.optimizer is not None:
            with self._kernels(self.optimizer):
                self.optimizer.step()

    def _kernels(self, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        """Inside, parts of blocks on a CPU are updated by torch's fused kernels: one pass over
        memory instead of one for each operation.
        """
        if self._has_parts_on_cpu and can_fuse(optimizer):
            return fused(optimizer)
        return nullcontext()

    def _schedule(self, totals: Totals) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(totals.values()[0])
        elif self.scheduler is not None:
            self.scheduler.step()

    def leaves_out(self, loss: float, squared_norm: float) -> bool:
        """Whether a step with these totals changes nothing."""
        is_overflow = math.isfinite(loss) and not math.isfinite(squared_norm)
        if self.loss_scale is not None and is_overflow:
            return True  # the smaller scale will mend it
        return self._is_wrong(loss, squared_norm)

    def _is_wrong(self, loss: float, norm: float) -> bool:
        """Whether there is a number that nothing mends, and the user does not want to continue."""
        if self._config.on_nonfinite == "continue":
            return False
        if self.loss_scale is not None:
            return not math.isfinite(loss)
        return not (math.isfinite(loss) and math.isfinite(norm))

    # ---- on an accelerator: looked at one step late

    @property
    def _schedules_late(self) -> bool:
        """Whether the LR scheduler must know what became of a step: it may not count, or its loss
        decides.
        """
        if self.masked is None or self.scheduler is None:
            return False
        may_skip = self._config.on_nonfinite == "skip" or self.loss_scale is not None
        assert self.optimizer is not None
        has_tensors = any(isinstance(group["lr"], Tensor) for group in self.optimizer.param_groups)
        return may_skip or has_tensors or isinstance(self.scheduler, ReduceLROnPlateau)

    def _apply_masked(
        self, masked: MaskedUpdates, held: Sequence[HeldParameter], update: Update, is_scaled: bool
    ) -> None:
        """Launches the update and looks at the step before."""
        start = time.perf_counter()
        if self._schedules_late:
            self.settle()  # the learning rate of this update
        masked.apply(held, update.totals.on_device(), is_scaled)
        if not self._schedules_late:
            self.settle()
            if self.scheduler is not None and self.optimizer is not None:
                update.schedule_before = ScheduleState.of(self.scheduler, self.optimizer)
                self.scheduler.step()
            update.rate = self.learning_rate
        update.seconds = time.perf_counter() - start
        self._pending = update

    def settle(self) -> None:
        """Looks at the last step, if nobody has: its message, its error, its LR scheduler. Waits
        until the device has the numbers; never a collective.
        """
        update = self._pending
        self._pending = None
        if update is None or self.masked is None:
            return
        loss, squared = update.totals.values()[:2]
        update.is_left_out = self.leaves_out(loss, squared)
        if self._is_wrong(loss, squared):
            if self._config.on_nonfinite == "stop":
                self.masked.resume()  # for those who catch the error
                if update.schedule_before is not None and self.optimizer is not None:
                    update.schedule_before.put_back(self.scheduler, self.optimizer)
            values = update.totals.values()
            self._report_nonfinite(
                update, self.masked.bad_parameters(values), values[NUM_EMPTY] > 0
            )
        elif not update.is_left_out and self._schedules_late:
            self._schedule(update.totals)
        update.rate = self.learning_rate

    def forget(self) -> None:
        """All state is replaced, by a checkpoint: what became of the last step no longer counts."""
        self._pending = None
        if self.masked is not None:
            self.masked.resume()

    # ---- numbers that are not finite

    def _find_bad(
        self, held: Sequence[HeldParameter], num_empty: CountEmpty
    ) -> tuple[dict[int, str], bool]:
        """Rank -> a parameter with a gradient that is not finite; and whether a denominator of the
        loss is zero. All ranks call it.
        """
        bad = None
        for parameter in held:
            gradient = parameter.tensor.grad
            if gradient is not None and not bool(gradient.isfinite().all()):
                bad = parameter.name
                break
        empty = num_empty()
        found = self._ranks.gather((bad, empty is not None and bool(empty)))
        places = {rank: name for rank, (name, _) in enumerate(found) if name is not None}
        return places, any(is_empty for _, is_empty in found)

    def _report_nonfinite(self, update: Update, places: Mapping[int, str], is_empty: bool) -> None:
        """Logs that a step is left out; `stop` raises, on every rank."""
        loss, squared = update.totals.values()[:2]
        where = (
            ", ".join(f"{name} on rank {rank}" for rank, name in list(places.items())[:4])
            or "no gradient, only the loss"
        )
        text = (
            f"step {update.step}: the loss is {loss:.6g} and the gradient norm {squared**0.5:.6g}; "
            f"not finite: {where}"
        )
        if self._config.on_nonfinite == "skip":
            logger.warning("%s. The step is skipped on all ranks", text)
            return
        advice = (
            "The loss divides by the number of samples or labels that count, and none counts in "
            "this mini-batch (all labels ignored, or a mask of zeros): leave such batches out"
            if is_empty
            else 'Lower the learning rate, set "clip_grad_norm"'
        )
        raise NonFiniteError(
            f'{text}. The weights are unchanged. {advice}, or continue with "on_nonfinite": "skip"',
            update.step,
        )
