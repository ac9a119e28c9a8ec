"""What a rank runs on when it is given a batch: the graph for its shape, and the rows that are its
own. Ranks compare what they were given.

Two kinds of batch: a whole mini-batch, the same on every rank, and one of `engine.loader`, of which
a rank holds only the samples that its stages read (`runtime/data.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from whale.capture.batch import BatchLayout, check_agrees, digest, read_batch
from whale.lowering.inputs import CopiedBatch, own_rows
from whale.lowering.program import Lowered
from whale.runtime.data import ShardedBatch
from whale.runtime.executor import StepInput
from whale.runtime.job import Job
from whale.runtime.shapes import LoweredGraphs, largest_micro_batches

CHECKED_STEPS = 3  # the first steps, in which ranks compare their batches ...
CHECK_EVERY = 100  # ... and then every so many


@dataclass(frozen=True)
class AheadBatch:
    """A batch for `engine.step` whose copy to the device has begun."""

    batch: Any
    lowered: Lowered
    copied: CopiedBatch
    num_rebalanced: int
    """how often samples had been shared again when it was copied"""


class Batches:
    """Reads the batches of one engine, in training and in evaluation."""

    def __init__(self, job: Job, shapes: LoweredGraphs) -> None:
        self._job = job
        self._shapes = shapes

    def ahead(self, batch: Any, num_rebalanced: int) -> Any:
        """The batch with its copy to the device begun. As it is where there is nothing to copy, or
        where something about it is new: `engine.step` then does it on all ranks alike.
        """
        if not self._job.ranks.device.is_accelerator:
            return batch
        is_sharded = isinstance(batch, ShardedBatch)
        if is_sharded and batch.batch is None:
            return batch
        try:
            layout, tensors = read_batch(batch.batch if is_sharded else batch, self._job.sample)
        except ValueError:
            return batch  # refused by the step
        lowered = self._shapes.known_training(layout)
        if lowered is None:
            return batch
        if is_sharded:
            copied = lowered.inputs.copy_rows(tensors)
        else:
            samples = self.own_samples(lowered, layout.batch_size)
            copied = lowered.inputs.copy(tensors, samples)
        return AheadBatch(batch, lowered, copied, num_rebalanced)

    def all_ahead(self, batches: Iterable[Any], num_rebalanced: Callable[[], int]) -> Iterator[Any]:
        """Yields the batches; on an accelerator, the copy of each begins before the one before
        it is given out.
        """
        if not self._job.ranks.device.is_accelerator:
            yield from batches
            return
        previous: Any = None
        for batch in batches:
            following = self.ahead(batch, num_rebalanced())
            if previous is not None:
                yield previous
            previous = following
        if previous is not None:
            yield previous

    def samples_to_read(self, batch_size: int) -> list[tuple[int, int]]:
        """Sample intervals of a mini-batch that this rank reads, one for each micro-batch; none
        when its stages read no input.
        """
        lowered = self._shapes.first
        num_inputs = len(self._job.sample.tensors)
        places: set[int] = set()
        for chunk in lowered.chunks.values():
            places.update(chunk.inputs)
        # places beyond are those of whole-mini-batch values, which every rank computes
        if not any(place < num_inputs for place in places):
            return []
        return self.own_samples(lowered, batch_size)

    def for_training(
        self,
        batch: Any,
        step: int,
        loss_scale: float | Tensor,
        num_rebalanced: int,
        outputs: bool = False,
    ) -> tuple[Lowered, StepInput, int]:
        """The graph for this batch, what this rank runs it on, and the samples of the mini-batch.

        `num_rebalanced`: how often samples were shared again so far. `outputs`: the graph gives the
        outputs of the model as well.
        """
        ahead = None
        if isinstance(batch, AheadBatch):
            ahead = batch if batch.num_rebalanced == num_rebalanced else None
            batch = batch.batch
        if isinstance(batch, ShardedBatch):
            if outputs:
                raise ValueError(
                    "engine.step(outputs=True) takes whole batches; those of engine.loader hold "
                    "only this rank's samples: use a DataLoader"
                )
            self._compare(batch.digest, step)
            order = batch.digest.hex()
            self._note_training(f"{batch.batch_size} samples of engine.loader, order {order}")
            self._check_sharded(batch, num_rebalanced)
            lowered = self._shapes.of_loader()
            if ahead is not None and ahead.lowered is not lowered:
                ahead = None
            samples = self.own_samples(lowered, batch.batch_size)
            copied = ahead.copied if ahead is not None else self._copy_rows(lowered, batch)
            everything = lowered.inputs.placeholders_of_rows(copied, samples, batch.batch_size)
            given = StepInput(everything, step, own_rows(samples), loss_scale)
            return lowered, given, batch.batch_size
        layout, tensors = read_batch(batch, self._job.sample)
        # before any other check: what only one rank would refuse, all refuse
        self._compare(digest(tensors, layout.paths) if self._compares(step) else b"", step)
        self._note_training(layout)
        check_agrees(layout, self._job.sample)
        lowered = self._shapes.training(layout, tensors, outputs)
        if ahead is not None and ahead.lowered is not lowered:
            ahead = None
        samples = self.own_samples(lowered, layout.batch_size)
        copied = ahead.copied if ahead is not None else lowered.inputs.copy(tensors, samples)
        given = StepInput(
            lowered.inputs.placeholders(copied, layout.batch_size),
            step,
            own_rows(samples) if copied.has_own_rows else samples,
            loss_scale,
        )
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
        num_micro_batch = largest_micro_batches(lowered.plan, batch_size)
        executor = self._shapes.executor(lowered, batch_size, num_micro_batch, is_training=True)
        return list(executor.program.samples)

    def _check_sharded(self, batch: ShardedBatch, num_rebalanced: int) -> None:
        if batch.num_rebalanced != num_rebalanced:
            raise ValueError(
                "this batch of engine.loader was loaded before the samples were shared again: "
                "take batches from one loader at a time, "
                'or set "adapt" to "suggest"'
            )

    def _copy_rows(self, lowered: Lowered, batch: ShardedBatch) -> CopiedBatch:
        """Begins to copy the rows of this rank's own samples."""
        if batch.batch is None:
            return lowered.inputs.copy_rows([])
        layout, tensors = read_batch(batch.batch)
        if layout.key != self._job.sample.key:
            raise ValueError(
                "a batch of engine.loader has another shape than the sample batch: pad all "
                "batches to one shape, or pass whole batches"
            )
        return lowered.inputs.copy_rows(tensors)

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

    def _note_training(self, shapes: Any) -> None:
        """Passes on also which numbers in Python are others than at the start: a rank where others
        are would capture the model alone.
        """
        names = self._shapes.names_of_other_numbers()
        self._note(f"{shapes}, with another {', '.join(names)}" if names else shapes)

    def _note(self, shapes: Any) -> None:
        """Passes the shapes to the watch, which compares them in every step, also where values are
        not compared: ranks with different shapes would hang.
        """
        watch = self._job.ranks.watch
        if watch is not None and self._job.config.check_batches:
            watch.note_batch(shapes)
