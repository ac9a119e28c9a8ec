"""Actions of one rank, prepared for one program: everything that is the same in every step was
looked up when they were made.

Tensors at the boundaries of stages lie in numbered slots (`runtime/boundaries.py`); after each
action the executor empties those that nobody wants any more. A stage keeps its inputs from forward
to backward. Its results go as soon as all stages that want them have them: for the backward their
places in the autograd graph are enough.
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
from whale.distributed.transport import Arrival, Transport
from whale.lowering.chunk import CrossingValue
from whale.lowering.program import Program
from whale.runtime.activations import Activations, Visit
from whale.runtime.boundaries import Boundary, Role
from whale.runtime.gradients import GradientSynchroniser
from whale.runtime.messages import Receive
from whale.runtime.split import Deferred, Product, run_products
from whale.runtime.stage_updates import StageUpdates
from whale.runtime.updates_ahead import LateBlocks
from whale.scheduling import Action
from whale.scheduling.queues import last_posted
from whale.scheduling.slots import Slots

if TYPE_CHECKING:
    from whale.runtime.executor import StepInput, StepOutcome

Root = GradientEdge | Tensor | None
"""where a backward starts: a result's place in the autograd graph, the loss itself, nothing for
what has no gradient
"""


@dataclass
class Pass:
    """State of one pass over the action list."""

    given: StepInput
    outcome: StepOutcome
    gradients: GradientSynchroniser | None
    """None for evaluation"""
    updates: StageUpdates | None
    """None where all is updated at the end of the step"""
    transport: Transport | None
    receives: Sequence[Receive]
    """all of the program, in order"""
    window: int
    """receives are posted at most so many actions beyond the one that is waited for next"""
    held: list[Tensor | None]
    """boundary tensors, by their slots"""
    activations: Activations | None = None
    """takes out what stages save for backward; None: all of it stays"""
    late: LateBlocks | None = None
    """brings whole weights that are updated under this forward; None: all are here"""
    num_posted: int = 0
    arrivals: dict[int, tuple[list[Arrival], dict[int, Tensor]]] = field(default_factory=dict)
    """what was posted for each receive, by its number, and the tensors that come in several
    messages, by their slots
    """
    roots: dict[Visit, list[Root]] = field(default_factory=dict)
    """where the backward starts, from forward to backward"""
    products: dict[Visit, list[Product]] = field(default_factory=dict)
    """weight products that were put off, from the input gradient of a backward to its weight
    gradient
    """
    num_in_flight: dict[int, int] = field(default_factory=dict)
    """by stage: micro-batches between their forward and their backward"""

    def post_receives(self, num_received: int = 0) -> None:
        """Posts receives as far ahead as the window says (`scheduling/queues.py`)."""
        stop = last_posted(self.num_posted, num_received, self.window, len(self.receives))
        while self.num_posted < stop:
            self.receives[self.num_posted].post(self)
            self.num_posted += 1

    def add(self, slot: int, gradient: Tensor) -> None:
        """Adds to the gradient of a result: one comes from each stage that used it."""
        known = self.held[slot]
        self.held[slot] = gradient if known is None else known + gradient


@dataclass(frozen=True, slots=True)
class _Argument:
    """Where a chunk gets one of its received tensors from."""

    slot: int
    gradient: bool
    source: int | None
    """slot of a result of another stage of this rank, which is taken as it is; None: a message"""
    empty: Tensor | None
    """on a grid, where none of its samples enter this device: no message brings it"""


class Forward:
    """Runs a chunk on one micro-batch."""

    def __init__(
        self,
        program: Program,
        action: Action,
        slots: Slots[Boundary],
        function: Callable[..., tuple[Tensor, ...]],
    ) -> None:
        chunk = program.chunks[action.stage]
        self.stage = action.stage
        self.micro_batch = action.micro_batch
        self.visit = (action.stage, action.micro_batch)
        self.chunk = chunk
        self.function = function
        self.seed_parts = program.seed_parts
        self.arguments = []
        for value in chunk.received:
            source = program.source_of[action.stage, value.index]
            self.arguments.append(
                _Argument(
                    slots.of[Role.INPUT, *self.visit, value.index],
                    value.gradient,
                    slots.of[Role.RESULT, source, action.micro_batch, value.index]
                    if source in program.chunks
                    else None,
                    _empty(program, action, value),
                )
            )
        self.results = [slots.of[Role.RESULT, *self.visit, value.index] for value in chunk.sent]
        self.inputs = [(place, program.batched[place]) for place in chunk.inputs]
        self.num_sent = len(chunk.sent)
        self.num_results = len(chunk.sent) + chunk.num_outputs
        self.is_idle = _is_idle(program, action)

    def run(self, state: Pass) -> None:
        if self.is_idle:
            self._meet(state)
            self._count(state, [])
            return
        received = [self._received(state, argument) for argument in self.arguments]
        if self.chunk.is_random:
            torch.manual_seed(self._seed(state.given.step))
        start, stop = state.given.samples[self.micro_batch]
        tensors = state.given.tensors
        inputs = (
            tensors[place][start:stop] if batched else tensors[place]
            for place, batched in self.inputs
        )
        activations = state.activations
        if activations is not None and activations.goes_out(self.stage):
            with activations.saving(self.visit, received):
                results = self.function(*received, *inputs)
        else:
            results = self.function(*received, *inputs)
        self._keep(state, results)

    def _received(self, state: Pass, argument: _Argument) -> Tensor:
        """A received tensor, or the result of another stage of this rank, as a leaf of this chunk's
        autograd graph.
        """
        tensor = state.held[argument.slot if argument.source is None else argument.source]
        if argument.source is None and argument.empty is not None:
            tensor = argument.empty.detach()
        assert tensor is not None
        if argument.source is not None:
            tensor = tensor.detach()
        if argument.gradient and state.gradients is not None:
            tensor.requires_grad_()
        state.held[argument.slot] = tensor
        return tensor

    def _keep(self, state: Pass, results: tuple[Tensor, ...]) -> None:
        chunk = self.chunk
        outcome = state.outcome
        roots: list[Root] = []
        for slot, result in zip(self.results, results, strict=False):
            state.held[slot] = result
            if state.gradients is not None:
                roots.append(get_gradient_edge(result) if result.requires_grad else None)
        if chunk.num_outputs:
            outputs = results[self.num_sent : self.num_results]
            outcome.outputs[self.visit] = tuple(output.detach() for output in outputs)
        if chunk.has_loss:
            loss = results[self.num_results]
            outcome.loss += loss.detach()
            roots.append(loss)
        for buffer, value in zip(
            chunk.updates, results[self.num_results + chunk.has_loss :], strict=True
        ):
            with torch.no_grad():
                buffer.copy_(value)
        self._count(state, roots)

    def _meet(self, state: Pass) -> None:
        """A rank without samples meets the others of its blocks where their forward needs them."""
        if state.late is not None:
            for use in self.chunk.uses:
                state.late.need(*use.blocks)

    def _count(self, state: Pass, roots: list[Root]) -> None:
        if state.gradients is not None:
            state.roots[self.visit] = roots
            count = state.num_in_flight[self.stage] = state.num_in_flight.get(self.stage, 0) + 1
            if count > state.outcome.peak_in_flight.get(self.stage, 0):
                state.outcome.peak_in_flight[self.stage] = count

    def _seed(self, step: int) -> int:
        parts = (*self.seed_parts, step, self.micro_batch, self.stage)
        return int.from_bytes(
            hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little"
        )


class Backward:
    """Differentiates what `Forward` saved: wholly, or with `deferred` without the weight products,
    which are saved for `WeightBackward`.
    """

    def __init__(
        self,
        program: Program,
        action: Action,
        slots: Slots[Boundary],
        is_last: bool,
        deferred: Deferred | None = None,
    ) -> None:
        """`is_last`: when it is done, all gradients of the stage are final."""
        chunk = program.chunks[action.stage]
        self.stage = action.stage
        self.visit = (action.stage, action.micro_batch)
        self.has_loss = chunk.has_loss
        self.is_last = is_last
        self.deferred = deferred
        self.is_idle = _is_idle(program, action)
        self.device = program.device.name
        start, stop = program.edges[action.micro_batch]
        # (slot of a result's gradient, what it is when none comes: zeros of this shape, or nothing)
        self.sent: list[tuple[int | None, tuple[int, ...] | None, torch.dtype]] = []
        for value in chunk.sent:
            slot = slots.of[Role.GRADIENT, *self.visit, value.index] if value.gradient else None
            # the next stage takes a value without samples from one device, and gives its gradient
            # back to that one; where the backward all-reduces, the others must run it as well
            is_of_one = value.gradient and value.batch_dim is None
            needs_zeros = chunk.is_sharded or (chunk.has_sums and is_of_one)
            zeros = value.shape_for(stop - start) if needs_zeros else None
            self.sent.append((slot, zeros, value.dtype))
        # (slot of a received tensor, the one that its gradient goes to, whether that belongs to a
        # stage of this rank)
        self.returned: list[tuple[int, int, bool]] = []
        for value in chunk.received:
            source = program.source_of[action.stage, value.index]
            if value.gradient:
                local = source in program.chunks
                role, stage = (Role.GRADIENT, source) if local else (Role.RETURNED, action.stage)
                target = slots.of[role, stage, action.micro_batch, value.index]
                self.returned.append(
                    (slots.of[Role.INPUT, *self.visit, value.index], target, local)
                )

    def run(self, state: Pass) -> None:
        known = state.roots.pop(self.visit)
        state.num_in_flight[self.stage] -= 1
        if self.is_idle:
            return  # its gradients, if there are any, are final when the stage is closed
        roots: list[Tensor | GradientEdge] = []
        seeds: list[Tensor] = []
        for (slot, zeros, dtype), root in zip(self.sent, known, strict=False):
            gradient = state.held[slot] if slot is not None else None
            if gradient is None and zeros is not None:
                # nobody wants this part; the exchanges behind it need all devices all the same
                gradient = torch.zeros(zeros, dtype=dtype, device=self.device)
            if gradient is not None and root is not None:
                roots.append(root)
                seeds.append(gradient)
        if self.has_loss:
            loss = known[-1]
            assert isinstance(loss, Tensor)
            if loss.requires_grad:
                roots.append(loss)
                scale = state.given.loss_scale
                if isinstance(scale, Tensor):
                    seeds.append(scale.to(loss.dtype).expand_as(loss))
                else:
                    seeds.append(torch.full_like(loss, scale))
        assert state.gradients is not None
        if self.deferred is not None:
            state.products[self.visit] = self.deferred.begin()
        else:
            state.gradients.begin_backward(self.stage, self.is_last)
        if state.activations is not None:
            state.activations.begin_backward(self.visit)
        if roots:
            run_backward(roots, seeds)
        if state.activations is not None:
            state.activations.end_backward(self.visit)
        if self.deferred is None:
            state.gradients.end_backward(self.stage)
        for slot, target, local in self.returned:
            tensor = state.held[slot]
            assert tensor is not None
            gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            # the tensor may wait long for a weight gradient, which needs no gradient of it
            tensor.grad = None
            if local:
                state.add(target, gradient)
            else:
                state.held[target] = gradient


class WeightBackward:
    """The weight products that the input gradient of a backward put off."""

    def __init__(self, action: Action) -> None:
        self.stage = action.stage
        self.visit = (action.stage, action.micro_batch)

    def run(self, state: Pass) -> None:
        # none where this device has no samples of the micro-batch
        run_products(state.products.pop(self.visit, []))
        if state.gradients is not None:
            state.gradients.end_backward(self.stage, is_second_half=True)


class Synchronise:
    """Starts the all-reduce and the update of a stage whose gradients are final."""

    def __init__(self, action: Action) -> None:
        self.stage = action.stage

    def run(self, state: Pass) -> None:
        if state.gradients is not None:
            state.gradients.close_stage(self.stage)
        if state.updates is not None:
            state.updates.close_stage(self.stage)


def _is_idle(program: Program, action: Action) -> bool:
    """The plan gives this device no sample of the micro-batch, so it does nothing for it: no
    message has a part of it either.
    """
    start, stop = program.samples[action.micro_batch]
    return start == stop


def _empty(program: Program, action: Action, value: CrossingValue) -> Tensor | None:
    start, stop = program.edges[action.micro_batch]
    if start < stop or value.batch_dim is None:
        return None
    return torch.empty(value.shape_for(0), dtype=value.dtype, device=program.device.name)
