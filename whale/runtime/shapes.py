"""Captured graphs of one engine: one for each shape of the batch, in training and in evaluation,
with their executors.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whale.capture.batch import BatchLayout
from whale.capture.capture import capture_evaluation, capture_training
from whale.capture.clean import tied_names
from whale.capture.export import Loss, Task
from whale.capture.guards import refuse
from whale.capture.prepare import CapturedModel, prepare
from whale.config import Config
from whale.distributed.intervals import Intervals
from whale.distributed.platform import Platform, StandIn
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.lowering.blocks import BlockWeights
from whale.lowering.program import Assign, Lowered, lower
from whale.lowering.subgroups import StageGroups
from whale.operations.nodes import trains_batch_norm
from whale.planning.planner import (
    apply_plan,
    check_loss_and_buffers,
    fingerprint,
    follow_plan,
)
from whale.plans.plan import Plan
from whale.plans.samples import least_batch, num_samples_by_rank, own_samples
from whale.plans.shards import Shards
from whale.runtime.executor import Executor
from whale.runtime.zero import Zero, trained_parts
from whale.scheduling.queues import Transfer, safe_window

logger = logging.getLogger("whale")


@dataclass
class Job:
    """What an engine is made from: the same on every rank, but for `weights`."""

    model: torch.nn.Module
    loss: Loss | None
    config: Config
    plan: Plan
    sample: BatchLayout
    prepared: CapturedModel
    weights: dict[str, Tensor]
    """this rank's parameters and buffers, by first name"""
    names: dict[str, str]
    """every tensor name of the model -> first name of the same tensor"""
    platform: Platform
    zero: Zero | None = None
    """parameters that are cut over ranks; None: each holder has all of what it holds"""

    @staticmethod
    def of_stand_in(stand_in: StandIn, platform: Platform) -> Job:
        """The job that trains a small model in place of the user's."""
        return Job(
            stand_in.model,
            None,
            stand_in.config,
            stand_in.plan,
            stand_in.layout,
            stand_in.prepared,
            stand_in.weights,
            tied_names(stand_in.model),
            platform,
        )

    @property
    def ranks(self) -> Ranks:
        return self.platform.ranks

    @cached_property
    def shards(self) -> Shards:
        """Who holds which part of which tensor."""
        return Shards(self.plan)

    @cached_property
    def state_shards(self) -> Shards:
        """Who updates which part of which parameter, and has its gradient and optimizer state."""
        return Shards(self.plan, "states") if self.plan.blocks else self.shards

    @property
    def updated(self) -> Mapping[str, Tensor]:
        """This rank's parameters as its optimizer updates them: of those that are cut its rows."""
        return trained_parts(self.zero, self.weights)

    @property
    def task(self) -> Task:
        return Task(self.loss, self.ranks.device.type, self.config.autocast)


@dataclass(frozen=True)
class _Channels:
    """What a program needs of the transport."""

    window: int
    """receives that are posted ahead"""
    pairs: frozenset[tuple[int, int]] = frozenset()
    """(source, destination) ranks that are to be connected before it runs"""


class Shapes:
    """Finds or makes the lowered graph for a batch. A new shape is captured once; of more than
    `max_captures` the one unused for longest is dropped.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.transport: Transport | None = None
        if job.ranks.is_distributed:
            pairs: set[tuple[int, int]] = set()
            for view in job.plan.by_template:
                pairs |= _pairs(view, {(each.source, each.destination) for each in view.crossings})
            pairs = self._cheap(pairs)
            self.transport = job.platform.transport(pairs, job.config.share_memory)
        for stage in job.plan.stages:  # every rank makes every group, in the same order
            ranks = job.plan.ranks_of_stage(stage.index)
            if len(ranks) > 1:
                job.ranks.group(ranks)
        for device in job.plan.virtual_devices:
            if device.grid is not None and len(device.ranks) > 1:
                for place in range(device.num_devices):
                    job.ranks.group(tuple(members[place] for members in device.ranks))
        has_statistics = any(
            trains_batch_norm(node) or "all_reduce" in node.meta
            for node in job.prepared.captured.compute_nodes()
        )
        if job.plan.blocks and self.transport is not None:
            intervals = Intervals(job.ranks, self.transport)
            job.zero = Zero(job.plan, job.weights, job.ranks, intervals)
        shortcut = self.transport.collectives.all_gather if self.transport is not None else None
        self._groups = StageGroups(job.plan, job.ranks, has_statistics, shortcut)
        self._training: OrderedDict[Any, Lowered] = OrderedDict()
        self._evaluation: OrderedDict[Any, Lowered] = OrderedDict()
        self._executors: dict[tuple[int, int, int], Executor] = {}
        self.first = self._lower(apply_plan, job.prepared)
        self._training[job.sample.key] = self.first

    def _lower(self, assign: Assign, prepared: CapturedModel) -> Lowered:
        """The chunks of this rank for one graph of the model."""
        job = self._job
        weights: Mapping[str, Tensor] = job.weights
        blocks: BlockWeights | None = None
        if job.zero is not None:
            weights = job.zero.computing
            residence = job.zero.residence
            if residence is not None:
                blocks = BlockWeights(residence, job.zero.block_of, residence.pool.slot_of)
        return lower(job.plan, assign, prepared, weights, job.ranks, self._groups, blocks)

    def training(self, layout: BatchLayout, tensors: list[Tensor]) -> Lowered:
        def capture() -> Lowered:
            job = self._job
            logger.info("capturing the model again: %s", _what_changed(layout, job.sample))
            captured = capture_training(job.model, layout, tensors, job.task)
            known = {finding.name for finding in job.prepared.capture.findings.gradient_changes()}
            if any(finding.name not in known for finding in captured.findings.gradient_changes()):
                refuse(captured.findings)  # the self-check of the first capture did not see these
            prepared = prepare(captured, _num_parts(job.plan), job.config.loss_per_micro_batch)
            check_loss_and_buffers(
                prepared.captured, prepared.not_additive, widest(job.plan), job.plan.num_micro_batch
            )
            job.ranks.agree(
                "the captured graph",
                fingerprint(prepared.captured),
                "All ranks must run the same script on the same versions",
            )
            return self._lower(follow_plan, prepared)

        return self._find(self._training, layout.key, capture)

    def known_training(self, layout: BatchLayout) -> Lowered | None:
        """The graph for batches of this shape, if there is one already."""
        return self._training.get(layout.key)

    def evaluation(self, layout: BatchLayout, tensors: list[Tensor]) -> Lowered:
        def capture() -> Lowered:
            job = self._job
            captured = capture_evaluation(job.model, layout, tensors, job.task)
            prepared = prepare(
                captured,
                num_micro_batch=len(job.plan.templates),  # not at one place where there are several
                loss_per_micro_batch=job.config.loss_per_micro_batch,
            )
            if (
                prepared.not_additive is not None
                and max(job.plan.num_micro_batch, widest(job.plan)) > 1
            ):
                raise ValueError(prepared.not_additive.message)
            return self._lower(follow_plan, prepared)

        return self._find(self._evaluation, layout.key, capture)

    def _find(
        self, known: OrderedDict[Any, Lowered], key: Any, capture: Callable[[], Lowered]
    ) -> Lowered:
        if key not in known:
            while len(known) >= self._job.config.max_captures:
                _, old = known.popitem(last=False)
                self._executors = {k: e for k, e in self._executors.items() if k[0] != id(old)}
            known[key] = capture()
            if self.transport is not None:
                # an evaluation, or a batch of another shape, may have edges that the plan has not
                pairs: set[tuple[int, int]] = set()
                for graph in known[key].graphs:
                    pairs |= _pairs(graph.plan, graph.edges)
                self.transport.connect(self._cheap(pairs))
        known.move_to_end(key)
        return known[key]

    def _cheap(self, pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Pairs of ranks that need no communicator of their own, which is dear: these are made for
        pairs that do talk, by `executor`.
        """
        return {pair for pair in pairs if self._job.ranks.backend_among(pair).has_tags}

    def follow(self, plan: Plan) -> None:
        """Takes the shares of this plan, which is otherwise the same, from now on: who holds what
        has not changed.
        """
        for lowered in (*self._training.values(), *self._evaluation.values()):
            lowered.plan = plan.of_rank(self._job.ranks.rank)
        self._executors.clear()

    def executors(self) -> list[Executor]:
        return list(self._executors.values())

    def executor(
        self, lowered: Lowered, batch_size: int, num_micro_batch: int, is_training: bool
    ) -> Executor:
        key = (id(lowered), batch_size, num_micro_batch)
        if key not in self._executors:
            job = self._job
            schedule = lowered.own_graph.schedule(batch_size, num_micro_batch, is_training)
            program = lowered.program(schedule, batch_size, job.config.seed)
            if is_training and batch_size > job.plan.batch_size and job.ranks.rank == 0:
                _warn_of_memory(job.plan, batch_size)
            compiles = job.config.compile if is_training else False
            num_samples = [stop - start for start, stop in program.samples]
            channels = self._channels(lowered, batch_size, is_training)
            self._executors[key] = Executor(
                program,
                self.transport,
                channels.window,
                job.ranks.watch,
                compiles,
                job.platform.pace(program.actions, num_samples, is_training),
                job.zero.residence if job.zero is not None else None,
            )
            self._executors[key].unconnected = channels.pairs
        return self._executors[key]

    def _channels(self, lowered: Lowered, batch_size: int, is_training: bool) -> _Channels:
        """What a program needs of the transport; the same pairs on every rank."""
        job = self._job
        window = job.config.num_posted_receives
        if self.transport is None or not job.ranks.needs_channels:
            return _Channels(window)
        transfers: dict[int, list[Transfer]] = {}
        for graph in lowered.graphs:
            number = largest_micro_batches(graph.plan, batch_size)
            if not is_training:
                number = evaluation_micro_batches(graph.plan, batch_size, lowered.prepared)
            schedule = graph.schedule(batch_size, number, is_training)
            transfers |= graph.transfers(schedule, batch_size)
        pairs = set()
        for rank, own in transfers.items():
            for transfer in own:
                for peer in transfer.peers:
                    pairs.add((rank, peer) if transfer.is_send else (peer, rank))
        if job.ranks.device.num_queues is not None and job.ranks.rank in lowered.plan.ranks:
            _, replica, _ = lowered.plan.place_of_rank(job.ranks.rank)
            members = {
                rank for device in lowered.plan.virtual_devices for rank in device.ranks[replica]
            }  # replicas send each other no messages
            own_replica = {rank: transfers[rank] for rank in members}
            window = self._safe_window(own_replica, window)
        return _Channels(window, frozenset(pairs))

    def _safe_window(self, transfers: Mapping[int, Sequence[Transfer]], most: int) -> int:
        """Receives that may be posted ahead, so that none blocks what its message waits for."""
        window = safe_window(transfers, most)
        if window is None:
            logger.warning(
                "with %s hardware queues for its streams, a device may hang in this schedule: a "
                "message that waits for its receive blocks what comes behind it. Try: %s=32",
                self._job.ranks.device.num_queues,
                self._job.ranks.device.queues_variable,
            )
            return most
        return window


def _warn_of_memory(plan: Plan, batch_size: int) -> None:
    """A mini-batch to train on that is larger than the planned one may need more memory than a
    device has.
    """
    loads = plan.loads
    most = [max(numbers, default=0) for numbers in num_samples_by_rank(plan, batch_size)]
    full = [(rank, number) for rank, number in enumerate(most) if number > loads[rank].most]
    if full:
        rank, number = full[0]
        logger.warning(
            "a mini-batch of %d samples may not fit: %d of %d devices get more than their memory "
            "was planned for (rank %d: %d samples of a "
            "micro-batch, memory for %d); planned were %d. Give wh.parallelize a sample batch of "
            "the largest size, or more micro-batches",
            *(
                batch_size,
                len(full),
                plan.num_devices,
                rank,
                number,
                loads[rank].most,
                plan.batch_size,
            ),
        )


def largest_micro_batches(plan: Plan, batch_size: int) -> int:
    """Number of micro-batches that the replicas of a plan of one template cut their part of this
    batch into: as planned, fewer for a smaller one.
    """
    start, stop = own_samples(plan, batch_size)
    return max(1, min(plan.num_micro_batch, (stop - start) // widest(plan)))


def evaluation_micro_batches(plan: Plan, batch_size: int, prepared: CapturedModel) -> int:
    """The same of an evaluation: one where sums over samples are all-reduced."""
    return 1 if prepared.loss.reductions else largest_micro_batches(plan, batch_size)


def widest(plan: Plan) -> int:
    """Largest number of devices that one micro-batch of all replicas is cut over."""
    return sum(least_batch(view, 1) for view in plan.by_template)


def _num_parts(plan: Plan) -> int:
    """Micro-batches of a mini-batch; replicas that are not alike have them at different times."""
    return max(plan.num_micro_batch, len(plan.templates))


def _pairs(plan: Plan, edges: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """All (source, destination) ranks between which messages of these edges between stages may go,
    gradients included: those of one replica of the model, whatever the batch size.
    """
    pairs = set()
    for from_stage, to_stage in edges:
        here = plan.virtual_devices[plan.stages[from_stage].virtual_device]
        there = plan.virtual_devices[plan.stages[to_stage].virtual_device]
        for sources, destinations in zip(here.ranks, there.ranks, strict=True):
            for source, destination in itertools.product(sources, destinations):
                if source != destination:
                    pairs |= {(source, destination), (destination, source)}
    return pairs


def _what_changed(layout: BatchLayout, sample: BatchLayout) -> str:
    for got, expected in zip(layout.tensors, sample.tensors, strict=False):
        if got.shape[1:] != expected.shape[1:]:
            return f"{got.path} is {list(got.shape)}, the sample was {list(expected.shape)}"
    return (
        f"constants of the batch are {[v for _, v in layout.constants]}, in the sample "
        f"{[v for _, v in sample.constants]}"
    )
