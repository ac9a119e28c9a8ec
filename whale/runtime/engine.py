"""The engine: one rank's part of a planned training job. All run-time state lives here."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from whale.checkpoint import Handle, nothing_to_save
from whale.devices import Moment
from whale.distributed.ranks import Ranks
from whale.distributed.watch import reporting
from whale.lowering.inputs import own_rows
from whale.lowering.program import Lowered
from whale.plans.plan import Plan
from whale.progress import open_progress
from whale.runtime.accumulation import BatchPass, PassResult, StepInParts
from whale.runtime.adapting import Adapting
from whale.runtime.batches import AheadBatch, Batches
from whale.runtime.block_gradients import BlockGradients
from whale.runtime.checkpoints import Checkpoints
from whale.runtime.data import Sampler, ShardedBatch, ShardedLoader
from whale.runtime.executor import Executor, StepInput, StepOutcome
from whale.runtime.gradients import GradientSynchroniser, Held, HeldPiece, by_backward_order
from whale.runtime.job import Job
from whale.runtime.local_model import gathered, give_back, local_model, save_pretrained
from whale.runtime.metrics import Shares, open_metrics, write_trace
from whale.runtime.replicas import ReplicaCheck
from whale.runtime.result import EvaluationResult, StepResult, Timing, Totals
from whale.runtime.shapes import (
    Shapes,
    evaluation_micro_batches,
    largest_micro_batches,
    widest,
)
from whale.runtime.state import gather_gradients, gather_outputs, gather_state
from whale.runtime.step_update import NonFiniteError, Update
from whale.runtime.timing import DeviceClock, StepMoments, StepTiming, timing_on_host
from whale.runtime.trackers import TrackerFactory
from whale.runtime.update import OptimizerFactory, SchedulerFactory, Updater
from whale.runtime.whole_updates import WholeUpdates
from whale.scheduling import Action, Kind

logger = logging.getLogger("whale")


class Engine:
    """Trains and evaluates the model as the plan says. Made by `wh.parallelize`."""

    def __init__(
        self, job: Job, optimizer: OptimizerFactory | None, scheduler: SchedulerFactory | None
    ) -> None:
        self._job = job
        self.plan = job.plan
        self.step_count = 0
        self._shapes = Shapes(job)
        self._batches = Batches(job, self._shapes)
        self._held = self._held_parameters(self._shapes.first)
        groups: set[tuple[int, ...]] = set()
        for name in self.plan.holders:
            for shards in (job.shards, job.state_shards):
                groups.update(piece.ranks for piece in shards.pieces(name) if len(piece.ranks) > 1)
        groups.update(block.ranks for block in self.plan.blocks)
        for ranks in sorted(groups):  # every rank makes every group, in the same order
            job.ranks.group(ranks)
        self._replicas = ReplicaCheck(job.weights, job.shards, job.ranks, job.config.check_replicas)
        self._replicas.check()  # before there are gradients: hashing takes workspace
        self._gradients = GradientSynchroniser(
            self._held,
            job.ranks,
            job.plan.settings.bucket_bytes,
            self._shapes.transport,
            job.platform,
            self._block_gradients(),
            self._global_order(),
        )
        self._whole = self._whole_updates(optimizer)
        trainable = self._trainable()
        if self._whole is not None:
            trainable = self._with_whole(trainable, self._whole)
        self._updater = Updater(
            trainable, optimizer, scheduler, job, self._shapes.first, self._whole
        )
        self._checkpoints = Checkpoints(job, self._updater)
        self.peak_in_flight: dict[int, int] = {}
        """largest number of micro-batches whose activations each stage of this rank held in the
        last step
        """
        self._parts = StepInParts(self)
        self._last_outcome: StepOutcome | None = None
        device = job.ranks.device
        self._clock = DeviceClock(device) if device.is_accelerator else None
        """None where the clock of the host says when an action is done"""
        self._last_timing: Callable[[], Timing] | None = None
        self._metrics = open_metrics(job.config, self.plan, job.ranks)
        self._progress = open_progress(job.ranks.rank, job.config.num_steps)
        self._adapting = Adapting(job)
        self._next_plan: Plan | None = None
        """with other shares, to be followed when the loader begins its next epoch: samples of this
        one are already on their way
        """
        self._reads_shards = False
        """the loader of this epoch has loaded further batches ahead, with the shares of now"""
        self._warnings: set[str] = set()
        self._trained: frozenset[str] = frozenset()
        """parameters that the last step trained"""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer; None when it holds nothing that is trained."""
        self._settle()
        return self._updater.optimizer

    @property
    def scheduler(self) -> Any:
        self._settle()
        return self._updater.scheduler

    @property
    def ranks(self) -> Ranks:
        """This process among those of the job."""
        return self._job.ranks

    @property
    def smallest_batch(self) -> int:
        """Samples that a batch must have at least: one for each device that it is cut over."""
        return widest(self.plan)

    @property
    def takes_named(self) -> bool:
        """Whether a batch is a dict of keyword arguments."""
        return self._job.sample.structure.type is dict

    @property
    def model_returns_loss(self) -> bool:
        """Whether the output of the model is the loss itself, not something that holds it."""
        return self._job.loss is None and self._job.prepared.capture.output_is_loss

    # ---- training

    def step(self, batch: Any, outputs: bool = False) -> StepResult:
        """Forward, backward, all-reduce of gradients and update for one mini-batch: the whole one
        on every rank, or one of `engine.loader`.

        With `outputs` the result also holds what the model returned, on every rank: a state that
        the next batch goes on with, say. These are copied to all ranks in every step.
        """
        with reporting(self._job.ranks.watch, f"step {self.step_count}"), self._at_failed_step():
            return self._step(batch, outputs)

    def _settle(self) -> None:
        """On an accelerator: looks at what became of the last step, and raises what is wrong."""
        with self._at_failed_step():
            self._updater.settle()

    @contextlib.contextmanager
    def _at_failed_step(self) -> Iterator[None]:
        """The step of a number that is not finite is the one that may be tried again."""
        try:
            yield
        except NonFiniteError as error:
            self.step_count = error.step
            raise

    def _step(self, batch: Any, outputs: bool) -> StepResult:
        self._need_optimizer("engine.step")
        self._parts.refuse_unfinished()
        now = self._job.ranks.device.event
        done = self._run(batch, self.step_count, updates_by_stage=True, outputs=outputs)
        totals = self._totals(done.outcome.loss, done)
        updating = now()
        update = self._updater.apply(
            self._held,
            totals,
            self.step_count,
            lambda: done.lowered.num_empty(done.given.tensors),
        )
        result = self._end_step(done, totals, update, updating)
        return replace(result, outputs=self._outputs(done, totals)) if outputs else result

    def _outputs(self, done: BatchPass, totals: Totals) -> Any:
        """What the model returned in a step, on every rank."""
        for warning in done.lowered.prepared.warnings:
            self._warn_once(f"engine.step: {warning}")
        ranks = self._job.ranks
        program = done.executor.program
        return ranks.from_first(gather_outputs(done.lowered, done.outcome, program, totals, ranks))

    def _need_optimizer(self, caller: str) -> None:
        if not self._updater.is_given and self._held:
            raise ValueError(
                f"{caller} needs an optimizer: pass optimizer=lambda params: "
                "torch.optim.AdamW(params, ...) to wh.parallelize"
            )

    def _run(
        self, batch: Any, draw: int, updates_by_stage: bool, outputs: bool = False
    ) -> BatchPass:
        """Forward, backward and all-reduce of gradients of one batch. `draw`: what random numbers
        are drawn from. `outputs`: what the model returns is held as well.
        """
        # the graph names no device index: it means the current one
        self._job.ranks.device.select()
        platform = self._job.platform
        batch = platform.read_batch(batch)
        platform.begin_step()
        now = self._job.ranks.device.event
        start = now()
        loss_scale = self._updater.loss_scale
        scale = loss_scale.scale if loss_scale is not None else 1.0
        lowered, given, batch_size = self._batches.for_training(
            batch, self.step_count, scale, self.num_rebalanced, outputs
        )
        self.plan = self._job.plan  # a longer batch than planned for was planned anew
        if draw != given.step:
            given = replace(given, step=draw)
        whole_or_own = batch.batch if isinstance(batch, AheadBatch) else batch
        if isinstance(whole_or_own, ShardedBatch):
            self._reads_shards = True
        # the last batch of an epoch may be too small for all micro-batches
        num_micro_batch = largest_micro_batches(lowered.plan, batch_size)
        executor = self._shapes.executor(lowered, batch_size, num_micro_batch, is_training=True)
        self._gradients.begin(lowered.trained)
        self._updater.trained = lowered.trained
        waited_before = self._waited_s
        updates = None
        if updates_by_stage and platform.updates_during_step and self._job.zero is None:
            updates = self._updater.begin(self._held, lowered.lending)
        outcome = executor.run(given, self._gradients, updates)
        bubble_s = self._waited_s - waited_before
        waiting = now()
        self._gradients.finish()
        return BatchPass(
            lowered, given, batch_size, executor, outcome, bubble_s, (start, waiting, now())
        )

    def _end_step(
        self, done: BatchPass, totals: Totals, update: Update, updating: Moment
    ) -> StepResult:
        """What follows an update: counts, times, checks, metrics."""
        start, waiting, waited = done.moments
        if self._job.zero is not None:  # of a step that is left out nothing has changed
            self._job.zero.after_update()
        self._job.platform.end_step(done.outcome.events, (waiting, waited), self._updater.optimizer)
        end = self._job.ranks.device.event()
        self.step_count += 1
        self._replicas.after_step(self.step_count)
        self._trained = done.lowered.trained
        self.peak_in_flight = done.outcome.peak_in_flight
        self._last_outcome = done.outcome
        moments = StepMoments(start, waiting, waited, updating, end)
        read_timing = self._timed(done.outcome, moments, update, done.bubble_s)
        result = StepResult(totals, read_timing, update)
        own_samples = sum(stop - start for start, stop in done.executor.program.samples)
        if self._metrics is not None:
            shares = Shares(done.batch_size, own_samples, self._adapting.num_rebalanced)
            self._metrics.note(self.step_count - 1, result, shares)
        if self._progress is not None:
            self._progress.note(self.step_count, done.batch_size, lambda: result.loss)
        self._next_plan = (
            self._adapting.after_step(
                done.executor,
                self._compute_seconds(done.outcome),
                done.batch_size,
                self.step_count - 1,
            )
            or self._next_plan
        )
        if not self._reads_shards:
            self.take_new_shares()
        return result

    # ---- a step in parts

    def forward_backward(self, batch: Any) -> PassResult:
        """Forward, backward and all-reduce of gradients of one batch, without an update. The
        gradient counts when `accumulate` is called, until then it is only the latest one.
        """
        with reporting(self._job.ranks.watch, f"step {self.step_count}"):
            return self._parts.forward_backward(batch)

    def accumulate(self, factor: float = 1.0) -> None:
        """Adds the gradient of the latest `forward_backward`, times `factor`, to those that the
        next `update` uses.
        """
        self._parts.accumulate(factor)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scales the gradients that the next `update` uses down to this norm where it is larger;
        gives their norm over the whole model before. All ranks must call it.
        """
        return self._parts.clip(max_norm)

    def update(self) -> StepResult:
        """Updates the weights by the gradients that were accumulated, which are gone then. All
        ranks must call it.
        """
        with reporting(self._job.ranks.watch, f"step {self.step_count}"), self._at_failed_step():
            return self._parts.update()

    def zero_gradients(self) -> None:
        """Forgets all gradients that were accumulated since the last update. That of the latest
        `forward_backward` stays when it was not accumulated yet.
        """
        self._parts.zero()

    def _timed(
        self, outcome: StepOutcome, moments: StepMoments, update: Update, bubble_s: float
    ) -> Callable[[], Timing]:
        """What reads where the time of a step went."""
        if self._clock is not None:
            device = self._job.ranks.device
            self._last_timing = StepTiming(self._clock, outcome, moments, device).read
            return self._last_timing
        timing = timing_on_host(outcome, moments, update, bubble_s)
        outcome.events.append((Action(Kind.UPDATE), moments.updating, moments.end))
        return lambda: timing

    def take_new_shares(self) -> None:
        """Follows the plan that `"adapt": "on"` has made, if there is one: between steps, on all
        ranks alike. A loader calls it, too.
        """
        if self._next_plan is not None:
            self.plan = self._job.plan = self._next_plan
            self._shapes.follow(self.plan)
            self._adapting.followed()
        self._next_plan = None
        self._reads_shards = False

    def _compute_seconds(self, outcome: StepOutcome) -> Callable[[], float]:
        """What gives the seconds of forward and backward of a step."""
        read = self._last_timing

        def seconds() -> float:
            if read is not None:
                read()
            return outcome.compute_s

        return seconds

    @property
    def num_rebalanced(self) -> int:
        """How often the samples were shared again since the start."""
        return self._adapting.num_rebalanced

    @property
    def _waited_s(self) -> float:
        return self._shapes.transport.waited_s if self._shapes.transport is not None else 0.0

    def _totals(self, loss: Tensor, done: BatchPass, is_scaled: bool = True) -> Totals:
        """Loss and squared gradient norm of the whole model, on their way. `loss`: this rank's
        part. `is_scaled`: gradients still have the loss scale in them.
        """
        return self._updater.totals(
            loss,
            self._held,
            self._shapes.transport,
            lambda: done.lowered.num_empty(done.given.tensors),
            is_scaled,
        )

    # ---- data

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Sampler | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
    ) -> ShardedLoader:
        """Mini-batches of which each rank loads only the samples that its stages need, in the order
        that local training would see.

        `sampler(epoch)` gives the sample numbers of an epoch, the same on every rank; default: in
        order, or shuffled by (seed, epoch).
        """
        return ShardedLoader(
            self,
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            sampler=sampler,
            collate=collate,
            num_workers=num_workers,
        )

    def prefetch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches for `engine.step`. On an accelerator each is copied there while the step
        before it runs: only the samples of this rank, through pinned memory.

        Batches of `engine.loader` are copied so by themselves.
        """
        if isinstance(batches, ShardedLoader):
            yield from batches
            return
        if hasattr(batches, "state_dict"):
            raise ValueError(
                f"engine.prefetch takes a batch before the one before it is trained on, so that "
                f"the position that {type(batches).__name__} counts would be one batch too far in "
                "a checkpoint. Try: engine.loader, or batches without engine.prefetch"
            )
        yield from self.copied_ahead(batches)

    def copied_ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """On an accelerator, the copy of a batch begins before the one before it is given out. A
        CPU trains on them where they are.
        """
        if not self._job.ranks.device.is_accelerator:
            yield from batches
            return
        previous: Any = None
        for batch in batches:
            following = self._batches.ahead(batch, self.num_rebalanced)
            if previous is not None:
                yield previous
            previous = following
        if previous is not None:
            yield previous

    def own_samples(self, batch_size: int) -> list[tuple[int, int]]:
        """Sample intervals of a mini-batch that this rank reads, one for each micro-batch; none
        when its stages read no input.
        """
        num_inputs = len(self._job.sample.tensors)
        places: set[int] = set()
        for chunk in self._shapes.first.chunks.values():
            places.update(chunk.inputs)
        # places beyond are those of whole-mini-batch values, which every rank computes
        if not any(place < num_inputs for place in places):
            return []
        return self._batches.own_samples(self._shapes.first, batch_size)

    # ---- evaluation

    def evaluate(self, batch: Any, outputs: bool = False) -> EvaluationResult:
        """Loss (when the batch has labels) and, on rank 0, the outputs in sample order; in eval
        mode, nothing is changed.

        A sum or mean over samples is that of the whole batch; what parts of it do not add up to (a
        maximum) is None, with a warning.
        """
        with reporting(self._job.ranks.watch, f"the evaluation before step {self.step_count}"):
            return self._evaluate(batch, outputs)

    def _evaluate(self, batch: Any, outputs: bool) -> EvaluationResult:
        if self._leaves_out("engine.evaluate gives no outputs and nan for the loss"):
            return EvaluationResult(Totals(torch.tensor([math.nan]), None), None)
        self._settle()
        self._job.ranks.device.select()
        layout, tensors = self._batches.for_evaluation(batch, self.step_count)
        if layout.batch_size < widest(self.plan):
            raise ValueError(
                f"engine.evaluate: a batch of {layout.batch_size} samples cannot be cut over "
                f"{widest(self.plan)} devices, each needs one. "
                f"Try: at least {widest(self.plan)} samples at a time: join this batch with the "
                "one before, or repeat its last sample and leave that output out"
            )
        lowered = self._shapes.evaluation(layout, tensors)
        prepared = lowered.prepared
        num_micro_batch = evaluation_micro_batches(lowered.plan, layout.batch_size, prepared)
        executor = self._shapes.executor(
            lowered, layout.batch_size, num_micro_batch, is_training=False
        )
        samples = executor.program.samples
        copied = lowered.inputs.copy(tensors, samples)
        everything = lowered.inputs.placeholders(copied, layout.batch_size)
        rows = own_rows(samples) if copied.has_own_rows else samples
        outcome = executor.run(StepInput(everything, self.step_count, rows), None)
        totals = None
        if prepared.num_terms:
            totals = Totals(torch.stack([outcome.loss]), self._job.ranks, self._shapes.transport)
        for warning in prepared.warnings if outputs else ():
            self._warn_once(f"engine.evaluate: {warning}")
        gathered = (
            gather_outputs(lowered, outcome, executor.program, totals, self._job.ranks)
            if outputs
            else None
        )
        return EvaluationResult(totals, gathered)

    # ---- state

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the local model's `state_dict()`, on the CPU of rank 0; empty on the
        other ranks. All ranks must call it.
        """
        if self._leaves_out("engine.full_state_dict is empty"):
            return {}
        self._settle()
        return gather_state(
            self._job.model, self._job.weights, self._job.names, self._job.shards, self._job.ranks
        )

    def save(self, folder: str | Path | None = None, data: Any = None) -> Handle:
        """Saves a checkpoint into `folder` (default: `checkpoints` in the run folder) while
        training continues. All ranks must call it.

        `data`: a loader with `state_dict()`, or plain JSON values. The handle's `wait()` returns
        when the checkpoint is in place and raises when it could not be written; training continues
        in both cases.
        """
        if self._leaves_out("engine.save writes nothing"):
            return nothing_to_save(self._checkpoint_folder(folder))
        self._settle()
        return self._checkpoints.save(self._checkpoint_folder(folder), self.step_count, data)

    def load(self, folder: str | Path | None = None, data: Any = None) -> int | None:
        """Loads the latest good checkpoint of `folder` (or this very checkpoint), saved under any
        plan and number of ranks.

        Gives its step, or None when there is none to load. `data`: the loader to set to the saved
        position. All ranks must call it.
        """
        if self._leaves_out("engine.load finds nothing"):
            return None
        step = self._checkpoints.load(self._checkpoint_folder(folder), data)
        if step is not None:
            self._updater.forget()
            self.step_count = step
            if self._job.zero is not None:
                self._job.zero.loaded()
            if self._whole is not None:
                self._whole.reload()
        return step

    def export(self, path: str | Path) -> None:
        """Writes the whole model as one safetensors file, for `safetensors.torch.load_model(model,
        path, strict=True)` or Hugging Face.

        All ranks must call it.
        """
        if not self._leaves_out("engine.export writes nothing"):
            self._checkpoints.export(Path(path), self.full_state_dict())

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None, **options: Any) -> None:
        """Writes the model for `from_pretrained`: config, safetensors in shards with their index,
        and the tokenizer if there is one; of a PEFT model the adapter files only.

        `options` go to the model's own `save_pretrained` (`max_shard_size`, say). All ranks must
        call it.
        """
        if not self._leaves_out("engine.save_pretrained writes nothing"):
            save_pretrained(self._job, Path(folder), tokenizer, options)

    def module(self, everywhere: bool = False) -> torch.nn.Module | None:
        """A real local copy of the model with the weights of now, on the CPU of rank 0 (None
        elsewhere) or with `everywhere` of every rank: for `generate`, say. All ranks must call it.
        """
        if self._leaves_out("engine.module gives None"):
            return None
        return local_model(self._job, everywhere)

    def gathered(self) -> contextlib.AbstractContextManager[torch.nn.Module]:
        """Inside `with engine.gathered() as model:` the model that was parallelized has copies of
        all weights on every rank and may be used as before. All ranks must enter it.
        """
        return gathered(self._job)

    def give_back(self) -> None:
        """Gives the model that was parallelized all its weights back, on every rank, and closes the
        engine. All ranks must call it.
        """
        give_back(self._job)
        self.close()

    def _checkpoint_folder(self, folder: str | Path | None) -> Path:
        if folder is None and self._job.config.folder is None:
            raise ValueError(
                'give engine.save and engine.load a folder, or set "run_folder" in the config'
            )
        return (
            Path(folder)
            if folder is not None
            else Path(str(self._job.config.folder)) / "checkpoints"
        )

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients of the last step, by parameter name; of a parameter that is cut, of
        the part that is here.
        """
        return {held.name: held.tensor.grad for held in self._held if held.tensor.grad is not None}

    def full_gradients(self) -> dict[str, Tensor]:
        """All gradients of the last step, whole, on the CPU of rank 0; empty on the other ranks.
        All ranks must call it.
        """
        return gather_gradients(
            self._job.model,
            self.gradients(),
            self._trained,
            self._job.state_shards,
            self._job.ranks,
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters that the loss trains."""
        return iter(
            [
                (held.name, held.tensor)
                for held in self._held
                if held.name in self._shapes.first.trained
            ]
        )

    # ---- looking at a run

    @property
    def num_captures(self) -> int:
        """How often the model was captured for training: once, and again for batches that no graph
        was for.
        """
        return self._shapes.num_captures

    def executors(self) -> list[Executor]:
        """What runs the steps, one for each shape and size of batch seen so far: for tools that
        measure.
        """
        return self._shapes.executors()

    def trace(self, path: str | Path) -> None:
        """Writes the last step of all ranks as a Chrome trace (open it in ui.perfetto.dev). All
        ranks must call it.
        """
        if self._last_timing is not None:
            self._last_timing()  # gives the outcome its events
        write_trace(path, self._last_outcome, self._job.ranks)

    def track(self, tracker: TrackerFactory) -> None:
        """Gives the figures of every step from now on to a tracker, which is made by this function
        on rank 0: `engine.track(lambda: Wandb(project="mine"))` (`whale.integrations.trackers`).
        """
        if self._metrics is None:
            self._metrics = open_metrics(
                self._job.config, self.plan, self._job.ranks, without_folder=True
            )
        assert self._metrics is not None
        if self._job.ranks.rank == 0:
            self._metrics.trackers.append(tracker())

    def close(self) -> None:
        """Waits for checkpoints under way and writes the last metrics line, or the timeline of an
        emulated run.
        """
        self._checkpoints.wait()
        self._job.platform.close()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._settle()

    # ---- inside

    def _leaves_out(self, consequence: str) -> bool:
        """Whether another model stands for the user's, which then has no weights to read or save;
        warns once.
        """
        missing = self._job.platform.missing_model
        if missing is not None:
            self._warn_once(f"{missing}: {consequence}")
        return missing is not None

    def _warn_once(self, warning: str) -> None:
        """Logs a warning for the first time that it is given, on rank 0."""
        if self._job.ranks.rank == 0 and warning not in self._warnings:
            self._warnings.add(warning)
            logger.warning(warning)

    def _held_parameters(self, lowered: Lowered) -> list[Held]:
        """This rank's trainable parameters, in the order in which backward reaches them. Another
        shape of the batch may train others.
        """
        rank = self._job.ranks.rank
        view = self.plan.of_rank(rank)
        own = set(view.stages_of_rank(rank))
        shards = self._job.state_shards
        updated = self._job.updated
        trainable = {name for name, _ in self._trainable()}
        names = [
            name for name, stages in view.holders.items() if name in trainable and own & set(stages)
        ]
        held = []
        for name in by_backward_order(names, lowered.first_use):
            tensor = updated[name]
            assert isinstance(tensor, torch.nn.Parameter)
            stages = tuple(sorted(own & set(view.holders[name])))
            shard = shards.on(name, rank)
            pieces = [
                HeldPiece(piece.ranks, piece.inside(shard))
                for piece in shards.pieces(name)
                if rank in piece.ranks and piece.cells is not None
            ]
            holders = {each for piece in pieces for each in piece.ranks} or shard.ranks
            held.append(Held(name, tensor, tuple(sorted(holders)), stages, tuple(pieces)))
        return held

    def _whole_updates(self, optimizer: OptimizerFactory | None) -> WholeUpdates | None:
        """What brings parameters together that the optimizer wants whole; None where it does not,
        or nothing is cut.
        """
        if not self.plan.owners or optimizer is None:
            return None
        job = self._job
        states = job.prepared.captured.state
        shapes = {name: tuple(states[name].shape) for name in self.plan.owners}
        return WholeUpdates(self.plan.owners, job.weights, shapes, job.shards, job.ranks)

    def _with_whole(
        self, trainable: list[tuple[str, torch.nn.Parameter]], whole: WholeUpdates
    ) -> list[tuple[str, torch.nn.Parameter]]:
        """What the optimizer gets: whole parameters that this rank owns in place of parts."""
        order = {name: place for place, name in enumerate(self._job.names)}
        kept = [pair for pair in trainable if pair[0] not in self.plan.owners]
        return sorted([*kept, *whole.parameters.items()], key=lambda pair: order[pair[0]])

    def _block_gradients(self) -> BlockGradients | None:
        """What sums the gradients of parameters that are cut; None where there are none."""
        zero = self._job.zero
        if zero is None or not zero.blocks:
            return None
        view = self.plan.of_rank(self._job.ranks.rank)
        own = set(view.stages_of_rank(self._job.ranks.rank))
        stages_of = {name: own & set(stages) for name, stages in view.holders.items()}
        return BlockGradients(zero, stages_of, self._shapes.first.first_use)

    def _global_order(self) -> dict[str, int] | None:
        """The order in which all ranks all-reduce gradients: parameters that backward reaches first
        come first. None where replicas are alike, or where messages are told apart by tags.
        """
        if self.plan.is_uniform or not self._job.ranks.needs_channels:
            return None
        names = by_backward_order(list(self.plan.holders), self._shapes.first.first_use)
        return {name: place for place, name in enumerate(names)}

    def _trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) pairs for the optimizer, in the model's own order."""
        order = {name: place for place, name in enumerate(self._job.names)}
        found = [
            (n, t)
            for n, t in self._job.updated.items()
            if isinstance(t, torch.nn.Parameter) and t.requires_grad
        ]
        return sorted(found, key=lambda pair: order[pair[0]])
