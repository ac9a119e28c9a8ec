"""Runs the action list of one rank. It decides nothing: order, messages and samples were all fixed
by the plan.

What is the same in every step (where a tensor comes from, its shape, its place among the results,
tags) is looked up once, when the executor is made: every action becomes a prepared one
(`runtime/actions.py`), and a step is a loop over these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from whale.config_values import REDUCE_OVERHEAD
from whale.devices import Moment
from whale.distributed.platform import Event, PaceLike
from whale.distributed.transport import Transport
from whale.distributed.watch import Watch
from whale.lowering.blocks import backward_uses
from whale.lowering.program import Program
from whale.runtime.actions import Backward, Forward, Pass, Synchronise, WeightBackward
from whale.runtime.activations import Activations, BackwardOrder, Visit
from whale.runtime.boundaries import boundary_slots
from whale.runtime.code import compile_chunk
from whale.runtime.gradients import GradientSynchroniser
from whale.runtime.messages import Receive, Send
from whale.runtime.residence import Residence
from whale.runtime.split import Deferred
from whale.runtime.stage_updates import StageUpdates
from whale.runtime.updates_ahead import LateBlocks
from whale.scheduling import Action, Kind


@dataclass(frozen=True)
class StepInput:
    """What one run of a program works on."""

    tensors: Sequence[Tensor]
    """the graph's placeholders: batch tensors, then whole-mini-batch values"""
    step: int
    samples: Sequence[tuple[int, int]]
    """rows of the batch tensors that belong to each micro-batch"""
    loss_scale: float | Tensor = 1.0
    """what the gradient of the loss is multiplied by; on an accelerator only the device may know"""


@dataclass
class StepOutcome:
    """What one run of the program leaves behind, besides gradients."""

    loss: Tensor
    """this rank's part, float64"""
    outputs: dict[Visit, tuple[Tensor, ...]]
    events: list[Event] = field(default_factory=list)
    """in the order in which they began"""
    moments: list[tuple[Action, Moment, Moment]] = field(default_factory=list)
    """the same on an accelerator, until they are read (`runtime/timing.py`)"""
    peak_in_flight: dict[int, int] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        return sum(end - start for action, start, end in self.events if action.is_compute)


class PreparedAction(NamedTuple):
    """An action, ready to run."""

    action: Action
    run: Callable[[Pass], None]
    freed: tuple[int, ...]
    """slots whose boundary tensors nobody wants any more"""
    position: str
    """for messages about a failed job"""


class Executor:
    """Runs a program step by step."""

    def __init__(
        self,
        program: Program,
        transport: Transport | None,
        window: int,
        watch: Watch | None = None,
        with_torch_compile: bool | str = False,
        pace: PaceLike | None = None,
        residence: Residence | None = None,
    ) -> None:
        self.program = program
        self.residence = residence
        """brings weights that are not always here"""
        self.transport = transport
        self.window = window
        self.watch = watch
        self.with_torch_compile = with_torch_compile
        self.activations: Activations | None = None
        """takes out what stages save for backward; None: all of it stays"""
        self.late: LateBlocks | None = None
        """brings whole weights that are updated under the forward; None: all are here"""
        self._backward_order = BackwardOrder.of(program.actions)
        self.unconnected: Collection[tuple[int, int]] = ()
        """(source, destination) ranks of all messages of the job, until their channels are made"""
        self.first_window: int | None = None
        """receives that are posted ahead until one pass is over, which loads kernels; None: as
        many as later
        """
        self.pace = pace
        """how long compute actions take; None: as long as they do"""
        self._has_random = any(chunk.is_random for chunk in program.chunks.values())
        self._receives: list[Receive] = []
        self.slots = boundary_slots(program)
        """where boundary tensors lie"""
        self._prepared = self._prepare()
        self._uses = _uses(program)

    def _prepare(self) -> list[PreparedAction]:
        """Every action with the function that does it."""
        program = self.program
        split = {
            (action.stage, action.micro_batch)
            for action in program.actions
            if action.kind is Kind.INPUT
        }
        deferred: dict[int, Deferred] = {}
        last = {
            action.stage: action
            for action in program.actions
            if action.kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
        }
        sends: dict[Action, Send] = {}
        prepared: list[PreparedAction] = []
        num_actions = sum(action.kind is not Kind.UPDATE for action in program.actions)
        for action, freed in zip(program.actions, self.slots.freed, strict=True):
            if action.kind is Kind.FORWARD:
                is_split = (action.stage, action.micro_batch) in split
                function, deferred[action.stage] = self._function(action, is_split)
                run = Forward(program, action, self.slots, function).run
            elif action.kind is Kind.BACKWARD:
                run = Backward(program, action, self.slots, last[action.stage] is action).run
            elif action.kind is Kind.INPUT:
                run = Backward(program, action, self.slots, False, deferred[action.stage]).run
            elif action.kind is Kind.WEIGHT:
                run = WeightBackward(action).run
            elif action.kind is Kind.SEND:
                sends[action] = Send(program, action, self.slots)
                run = sends[action].run
            elif action.kind is Kind.RECEIVE:
                arrived = [sends[send] for send in program.arrived_by[action]]
                self._receives.append(
                    Receive(program, action, self.slots, len(self._receives), arrived)
                )
                run = self._receives[-1].run
            elif action.kind is Kind.SYNCHRONISE:
                run = Synchronise(action).run
            else:
                continue
            prepared.append(
                PreparedAction(
                    action, run, freed, _position(len(prepared) + 1, action, run, num_actions)
                )
            )
        return prepared

    def _function(
        self, action: Action, is_split: bool
    ) -> tuple[Callable[..., tuple[Tensor, ...]], Deferred]:
        """What runs the chunk of an action, and where its split backward puts weight products.
        Executors for other batches share both: one runs at a time.
        """
        chunk = self.program.chunks[action.stage]
        start, stop = self.program.samples[action.micro_batch]
        num_samples = stop - start if chunk.is_sharded else 0
        deferred = chunk.compiled.setdefault("deferred", Deferred())
        key = (is_split, num_samples, self.with_torch_compile)
        if key not in chunk.compiled:
            name = f"stage {action.stage}" + ", split backward" * is_split
            if chunk.is_sharded:
                name += f", {num_samples} samples"
            chunk.compiled[key] = compile_chunk(
                chunk.module_for(stop - start),
                name,
                deferred if is_split else None,
                self.with_torch_compile,
            )
        return chunk.compiled[key], deferred

    def _begin(
        self,
        given: StepInput,
        outcome: StepOutcome,
        gradients: GradientSynchroniser | None,
        updates: StageUpdates | None,
    ) -> Pass:
        """State of a pass in which transport, blocks of weights and saved tensors are ready."""
        if self.transport is not None:
            if self.unconnected:
                self.transport.connect(self.unconnected)
                self.unconnected = ()
            self.transport.begin()
        if self.residence is not None:
            self.residence.begin(self._uses)
        held: list[Tensor | None] = [None] * self.slots.count
        window = self.window if self.first_window is None else self.first_window
        state = Pass(
            given, outcome, gradients, updates, self.transport, self._receives, window, held
        )
        state.late = self.late
        if self.activations is not None and gradients is not None:
            self.activations.begin(self._backward_order, given.tensors)
            state.activations = self.activations
        return state

    def run(
        self,
        given: StepInput,
        gradients: GradientSynchroniser | None,
        updates: StageUpdates | None = None,
    ) -> StepOutcome:
        """One pass over the action list. `gradients` is None for evaluation. `updates`: stages are
        updated before this rank would wait.
        """
        device = self.program.device
        if self.with_torch_compile == REDUCE_OVERHEAD:
            device.begin_replays()
        random_states = device.random_states() if self._has_random else None
        outcome = StepOutcome(torch.zeros((), dtype=torch.float64, device=device.name), {})
        now = device.event
        events: list[tuple[Action, Moment, Moment]] = outcome.events
        watch: Watch | DevicePosition | None = self.watch
        if device.is_accelerator:
            events = outcome.moments
            if self.watch is not None:
                watch = DevicePosition(self.watch, events, device.is_over)
        pace = self.pace
        state = self._begin(given, outcome, gradients, updates)
        held = state.held
        try:
            with torch.set_grad_enabled(gradients is not None):
                state.post_receives()
                for action, run, freed, position in self._prepared:
                    if watch is not None:
                        watch.position = position
                    start = now()
                    if updates is not None and updates.ready and action.kind is Kind.RECEIVE:
                        updates.run()
                        updated = now()
                        events.append((Action(Kind.UPDATE), start, updated))
                        start = updated
                    run(state)
                    for slot in freed:
                        held[slot] = None
                    if pace is not None and action.is_compute:
                        pace.finish(action, start)
                    events.append((action, start, now()))
            if watch is not None:
                watch.position = (
                    "all-reduce of gradients and loss"
                    if gradients is not None
                    else "all-reduce of the loss"
                )
            if self.transport is not None:
                self.transport.drain()
            self.first_window = None
        finally:
            if random_states is not None:
                device.set_random_states(random_states)
        return outcome


def _uses(program: Program) -> list[tuple[int, ...]]:
    """Blocks of weights in the order in which the actions of a program use them."""
    found: list[tuple[int, ...]] = []
    for action in program.actions:
        if action.kind is Kind.FORWARD:
            found += [use.blocks for use in program.chunks[action.stage].uses]
        elif action.kind in (Kind.BACKWARD, Kind.INPUT):
            found += backward_uses(program.chunks[action.stage].uses)
    return found


@dataclass(frozen=True)
class PendingAction:
    """An action that a device was given and has not finished."""

    where: str
    """`step 3, action 2 of 12, F 0.1`"""
    waits_for_others: bool
    """it is a message or a collective; otherwise this device itself takes so long"""


class DevicePosition:
    """Where the device of this rank stands, which may be far behind the host: the first action that
    is launched and not over. The watch asks, from its own thread.
    """

    def __init__(
        self,
        watch: Watch,
        moments: Sequence[tuple[Action, Moment, Moment]],
        is_over: Callable[[Moment], bool],
    ) -> None:
        self._moments = moments
        self._is_over = is_over
        self._watch = watch
        self._during = watch.during
        self._launched: list[str] = ["the start"]
        self._num_over = 0
        before = watch.position
        self._before = before if isinstance(before, DevicePosition) else None
        """that of the step before, until the device is through with it"""
        watch.position = self

    @property
    def pending(self) -> PendingAction | None:
        """What the device is at; None where all that it was given is over."""
        found = self._pending()
        if found is None:
            return None
        launched = _in_step(self._watch.during, self._launched[-1])
        if found.where == launched:
            return found
        return replace(found, where=f"{found.where} (launched so far: {launched})")

    def _pending(self) -> PendingAction | None:
        steps: list[DevicePosition] = [self]
        while (before := steps[-1]._before) is not None:
            steps.append(before)
        # the oldest first: the device is at the first of them that is not over
        for step in reversed(steps):
            step._before = None
            found = step._pending_here()
            if found is not None:
                return found
        return None

    def _pending_here(self) -> PendingAction | None:
        own = [moment for moment in list(self._moments) if moment[0].kind is not Kind.UPDATE]
        more = ""
        try:
            while self._num_over < len(own) and self._is_over(own[self._num_over][2]):
                self._num_over += 1
        except RuntimeError:  # the device has failed, and says no more how far it came
            more = " or later"
        launched = list(self._launched)
        if self._num_over >= min(len(own), len(launched) - 1):
            return None
        where = _in_step(self._during, launched[self._num_over + 1]) + more
        return PendingAction(where, not own[self._num_over][0].is_compute)

    @property
    def position(self) -> str:
        """Where the host stands."""
        return self._launched[-1]

    @position.setter
    def position(self, position: str) -> None:
        self._launched.append(position)

    def __str__(self) -> str:
        return self.position


def _in_step(during: str | None, place: str) -> str:
    return place if during is None else f"{during}, {place}"


def _position(place: int, action: Action, run: Callable[[Pass], None], num_actions: int) -> str:
    """`action 3 of 12, receive F 0>1.2 from rank 0`."""
    messages = getattr(getattr(run, "__self__", None), "messages", ())
    peers = ", ".join(str(message.peer) for message in messages)
    toward = (
        {Kind.SEND: f" to rank {peers}", Kind.RECEIVE: f" from rank {peers}"}.get(action.kind, "")
        if peers
        else ""
    )
    return f"action {place} of {num_actions}, {action}{toward}"
