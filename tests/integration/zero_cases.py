"""Models under ZeRO on real ranks, and the same locally: the table of `test_zero.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

import whale as wh
from tests.exactness import Float64Mode, Trace, local_training
from tests.integration.table import NUM_STEPS
from tests.integration.training import Subject, batches, prepare_subject
from tests.ranks import ModelServer
from whale.capture.batch import read_batch
from whale.emulation.emulation import platform_of_this_job
from whale.model_planner import ModelPlanner
from whale.planning.zero_blocks import Sharing, blocks_of
from whale.plans.plan import Plan
from whale.runtime.engine import Engine
from whale.session import ranks_of_job


def sgd(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(pairs, lr=0.1, momentum=0.9)


def adamw(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pairs, lr=0.01)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
MODELS = ("tied", "gpt2", "llama", "batch_norm", "resnet", "mixtral", "lora")


@dataclass(frozen=True)
class ZeroCase:
    """One way to run a model."""

    name: str
    num_ranks: int
    config: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    """devices of each annotated stage; a negative number: a `split` over so many"""
    fractions: tuple[float, ...] = ()
    """of every group of as many ranks: what each holds; none: even"""

    @property
    def num_micro_batch(self) -> int:
        return int(self.config.get("num_micro_batch", 1))


TWO = {"num_micro_batch": 2}
WAYS = (
    ZeroCase("DP 2", 2),
    ZeroCase("DP 3, 2 micro-batches", 3, TWO),
    ZeroCase("DP 4", 4),
    ZeroCase("DP 2, uneven", 2, TWO, fractions=(0.8, 0.2)),
    ZeroCase("DP 3, one holds nothing", 3, fractions=(0.37, 0.0, 0.63)),
    ZeroCase("DP 4, uneven", 4, fractions=(0.1, 0.45, 0.0, 0.45)),
    ZeroCase("2 stages x 2", 4, TWO, (1, 1)),
    ZeroCase("2 stages x 2, uneven", 4, TWO, (1, 1), (0.25, 0.75)),
    ZeroCase("replicate(2) -> replicate(1)", 3, TWO, (2, 1)),
    ZeroCase("wave x 2", 4, {**TWO, "schedule": "wave", "num_task_graph": 2}),
    ZeroCase("zero-bubble x 2", 4, {**TWO, "schedule": "zero-bubble", "num_task_graph": 2}),
    ZeroCase("recompute", 2, {**TWO, "recompute": True}, fractions=(0.3, 0.7)),
    ZeroCase("beside split", 4, TWO, (2, -2)),
    ZeroCase("by gloo, uneven", 3, {**TWO, "share_memory": False}, fractions=(0.5, 0.0, 0.5)),
    ZeroCase("by gloo, 2 stages x 2", 4, {**TWO, "share_memory": False}, (1, 1)),
)


def engine_of(
    subject: Subject, case: ZeroCase, optimizer: Any, level: int, **settings: Any
) -> Engine:
    """The engine of one rank."""
    config = _settle(subject, case, level, settings)
    sample = batches(subject.case, False, 1)[0]
    plan = None
    if case.fractions and level:
        plan = recut(_plan_of(subject, config), subject, case.fractions)
    return wh.parallelize(
        subject.model,
        sample,
        optimizer=optimizer,
        loss=subject.case.loss,
        prepared=subject.prepared,
        plan=plan,
    )


def _settle(subject: Subject, case: ZeroCase, level: int, settings: dict[str, Any]) -> wh.Config:
    """The config of the job; the model gets its annotations."""
    config = wh.Config({**case.config, "zero": level, **settings})
    wh.init(config)
    if case.stages:
        globs = subject.case.cuts(len(case.stages))
        marks = [wh.replicate(d) if d > 0 else wh.split(-d) for d in case.stages]
        named = {"|".join(glob): mark for glob, mark in zip(globs, marks, strict=True)}
        wh.annotate(subject.model, named)
    return config


def plan_of(subject: Subject, case: ZeroCase, level: int, **settings: Any) -> Plan:
    """The plan of the job, with the parts of every block that the case says."""
    made = _plan_of(subject, _settle(subject, case, level, settings))
    return recut(made, subject, case.fractions) if case.fractions and level else made


def _plan_of(subject: Subject, config: wh.Config) -> Plan:
    assert subject.prepared is not None
    cluster = platform_of_this_job(ranks_of_job()).cluster(None)
    layout, _ = read_batch(batches(subject.case, False, 1)[0])
    planner = ModelPlanner(subject.model, cluster, config, layout.batch_size)
    return planner.plan(subject.prepared, {})


def recut(plan: Plan, subject: Subject, fractions: Sequence[float]) -> Plan:
    """The plan with these parts on every group of as many ranks."""
    assert subject.prepared is not None
    groups = {block.ranks for block in plan.blocks}
    chosen = {ranks: fractions for ranks in groups if len(ranks) == len(fractions)}
    assert chosen, f"no ranks share {len(fractions)} parts: {groups}"
    blocks = blocks_of(Sharing.of_plan(plan, subject.prepared.captured), chosen)
    first = plan.blocks[0]
    homes = {"weights": first.weights, "states": first.states, "gradients": first.gradients}
    return replace(plan, blocks=tuple(replace(block, **homes) for block in blocks))


@dataclass
class ZeroTrace:
    """What one rank saw; gradients and state on rank 0."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    level: int
    num_held: int
    """elements that this rank's optimizer updates"""


def train(subject: Subject, case: ZeroCase, optimizer: str, level: int) -> ZeroTrace:
    """Three steps on one rank."""
    with Float64Mode():
        data = batches(subject.case, False, NUM_STEPS)
        engine = engine_of(subject, case, OPTIMIZERS[optimizer], level)
        losses = []
        gradients: dict[str, Tensor] = {}
        for batch in data:
            losses.append(engine.step(batch).loss)
            if len(losses) == 1:
                gradients = engine.full_gradients()
        num_held = sum(tensor.numel() for _, tensor in engine.named_parameters())
        trace = ZeroTrace(losses, gradients, engine.full_state_dict(), engine.plan.zero, num_held)
        if not subject.case.batch_statistics:
            evaluated = engine.evaluate(data[0]).loss
            trained = engine.step(data[0]).loss
            assert evaluated is not None and abs(evaluated - trained) < 1e-10 * abs(trained)
        return trace


def train_locally(subject: Subject, optimizer: str, num_micro_batch: int) -> Trace:
    """The same in plain PyTorch."""
    case = subject.case
    with Float64Mode():
        return local_training(
            case.build(),
            batches(case, False, NUM_STEPS),
            case.loss,
            OPTIMIZERS[optimizer],
            num_micro_batch if case.batch_statistics else 1,
        )


def trace_of(first: ZeroTrace, reference: Trace) -> Trace:
    """What rank 0 saw, as local training says it."""
    weights = {name: first.state[name] for name in reference.weights}
    buffers = {name: first.state[name] for name in reference.buffers or {}}
    return Trace(first.losses, first.gradients, weights, buffers)


class Servers:
    """Models that are captured when a test first asks for them, and their local training."""

    def __init__(self) -> None:
        self._made: dict[str, ModelServer] = {}
        self._references: dict[tuple[str, str, int], Trace] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self._made.values():
            server.close()

    def __getitem__(self, model: str) -> ModelServer:
        if model not in self._made:
            self._made[model] = ModelServer(prepare_subject, model)
        return self._made[model]

    def reference(self, model: str, optimizer: str, num_micro_batch: int) -> Trace:
        """The same in plain PyTorch."""
        key = (model, optimizer, num_micro_batch)
        if key not in self._references:
            made = self[model].run_local(train_locally, optimizer, num_micro_batch)
            self._references[key] = made
        return self._references[key]
