"""The engine: what a user calls to train, evaluate, save and load. Steps run in `training.py`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from whale.checkpoint import Handle, nothing_to_save
from whale.distributed.calls import Meets
from whale.distributed.ranks import Ranks
from whale.distributed.watch import reporting
from whale.plans.plan import Plan
from whale.runtime.accumulation import PassResult
from whale.runtime.batches import Batches
from whale.runtime.checkpoints import Checkpoints
from whale.runtime.data import Sampler, ShardedLoader
from whale.runtime.evaluation import Evaluation
from whale.runtime.executor import Executor
from whale.runtime.job import Job
from whale.runtime.local_model import gathered, give_back, local_model, save_pretrained
from whale.runtime.metrics import write_trace
from whale.runtime.other_names import TRAINS, instead
from whale.runtime.result import EvaluationResult, StepResult, Totals
from whale.runtime.shapes import LoweredGraphs, widest
from whale.runtime.spill import remove_leftovers
from whale.runtime.state import gather_gradients, gather_state
from whale.runtime.trackers import TrackerFactory
from whale.runtime.training import Training
from whale.runtime.update import OptimizerFactory, SchedulerFactory


class Engine:
    """Trains and evaluates the model as the plan says. Made by `wh.parallelize`."""

    def __init__(
        self, job: Job, optimizer: OptimizerFactory | None, scheduler: SchedulerFactory | None
    ) -> None:
        self._job = job
        if job.config.folder is not None:
            remove_leftovers(job.config.folder, job.ranks.rank, job.ranks.num_ranks)
        self._shapes = LoweredGraphs(job)
        self._batches = Batches(job, self._shapes)
        self._training = Training(job, self._shapes, self._batches, optimizer, scheduler)
        self._evaluation = Evaluation(job, self._shapes, self._batches)
        self._checkpoints = Checkpoints(job, self._training.updater)
        self.is_in_step = False
        """whether this rank is inside of a training step: backwards are the engine's own"""
        self.is_closed = False

    if not TYPE_CHECKING:  # a misspelt name is still one for mypy

        def __getattr__(self, name: str) -> Any:
            """Says what an engine has for a method of a model or of another framework's engine."""
            if hasattr(type(self), name):  # a property failed: its own error again
                return object.__getattribute__(self, name)
            raise AttributeError(instead(name), name=name, obj=self)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """An engine is no model."""
        raise TypeError(f"a Whale engine is not called like a model. Try: {TRAINS}")

    @property
    def plan(self) -> Plan:
        """The plan that is followed now: with `"adapt": "on"`, and for longer batches than planned,
        another one than at the start.
        """
        return self._job.plan

    @property
    def step_count(self) -> int:
        """Training steps that were done, those before the loaded checkpoint included."""
        return self._training.step_count

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """Largest number of micro-batches whose activations each stage of this rank held in the
        last step.
        """
        outcome = self._training.last_outcome
        return outcome.peak_in_flight if outcome is not None else {}

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer; None when it holds nothing that is trained."""
        self._training.settle()
        self._training.updater.finish()
        return self._training.updater.optimizer

    @property
    def scheduler(self) -> Any:
        self._training.settle()
        return self._training.updater.scheduler

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
        the next batch continues from, say. These are copied to all ranks in every step.
        """
        with self._in_step("engine.step"), self._training.at_failed_step():
            return self._training.step(batch, outputs)

    # ---- a step in parts

    def forward_backward(self, batch: Any) -> PassResult:
        """Forward, backward and all-reduce of gradients of one batch, without an update. The
        gradient counts when `accumulate` is called, until then it is only the latest one.
        """
        with self._in_step("engine.forward_backward"):
            return self._training.parts.forward_backward(batch)

    def accumulate(self, factor: float = 1.0) -> None:
        """Adds the gradient of the latest `forward_backward`, times `factor`, to those that the
        next `update` uses.
        """
        self._training.parts.accumulate(factor)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scales the gradients that the next `update` uses down to this norm where it is larger;
        gives their norm over the whole model before. All ranks must call it.
        """
        self._job.ranks.note_call("engine.clip_grad_norm", Meets.NEVER)
        return self._training.parts.clip(max_norm)

    def update(self) -> StepResult:
        """Updates the weights by the gradients that were accumulated, which are gone then. All
        ranks must call it.
        """
        with self._in_step("engine.update"), self._training.at_failed_step():
            return self._training.parts.update()

    def zero_gradients(self) -> None:
        """Forgets all gradients that were accumulated since the last update. That of the latest
        `forward_backward` stays when it was not accumulated yet.
        """
        self._training.parts.zero()

    def take_new_shares(self) -> None:
        """Follows the plan that `"adapt": "on"` has made, if there is one: between steps, on all
        ranks alike. A loader calls it, too.
        """
        self._training.take_new_shares()

    @property
    def num_rebalanced(self) -> int:
        """How often the samples were shared again since the start."""
        return self._training.num_rebalanced

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
        """Yields the batches for `engine.step`. On an accelerator each is copied there while the
        step before it runs: only the samples of this rank, through pinned memory.

        Batches of `engine.loader` are copied so by themselves.
        """
        if isinstance(batches, ShardedLoader):
            yield from batches
            return
        if hasattr(batches, "state_dict"):
            raise ValueError(
                "engine.prefetch takes a batch before the one before it is trained on, so that the "
                f"position that {type(batches).__name__} counts would be one batch too far in a "
                "checkpoint. Try: engine.loader, or batches without engine.prefetch"
            )
        yield from self.copied_ahead(batches)

    def copied_ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches; on an accelerator, the copy of each begins before the one before
        it is given out. A CPU trains on them where they are.
        """
        return self._batches.all_ahead(batches, lambda: self.num_rebalanced)

    def own_samples(self, batch_size: int) -> list[tuple[int, int]]:
        """Sample intervals of a mini-batch that this rank reads, one for each micro-batch; none
        when its stages read no input.
        """
        return self._batches.samples_to_read(batch_size)

    # ---- evaluation

    def evaluate(self, batch: Any, outputs: bool = False) -> EvaluationResult:
        """Loss (when the batch has labels) and, on rank 0, the outputs in sample order; in eval
        mode, nothing is changed.

        A sum or mean over samples is that of the whole batch; what is no sum over its parts (a
        maximum) is None, with a warning. All ranks must call it.
        """
        self._job.ranks.note_call("engine.evaluate", Meets.AFTER_ANOTHER)
        with reporting(self._job.ranks.watch, f"the evaluation before step {self.step_count}"):
            if self._leaves_out("engine.evaluate gives no outputs and nan for the loss"):
                return EvaluationResult(Totals(torch.tensor([math.nan]), None), None)
            self._training.settle()
            self._training.finish_ahead()
            return self._evaluation.run(batch, self.step_count, outputs)

    # ---- state

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the local model's `state_dict()`, on the CPU of rank 0; empty on the
        other ranks. All ranks must call it.
        """
        self._job.ranks.note_call("engine.full_state_dict")
        return self._full_state_dict()

    def _full_state_dict(self) -> dict[str, Tensor]:
        if self._leaves_out("engine.full_state_dict is empty"):
            return {}
        self._training.settle()
        self._training.finish_ahead()
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
        self._job.ranks.note_call("engine.save")
        if self._leaves_out("engine.save writes nothing"):
            return nothing_to_save(self._checkpoint_folder(folder))
        self._training.settle()
        self._training.finish_ahead()
        return self._checkpoints.save(self._checkpoint_folder(folder), self.step_count, data)

    def load(self, folder: str | Path | None = None, data: Any = None) -> int | None:
        """Loads the latest good checkpoint of `folder` (or this very checkpoint), saved under any
        plan and number of ranks.

        Gives its step, or None when there is none to load. `data`: the loader to set to the saved
        position. All ranks must call it.
        """
        self._job.ranks.note_call("engine.load")
        if self._leaves_out("engine.load finds nothing"):
            return None
        step = self._checkpoints.load(self._checkpoint_folder(folder), data)
        if step is not None:
            self._training.loaded(step)
        return step

    def export(self, path: str | Path) -> None:
        """Writes the whole model as one safetensors file, for `safetensors.torch.load_model(model,
        path, strict=True)` or Hugging Face.

        All ranks must call it.
        """
        self._job.ranks.note_call("engine.export")
        if not self._leaves_out("engine.export writes nothing"):
            self._checkpoints.export(Path(path), self._full_state_dict())

    def save_pretrained(self, folder: str | Path, tokenizer: Any = None, **options: Any) -> None:
        """Writes the model for `from_pretrained`: config, safetensors in shards with their index,
        and the tokenizer if there is one; of a PEFT model the adapter files only.

        `options` go to the model's own `save_pretrained` (`max_shard_size`, say). All ranks must
        call it.
        """
        self._job.ranks.note_call("engine.save_pretrained")
        if not self._leaves_out("engine.save_pretrained writes nothing"):
            self._training.finish_ahead()
            save_pretrained(self._job, Path(folder), tokenizer, options)

    def module(self, everywhere: bool = False) -> torch.nn.Module | None:
        """A real local copy of the model with the weights of now, on the CPU of rank 0 (None
        elsewhere) or with `everywhere` of every rank: for `generate`, say. All ranks must call it.
        """
        self._job.ranks.note_call("engine.module")
        if self._leaves_out("engine.module gives None"):
            return None
        self._training.finish_ahead()
        return local_model(self._job, everywhere)

    def gathered(self) -> contextlib.AbstractContextManager[torch.nn.Module]:
        """Inside `with engine.gathered() as model:` the model that was parallelized has copies of
        all weights on every rank and may be used as before. All ranks must enter it.
        """
        self._job.ranks.note_call("engine.gathered")
        self._training.finish_ahead()
        return gathered(self._job)

    def give_back(self) -> None:
        """Gives the model that was parallelized all its weights back, on every rank, and closes the
        engine. All ranks must call it.
        """
        self._job.ranks.note_call("engine.give_back")
        self._training.finish_ahead()
        give_back(self._job)
        self.close()

    def _checkpoint_folder(self, folder: str | Path | None) -> Path:
        if folder is None and self._job.config.folder is None:
            raise ValueError(
                'give engine.save and engine.load a folder, or set "run_folder" in the config'
            )
        if folder is not None:
            return Path(folder)
        return Path(str(self._job.config.folder)) / "checkpoints"

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients of the last step, by parameter name; of a parameter that is cut, of
        the part that is here.
        """
        return {
            held.name: held.tensor.grad
            for held in self._training.held
            if held.tensor.grad is not None
        }

    def full_gradients(self) -> dict[str, Tensor]:
        """All gradients of the last step, whole, on the CPU of rank 0; empty on the other ranks.
        All ranks must call it.
        """
        self._job.ranks.note_call("engine.full_gradients")
        return gather_gradients(
            self._job.model,
            self.gradients(),
            self._training.trained,
            self._job.state_shards,
            self._job.ranks,
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters that the loss trains."""
        self._training.updater.finish()
        for held in self._training.held:
            if held.name in self._shapes.first.trained:
                yield held.name, held.tensor

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
        self._job.ranks.note_call("engine.trace")
        write_trace(path, self._training.read_last_outcome(), self._job.ranks)

    def track(self, tracker: TrackerFactory) -> None:
        """Gives the figures of every step from now on to a tracker, which is made by this function
        on rank 0: `engine.track(lambda: Wandb(project="mine"))` (`whale.integrations.trackers`).
        """
        self._training.track(tracker)

    def close(self) -> None:
        """Waits for checkpoints under way and writes the last metrics line, or the timeline of an
        emulated run.
        """
        self.is_closed = True
        self._checkpoints.wait()
        try:
            self._training.updater.close()
        finally:  # an update that failed leaves no files behind
            self._job.remove_spilled()
            self._job.platform.close()
            self._training.close()

    # ---- inside

    def _leaves_out(self, consequence: str) -> bool:
        """Whether another model stands for the user's, which then has no weights to read or save;
        warns once.
        """
        missing = self._job.platform.missing_model
        if missing is not None:
            self._job.warn_once(f"{missing}: {consequence}")
        return missing is not None

    @contextlib.contextmanager
    def _in_step(self, name: str) -> Iterator[None]:
        """Errors of what runs inside are reported with the number of the step. `name`: of the
        method that all ranks call.
        """
        self._job.ranks.note_call(name, Meets.NEVER)
        self.is_in_step = True
        try:
            with reporting(self._job.ranks.watch, f"step {self.step_count}"):
                yield
        finally:
            self.is_in_step = False
