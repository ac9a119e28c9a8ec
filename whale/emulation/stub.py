"""A small model that runs like a large plan: same stages, crossings, holders and schedule; one
number where the plan has tensors.

Every set of stages that hold the same parameters gets one parameter of one number; every value that
crosses becomes a [batch, 1] tensor, or [1, 1] where it has no batch dim; a value without gradient
is detached. Stage s computes

    h_s = batch + its parameters + all that it receives,
    value_k = tanh(h_s + k) or tanh(mean(h_s) + k),

and where the plan has a loss term, mean(h_s).

The machinery of real models (capture, lowering, bridges, executor, all-reduces) runs it
unchanged. Its losses mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.fx import Node

from whale.capture.batch import BatchLayout, read_batch
from whale.capture.capture import capture_training
from whale.capture.clean import Capture
from whale.capture.export import Task
from whale.capture.graph import module_name
from whale.capture.kinds import value_kinds
from whale.capture.losses import LossPlan, TermInfo
from whale.capture.prepare import CapturedModel
from whale.distributed.message import Message
from whale.lowering.chunk import crossing_values
from whale.planning.planner import apply_plan, fingerprint
from whale.planning.split import stage_program
from whale.planning.stages import Assignment
from whale.plans.figures import Figures
from whale.plans.plan import Crossing, LossTerm, Plan
from whale.plans.revise import revise
from whale.plans.sharding import StageSharding
from whale.sharding.solve import solve

VALUE = "value_"
STAGE = "stage_"


class _Value(nn.Module):
    """What crosses to other stages."""

    def __init__(self, number: int, gradient: bool) -> None:
        super().__init__()
        self.number = number
        self.gradient = gradient

    def forward(self, x: Tensor) -> Tensor:
        result = torch.tanh(x + self.number)
        return result if self.gradient else result.detach()


class _Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class _Stage(nn.Module):
    """One stage: [batch, 1] in, its crossing values and its loss term out."""

    def __init__(
        self, crossings: list[tuple[int, Crossing]], weights: list[nn.Parameter], has_loss: bool
    ) -> None:
        super().__init__()
        self.has_loss = has_loss
        self.weights = nn.ParameterList(weights)
        self.loss = _Loss()
        self.batched = {number: each.batched for number, each in crossings}
        for number, each in crossings:
            self.add_module(f"{VALUE}{number}", _Value(number, each.gradient))

    def forward(self, x: Tensor, received: list[Tensor]) -> tuple[dict[int, Tensor], Tensor | None]:
        whole = x
        for tensor in (*self.weights, *received):
            whole = whole + tensor
        values = {}
        for number, batched in self.batched.items():
            values[number] = self.get_submodule(f"{VALUE}{number}")(
                whole if batched else whole.mean().reshape(1, 1)
            )
        return values, self.loss(whole) if self.has_loss else None


class StubModel(nn.Module):
    """All stages of a plan; gives the loss of a batch [batch, 1]."""

    def __init__(self, plan: Plan, figures: Figures) -> None:
        super().__init__()
        self.crossings = plan.crossings
        numbers: dict[tuple[int, str], int] = {}
        for each in plan.crossings:
            numbers.setdefault((each.source, each.value), len(numbers))
        self.number_of = [numbers[each.source, each.value] for each in plan.crossings]
        groups = [
            (s.stages, nn.Parameter(torch.zeros(1, 1), requires_grad=s.trained_bytes > 0))
            for s in figures.states
            if s.weight_bytes
        ]
        with_loss = {term.stage for term in plan.loss_terms} | {
            stage.index for stage in plan.stages
        } - {c.source for c in plan.crossings}
        for stage in plan.stages:
            own = {
                number: each
                for number, each in zip(self.number_of, plan.crossings, strict=True)
                if each.source == stage.index
            }
            weights = [weight for stages, weight in groups if stage.index in stages]
            weights = weights or [nn.Parameter(torch.zeros(1, 1), requires_grad=False)]
            self.add_module(
                f"{STAGE}{stage.index}",
                _Stage(sorted(own.items()), weights, stage.index in with_loss),
            )

    def forward(self, x: Tensor) -> Tensor:
        values: dict[int, Tensor] = {}
        losses: list[Tensor] = []
        for index, stage in enumerate(self.children()):
            received = [
                values[number]
                for number, each in zip(self.number_of, self.crossings, strict=True)
                if each.destination == index
            ]
            made, loss = stage(x, received)
            values |= made
            losses += [loss] if loss is not None else []
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total


@dataclass
class Stub:
    """The small model with its plan, ready to be lowered like any other."""

    model: StubModel
    prepared: CapturedModel
    layout: BatchLayout
    plan: Plan
    full: Plan

    @cached_property
    def _unit_bytes(self) -> list[float]:
        """Bytes that one number of each crossing value stands for, by the value's index."""
        assignment = apply_plan(self.plan, self.prepared.captured, self.prepared.kinds)
        bytes_of = {
            number: each.sample_bytes
            for number, each in zip(self.model.number_of, self.full.crossings, strict=True)
        }
        values = crossing_values(self.prepared.captured, assignment)
        return [
            float(bytes_of[_number(node)])
            for node in sorted(values, key=lambda node: values[node].index)
        ]

    def num_bytes(self, message: Message) -> float:
        """Bytes of the message that this one stands for."""
        return sum(piece.numel * self._unit_bytes[piece.value] for piece in message.pieces)


def batch_of(batch_size: int) -> Tensor:
    """What stands for a batch of so many samples."""
    return torch.ones(batch_size, 1)


def make_stub(plan: Plan, figures: Figures) -> Stub:
    """The stub of a plan. The same on every rank."""
    model = StubModel(plan, figures)
    layout, tensors = read_batch(batch_of(plan.batch_size))
    prepared = _prepare(capture_training(model, layout, tensors, Task(None, "cpu", None)))
    captured = prepared.captured
    stage_of = {
        node: int(module_name(node).split(".")[0].removeprefix(STAGE))
        for node in captured.compute_nodes()
    }
    holders: dict[str, list[int]] = {name: [] for name in captured.state}
    for node in captured.compute_nodes():
        for source in node.all_input_nodes:
            if source.op == "get_attr" and stage_of[node] not in holders[str(source.target)]:
                holders[str(source.target)].append(stage_of[node])
    small = revise(
        plan,
        model=fingerprint(captured),
        stage_of_operation=tuple(stage_of[node] for node in captured.compute_nodes()),
        holders={name: tuple(sorted(stages)) for name, stages in holders.items()},
        stages=tuple(replace(stage, recomputed=()) for stage in plan.stages),
        loss_terms=tuple(LossTerm(stage_of[node], "stands for a loss") for node in prepared.terms),
        notes=(
            "stub chunks: one small parameter and one small tensor per boundary stand for the "
            "model; losses mean nothing",
        ),
    )
    assignment = apply_plan(small, captured, prepared.kinds)
    small = revise(
        small,
        shardings=tuple(_on_grid(small, prepared, assignment, each) for each in plan.shardings),
    )
    found = {
        (source, destination, node in assignment.gradients)
        for node, source, destination in assignment.crossings
    }
    assert found == {(c.source, c.destination, c.gradient) for c in plan.crossings}, (
        "the stub crosses other boundaries than its plan"
    )
    return Stub(model, prepared, layout, small, plan)


def _on_grid(
    plan: Plan, prepared: CapturedModel, assignment: Assignment, full: StageSharding
) -> StageSharding:
    """A stage on a grid: its one number lies whole on every device, its samples are cut
    over all.
    """
    grid = plan.virtual_devices[plan.stages[full.stage].virtual_device].grid
    assert grid is not None
    terms = [node for node in prepared.terms if assignment.result_stage[node] == full.stage]
    operations = frozenset(assignment.slices[full.stage].operations)
    program = stage_program(
        prepared.captured, prepared.kinds, assignment, full.stage, terms, by_samples=operations
    )
    return StageSharding.of(full.stage, solve(program, grid, full.num_samples), full.num_samples)


def _prepare(capture: Capture) -> CapturedModel:
    """The means of the stages are the terms of the loss; there is nothing to divide by."""
    captured = capture.captured
    terms = [node for node in captured.compute_nodes() if module_name(node).endswith(".loss")]
    captured.output.args = (tuple(terms),)
    for node in reversed(list(captured.compute_nodes())):  # their sum, which no stage is to compute
        if not node.users:
            captured.graph.erase_node(node)
    infos = tuple(TermInfo("stands for a loss", module_name(node), ()) for node in terms)
    return CapturedModel(capture, value_kinds(captured), LossPlan(terms=infos), len(terms))


def _number(node: Node) -> int:
    return int(module_name(node).rsplit(VALUE, 1)[1])
