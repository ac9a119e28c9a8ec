"""A small model that runs like a large plan: same stages, crossings, holders and schedule; one
number where the plan has tensors.

Every set of stages that hold the same parameters gets one parameter of one number; every value that
crosses becomes a [batch, 1] tensor, or [1, 1] where it has no batch dim; a value without gradient
is detached. Model replicas that are not alike cut the model at different points: then the stub has
a segment for every combination of their stages that some operation has. Segment s (of alike
replicas: stage) computes

    h_s = batch + its parameters + all that it receives,
    value_k = tanh(h_s + k) or tanh(mean(h_s) + k),

and where the plan has a loss term, mean(h_s).

The machinery of real models (capture, lowering, bridges, executor, all-reduces) runs it
unchanged. Its losses mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from whale.planning.planner import fingerprint
from whale.planning.split import stage_program
from whale.planning.stages import Assignment, apply_plan
from whale.plans.figures import Figures
from whale.plans.plan import Crossing, Holding, LossTerm, Plan, ReplicaTemplate
from whale.plans.revise import with_boxes
from whale.plans.sharding import StageSharding
from whale.plans.templates import stage_offsets
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


Segment = tuple[int, ...]
"""stage in the replicas of every template: operations that stand together in all of them"""


@dataclass(frozen=True)
class _Flow:
    """A value that crosses between stages of some template."""

    crossing: Crossing
    source: Segment
    destinations: frozenset[Segment]


def _segments(plan: Plan) -> list[Segment]:
    """All segments of a plan, each behind those that it may depend on: no stage number of any
    template falls along the way of a value, so sorting is enough.
    """
    stages = [template.stage_of_operation for template in plan.templates]
    found = {segment for segment in zip(*stages, strict=True) if min(segment) >= 0}
    if plan.is_uniform:  # also stages that only hand on what they receive
        found |= {(stage.index,) for stage in plan.template.stages}
    return sorted(found)


def _flows(plan: Plan, segments: Sequence[Segment]) -> list[_Flow]:
    """Every value that crosses in some template, between segments such that it crosses the same
    boundaries in all of them. A value that does not cross in a template stays in one of its stages.
    """
    by_value: dict[str, dict[int, list[Crossing]]] = {}
    for number, template in enumerate(plan.templates):
        for each in template.crossings:
            by_value.setdefault(each.value, {}).setdefault(number, []).append(each)
    found = []
    for value, crossings in by_value.items():
        first = next(iter(crossings.values()))[0]
        sources = [
            segment
            for segment in segments
            if all(segment[number] == each[0].source for number, each in crossings.items())
        ]
        for source in sources:
            allowed = [
                {source[number], *(each.destination for each in crossings.get(number, ()))}
                for number in range(len(plan.templates))
            ]
            reached = frozenset(_reached(segments, allowed)) - {source}
            if _crosses_as_planned(source, reached, crossings):
                found.append(_Flow(first, source, reached))
                break
        else:
            raise ValueError(
                f"stub chunks cannot stand for this plan: {value} crosses between stages of model "
                "replicas in which different operations are recomputed. Try: without --stub"
            )
    return found


def _crosses_as_planned(
    source: Segment, reached: frozenset[Segment], crossings: Mapping[int, Sequence[Crossing]]
) -> bool:
    """Whether a value that goes from `source` to all that is `reached` crosses what it should."""
    for number, stage in enumerate(source):
        planned = {each.destination for each in crossings.get(number, ())}
        if {segment[number] for segment in reached} - {stage} != planned:
            return False
    return True


class StubModel(nn.Module):
    """All stages of a plan; gives the loss of a batch [batch, 1]. A stage of one template may be
    several segments, between which stages of other templates are cut.
    """

    def __init__(self, plan: Plan, figures: Figures) -> None:
        super().__init__()
        self.segments = _segments(plan)
        self.flows = _flows(plan, self.segments)
        groups = []
        for state in figures.states:
            if state.weight_bytes:
                weight = nn.Parameter(torch.zeros(1, 1), requires_grad=state.trained_bytes > 0)
                groups.append((_readers(plan, self.segments, state.stages), weight))
        with_loss = {
            tuple(terms)
            for terms in zip(
                *([term.stage for term in each.loss_terms] for each in plan.templates), strict=True
            )
        }
        with_loss |= set(self.segments) - {flow.source for flow in self.flows}
        for index, segment in enumerate(self.segments):
            own = [
                (number, flow.crossing)
                for number, flow in enumerate(self.flows)
                if flow.source == segment
            ]
            weights = [weight for readers, weight in groups if segment in readers]
            weights = weights or [nn.Parameter(torch.zeros(1, 1), requires_grad=False)]
            self.add_module(f"{STAGE}{index}", _Stage(own, weights, segment in with_loss))

    def forward(self, x: Tensor) -> Tensor:
        values: dict[int, Tensor] = {}
        losses: list[Tensor] = []
        for segment, stage in zip(self.segments, self.children(), strict=True):
            received = [
                values[number]
                for number, flow in enumerate(self.flows)
                if segment in flow.destinations
            ]
            made, loss = stage(x, received)
            values |= made
            losses += [loss] if loss is not None else []
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total


def _reached(segments: Sequence[Segment], allowed: Sequence[set[int]]) -> Iterator[Segment]:
    """Segments all of whose stages are allowed, those of each template apart."""
    for segment in segments:
        if all(stage in each for stage, each in zip(segment, allowed, strict=True)):
            yield segment


def _readers(plan: Plan, segments: Sequence[Segment], stages: Sequence[int]) -> set[Segment]:
    """Segments on stages that hold a weight, given as the whole plan counts them, in all
    templates.
    """
    firsts = stage_offsets(plan)
    return {
        segment
        for segment in segments
        if all(first + stage in stages for first, stage in zip(firsts, segment))
    }


@dataclass
class Stub:
    """The small model with its plan, ready to be lowered like any other."""

    model: StubModel
    prepared: CapturedModel
    layout: BatchLayout
    plan: Plan

    @cached_property
    def _unit_bytes(self) -> list[list[float]]:
        """Bytes that one number of each crossing value stands for: [template][value]"""
        captured = self.prepared.captured
        found = []
        for view in self.plan.by_template:
            assignment = apply_plan(view, captured, self.prepared.kinds)
            values = crossing_values(captured, assignment)
            in_order = sorted(values, key=lambda node: values[node].index)
            flows = [self.model.flows[_number(node)] for node in in_order]
            found.append([float(flow.crossing.sample_bytes) for flow in flows])
        return found

    def num_bytes(self, message: Message, template: int = 0) -> float:
        """Bytes of the message that this one, between replicas of a template, stands for."""
        unit_bytes = self._unit_bytes[template]
        return sum(piece.numel * unit_bytes[piece.value] for piece in message.pieces)


def batch_of(batch_size: int) -> Tensor:
    """What stands for a batch of so many samples."""
    return torch.ones(batch_size, 1)


def make_stub(plan: Plan, figures: Figures) -> Stub:
    """The stub of a plan. The same on every rank."""
    model = StubModel(plan, figures)
    layout, tensors = read_batch(batch_of(plan.batch_size))
    prepared = _prepare(capture_training(model, layout, tensors, Task(None, "cpu", None)))
    captured = prepared.captured
    segment_of = {
        node: model.segments[int(module_name(node).split(".")[0].removeprefix(STAGE))]
        for node in captured.compute_nodes()
    }
    templates = []
    for number, template in enumerate(plan.templates):
        stage_of = {node: segment[number] for node, segment in segment_of.items()}
        templates.append(_small_template(template, prepared, stage_of))
    notes = (
        "stub chunks: one small parameter and one small tensor per boundary stand for the "
        "model; losses mean nothing",
    )
    small = replace(
        plan,
        model=fingerprint(captured),
        templates=tuple(templates),
        notes=notes,
        figures=None,
        zero=0,  # the figures have its messages and its memory
        blocks=(),
        owners={},
        summed_norms=(),
    )
    templates = []
    for view, full in zip(small.by_template, plan.templates, strict=True):
        assignment = apply_plan(view, captured, prepared.kinds)
        shardings = tuple(_on_grid(view, prepared, assignment, each) for each in full.shardings)
        template = small.templates[len(templates)]
        templates.append(with_boxes(replace(template, shardings=shardings)))
        found = {
            (source, destination, node in assignment.gradients)
            for node, source, destination in assignment.crossings
        }
        assert found == {(c.source, c.destination, c.gradient) for c in full.crossings}, (
            "the stub crosses other boundaries than its plan"
        )
    small = replace(small, templates=tuple(templates), figures=plan.figures)
    return Stub(model, prepared, layout, small)


def _small_template(
    template: ReplicaTemplate, prepared: CapturedModel, stage_of: Mapping[Node, int]
) -> ReplicaTemplate:
    """What the replicas of one template run of the stub. Nothing is cut yet."""
    captured = prepared.captured
    holders: dict[str, list[int]] = {name: [] for name in captured.state}
    for node in captured.compute_nodes():
        for source in node.all_input_nodes:
            if source.op == "get_attr" and stage_of[node] not in holders[str(source.target)]:
                holders[str(source.target)].append(stage_of[node])
    return replace(
        template,
        stage_of_operation=tuple(stage_of[node] for node in captured.compute_nodes()),
        tensors={name: Holding(tuple(sorted(stages))) for name, stages in holders.items()},
        boxes=(),
        shardings=(),
        stages=tuple(
            replace(stage, recomputed=(), activations="device") for stage in template.stages
        ),
        loss_terms=tuple(LossTerm(stage_of[node], "stands for a loss") for node in prepared.terms),
    )


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
