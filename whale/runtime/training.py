"""Training steps on one rank: forward, backward, all-reduce of gradients, update, and what follows
an update (counts, times, checks, metrics, new shares).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from whale.devices import Moment
from whale.plans.plan import Plan
from whale.progress import open_progress
from whale.runtime.accumulation import BatchPass, StepInParts
from whale.runtime.adapting import Adapting
from whale.runtime.batches import AheadBatch, Batches
from whale.runtime.block_gradients import BlockGradients
from whale.runtime.data import ShardedBatch
from whale.runtime.executor import StepOutcome
from whale.runtime.gradients import GradientSynchroniser
from whale.runtime.held import (
    all_reduce_order,
    for_optimizer,
    held_parameters,
    make_groups,
    summed_norms,
    whole_updates,
)
from whale.runtime.job import Job
from whale.runtime.metrics import StepShares, open_metrics
from whale.runtime.replicas import ReplicaCheck
from whale.runtime.result import StepResult, Timing, Totals
from whale.runtime.shapes import LoweredGraphs, largest_micro_batches
from whale.runtime.state import gather_outputs
from whale.runtime.step_update import NonFiniteError, Update
from whale.runtime.timing import DeviceClock, StepMoments, StepTiming, timing_on_host
from whale.runtime.trackers import TrackerFactory
from whale.runtime.update import OptimizerFactory, SchedulerFactory, Updater
from whale.scheduling import Action, Kind


class Training:
    """Runs the training steps of an engine. All ranks call the same methods in the same order."""

    def __init__(
        self,
        job: Job,
        shapes: LoweredGraphs,
        batches: Batches,
        optimizer: OptimizerFactory | None,
        scheduler: SchedulerFactory | None,
    ) -> None:
        self.job = job
        self.shapes = shapes
        self._batches = batches
        self.step_count = 0
        self.held = held_parameters(job, shapes.first)
        make_groups(job)
        self._replicas = ReplicaCheck(job.weights, job.shards, job.ranks, job.config.check_replicas)
        self._replicas.check()  # before there are gradients: hashing takes workspace
        self.gradients = GradientSynchroniser(
            self.held,
            job.ranks,
            job.plan.settings.bucket_bytes,
            shapes.transport,
            job.platform,
            _block_gradients(job, shapes),
            all_reduce_order(job, shapes.first),
        )
        self.whole = whole_updates(job) if optimizer is not None else None
        self.updater = Updater(
            for_optimizer(job, self.whole), optimizer, scheduler, job, shapes.first, self.whole
        )
        self.updater.norms = summed_norms(job, self.updater.optimizer)
        self.parts = StepInParts(self)
        self.last_outcome: StepOutcome | None = None
        self.trained: frozenset[str] = frozenset()
        """parameters that the last step trained"""
        device = job.ranks.device
        self._clock = DeviceClock(device) if device.is_accelerator else None
        """None where the clock of the host says when an action is done"""
        self._last_timing: Callable[[], Timing] | None = None
        self.metrics = open_metrics(job.config, job.plan, job.ranks)
        self._progress = open_progress(job.ranks.rank, job.config.num_steps)
        self.adapting = Adapting(job)
        self.next_plan: Plan | None = None
        """with other shares, to be followed when the loader begins its next epoch: samples of this
        one are already on their way
        """
        self._reads_shards = False
        """the loader of this epoch has loaded further batches ahead, with the shares of now"""

    @property
    def num_rebalanced(self) -> int:
        """How often the samples were shared again since the start."""
        return self.adapting.num_rebalanced

    @property
    def _waited_s(self) -> float:
        return self.shapes.transport.waited_s if self.shapes.transport is not None else 0.0

    # ---- one step

    def step(self, batch: Any, outputs: bool) -> StepResult:
        """Forward, backward, all-reduce of gradients and update for one mini-batch."""
        self.need_optimizer("engine.step")
        self.parts.refuse_unfinished()
        now = self.job.ranks.device.event
        done = self.run(batch, self.step_count, updates_by_stage=True, outputs=outputs)
        totals = self.totals(done.outcome.loss, done)
        updating = now()
        self.finish_ahead()  # blocks that this forward did not read
        update = self.updater.apply(
            self.held,
            totals,
            self.step_count,
            lambda: done.lowered.num_empty(done.given.tensors),
            ahead=True,
        )
        result = self.end_step(done, totals, update, updating)
        return replace(result, outputs=self._outputs(done, totals)) if outputs else result

    def settle(self) -> None:
        """Looks, on an accelerator, at what became of the last step, and raises what is wrong."""
        with self.at_failed_step():
            self.updater.settle()

    def finish_ahead(self) -> None:
        """Returns when no update runs any more and all weights are new on this rank, those that
        other ranks update included; raises what went wrong with an update. All ranks call it
        together.
        """
        self.updater.finish()
        if self.job.zero is not None:
            self.job.zero.bring_late()

    @contextlib.contextmanager
    def at_failed_step(self) -> Iterator[None]:
        """The step of a number that is not finite is the one that may be tried again."""
        try:
            yield
        except NonFiniteError as error:
            self.step_count = error.step
            raise

    def loaded(self, step: int) -> None:
        """A checkpoint of this step has replaced weights and states."""
        self.updater.forget()
        self.step_count = step
        if self.job.zero is not None:
            self.job.zero.loaded()
        if self.whole is not None:
            self.whole.reload()

    def _outputs(self, done: BatchPass, totals: Totals) -> Any:
        """What the model returned in a step, on every rank."""
        for warning in done.lowered.prepared.warnings:
            self.job.warn_once(f"engine.step: {warning}")
        ranks = self.job.ranks
        program = done.executor.program
        return ranks.from_first(gather_outputs(done.lowered, done.outcome, program, totals, ranks))

    def need_optimizer(self, caller: str) -> None:
        """Refuses a training step of an engine that has no optimizer."""
        if not self.updater.is_given and self.held:
            raise ValueError(
                f"{caller} needs an optimizer: pass optimizer=lambda params: "
                "torch.optim.AdamW(params, ...) to wh.parallelize"
            )

    def run(
        self, batch: Any, draw: int, updates_by_stage: bool, outputs: bool = False
    ) -> BatchPass:
        """Forward, backward and all-reduce of gradients of one batch. `draw`: what random numbers
        are drawn from. `outputs`: what the model returns is held as well.
        """
        job = self.job
        # the graph names no device index: it means the current one
        job.ranks.device.select()
        batch = job.platform.read_batch(batch)
        job.platform.begin_step()
        now = job.ranks.device.event
        start = now()
        loss_scale = self.updater.loss_scale
        scale = loss_scale.scale if loss_scale is not None else 1.0
        # a batch that is longer than planned may change `job.plan` here
        lowered, given, batch_size = self._batches.for_training(
            batch, self.step_count, scale, self.num_rebalanced, outputs
        )
        if draw != given.step:
            given = replace(given, step=draw)
        whole_or_own = batch.batch if isinstance(batch, AheadBatch) else batch
        if isinstance(whole_or_own, ShardedBatch):
            self._reads_shards = True
        # the last batch of an epoch may be too small for all micro-batches
        num_micro_batch = largest_micro_batches(lowered.plan, batch_size)
        executor = self.shapes.executor(lowered, batch_size, num_micro_batch, is_training=True)
        self.gradients.begin(lowered.trained)
        self.updater.trained = lowered.trained
        waited_before = self._waited_s
        updates = None
        if updates_by_stage and job.platform.updates_during_step and job.zero is None:
            updates = self.updater.begin(self.held, lowered.lending)
        outcome = executor.run(given, self.gradients, updates)
        bubble_s = self._waited_s - waited_before
        waiting = now()
        self.gradients.finish()
        return BatchPass(
            lowered, given, batch_size, executor, outcome, bubble_s, (start, waiting, now())
        )

    def totals(self, loss: Tensor, done: BatchPass, is_scaled: bool = True) -> Totals:
        """Loss and squared gradient norm of the whole model, on their way. `loss`: this rank's
        part. `is_scaled`: gradients still have the loss scale in them.
        """
        return self.updater.totals(
            loss,
            self.held,
            self.shapes.transport,
            lambda: done.lowered.num_empty(done.given.tensors),
            is_scaled,
        )

    # ---- after an update

    def end_step(
        self, done: BatchPass, totals: Totals, update: Update, updating: Moment
    ) -> StepResult:
        """What follows an update: counts, times, checks, metrics."""
        job = self.job
        start, waiting, waited = done.moments
        if job.zero is not None:  # of a step that is left out nothing has changed
            job.zero.after_update()
        job.platform.end_step(done.outcome.events, (waiting, waited), self.updater.optimizer)
        end = job.ranks.device.event()
        self.step_count += 1
        if self._replicas.reads_after(self.step_count):
            self.finish_ahead()
        self._replicas.after_step(self.step_count)
        self.trained = frozenset(self.updater.trained)
        self.last_outcome = done.outcome
        moments = StepMoments(start, waiting, waited, updating, end)
        read_timing = self._timed(done.outcome, moments, update, done.bubble_s)
        result = StepResult(totals, read_timing, update)
        self._note(done, result)
        found = self.adapting.after_step(
            done.executor,
            self._compute_seconds(done.outcome),
            done.batch_size,
            self.step_count - 1,
        )
        self.next_plan = found or self.next_plan
        if not self._reads_shards:
            self.take_new_shares()
        return result

    def _note(self, done: BatchPass, result: StepResult) -> None:
        """Metrics and the line of progress of a step."""
        if self.metrics is not None:
            own_samples = sum(stop - start for start, stop in done.executor.program.samples)
            shares = StepShares(done.batch_size, own_samples, self.num_rebalanced)
            self.metrics.note(self.step_count - 1, result, shares)
        if self._progress is not None:
            self._progress.note(self.step_count, done.batch_size, lambda: result.loss)

    def _timed(
        self, outcome: StepOutcome, moments: StepMoments, update: Update, bubble_s: float
    ) -> Callable[[], Timing]:
        """What reads where the time of a step went."""
        if self._clock is not None:
            device = self.job.ranks.device
            self._last_timing = StepTiming(self._clock, outcome, moments, device).read
            return self._last_timing
        timing = timing_on_host(outcome, moments, update, bubble_s)
        outcome.events.append((Action(Kind.UPDATE), moments.updating, moments.end))
        return lambda: timing

    def _compute_seconds(self, outcome: StepOutcome) -> Callable[[], float]:
        """What gives the seconds of forward and backward of a step."""
        read = self._last_timing

        def seconds() -> float:
            if read is not None:
                read()
            return outcome.compute_s

        return seconds

    def take_new_shares(self) -> None:
        """Follows the plan that `"adapt": "on"` has made, if there is one."""
        if self.next_plan is not None:
            self.finish_ahead()
            self.job.plan = self.next_plan
            self.shapes.follow(self.next_plan)
            self.adapting.followed()
        self.next_plan = None
        self._reads_shards = False

    # ---- looking at steps

    def read_last_outcome(self) -> StepOutcome | None:
        """The outcome of the last step with its events, which a device has to be waited for."""
        if self._last_timing is not None:
            self._last_timing()  # gives the outcome its events
        return self.last_outcome

    def track(self, tracker: TrackerFactory) -> None:
        """Gives the figures of every step from now on to a tracker, made on rank 0."""
        job = self.job
        if self.metrics is None:
            self.metrics = open_metrics(job.config, job.plan, job.ranks, without_folder=True)
        assert self.metrics is not None
        if job.ranks.rank == 0:
            self.metrics.trackers.append(tracker())

    def close(self) -> None:
        """Writes the last line of the metrics and raises what was wrong with the last step."""
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None
        self.settle()


def _block_gradients(job: Job, shapes: LoweredGraphs) -> BlockGradients | None:
    """What sums the gradients of parameters that are cut; None where there are none."""
    if job.zero is None or not job.zero.blocks:
        return None
    view = job.plan.of_rank(job.ranks.rank)
    own = set(view.stages_of_rank(job.ranks.rank))
    stages_of = {name: own & set(stages) for name, stages in view.holders.items()}
    return BlockGradients(job.zero, stages_of, shapes.first.first_use)
