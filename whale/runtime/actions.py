"""Actions of one rank, prepared for one program: everything that is the same in every step was looked up when they were made.

For each micro-batch a stage keeps its received inputs from forward to backward. Its results go as soon as all stages that want them have
them: for the backward their places in the autograd graph are enough. So the memory of boundaries is what is in flight (and the few
receives that are posted ahead), however many micro-batches there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from whale.compat import run_backward
from whale.lowering.chunk import Value
from whale.lowering.program import Program
from whale.runtime.gradients import GradientSynchroniser
from whale.runtime.messages import Receive, ValueKey, place_of
from whale.runtime.split import Deferred, Product, run_products
from whale.runtime.transport import Arrival, Transport
from whale.scheduling import Action

if TYPE_CHECKING:
    from whale.runtime.executor import StepInput, StepOutcome

Slot = tuple[int, int]  # (stage, micro-batch)
Root = GradientEdge | Tensor | None
"""where a backward starts: a result's place in the autograd graph, the loss itself, nothing for what has no gradient"""


@dataclass
class Pass:
    """State of one pass over the action list."""

    given: StepInput
    outcome: StepOutcome
    gradients: GradientSynchroniser | None
    """None for evaluation"""
    transport: Transport | None
    receives: Sequence[Receive]
    """all of the program, in order"""
    window: int
    """receives are posted at most so many actions beyond the one that is waited for next"""
    num_posted: int = 0
    arrivals: dict[int, tuple[list[Arrival], dict[ValueKey, Tensor]]] = field(default_factory=dict)
    """what was posted for each receive, by its number, and the tensors that come in several messages"""
    received: dict[ValueKey, Tensor] = field(default_factory=dict)
    incoming: dict[ValueKey, Tensor] = field(default_factory=dict)
    """gradients of results, summed over consumers"""
    results: dict[Slot, tuple[Tensor, ...]] = field(default_factory=dict)
    """until the last stage that wants them has them"""
    uses_left: dict[Slot, int] = field(default_factory=dict)
    kept: dict[Slot, tuple[list[Tensor], list[Root]]] = field(default_factory=dict)
    """received inputs, and where the backward starts, from forward to backward"""
    products: dict[Slot, list[Product]] = field(default_factory=dict)
    """weight products that were put off, from the input part of a backward to its weight part"""
    input_gradients: dict[ValueKey, Tensor] = field(default_factory=dict)
    """on their way to the stage that made the input"""
    num_kept: dict[int, int] = field(default_factory=dict)

    def post_receives(self, num_received: int = 0) -> None:
        """Several at a time, whenever less than half of the window is posted: each wakes up a thread of the sender."""
        if self.num_posted - num_received > self.window // 2:
            return
        stop = min(len(self.receives), num_received + self.window)
        while self.num_posted < stop:
            self.receives[self.num_posted].post(self)
            self.num_posted += 1

    def add_incoming(self, key: ValueKey, gradient: Tensor) -> None:
        known = self.incoming.get(key)
        self.incoming[key] = gradient if known is None else known + gradient

    def used(self, slot: Slot) -> None:
        """One of the stages that want these results has them."""
        left = self.uses_left[slot] - 1
        self.uses_left[slot] = left
        if left == 0:
            del self.results[slot]


@dataclass(frozen=True, slots=True)
class _Argument:
    """Where a chunk gets one of its received tensors from."""

    key: ValueKey
    gradient: bool
    source: Slot | None
    """another stage of this rank, whose result at `place` is taken as it is; None: a message"""
    place: int
    empty: Tensor | None
    """on a grid, where none of its samples enter this device: no message brings it"""


class Forward:
    """Runs a chunk on one micro-batch."""

    def __init__(self, program: Program, action: Action, function: Callable[..., tuple[Tensor, ...]]) -> None:
        chunk = program.chunks[action.stage]
        self.stage, self.micro_batch, self.slot = action.stage, action.micro_batch, (action.stage, action.micro_batch)
        self.chunk, self.function, self.seed_parts = chunk, function, program.seed_parts
        self.arguments = []
        for value in chunk.received:
            source = program.source_of[action.stage, value.index]
            local = source in program.chunks
            self.arguments.append(
                _Argument(
                    (*self.slot, value.index),
                    value.gradient,
                    (source, action.micro_batch) if local else None,
                    place_of(program, source, value.index) if local else 0,
                    _empty(program, action, value),
                )
            )
        self.sources = {argument.source for argument in self.arguments if argument.source is not None}
        self.inputs = [(place, program.batched[place]) for place in chunk.inputs]
        self.num_sent, self.num_results = len(chunk.sent), len(chunk.sent) + chunk.num_outputs
        self.num_consumers = len(program.consumers_of[action.stage])
        self.is_idle = _is_idle(program, action)

    def run(self, this: Pass) -> None:
        if self.is_idle:
            self._hold(this, (), [], [])
            for source in self.sources:
                this.used(source)
            return
        received = [self._received(this, argument) for argument in self.arguments]
        for source in self.sources:
            this.used(source)
        if self.chunk.is_random:
            torch.manual_seed(self._seed(this.given.step))
        start, stop = this.given.samples[self.micro_batch]
        tensors = this.given.tensors
        results = self.function(*received, *(tensors[place][start:stop] if batched else tensors[place] for place, batched in self.inputs))
        self._keep(this, received, results)

    def _received(self, this: Pass, argument: _Argument) -> Tensor:
        """A received tensor, or the result of another stage of this rank, as a leaf of this chunk's autograd graph."""
        if argument.source is None:
            tensor = this.received.pop(argument.key) if argument.empty is None else argument.empty.detach()
        else:
            tensor = this.results[argument.source][argument.place].detach()
        return tensor.requires_grad_() if argument.gradient and this.gradients is not None else tensor

    def _keep(self, this: Pass, received: list[Tensor], results: tuple[Tensor, ...]) -> None:
        chunk, outcome = self.chunk, this.outcome
        sent = results[: self.num_sent]
        roots: list[Root] = []
        if this.gradients is not None:
            roots = [get_gradient_edge(result) if result.requires_grad else None for result in sent]
        if chunk.num_outputs:
            outcome.outputs[self.slot] = results[self.num_sent : self.num_results]
        if chunk.has_loss:
            loss = results[self.num_results]
            outcome.loss += loss.detach()
            roots.append(loss)
        for buffer, value in zip(chunk.updates, results[self.num_results + chunk.has_loss :], strict=True):
            with torch.no_grad():
                buffer.copy_(value)
        self._hold(this, sent, received, roots)

    def _hold(self, this: Pass, sent: tuple[Tensor, ...], received: list[Tensor], roots: list[Root]) -> None:
        stage = self.stage
        if self.num_consumers:
            this.results[self.slot], this.uses_left[self.slot] = sent, self.num_consumers
        if this.gradients is not None:
            this.kept[self.slot] = (received, roots)
            count = this.num_kept[stage] = this.num_kept.get(stage, 0) + 1
            if count > this.outcome.peak_in_flight.get(stage, 0):
                this.outcome.peak_in_flight[stage] = count

    def _seed(self, step: int) -> int:
        parts = (*self.seed_parts, step, self.micro_batch, self.stage)
        return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


class Backward:
    """Differentiates what `Forward` kept: wholly, or with `deferred` without the weight products, which are kept for `WeightBackward`."""

    def __init__(self, program: Program, action: Action, is_last: bool, deferred: Deferred | None = None) -> None:
        """`is_last`: when it is done, all gradients of the stage are final."""
        chunk = program.chunks[action.stage]
        self.stage, self.slot, self.has_loss = action.stage, (action.stage, action.micro_batch), chunk.has_loss
        self.is_last, self.deferred = is_last, deferred
        self.is_idle, self.device = _is_idle(program, action), program.device
        start, stop = program.edges[action.micro_batch]
        # (the result, what its gradient is when none comes: on a grid zeros of this shape, elsewhere nothing)
        self.sent = [
            ((*self.slot, value.index), value.shape_for(stop - start) if chunk.is_sharded else None, value.dtype) for value in chunk.sent
        ]
        # (place among the received tensors, where its gradient goes, whether that is a stage of this rank)
        self.returned: list[tuple[int, ValueKey, bool]] = []
        for place, value in enumerate(chunk.received):
            source = program.source_of[action.stage, value.index]
            if value.gradient:
                local = source in program.chunks
                self.returned.append((place, (source if local else action.stage, action.micro_batch, value.index), local))

    def run(self, this: Pass) -> None:
        received, known = this.kept.pop(self.slot)
        this.num_kept[self.stage] -= 1
        if self.is_idle:
            return  # its gradients, if there are any, are final when the stage is closed
        roots: list[Tensor | GradientEdge] = []
        seeds: list[Tensor] = []
        for (key, zeros, dtype), root in zip(self.sent, known, strict=False):
            gradient = this.incoming.pop(key, None)
            if gradient is None and zeros is not None:  # nobody wants this part; the exchanges behind it need all devices all the same
                gradient = torch.zeros(zeros, dtype=dtype, device=self.device)
            if gradient is not None and root is not None:
                roots.append(root)
                seeds.append(gradient)
        if self.has_loss:
            loss = known[-1]
            assert isinstance(loss, Tensor)
            if loss.requires_grad:
                roots.append(loss)
                seeds.append(torch.full_like(loss, this.given.loss_scale))
        assert this.gradients is not None
        if self.is_last:
            this.gradients.last_backward(self.stage)
        if self.deferred is not None:
            this.products[self.slot] = self.deferred.begin()
        if roots:
            run_backward(roots, seeds)
        for place, key, local in self.returned:
            tensor = received[place]
            gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            if local:
                this.add_incoming(key, gradient)
            else:
                this.input_gradients[key] = gradient


class WeightBackward:
    """The weight products that the input part of a backward put off."""

    def __init__(self, action: Action) -> None:
        self.slot = (action.stage, action.micro_batch)

    def run(self, this: Pass) -> None:
        run_products(this.products.pop(self.slot, []))  # none where this device has no samples of the micro-batch


class Synchronise:
    """All gradients of a stage are final."""

    def __init__(self, action: Action) -> None:
        self.stage = action.stage

    def run(self, this: Pass) -> None:
        if this.gradients is not None:
            this.gradients.close_stage(self.stage)


def _is_idle(program: Program, action: Action) -> bool:
    """The plan gives this device no sample of the micro-batch, so it does nothing for it: no message has a part of it either."""
    start, stop = program.samples[action.micro_batch]
    return start == stop



def _empty(program: Program, action: Action, value: Value) -> Tensor | None:
    start, stop = program.edges[action.micro_batch]
    if start < stop or value.batch_dim is None:
        return None
    return torch.empty(value.shape_for(0), dtype=value.dtype, device=program.device)
