"""Evaluation of one batch on all ranks: the forward in eval mode, nothing is changed."""

from __future__ import annotations

from typing import Any

import torch

from whale.lowering.inputs import own_rows
from whale.runtime.accumulation import DRAW_SHIFT
from whale.runtime.batches import Batches
from whale.runtime.executor import StepInput
from whale.runtime.job import Job
from whale.runtime.result import EvaluationResult, Totals
from whale.runtime.shapes import LoweredGraphs, evaluation_micro_batches, widest
from whale.runtime.state import gather_outputs


class Evaluation:
    """Evaluates batches of an engine. All ranks call it."""

    def __init__(self, job: Job, shapes: LoweredGraphs, batches: Batches) -> None:
        self._job = job
        self._shapes = shapes
        self._batches = batches
        self._step = -1
        self._num_evaluated = 0  # batches since that step

    def run(self, batch: Any, step: int, outputs: bool) -> EvaluationResult:
        """Loss (when the batch has labels) and, where they are asked for, the outputs on rank 0.
        `step`: the number of the training step that follows.
        """
        ranks = self._job.ranks
        ranks.device.select()
        layout, tensors = self._batches.for_evaluation(batch, step)
        self._refuse_small(layout.batch_size)
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
        outcome = executor.run(StepInput(everything, self._draw(step), rows), None)
        totals = None
        if prepared.num_terms:
            totals = Totals(torch.stack([outcome.loss]), ranks, self._shapes.transport)
        if not outputs:
            return EvaluationResult(totals, None)
        for warning in prepared.warnings:
            self._job.warn_once(f"engine.evaluate: {warning}")
        gathered = gather_outputs(lowered, outcome, executor.program, totals, ranks)
        return EvaluationResult(totals, gathered)

    def _draw(self, step: int) -> int:
        """What random numbers are drawn from (a model may draw in evaluation, too): others for
        every batch that is evaluated before a step, and none that a training step gets.
        """
        if step != self._step:
            self._step = step
            self._num_evaluated = 0
        draw = step + (self._num_evaluated << DRAW_SHIFT)
        self._num_evaluated += 1
        return -1 - draw

    def _refuse_small(self, batch_size: int) -> None:
        least = widest(self._job.plan)
        if batch_size < least:
            raise ValueError(
                f"engine.evaluate: a batch of {batch_size} samples cannot be cut over {least} "
                f"devices, each needs one. Try: at least {least} samples at a time: join this "
                "batch with the one before, or repeat its last sample and leave that output out"
            )
