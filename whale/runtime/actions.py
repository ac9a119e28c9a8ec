"""Actions of one rank, prepared for one program: everything that is the same in every step was looked up when they were made.

For each micro-batch a stage keeps its received inputs and its results from forward to backward, and lets go of them there.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whale.lowering.chunk import Value
from whale.lowering.messages import Part
from whale.lowering.program import Program
from whale.runtime.gradients import GradientSynchroniser
from whale.runtime.split import Deferred, Product, run_products
from whale.runtime.transport import Arrival, Transport, as_message
from whale.scheduling import Action, Kind

if TYPE_CHECKING:
    from whale.runtime.executor import StepInput, StepOutcome

Slot = tuple[int, int]  # (stage, micro-batch)
ValueKey = tuple[int, int, int]  # (stage, micro-batch, value)

NUM_SHAPE_TAGS = 61  # tags have 31 bits: this leaves 35 million messages of one step


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
    arrivals: dict[Action, list[tuple[Arrival, Tensor]]] = field(default_factory=dict)
    received: dict[ValueKey, Tensor] = field(default_factory=dict)
    incoming: dict[ValueKey, Tensor] = field(default_factory=dict)
    """gradients of results, summed over consumers"""
    kept: dict[Slot, tuple[list[Tensor], tuple[Tensor, ...]]] = field(default_factory=dict)
    """received inputs and results, from forward to backward"""
    products: dict[Slot, list[Product]] = field(default_factory=dict)
    """weight products that were put off, from the input part of a backward to its weight part"""
    input_gradients: dict[ValueKey, Tensor] = field(default_factory=dict)
    """on their way to the stage that made the input"""
    num_kept: dict[int, int] = field(default_factory=dict)
    uses_left: dict[Slot, int] = field(default_factory=dict)
    """evaluation only"""

    def post_receives(self, num_received: int = 0) -> None:
        stop = min(len(self.receives), num_received + self.window)
        while self.num_posted < stop:
            self.receives[self.num_posted].post(self)
            self.num_posted += 1

    def add_incoming(self, key: ValueKey, gradient: Tensor) -> None:
        known = self.incoming.get(key)
        self.incoming[key] = gradient if known is None else known + gradient

    def used(self, slot: Slot, uses: int = 1) -> None:
        """In evaluation nothing is differentiated: results go when the last stage that wants them has them."""
        if self.gradients is None:
            self.uses_left[slot] -= uses
            if self.uses_left[slot] == 0:
                self.kept.pop(slot)
                self.num_kept[slot[0]] -= 1


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
                    _place(program, source, value.index) if local else 0,
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
            self._hold(this, [], ())
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
            tensor = this.kept[argument.source][1][argument.place].detach()
        return tensor.requires_grad_() if argument.gradient and this.gradients is not None else tensor

    def _keep(self, this: Pass, received: list[Tensor], results: tuple[Tensor, ...]) -> None:
        chunk, outcome = self.chunk, this.outcome
        kept = results[: self.num_sent]
        if chunk.num_outputs:
            outcome.outputs[self.slot] = results[self.num_sent : self.num_results]
        if chunk.has_loss:
            loss = results[self.num_results]
            outcome.loss += loss.detach()
            kept = (*kept, loss)
        for buffer, value in zip(chunk.updates, results[self.num_results + chunk.has_loss :], strict=True):
            with torch.no_grad():
                buffer.copy_(value)
        self._hold(this, received, kept)

    def _hold(self, this: Pass, received: list[Tensor], kept: tuple[Tensor, ...]) -> None:
        outcome, stage = this.outcome, self.stage
        this.kept[self.slot] = (received, kept)
        this.num_kept[stage] = this.num_kept.get(stage, 0) + 1
        outcome.peak_in_flight[stage] = max(outcome.peak_in_flight.get(stage, 0), this.num_kept[stage])
        if this.gradients is None:
            this.uses_left[self.slot] = self.num_consumers
            this.used(self.slot, uses=0)

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
        self.is_idle, self.is_sharded = _is_idle(program, action), chunk.is_sharded
        self.sent = [(*self.slot, value.index) for value in chunk.sent]
        # (place among the received tensors, where its gradient goes, whether that is a stage of this rank)
        self.returned: list[tuple[int, ValueKey, bool]] = []
        for place, value in enumerate(chunk.received):
            source = program.source_of[action.stage, value.index]
            if value.gradient:
                local = source in program.chunks
                self.returned.append((place, (source if local else action.stage, action.micro_batch, value.index), local))

    def run(self, this: Pass) -> None:
        received, results = this.kept.pop(self.slot)
        this.num_kept[self.stage] -= 1
        if self.is_idle:
            return  # its gradients, if there are any, are final when the stage is closed
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        for key, result in zip(self.sent, results, strict=False):
            gradient = this.incoming.pop(key, None)
            if gradient is None and self.is_sharded:  # nobody wants this part; the exchanges behind it need all devices all the same
                gradient = torch.zeros_like(result)
            if gradient is not None and result.requires_grad:
                roots.append(result)
                seeds.append(gradient)
        if self.has_loss and results[-1].requires_grad:
            scale = this.given.loss_scale
            roots.append(results[-1])
            seeds.append(None if scale == 1.0 else torch.full_like(results[-1], scale))
        assert this.gradients is not None
        if self.is_last:
            this.gradients.last_backward(self.stage)
        if self.deferred is not None:
            this.products[self.slot] = self.deferred.begin()
        if roots:
            torch.autograd.backward(roots, seeds)
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """One message: a whole tensor, or rows of it."""

    key: ValueKey
    place: int
    """among the results of the sending chunk"""
    peer: int
    tag: int
    rows: tuple[int, int, int] | None
    """dim, start and length; None: everything"""
    shape: tuple[int, ...]
    """of the whole tensor"""
    dtype: torch.dtype

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor.narrow(*self.rows)


class Send:
    """Sends the results of a forward, or the gradients of received inputs after a backward."""

    def __init__(self, program: Program, action: Action) -> None:
        self.gradient, self.slot = action.gradient, (action.stage, action.micro_batch)
        self.pieces = _pieces(program, action)

    def run(self, this: Pass) -> None:
        assert this.transport is not None
        for piece in self.pieces:
            tensor = this.input_gradients[piece.key] if self.gradient else this.kept[self.slot][1][piece.place]
            this.transport.send(as_message(piece.of(tensor)), piece.peer, piece.tag)
        if self.gradient:
            for piece in self.pieces:
                this.input_gradients.pop(piece.key, None)
        else:
            this.used(self.slot)


class Receive:
    """Waits for tensors or gradients that were posted earlier."""

    def __init__(self, program: Program, action: Action, num_before: int) -> None:
        """`num_before`: receives of the program that come earlier."""
        self.action, self.description, self.device, self.num_before = action, str(action), program.device, num_before
        self.pieces = _pieces(program, action)

    def post(self, this: Pass) -> None:
        assert this.transport is not None
        wholes: dict[ValueKey, Tensor] = {}
        posted = []
        for piece in self.pieces:
            if piece.rows is None or piece.key not in wholes:
                wholes[piece.key] = torch.empty(piece.shape, dtype=piece.dtype, device=self.device)
            whole = wholes[piece.key]
            buffer = piece.of(whole)
            if not buffer.is_contiguous():
                buffer = torch.empty(buffer.shape, dtype=piece.dtype, device=self.device)
            posted.append((this.transport.post(buffer, piece.peer, piece.tag, self.description), whole))
        this.arrivals[self.action] = posted

    def run(self, this: Pass) -> None:
        this.post_receives(self.num_before + 1)
        assert this.transport is not None
        complete: dict[ValueKey, Tensor] = {}
        for piece, (arrival, whole) in zip(self.pieces, this.arrivals.pop(self.action), strict=True):
            this.transport.wait(arrival)
            if piece.rows is not None:
                target = piece.of(whole)
                if target.data_ptr() != arrival.buffer.data_ptr():
                    target.copy_(arrival.buffer)
            elif piece.key in complete:
                whole = complete[piece.key] + whole  # a value without batch dim, used by several devices
            complete[piece.key] = whole
        for key, tensor in complete.items():
            if self.action.gradient:
                this.add_incoming(key, tensor)
            else:
                this.received[key] = tensor


def _is_idle(program: Program, action: Action) -> bool:
    """The plan gives this device no sample of the micro-batch, so it does nothing for it: no message has a part of it either."""
    start, stop = program.samples[action.micro_batch]
    return start == stop


def _empty(program: Program, action: Action, value: Value) -> Tensor | None:
    start, stop = program.edges[action.micro_batch]
    if start < stop or value.batch_dim is None:
        return None
    return torch.empty(value.shape_for(0), dtype=value.dtype, device=program.device)


def _place(program: Program, stage: int, value: int) -> int:
    """Of a value among the results of a stage of this rank."""
    return [sent.index for sent in program.chunks[stage].sent].index(value)


def _pieces(program: Program, action: Action) -> list[_Piece]:
    bridges, is_receive = program.bridges, action.kind is Kind.RECEIVE
    if action.gradient:  # the gradient takes the way of its value backwards
        key = (action.destination, action.source, action.micro_batch)
        parts = tuple(part for part in (bridges.sending if is_receive else bridges.receiving).get(key, ()) if part.value.gradient)
    else:
        key = (action.source, action.destination, action.micro_batch)
        parts = (bridges.receiving if is_receive else bridges.sending).get(key, ())
    return [_piece(program, action, part) for part in parts]


def _piece(program: Program, action: Action, part: Part) -> _Piece:
    value = part.value
    start, stop = program.edges[action.micro_batch]
    rows = None
    if not part.is_all:
        assert value.batch_dim is not None
        per_sample = value.rows_per_sample()
        rows = (value.batch_dim, part.start * per_sample, part.num_samples * per_sample)
    shape = value.shape_for(stop - start)
    sends_result = action.kind is Kind.SEND and not action.gradient
    return _Piece(
        key=(action.stage, action.micro_batch, value.index),
        place=_place(program, action.stage, value.index) if sends_result else 0,
        peer=part.peer,
        tag=_tag(part.tag + action.gradient, shape, rows),
        rows=rows,
        shape=shape,
        dtype=value.dtype,
    )


def _tag(number: int, shape: tuple[int, ...], rows: tuple[int, int, int] | None) -> int:
    """A number for the message in which its shape takes part: ranks with batches of unlike shapes wait for each other, and the watch says
    why, instead of reading a message of another size (gloo ends the process when it is too long and says nothing when it is too short)."""
    sizes = shape if rows is None else shape[: rows[0]] + (rows[2],) + shape[rows[0] + 1 :]
    return number * NUM_SHAPE_TAGS + zlib.crc32(repr(tuple(map(int, sizes))).encode()) % NUM_SHAPE_TAGS
