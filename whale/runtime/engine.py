"""The engine: one rank's part of a planned training job. All run-time state lives here."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whale import scheduling
from whale.capture.batch import BatchLayout, check_agrees, digest, read_batch
from whale.capture.capture import capture_evaluation, capture_training
from whale.capture.export import Loss, Task
from whale.capture.prepare import Prepared, prepare
from whale.config import Config
from whale.lowering.program import Lowered, lower
from whale.planning.plan import Plan
from whale.planning.planner import apply_plan, fingerprint, follow_plan
from whale.runtime.executor import Executor, StepOutcome
from whale.runtime.gradients import GradientSynchroniser, Held, by_backward_order, scale_gradients, squared_norm
from whale.runtime.ranks import Ranks
from whale.runtime.result import EvaluationResult, StepResult, Timing, Totals
from whale.runtime.state import gather_outputs, gather_state
from whale.runtime.transport import Transport

logger = logging.getLogger("whale")

CHECKED_STEPS = 3  # the first steps, in which ranks compare their batches ...
CHECK_EVERY = 100  # ... and then every so many

OptimizerFactory = Callable[[Iterator[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


@dataclass
class Job:
    """What an engine is made from: the same on every rank, but for `weights`."""

    model: torch.nn.Module
    loss: Loss | None
    config: Config
    plan: Plan
    sample: BatchLayout
    prepared: Prepared
    weights: dict[str, Tensor]
    """this rank's parameters and buffers, by first name"""
    ranks: Ranks

    @property
    def task(self) -> Task:
        return Task(self.loss, torch.device(self.ranks.device).type, self.config.autocast)


class Engine:
    """Trains and evaluates the model as the plan says. Made by `wh.parallelize`."""

    def __init__(self, job: Job, optimizer: OptimizerFactory | None, scheduler: SchedulerFactory | None) -> None:
        self._job = job
        self.plan = job.plan
        self.step_count = 0
        self._transport = Transport(job.ranks, _pairs(job.plan)) if job.ranks.is_distributed else None
        self._training: OrderedDict[Any, Lowered] = OrderedDict()
        self._evaluation: OrderedDict[Any, tuple[Prepared, Lowered]] = OrderedDict()
        self._executors: dict[Any, Executor] = {}
        for stage in job.plan.stages:  # every rank makes every group, in the same order
            ranks = job.plan.ranks_of_stage(stage.index)
            if len(ranks) > 1:
                job.ranks.group(ranks)
        lowered = lower(job.plan, apply_plan(job.plan, job.prepared.captured, job.prepared.kinds), job.prepared, job.weights, job.ranks)
        self._training[job.sample.key] = lowered
        self._held = self._held_parameters(lowered)
        for ranks in sorted({holders for holders in self._all_holders().values() if len(holders) > 1}):
            job.ranks.group(ranks)
        self._gradients = GradientSynchroniser(self._held, job.ranks, job.config.bucket_bytes)
        self.optimizer = self._make_optimizer(optimizer)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None and self.optimizer is not None else None
        self.peak_in_flight: dict[int, int] = {}

    # ---- training

    def step(self, batch: Any) -> StepResult:
        """Forward, backward, gradient sums and update for one whole mini-batch, which every rank is given."""
        if self.optimizer is None and self._held:
            raise ValueError(
                "engine.step needs an optimizer: pass optimizer=lambda params: torch.optim.AdamW(params, ...) to wh.parallelize"
            )
        start = time.perf_counter()
        layout, tensors = self._read(batch)
        lowered = self._lowered_for(layout, tensors)
        executor = self._executor(lowered, layout.batch_size, self.plan.num_micro_batch, training=True)
        for parameter in self._held:
            parameter.tensor.grad = None
        self._gradients.begin()
        waited_before = self._transport.waited_s if self._transport else 0.0
        outcome = executor.run(lowered.all_tensors(tensors), self.step_count, self._gradients)
        bubble_s = (self._transport.waited_s if self._transport else 0.0) - waited_before
        waiting = time.perf_counter()
        self._gradients.finish()
        communication_s = time.perf_counter() - waiting
        totals = self._totals(outcome)
        update_s = self._update(totals)
        self.step_count += 1
        self.peak_in_flight = outcome.peak_in_flight
        timing = Timing(time.perf_counter() - start, outcome.compute_s + update_s, communication_s, bubble_s)
        return StepResult(totals, timing, self.learning_rate)

    def _update(self, totals: Totals) -> float:
        """Clips when asked to, then steps the optimizer and the LR scheduler."""
        limit = self._job.config.clip_grad_norm
        if limit is not None:
            norm = totals.values()[1] ** 0.5
            scale_gradients(self._held, min(1.0, limit / (norm + CLIP_EPSILON)))
        start = time.perf_counter()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return time.perf_counter() - start

    def _totals(self, outcome: StepOutcome) -> Totals:
        norm = squared_norm(self._held, self._job.ranks.rank)
        return Totals(torch.stack([outcome.loss, norm.to(outcome.loss)]), self._job.ranks.is_distributed)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None and self.optimizer.param_groups else 0.0

    # ---- evaluation

    def evaluate(self, batch: Any, outputs: bool = False) -> EvaluationResult:
        """Loss (when the batch has labels) and, on rank 0, the outputs in sample order; in eval mode, nothing is changed."""
        layout, tensors = read_batch(batch)
        self._compare_batches(tensors)
        if layout.key not in self._evaluation:
            _make_room(self._evaluation, self._job.config.max_captures)
            job = self._job
            capture = capture_evaluation(job.model, layout, tensors, job.task)
            prepared = prepare(capture, num_micro_batch=1, loss_per_micro_batch=job.config.loss_per_micro_batch)
            if prepared.only_whole is not None and max(self.plan.num_micro_batch, _widest(self.plan)) > 1:
                raise ValueError(prepared.only_whole.message)
            assignment = follow_plan(job.plan, prepared.captured, prepared.kinds)
            self._evaluation[layout.key] = (prepared, lower(job.plan, assignment, prepared, job.weights, job.ranks))
        self._evaluation.move_to_end(layout.key)
        prepared, lowered = self._evaluation[layout.key]
        num_micro_batch = 1 if prepared.loss.reductions else _largest_micro_batches(self.plan, layout.batch_size)
        executor = self._executor(lowered, layout.batch_size, num_micro_batch, training=False)
        outcome = executor.run(lowered.all_tensors(tensors), self.step_count, None)
        totals = Totals(torch.stack([outcome.loss]), self._job.ranks.is_distributed) if prepared.num_terms else None
        gathered = gather_outputs(lowered, prepared, outcome, executor.program, totals, self._job.ranks) if outputs else None
        return EvaluationResult(totals, gathered)

    # ---- state

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the local model's `state_dict()`, on the CPU of rank 0; empty on the other ranks. All ranks must call it."""
        return gather_state(self._job.model, self._job.weights, self.plan, self._job.ranks)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients of the last step, by parameter name."""
        return {held.name: held.tensor.grad for held in self._held if held.tensor.grad is not None}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's trainable parameters."""
        return iter([(held.name, held.tensor) for held in self._held])

    # ---- inside

    def _read(self, batch: Any) -> tuple[BatchLayout, list[Tensor]]:
        layout, tensors = read_batch(batch)
        check_agrees(layout, self._job.sample)
        self._compare_batches(tensors)
        return layout, tensors

    def _compare_batches(self, tensors: list[Tensor]) -> None:
        checked = self.step_count < CHECKED_STEPS or self.step_count % CHECK_EVERY == 0
        if checked and self._job.config.check_batches and self._job.ranks.is_distributed:
            self._job.ranks.agree(
                f"the batch of step {self.step_count}",
                digest(tensors).hex(),
                "Every rank must be given the same whole mini-batch: use the same seed and sampler everywhere, and no DistributedSampler",
            )

    def _lowered_for(self, layout: BatchLayout, tensors: list[Tensor]) -> Lowered:
        """The lowered graph for this shape; a new shape is captured once and kept."""
        if layout.key not in self._training:
            job = self._job
            logger.info("capturing the model again: %s", _what_changed(layout, job.sample))
            _make_room(self._training, job.config.max_captures)
            capture = capture_training(job.model, layout, tensors, job.task)
            prepared = prepare(capture, job.config.num_micro_batch, job.config.loss_per_micro_batch)
            job.ranks.agree("the captured graph", fingerprint(prepared.captured), "All ranks must run the same script on the same versions")
            assignment = follow_plan(job.plan, prepared.captured, prepared.kinds)
            self._training[layout.key] = lower(job.plan, assignment, prepared, job.weights, job.ranks)
        self._training.move_to_end(layout.key)
        return self._training[layout.key]

    def _executor(self, lowered: Lowered, batch_size: int, num_micro_batch: int, training: bool) -> Executor:
        key = (id(lowered), batch_size, num_micro_batch)
        if key not in self._executors:
            is_planned = training and num_micro_batch == self.plan.num_micro_batch and lowered.edges_are(self.plan)
            schedule = scheduling.Schedule.from_json(self.plan.schedule) if is_planned else lowered.schedule(num_micro_batch, training)
            program = lowered.program(schedule, batch_size, self._job.config.seed)
            self._executors[key] = Executor(program, self._transport, self._job.config.num_posted_receives)
        return self._executors[key]

    def _all_holders(self) -> dict[str, tuple[int, ...]]:
        """Ranks that hold each parameter."""
        plan = self.plan
        return {name: tuple(sorted({r for s in stages for r in plan.ranks_of_stage(s)})) for name, stages in plan.holders.items()}

    def _held_parameters(self, lowered: Lowered) -> list[Held]:
        """This rank's parameters that get a gradient, in the order in which backward reaches them."""
        own = set(self.plan.stages_of_rank(self._job.ranks.rank))
        holders = self._all_holders()
        names = [name for name in lowered.trained if own & set(self.plan.holders[name])]
        held = []
        for name in by_backward_order(names, lowered.first_use):
            tensor = self._job.weights[name]
            assert isinstance(tensor, torch.nn.Parameter)
            held.append(Held(name, tensor, holders[name], tuple(sorted(own & set(self.plan.holders[name])))))
        return held

    def _make_optimizer(self, factory: OptimizerFactory | None) -> torch.optim.Optimizer | None:
        """Calls the user's factory with this rank's trainable (name, parameter) pairs, in the model's own order."""
        if factory is None:
            return None
        order = {name: place for place, (name, _) in enumerate(self._job.model.named_parameters(remove_duplicate=False))}
        own = sorted(self._trainable(), key=lambda pair: order[pair[0]])
        return factory(iter(own)) if own else None

    def _trainable(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        for name, tensor in self._job.weights.items():
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                yield name, tensor


CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def _pairs(plan: Plan) -> set[tuple[int, int]]:
    """All (source, destination) ranks between which messages go, gradients included."""
    pairs = set()
    for crossing in plan.crossings:
        for source in plan.ranks_of_stage(crossing.source):
            for destination in plan.ranks_of_stage(crossing.destination):
                pairs |= {(source, destination), (destination, source)} if source != destination else set()
    return pairs


def _largest_micro_batches(plan: Plan, batch_size: int) -> int:
    """As many micro-batches as in training, fewer for a smaller batch."""
    return max(1, min(plan.num_micro_batch, batch_size // _widest(plan)))


def _widest(plan: Plan) -> int:
    """Over how many devices a micro-batch is cut at most."""
    return max(plan.num_replicas * device.num_devices for device in plan.virtual_devices)


def _make_room(kept: OrderedDict[Any, Any], limit: int) -> None:
    while len(kept) >= limit:
        kept.popitem(last=False)


def _what_changed(layout: BatchLayout, sample: BatchLayout) -> str:
    for got, expected in zip(layout.tensors, sample.tensors, strict=False):
        if got.shape[1:] != expected.shape[1:]:
            return f"{got.path} is {list(got.shape)}, the sample was {list(expected.shape)}"
    return (
        f"constants of the batch are {[value for _, value in layout.constants]}, in the sample {[value for _, value in sample.constants]}"
    )
