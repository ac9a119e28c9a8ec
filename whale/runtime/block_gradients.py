"""Gradients of blocks under ZeRO: summed over the ranks of a block, each of which gets its own
interval (docs/memory.md).

    level 1      after the last backward of all stages that use a block
    level 2, 3   in every backward; whole gradients of a block live from its backward to its
                 reduce-scatter, and the sums are added to this rank's part

Blocks go in one order, that of the backward, whatever order gradients become final in: ranks meet
in the same calls. What the backward leaves out (an expert without tokens) is zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whale.distributed.intervals import Transfer
from whale.plans.blocks import GRADIENTS_TOO, Block
from whale.runtime.zero import Zero


@dataclass
class _BlockSum:
    """One block and its gradients."""

    block: Block
    stages: frozenset[int]
    """of this rank that use it"""
    waiting: set[str] = field(default_factory=set)
    """parameters whose gradient is not final yet"""
    open_stages: set[int] = field(default_factory=set)
    """level 1: stages that have not finished their last backward"""


class BlockGradients:
    """Watches the gradients of one rank's blocks."""

    def __init__(
        self, zero: Zero, stages_of: Mapping[str, Collection[int]], first_use: Mapping[str, int]
    ) -> None:
        """`stages_of`: stages of this rank that use a parameter; `first_use`: its place in the
        graph.
        """
        self._zero = zero
        self._trained: Collection[str] = ()
        self._now: int | None = None
        """the stage whose backward runs"""
        sums = [
            _BlockSum(block, frozenset(stages_of[block.parameters[0]]))
            for block in zero.blocks
            if zero.is_trained(block)
        ]
        self._sums = sorted(
            sums,
            key=lambda each: -max(first_use.get(name, -1) for name in each.block.parameters),
        )
        self._sum_of = {name: each for each in self._sums for name in each.block.parameters}
        self._queue: list[_BlockSum] = []
        """blocks that are still to be reduced, in order; level 1: of the step, else of the
        backward that runs
        """
        self._pending: tuple[_BlockSum, Tensor, Transfer] | None = None
        for name in self._sum_of:
            parameter = zero.computing[name]
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))

    @property
    def in_every_backward(self) -> bool:
        return self._zero.level >= GRADIENTS_TOO

    def begin(self, trained: Collection[str]) -> None:
        """Start of a step in which the loss reaches the parameters `trained`."""
        self._trained = trained
        self._now = None
        self._pending = None
        for name in self._sum_of:
            self._zero.computing[name].grad = None
            self._zero.updated[name].grad = None
        for each in self._sums:
            each.waiting = self._trained_of(each)
            each.open_stages = set(each.stages)
        self._queue = (
            [] if self.in_every_backward else [each for each in self._sums if each.waiting]
        )

    def begin_backward(self, stage: int, is_last: bool) -> None:
        """The whole backward of a micro-batch begins. `is_last`: what it accumulates is final for
        the stage.
        """
        if self.in_every_backward:
            self._now = stage
            self._queue = self._of_stage(stage)
            for each in self._queue:
                each.waiting = self._trained_of(each)
        elif is_last:
            self._now = stage

    def end_backward(self, stage: int, is_second_half: bool) -> None:
        """A backward, or the second half of a split one, is over: what it left goes out."""
        self._now = None
        if not self.in_every_backward:
            return
        for each in self._of_stage(stage) if is_second_half else self._queue:
            self._reduce(each)
        self._queue = []

    def close_stage(self, stage: int) -> None:
        """No backward of the stage comes any more."""
        self._now = None
        if self.in_every_backward:
            return
        for each in self._sums:
            each.open_stages.discard(stage)
            if not each.open_stages:
                each.waiting = set()
        self._send_ready()

    def finish(self) -> None:
        """Every part that this rank updates has its gradient."""
        assert all(not each.waiting for each in self._queue), "a stage was not closed"
        while self._queue:
            self._reduce(self._queue.pop(0))
        self._take_pending()

    def _trained_of(self, each: _BlockSum) -> set[str]:
        return {name for name in each.block.parameters if name in self._trained}

    def _of_stage(self, stage: int) -> list[_BlockSum]:
        return [each for each in self._sums if stage in each.stages and self._trained_of(each)]

    def _accumulated(self, name: str) -> None:
        """A gradient was added to: by the backward that runs, which adds to each parameter once."""
        each = self._sum_of[name]
        if self._now is None:
            return
        if not self.in_every_backward and each.open_stages - {self._now}:
            return  # another stage of this rank will add to it
        each.waiting.discard(name)
        self._send_ready()

    def _send_ready(self) -> None:
        """Reduces blocks that are ready, in order. At level 1 through memory they wait for the end
        of the step: the core that would sum is the one that runs the backward.
        """
        if not self.in_every_backward and not self._zero.hides_reduces:
            return
        while self._queue and not self._queue[0].waiting:
            self._reduce(self._queue.pop(0))

    def _reduce(self, each: _BlockSum) -> None:
        """Begins the reduce-scatter of a block. The one before it is over then: one buffer more
        than that in use is enough.
        """
        self._take_pending()
        zero = self._zero
        block = each.block
        first = zero.computing[block.parameters[0]]
        buffer = torch.empty(block.num_elements, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for name, (start, stop) in block.intervals.items():
                gradient = zero.computing[name].grad
                view = buffer[start:stop]
                if gradient is None:
                    view.zero_()
                else:
                    dense = gradient.to_dense() if gradient.is_sparse else gradient
                    view.view(dense.shape).copy_(dense)
                zero.computing[name].grad = None
            transfer = zero.intervals.begin_reduce(buffer, block.ends, block.ranks)
        self._pending = (each, buffer, transfer)

    def _take_pending(self) -> None:
        """Waits for the reduce-scatter that began last, and adds the sums to this rank's part."""
        if self._pending is None:
            return
        each, buffer, transfer = self._pending
        self._pending = None
        transfer.wait()
        zero = self._zero
        block = each.block
        rank = zero.ranks.rank
        start, stop = block.interval(rank)
        with torch.no_grad():
            # a copy, so that the whole buffer can go; where the part lives
            device = zero.updated[block.parameters[0]].device
            own = buffer[start:stop].to(device, copy=True)
            parts = [zero.updated[name] for name in block.parameters if name in self._trained]
            if all(part.grad is None for part in parts):
                own = zero.gradients_at_home(block.parameters[0], own)
            for name, (first, last) in block.intervals.items():
                part = zero.updated[name]
                if name not in self._trained or not part.numel():
                    continue
                low = max(start, first) - start
                high = min(stop, last) - start
                gradient = own[low:high].view(part.shape)
                if part.grad is None:
                    part.grad = gradient
                else:
                    part.grad.add_(gradient)


def _hook(gradients: weakref.ref[BlockGradients], name: str) -> Callable[[Tensor], None]:
    """A hook that does not keep the gradients alive."""

    def accumulated(_: Tensor) -> None:
        if (own := gradients()) is not None:
            own._accumulated(name)

    return accumulated
