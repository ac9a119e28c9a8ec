"""Models whose optimizer states, weights or activations live on the host or on disk, on real ranks:
the table of `test_offload.py`.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import whale as wh
from tests.exactness import Float64Mode
from tests.integration.held_updates import HeldUpdates, held_updates
from tests.integration.table import NUM_STEPS
from tests.integration.training import Subject, batches
from tests.integration.zero_cases import OPTIMIZERS, ZeroCase, ZeroTrace, engine_of, plan_of
from whale.plans.blocks import Memory
from whale.runtime import activations
from whale.runtime.engine import Engine


@dataclass(frozen=True)
class OffloadCase(ZeroCase):
    """One way to run a model."""

    segment_bytes: int = activations.SEGMENT_BYTES
    """of activations that go out together"""
    is_direct: bool = False
    """every backward comes right after its forward, and one segment holds all: nothing goes out"""


TWO = {"num_micro_batch": 2}
GPIPE = {**TWO, "schedule": "gpipe"}
WAVE = {**TWO, "schedule": "wave", "num_task_graph": 2}
ZERO_BUBBLE = {**TWO, "schedule": "zero-bubble", "num_task_graph": 2}
WAYS = (
    OffloadCase("one rank", 1, TWO, is_direct=True),
    OffloadCase("DP 2", 2, is_direct=True),
    OffloadCase("DP 2, small segments", 2, segment_bytes=4096),
    OffloadCase("DP 2, gpipe", 2, GPIPE),
    OffloadCase("DP 2, uneven", 2, TWO, fractions=(0.8, 0.2), is_direct=True),
    OffloadCase("DP 2, gloo", 2, {**GPIPE, "share_memory": False}),
    OffloadCase("2 stages", 2, {"num_micro_batch": 3}, (1, 1)),
    OffloadCase("2 stages x 2", 4, TWO, (1, 1)),
    OffloadCase("wave", 2, WAVE, segment_bytes=8192),
    OffloadCase("zero-bubble", 2, ZERO_BUBBLE),
    OffloadCase("recompute", 2, {**TWO, "recompute": True}, segment_bytes=4096),
    OffloadCase("beside split", 4, TWO, (2, -2)),
)


@dataclass(frozen=True)
class Placement:
    """Where each class lives."""

    states: Memory = "device"
    weights: Memory = "device"
    activations: Memory = "device"
    mixed: int | None = None
    """start of random numbers by which some blocks stay on the device; None: none do"""
    gradients: Memory = "device"
    updated_on: str | None = None
    """where blocks are updated whose states are elsewhere; None: as the planner says"""
    ahead: bool = False
    """updates on the host run under the next forward, each as late as that allows"""

    @property
    def config(self) -> dict[str, str]:
        """The config of a case as a user writes it."""
        return {
            "optimizer": self.states,
            "weights": self.weights,
            "activations": self.activations,
            "gradients": self.gradients,
        }

    def __str__(self) -> str:
        asked = self.config.items()
        words = [f"{key} {value}" for key, value in asked if value != "device"]
        words += [f"updated on {self.updated_on}"] * bool(self.updated_on)
        return ", ".join(words + ["ahead"] * self.ahead)


def offloading_engine(
    subject: Subject, case: OffloadCase, optimizer: Any, level: int, placement: Placement
) -> Engine:
    """The engine of one rank. Files go to the run folder of `case.config`."""
    if placement.mixed is None and placement.updated_on is None and not placement.ahead:
        return engine_of(subject, case, optimizer, level, offload=placement.config)
    plan = plan_of(subject, case, level, offload=placement.config)
    draws = random.Random(placement.mixed)
    blocks = []
    for block in plan.blocks:
        states = block.states
        weights = block.weights
        if placement.mixed is not None:
            states = draws.choice(("device", states))
            weights = draws.choice(("device", weights))
        updated_on = placement.updated_on or block.updated_on
        if states == "device":
            updated_on = "device"
        blocks.append(replace(block, states=states, weights=weights, updated_on=updated_on))
    return wh.parallelize(
        subject.model,
        batches(subject.case, False, 1)[0],
        optimizer=optimizer,
        loss=subject.case.loss,
        prepared=subject.prepared,
        plan=replace(plan, blocks=tuple(blocks), updates_ahead=placement.ahead),
    )


@dataclass
class OffloadTrace(ZeroTrace):
    """What one rank saw."""

    num_bytes_moved: dict[str, int]
    """between homes and the device, by class"""
    num_updates: int = 0
    """of blocks, under the next forward"""


def train(
    subject: Subject,
    case: OffloadCase,
    optimizer: str,
    level: int,
    placement: Placement,
    folder: Path,
) -> OffloadTrace:
    """Three steps on one rank."""
    holding: AbstractContextManager[HeldUpdates | None] = nullcontext()
    if placement.ahead:
        holding = held_updates()
    with Float64Mode(), holding as held:
        data = batches(subject.case, False, NUM_STEPS)
        activations.SEGMENT_BYTES = case.segment_bytes
        case = replace(case, config={**case.config, "run_folder": str(folder)})
        engine = offloading_engine(subject, case, OPTIMIZERS[optimizer], level, placement)
        losses = []
        gradients = {}
        for batch in data:
            losses.append(engine.step(batch).loss)
            if len(losses) == 1:
                gradients = engine.full_gradients()
        state = engine.full_state_dict()
        moved = {what: homes.num_bytes_moved for what, homes in engine._job.home_makers.items()}
        trace = OffloadTrace(losses, gradients, state, engine.plan.zero, 0, moved)
        if not subject.case.batch_statistics:
            evaluated = engine.evaluate(data[0]).loss
            trained = engine.step(data[0]).loss
            assert evaluated is not None and abs(evaluated - trained) < 1e-10 * abs(trained)
        engine.close()
        trace.num_updates = held.num_updates if held is not None else 0
        return trace
