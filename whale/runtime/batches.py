"""What a rank runs on when it is given a batch: the graph for its shape, and the rows that are its
own. Ranks compare what they were given.

Two kinds of batch: a whole mini-batch, the same on every rank, and one of `engine.loader`, of which
a rank holds only the samples that its stages read (`runtime/data.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from whale.capture.batch import BatchLayout, check_agrees, digest, read_batch
from whale.lowering.program import Lowered
from whale.runtime.data import ShardedBatch
from whale.runtime.executor import StepInput
from whale.runtime.shapes import Job, Shapes

CHECKED_STEPS = 3  # the first steps, in which ranks compare their batches ...
CHECK_EVERY = 100  # ... and then every so many


class Batches:
    """Reads the batches of one engine, in training and in evaluation."""

    def __init__(self, job: Job, shapes: Shapes) -> None:
        self._job = job
        self._shapes = shapes

    def for_training(
        self, batch: Any, step: int, loss_scale: float, num_rebalanced: int
    ) -> tuple[Lowered, StepInput, int]:
        """The graph for this batch, what this rank runs it on, and the samples of the mini-batch.

        `num_rebalanced`: how often samples were shared again so far.
        """
        if isinstance(batch, ShardedBatch):
            lowered = self._shapes.first
            self._compare(batch.digest, step)
            self._note(f"{batch.batch_size} samples of engine.loader, order {batch.digest.hex()}")
            given = self._sharded_input(lowered, batch, step, loss_scale, num_rebalanced)
            return lowered, given, batch.batch_size
        layout, tensors = read_batch(batch, self._job.sample)
        # before any other check: what only one rank would refuse, all refuse
        self._compare(digest(tensors, layout.paths) if self._compares(step) else b"", step)
        self._note(layout)
        check_agrees(layout, self._job.sample)
        lowered = self._shapes.training(layout, tensors)
        samples = self.own_samples(lowered, layout.batch_size)
        given = StepInput(lowered.all_tensors(tensors), step, samples, loss_scale)
        return lowered, given, layout.batch_size

    def for_evaluation(self, batch: Any, step: int) -> tuple[BatchLayout, list[Tensor]]:
        """Layout and tensors of a whole batch."""
        if isinstance(batch, ShardedBatch):
            raise ValueError(
                "engine.evaluate takes whole batches; those of engine.loader hold only this "
                "rank's samples: use a DataLoader"
            )
        layout, tensors = read_batch(batch, self._job.sample)
        self._compare(digest(tensors) if self._compares(step) else b"", step)
        self._note(layout)
        return layout, tensors

    def own_samples(self, lowered: Lowered, batch_size: int) -> list[tuple[int, int]]:
        """Sample intervals of a mini-batch that this rank trains on, one for each micro-batch."""
        executor = self._shapes.executor(
            lowered, batch_size, self._job.plan.num_micro_batch, is_training=True
        )
        return list(executor.program.samples)

    def _sharded_input(
        self,
        lowered: Lowered,
        batch: ShardedBatch,
        step: int,
        loss_scale: float,
        num_rebalanced: int,
    ) -> StepInput:
        """Rows of this rank's own samples, micro-batch after micro-batch."""
        if batch.num_rebalanced != num_rebalanced:
            raise ValueError(
                "this batch of engine.loader was loaded before the samples were shared again: "
                "take batches from one loader at a time, "
                'or set "adapt" to "suggest"'
            )
        tensors: list[Tensor] = []
        intervals = self.own_samples(lowered, batch.batch_size)
        if batch.batch is not None:
            layout, tensors = read_batch(batch.batch)
            if layout.key != self._job.sample.key:
                raise ValueError(
                    "a batch of engine.loader has another shape than the sample batch: pad all "
                    "batches to one shape, or pass whole batches"
                )
        rows = []
        start = 0
        for first, last in intervals:
            rows.append((start, start + last - first))
            start += last - first
        everything = lowered.all_tensors_from_shards(tensors, intervals, batch.batch_size)
        return StepInput(everything, step, rows, loss_scale)

    # ---- all ranks must have the same batch

    def _compares(self, step: int) -> bool:
        due = step < CHECKED_STEPS or step % CHECK_EVERY == 0
        return due and self._job.config.check_batches and self._job.ranks.is_distributed

    def _compare(self, batch_digest: bytes, step: int) -> None:
        """Raises on all ranks where one was given another batch. A hash of all values takes a
        while: callers make it only in steps that compare.
        """
        if self._compares(step):
            self._job.ranks.agree(
                f"the batch of step {step}",
                batch_digest.hex(),
                "Every rank must be given the same whole mini-batch: use the same seed and "
                "sampler everywhere, and no DistributedSampler",
            )

    def _note(self, shapes: Any) -> None:
        """Passes the shapes to the watch, which compares them in every step, also where values are
        not compared: ranks with different shapes would hang.
        """
        watch = self._job.ranks.watch
        if watch is not None and self._job.config.check_batches:
            watch.note_batch(shapes)
