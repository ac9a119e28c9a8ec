"""Gradients of blocks under ZeRO: summed over the ranks of a block, each of which gets its own
interval (docs/memory.md).

    level 1      after the last backward of all stages that use a block
    level 2, 3   in every backward; whole gradients of a block live from its backward to its
                 reduce-scatter, and the sums are added to this rank's part

Blocks go in one order, that of the backward, whatever order gradients become final in: ranks meet
in the same calls. What the backward leaves out (an expert without tokens) is zero.

Parts that are at home on the host of an accelerator have their gradients there. These are copied
beside the backward, and the host adds them when the next block comes: it waits for nothing that was
launched later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from whale.devices import HostCopy
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
        """the reduce-scatter that began last"""
        self._arriving: tuple[_BlockSum, HostCopy, Tensor | None] | None = None
        """sums on their way to the host, and their home there if they are the first of a step"""
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
        self._arriving = None
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
        self._take_arrived()

    def _trained_of(self, each: _BlockSum) -> set[str]:
        return {name for name in each.block.parameters if name in self._trained}

    def _of_stage(self, stage: int) -> list[_BlockSum]:
        own = [each for each in self._sums if stage in each.stages]
        return [each for each in own if self._trained_of(each)]

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
        if zero.sums_through_memory(block):
            sizes = [stop - start for start, stop in map(block.interval, block.ranks)]
            parts = [torch.empty(size, dtype=first.dtype, device=first.device) for size in sizes]
            self._fill(block, parts)
            zero.intervals.reduce(dict(zip(block.ranks, parts, strict=True)))
            self._take(each, parts[block.ranks.index(zero.ranks.rank)], is_alone=True)
            return
        buffer = torch.empty(block.num_elements, dtype=first.dtype, device=first.device)
        self._fill(block, [buffer])
        with torch.no_grad():
            transfer = zero.intervals.begin_reduce(buffer, block.ends, block.ranks)
        self._pending = (each, buffer, transfer)

    def _fill(self, block: Block, parts: Sequence[Tensor]) -> None:
        """Moves the gradients of a block into flat tensors, each of which begins where the one
        before it ends.
        """
        ends = list(accumulate(part.numel() for part in parts))
        with torch.no_grad():
            for name, (start, stop) in block.intervals.items():
                parameter = self._zero.computing[name]
                gradient = parameter.grad
                if gradient is not None:
                    gradient = gradient.to_dense() if gradient.is_sparse else gradient
                    gradient = gradient.reshape(-1)
                for part, end in zip(parts, ends, strict=True):
                    begin = end - part.numel()
                    low = max(start, begin)
                    high = min(stop, end)
                    if low >= high:
                        continue
                    view = part[low - begin : high - begin]
                    if gradient is None:
                        view.zero_()
                    else:
                        view.copy_(gradient[low - start : high - start])
                parameter.grad = None

    def _take_pending(self) -> None:
        """Waits for the reduce-scatter that began last, and takes this rank's part of the sums."""
        if self._pending is None:
            return
        each, buffer, transfer = self._pending
        self._pending = None
        transfer.wait()
        self._take_arrived()
        start, stop = each.block.interval(self._zero.ranks.rank)
        self._take(each, buffer[start:stop], is_alone=False)

    def _take(self, each: _BlockSum, own: Tensor, is_alone: bool) -> None:
        """Adds the sums of this rank's interval of a block to its part, or begins to copy them to
        the host where that is. `is_alone`: they have their memory to themselves.
        """
        if not own.numel():
            return
        zero = self._zero
        first = each.block.parameters[0]
        is_first = all(zero.updated[name].grad is None for name in self._trained_of(each))
        home = zero.gradient_home(first, own) if is_first else None
        with torch.no_grad():
            if zero.updated[first].device.type != own.device.type:
                # of a copy, so that the whole buffer can go before that is done
                copy = zero.begin_copy_to_host(own.clone(), home)
                self._arriving = (each, copy, home)
            elif home is not None:
                self._add(each, home.copy_(own))
            elif is_alone or not is_first:
                self._add(each, own)
            else:
                self._add(each, own.clone())  # a copy, so that the whole buffer can go

    def _take_arrived(self) -> None:
        """Adds the sums that are on their way to the host, and waits for them there."""
        if self._arriving is not None:
            each, copy, home = self._arriving
            self._arriving = None
            own = copy.read()
            self._add(each, own if home is None or home is own else home.copy_(own))

    def _add(self, each: _BlockSum, own: Tensor) -> None:
        """Adds sums of this rank's interval of a block to the gradients of its parts."""
        zero = self._zero
        start, stop = each.block.interval(zero.ranks.rank)
        with torch.no_grad():
            for name, (first, last) in each.block.intervals.items():
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
