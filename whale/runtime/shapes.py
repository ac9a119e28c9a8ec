"""Captured graphs of one engine, in training and in evaluation, with their executors: one for all
lengths of the batch, or one for each shape where the model fixes it (`runtime/captures.py`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whale.capture.batch import BatchLayout
from whale.capture.capture import capture_evaluation, capture_training
from whale.capture.guards import Finding, Findings, refuse
from whale.capture.lengths import Numbers
from whale.capture.prepare import CapturedModel, prepare
from whale.capture.python_numbers import PythonNumbers
from whale.distributed.intervals import Intervals
from whale.distributed.transport import Transport
from whale.lowering.blocks import BlockWeights
from whale.lowering.own_gradients import give_own_memory, may_share_gradients
from whale.lowering.program import Assign, Lowered, lower
from whale.lowering.subgroups import StageGroups
from whale.operations.nodes import sums_over_devices
from whale.planning.planner import fingerprint
from whale.planning.problem import check_loss_and_buffers
from whale.planning.stages import apply_plan, follow_plan
from whale.plans.plan import Plan
from whale.plans.samples import least_batch, num_samples_by_rank, own_samples
from whale.runtime.activations import offloaded_activations
from whale.runtime.captures import (
    MOST_LENGTHS,
    Captures,
    Family,
    computes_the_same,
    same_on_all_ranks,
    what_changed,
)
from whale.runtime.executor import Executor
from whale.runtime.job import Job
from whale.runtime.longest import Longest
from whale.runtime.untouched import Untouched
from whale.runtime.zero import Zero, own_blocks
from whale.scheduling.queues import QueuedTransfer, safe_window

logger = logging.getLogger("whale")


@dataclass(frozen=True)
class _Channels:
    """What a program needs of the transport."""

    window: int
    """receives that are posted ahead"""
    pairs: frozenset[tuple[int, int]] = frozenset()
    """(source, destination) ranks that are to be connected before it runs"""
    first_window: int | None = None
    """receives that are posted ahead in the first pass; None: as in all"""


class LoweredGraphs:
    """Finds or makes the lowered graph for a batch. What no graph is for is captured once; of more
    than `max_captures` the one unused for longest is dropped.
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
            sums_over_devices(node) for node in job.prepared.captured.compute_nodes()
        )
        if own_blocks(job.plan, job.ranks.rank, job.weights):
            intervals = Intervals(job.ranks, self.transport)
            # where updates are not emulated they take their own time at the end of a step
            is_ahead = job.plan.updates_ahead and job.platform.updates_during_step
            job.zero = Zero(job.plan, job.weights, job.ranks, intervals, job.homes, is_ahead)
        self._activations = offloaded_activations(job)
        collectives = self.transport.collectives if self.transport is not None else None
        self._groups = StageGroups(
            job.plan,
            job.ranks,
            has_statistics,
            collectives.all_gather if collectives is not None else None,
            collectives.begin_exchange if collectives is not None else None,
        )
        most = job.config.max_captures
        self._training = Captures(most, PythonNumbers(job.model, job.loss))
        self._with_outputs = Captures(most, PythonNumbers(job.model, job.loss))
        """of steps whose outputs are asked for"""
        self._evaluation = Captures(most, PythonNumbers(job.model, job.loss), in_training=False)
        self._executors: dict[tuple[int, int, int], Executor] = {}
        self._have_own_memory: frozenset[str] = frozenset()
        """parameters whose gradients are copied, since another may lie in their memory"""
        family = self._family(job.prepared, job.sample, apply_plan)
        self._training.add(family)
        self._untouched = Untouched(job.model)
        self._longest = Longest(job)
        self.first = self._lowered(family, job.prepared.longest(job.longest))
        if self.transport is not None:
            # before the first step; batches of other sizes may need more (`Executor.run`)
            channels = self._channels(self.first, job.plan.batch_size, is_training=True)
            self.transport.connect(channels.pairs)

    @property
    def num_captures(self) -> int:
        """How often the model was captured for training."""
        return self._training.num_captures

    def training(
        self, layout: BatchLayout, tensors: list[Tensor], outputs: bool = False
    ) -> Lowered:
        """What runs a batch in training, with outputs or without; the model is captured where no
        graph is for it.
        """
        self._untouched.check()
        captures = self._with_outputs if outputs else self._training
        found = self._find(
            captures,
            layout,
            lambda named: self._capture_training(named, tensors, outputs),
            says_why=not outputs,
        )
        plan = self._longest.plan_for(layout, *found)
        if plan is not None:
            self._job.plan = plan
            self.follow(plan)
        return self._lowered(*found)

    def _find(
        self,
        captures: Captures,
        layout: BatchLayout,
        capture: Callable[[BatchLayout], Family],
        says_why: bool,
    ) -> tuple[Family, Numbers]:
        """The graph of a batch, captured where there is none for its form or for the numbers in
        Python as they are now.
        """
        found = captures.find(layout)
        if found is not None:
            return found
        other = captures.find_with_other_numbers(layout)
        if other is None and says_why:
            logger.info("capturing the model again: %s", what_changed(layout, self._job.sample))
        changed = captures.other_numbers(other) if other is not None else None
        is_tensor = other is not None and captures.is_tensor_changed(other)
        family = captures.capture(layout, self._training.names(), capture)
        if (
            other is not None
            and not is_tensor
            and computes_the_same(other.prepared, family.prepared)
        ):
            self._job.warn_once(
                f"{changed}, which did not change the captured graph: from now on Whale takes it "
                "for a number that nothing depends on. Try: give it in the batch, as a tensor of "
                "one number, where forward or loss compare it with something"
            )
            captures.look_no_more_at_others(other)
            found = captures.find(layout)
            if found is not None:
                return found  # else a mode has changed, which is looked at all the same
        elif other is not None:
            self._job.warn_once(
                f"{changed}: the captured graph has its value inside, so the model is captured "
                "again whenever such a number changes, which takes seconds each time. Try: give it "
                "in the batch, as a tensor of one number"
            )
        self._forget(captures.add(family))
        found = captures.find(layout)
        assert found is not None, "a capture runs the batch that it was made with"
        return found

    def other_numbers(self) -> str | None:
        """A number in Python that is another one than at the start; None: all are as they were."""
        return self._training.other_numbers()

    def names_of_other_numbers(self) -> list[str]:
        """All such numbers, without their values."""
        return self._training.names_of_other_numbers()

    def of_loader(self) -> Lowered:
        """What runs batches of `engine.loader`, which have the form of the sample."""
        if self.other_numbers() is None:
            return self.first
        sample = self._job.sample
        tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in sample.tensors]
        lowered = self.training(sample, tensors)
        return self.first if self.other_numbers() is None else lowered

    def _capture_training(
        self, layout: BatchLayout, tensors: list[Tensor], outputs: bool
    ) -> Family:
        job = self._job
        captured = capture_training(job.model, layout, tensors, job.task, outputs, job.sample)
        self._refuse_unchecked(captured.findings.gradient_changes())
        prepared = prepare(captured, _num_parts(job.plan), job.config.loss_per_micro_batch)
        check_loss_and_buffers(
            prepared.captured, prepared.not_additive, widest(job.plan), job.plan.num_micro_batch
        )
        advice = "All ranks must run the same script on the same versions"
        prepared = same_on_all_ranks(prepared, job.ranks, "the captured graph", advice)
        return self._family(prepared, layout)

    def _refuse_unchecked(self, found: list[Finding]) -> None:
        """Raises when the self-check of the first capture did not see one of these."""
        entries = self._job.prepared.capture.findings.entries
        known = {(finding.kind, finding.name) for finding in entries}
        if any((finding.kind, finding.name) not in known for finding in found):
            refuse(Findings(found))

    def known_training(self, layout: BatchLayout) -> Lowered | None:
        """The graph for batches of this shape, if there is one already."""
        found = self._training.find(layout)
        return None if found is None else self._lowered(*found)

    def evaluation(self, layout: BatchLayout, tensors: list[Tensor]) -> Lowered:
        """What runs a batch in evaluation."""
        found = self._find(
            self._evaluation,
            layout,
            lambda named: self._capture_evaluation(named, tensors),
            says_why=False,
        )
        return self._lowered(*found)

    def _capture_evaluation(self, layout: BatchLayout, tensors: list[Tensor]) -> Family:
        job = self._job
        captured = capture_evaluation(job.model, layout, tensors, job.task, job.sample)
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
        return self._family(prepared, layout)

    def _family(
        self, prepared: CapturedModel, layout: BatchLayout, assign: Assign = follow_plan
    ) -> Family:
        """A graph, lowered at once where one program is for all its lengths."""
        is_planned = fingerprint(prepared.captured) == self._job.plan.model
        named = layout.with_lengths(prepared.capture.layout.length_names)
        family = Family(prepared, named, assign, is_planned)
        if not self._on_grid or not prepared.captured.lengths:
            family.symbolic = self._lower(assign, prepared, is_planned)
        return family

    @property
    def _on_grid(self) -> bool:
        return any(device.grid is not None for device in self._job.plan.virtual_devices)

    def _lowered(self, family: Family, numbers: Numbers) -> Lowered:
        """What runs batches of these lengths."""
        if not numbers:
            assert family.symbolic is not None
            return family.symbolic
        key = tuple(numbers.values())
        known = family.by_lengths
        if key not in known:
            while len(known) >= MOST_LENGTHS:
                self._forget([known.popitem(last=False)[1]])
            if family.symbolic is not None:
                known[key] = family.symbolic.at(numbers)
            else:
                at_length = family.prepared.at(numbers)
                known[key] = self._lower(family.assign, at_length, family.is_planned)
        known.move_to_end(key)
        return known[key]

    def _lower(self, assign: Assign, prepared: CapturedModel, is_planned: bool) -> Lowered:
        """The chunks of this rank for one graph of the model."""
        job = self._job
        weights: Mapping[str, Tensor] = job.weights
        blocks: BlockWeights | None = None
        if job.zero is not None:
            weights = job.zero.computing
            bringer = job.zero.bringer
            if bringer is not None:
                stays = job.zero.residence is None
                blocks = BlockWeights(bringer, job.zero.block_of, job.zero.slot_of, stays)
        sharing = may_share_gradients(prepared.captured.graph) - self._have_own_memory
        give_own_memory(weights, sharing)
        self._have_own_memory |= sharing
        lowered = lower(
            job.plan, assign, prepared, weights, job.ranks, self._groups, is_planned, blocks
        )
        if self.transport is not None:
            # an evaluation, or a batch of another shape, may have edges that the plan has not
            pairs: set[tuple[int, int]] = set()
            for graph in lowered.graphs:
                pairs |= _pairs(graph.plan, graph.edges)
            self.transport.connect(self._cheap(pairs))
        return lowered

    def _cheap(self, pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Pairs of ranks that need no communicator of their own, which is dear: these are made for
        pairs that do talk.
        """
        return {pair for pair in pairs if self._job.ranks.backend_among(pair).has_tags}

    def _forget(self, gone: Iterable[Lowered]) -> None:
        """Drops the executors of graphs that are held no longer."""
        ids = {id(lowered) for lowered in gone}
        self._executors = {
            key: executor for key, executor in self._executors.items() if key[0] not in ids
        }

    def follow(self, plan: Plan) -> None:
        """Takes the shares of this plan, which is otherwise the same, from now on: who holds what
        has not changed.
        """
        for captures in (self._training, self._with_outputs, self._evaluation):
            for lowered in captures.all_lowered():
                lowered.plan = plan.of_rank(self._job.ranks.rank)
        self.first.plan = plan.of_rank(self._job.ranks.rank)
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
            self._executors[key].first_window = channels.first_window
            self._executors[key].activations = self._activations
            if job.zero is not None:
                self._executors[key].late = job.zero.late
        return self._executors[key]

    def _channels(self, lowered: Lowered, batch_size: int, is_training: bool) -> _Channels:
        """What a program needs of the transport; the same pairs on every rank."""
        job = self._job
        window = job.config.num_posted_receives
        if self.transport is None or not job.ranks.needs_channels:
            return _Channels(window)
        transfers: dict[int, list[QueuedTransfer]] = {}
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
        if not job.ranks.device.is_accelerator or job.ranks.rank not in lowered.plan.ranks:
            return _Channels(window, frozenset(pairs))
        _, replica, _ = lowered.plan.place_of_rank(job.ranks.rank)
        # replicas send each other no messages
        members = {
            rank for device in lowered.plan.virtual_devices for rank in device.ranks[replica]
        }
        own_replica = {rank: transfers[rank] for rank in members}
        if job.ranks.device.num_queues is not None:
            window = self._safe_window(own_replica, window)
        return _Channels(window, frozenset(pairs), self._first_window(own_replica, window))

    def _safe_window(self, transfers: Mapping[int, Sequence[QueuedTransfer]], most: int) -> int:
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

    def _first_window(
        self, transfers: Mapping[int, Sequence[QueuedTransfer]], later: int
    ) -> int | None:
        """Receives that may be posted ahead while kernels are loaded; None: as many as later."""
        device = self._job.ranks.device
        if device.loads_at_start:
            return None
        window = safe_window(transfers, later, is_first=True)
        if window is None:
            advice = "=".join(device.loading_at_start)
            logger.warning(
                "the first step of this schedule may hang: kernels are loaded when they are first "
                "called, which may wait for messages that wait for this rank. Try: %s",
                advice or "another schedule",
            )
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
            "was planned for (rank %d: %d samples of a micro-batch, memory for %d); planned were "
            "%d. Give wh.parallelize a sample batch of the largest size, or more micro-batches",
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
    """Number of micro-batches of an evaluation: one where sums over samples are all-reduced."""
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
