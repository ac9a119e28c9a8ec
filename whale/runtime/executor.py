"""Runs the action list of one rank. It decides nothing: order, messages and samples were all fixed by the plan.

For each micro-batch a stage keeps its received inputs and its results from forward to backward, and lets go of them there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whale.lowering.chunk import Value
from whale.lowering.messages import Part
from whale.lowering.program import Program
from whale.runtime.gradients import GradientSynchroniser
from whale.runtime.transport import Arrival, Transport, as_message
from whale.runtime.watch import Watch
from whale.scheduling import Action, Kind

Slot = tuple[int, int]  # (stage, micro-batch)


@dataclass(frozen=True)
class StepInput:
    """What one run of a program works on."""

    tensors: Sequence[Tensor]
    """the graph's placeholders: batch tensors, then whole-mini-batch values"""
    step: int
    samples: Sequence[tuple[int, int]]
    """rows of the batch tensors that belong to each micro-batch"""
    loss_scale: float = 1.0


@dataclass
class StepOutcome:
    """What one run of the program leaves behind, besides gradients."""

    loss: Tensor
    """this rank's part, float64"""
    outputs: dict[Slot, tuple[Tensor, ...]]
    events: list[tuple[Action, float, float]] = field(default_factory=list)
    """(action, start, end) on this process's clock"""
    peak_in_flight: dict[int, int] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        return sum(end - start for action, start, end in self.events if action.is_compute)


class Executor:
    """Interprets a program step by step."""

    def __init__(self, program: Program, transport: Transport | None, window: int, watch: Watch | None = None) -> None:
        self.program, self.transport, self.window, self.watch = program, transport, window, watch
        self._receives = [action for action in program.actions if action.kind is Kind.RECEIVE]
        self._has_random = any(chunk.is_random for chunk in program.chunks.values())

    def run(self, given: StepInput, gradients: GradientSynchroniser | None) -> StepOutcome:
        """One pass over the action list. `gradients` is None for evaluation."""
        state = torch.random.get_rng_state() if self._has_random else None
        run = _Run(self, given, gradients)
        events = run.outcome.events
        try:
            with torch.set_grad_enabled(gradients is not None):
                for action in self.program.actions:
                    if self.watch is not None:
                        self.watch.position = action
                    start = time.perf_counter()
                    run.do(action)
                    events.append((action, start, time.perf_counter()))
            if self.transport is not None:
                self.transport.drain()
        finally:
            if state is not None:
                torch.random.set_rng_state(state)
        return run.outcome


class _Run:
    """State of one pass."""

    def __init__(self, executor: Executor, given: StepInput, gradients: GradientSynchroniser | None) -> None:
        self.program, self.transport, self.window = executor.program, executor.transport, executor.window
        self.receives = executor._receives
        self.tensors, self.samples, self.step, self.gradients = given.tensors, given.samples, given.step, gradients
        self.loss_scale = given.loss_scale
        self.arrivals: dict[Action, list[tuple[Part, Arrival, Tensor]]] = {}
        self.num_posted = self.num_received = 0
        self.received: dict[tuple[int, int, int], Tensor] = {}  # (stage, micro-batch, value)
        self.incoming: dict[tuple[int, int, int], Tensor] = {}  # gradients of results, summed over consumers
        self.kept: dict[Slot, tuple[list[Tensor], tuple[Tensor, ...]]] = {}  # received inputs and results, forward to backward
        self.input_gradients: dict[tuple[int, int, int], Tensor | None] = {}
        self.num_kept: dict[int, int] = {}
        self.uses_left: dict[Slot, int] = {}  # evaluation only
        self.outcome = StepOutcome(torch.zeros((), dtype=torch.float64, device=self.program.device), {})
        self._post()

    def do(self, action: Action) -> None:
        if self.transport is not None:
            self.transport.retire()
        if action.kind is Kind.FORWARD:
            self._forward(action.stage, action.micro_batch)
        elif action.kind is Kind.BACKWARD:
            self._backward(action.stage, action.micro_batch)
        elif action.kind is Kind.RECEIVE:
            self._receive(action)
        elif action.kind is Kind.SEND:
            self._send(action)
        elif action.kind is Kind.SYNCHRONISE and self.gradients is not None:
            self.gradients.close_stage(action.stage)

    # ---- compute

    def _forward(self, stage: int, micro_batch: int) -> None:
        chunk = self.program.chunks[stage]
        received = [self._input(stage, micro_batch, value) for value in chunk.received]
        for source in {self.program.source_of[stage, value.index] for value in chunk.received} & self.program.chunks.keys():
            self._used(source, micro_batch)
        if chunk.is_random:
            torch.manual_seed(self._seed(stage, micro_batch))
        start, stop = self.samples[micro_batch]
        inputs = [self.tensors[i][start:stop] if self.program.batched[i] else self.tensors[i] for i in chunk.inputs]
        results: tuple[Tensor, ...] = chunk.module(*received, *inputs)
        num_sent = len(chunk.sent)
        if chunk.num_outputs:
            self.outcome.outputs[stage, micro_batch] = results[num_sent : num_sent + chunk.num_outputs]
        num_results = num_sent + chunk.num_outputs
        if chunk.has_loss:
            self.outcome.loss += results[num_results].detach()
        for name, value in zip(chunk.updates, results[num_results + chunk.has_loss :], strict=True):
            with torch.no_grad():
                chunk.module.get_buffer(name).copy_(value)
        kept = results[:num_sent] + ((results[num_results],) if chunk.has_loss else ())
        self.kept[stage, micro_batch] = (received, kept)
        self.num_kept[stage] = self.num_kept.get(stage, 0) + 1
        self.outcome.peak_in_flight[stage] = max(self.outcome.peak_in_flight.get(stage, 0), self.num_kept[stage])
        if self.gradients is None:
            self.uses_left[stage, micro_batch] = len(self.program.consumers_of[stage])
            self._used(stage, micro_batch, uses=0)

    def _input(self, stage: int, micro_batch: int, value: Value) -> Tensor:
        """A received tensor, or the result of another stage of this rank, as a leaf of this chunk's autograd graph."""
        tensor = self.received.pop((stage, micro_batch, value.index), None)
        if tensor is None:
            source = self.program.source_of[stage, value.index]
            place = [sent.index for sent in self.program.chunks[source].sent].index(value.index)
            tensor = self.kept[source, micro_batch][1][place].detach()
        return tensor.requires_grad_() if value.gradient and self.gradients is not None else tensor

    def _backward(self, stage: int, micro_batch: int) -> None:
        chunk = self.program.chunks[stage]
        received, results = self.kept.pop((stage, micro_batch))
        self.num_kept[stage] -= 1
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        for value, result in zip(chunk.sent, results, strict=False):
            gradient = self.incoming.pop((stage, micro_batch, value.index), None)
            if gradient is not None and result.requires_grad:
                roots.append(result)
                seeds.append(gradient)
        if chunk.has_loss and results[-1].requires_grad:
            roots.append(results[-1])
            seeds.append(None if self.loss_scale == 1.0 else torch.full_like(results[-1], self.loss_scale))
        assert self.gradients is not None
        if micro_batch == self.program.num_micro_batch - 1:
            self.gradients.last_backward(stage)
        if roots:
            torch.autograd.backward(roots, seeds)
        for value, tensor in zip(chunk.received, received, strict=True):
            if value.gradient:
                self._hand_back(stage, micro_batch, value, tensor)

    def _hand_back(self, stage: int, micro_batch: int, value: Value, tensor: Tensor) -> None:
        gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
        source = self.program.source_of[stage, value.index]
        if source in self.program.chunks:
            self._add_incoming(source, micro_batch, value.index, gradient)
        else:
            self.input_gradients[stage, micro_batch, value.index] = gradient

    def _add_incoming(self, stage: int, micro_batch: int, value: int, gradient: Tensor) -> None:
        known = self.incoming.get((stage, micro_batch, value))
        self.incoming[stage, micro_batch, value] = gradient if known is None else known + gradient

    def _used(self, stage: int, micro_batch: int, uses: int = 1) -> None:
        """In evaluation nothing is differentiated: results go when the last stage that wants them has them."""
        if self.gradients is None:
            self.uses_left[stage, micro_batch] -= uses
            if self.uses_left[stage, micro_batch] == 0:
                self.kept.pop((stage, micro_batch))
                self.num_kept[stage] -= 1

    def _seed(self, stage: int, micro_batch: int) -> int:
        parts = (*self.program.seed_parts, self.step, micro_batch, stage)
        return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "little")

    # ---- messages

    def _parts(self, action: Action) -> tuple[Part, ...]:
        bridges = self.program.bridges
        if action.gradient:
            key = (action.destination, action.source, action.micro_batch)
            parts = bridges.sending if action.kind is Kind.RECEIVE else bridges.receiving
            return tuple(part for part in parts.get(key, ()) if part.value.gradient)
        key = (action.source, action.destination, action.micro_batch)
        return (bridges.receiving if action.kind is Kind.RECEIVE else bridges.sending).get(key, ())

    def _post(self) -> None:
        """Posts receives ahead, at most `window` actions beyond the one that is waited for next."""
        while self.num_posted < min(len(self.receives), self.num_received + self.window):
            action = self.receives[self.num_posted]
            start, stop = self.samples[action.micro_batch]
            buffers: dict[int, Tensor] = {}
            posted = []
            for part in self._parts(action):
                value = part.value
                if part.is_all or value.index not in buffers:
                    whole = torch.empty(value.shape_for(stop - start), dtype=value.dtype, device=self.program.device)
                    buffers[value.index] = whole
                whole = buffers[value.index]
                buffer = whole if part.is_all else _slice(whole, part)
                if not buffer.is_contiguous():
                    buffer = torch.empty(buffer.shape, dtype=value.dtype, device=self.program.device)
                assert self.transport is not None
                arrival = self.transport.post(buffer, part.peer, part.tag + action.gradient, str(action))
                posted.append((part, arrival, whole))
            self.arrivals[action] = posted
            self.num_posted += 1

    def _receive(self, action: Action) -> None:
        self.num_received += 1
        self._post()
        assert self.transport is not None
        complete: dict[int, Tensor] = {}
        for part, arrival, whole in self.arrivals.pop(action):
            self.transport.wait(arrival)
            if not part.is_all:
                target = _slice(whole, part)
                if target.data_ptr() != arrival.buffer.data_ptr():
                    target.copy_(arrival.buffer)
            elif part.value.index in complete:
                whole = complete[part.value.index] + whole  # a value without batch dim, used by several devices
            complete[part.value.index] = whole
        for index, tensor in complete.items():
            if action.gradient:
                self._add_incoming(action.stage, action.micro_batch, index, tensor)
            else:
                self.received[action.stage, action.micro_batch, index] = tensor

    def _send(self, action: Action) -> None:
        assert self.transport is not None
        for part in self._parts(action):
            if action.gradient:
                tensor = self.input_gradients[action.stage, action.micro_batch, part.value.index]
            else:
                place = [value.index for value in self.program.chunks[action.stage].sent].index(part.value.index)
                tensor = self.kept[action.stage, action.micro_batch][1][place]
            assert tensor is not None
            piece = as_message(tensor if part.is_all else _slice(tensor, part))
            self.transport.send(piece, part.peer, part.tag + action.gradient)
        if action.gradient:
            for part in self._parts(action):
                self.input_gradients.pop((action.stage, action.micro_batch, part.value.index), None)
        else:
            self._used(action.stage, action.micro_batch)


def _slice(tensor: Tensor, part: Part) -> Tensor:
    rows = part.value.rows_per_sample()
    assert part.value.batch_dim is not None
    return tensor.narrow(part.value.batch_dim, part.start * rows, part.num_samples * rows)
