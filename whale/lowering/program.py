"""A plan applied to one captured graph on one rank: its chunks, and programs for any batch size and
number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import Node

from whale import scheduling
from whale.capture.graph import CapturedGraph, user_line
from whale.capture.kinds import ValueKind
from whale.capture.lengths import Numbers
from whale.capture.prepare import CapturedModel
from whale.devices import LocalDevice
from whale.lowering.blocks import BlockWeights
from whale.lowering.chunk import Chunk, CrossingValue, Surroundings, build_chunk, crossing_values
from whale.lowering.communication import RealCommunication
from whale.lowering.inputs import BatchInputs
from whale.lowering.messages import Bridges, build_bridges, transfers_of
from whale.lowering.sharded_chunk import OnGrid, build_sharded_chunk
from whale.lowering.subgroups import StageGroups
from whale.operations.nodes import argument, aten_name, op_name
from whale.operations.table import CASTS, FREE
from whale.planning.recompute import Regions, counts_of, regions_of_stage
from whale.planning.schedules import schedule_of_plan
from whale.planning.stages import Assignment
from whale.plans.plan import Plan
from whale.plans.samples import SampleMap
from whale.scheduling.queues import QueuedTransfer

if TYPE_CHECKING:
    from whale.distributed.ranks import Ranks


@dataclass
class Program:
    """What one rank does for one size of the mini-batch."""

    actions: tuple[scheduling.Action, ...]
    arrived_by: Mapping[scheduling.Action, tuple[scheduling.Action, ...]]
    """receive -> earlier sends whose messages have arrived when it is done"""
    chunks: Mapping[int, Chunk]
    source_of: Mapping[tuple[int, int], int]
    """(stage, value) -> stage that computes it"""
    bridges: Bridges
    samples: Sequence[tuple[int, int]]
    """samples of each micro-batch that this rank runs on"""
    edges: Sequence[tuple[int, int]]
    """samples of each micro-batch that enter and leave this rank: on a grid a part of `samples`,
    else the same
    """
    batched: Sequence[bool]
    """of each placeholder: cut by samples, or given whole"""
    batch_size: int
    num_micro_batch: int
    device: LocalDevice
    seed_parts: tuple[int, int, int]
    """(config seed, replica, place): dropout differs between devices; on a grid each operation sees
    to that
    """


@dataclass(frozen=True)
class TemplateGraph:
    """One graph as the model replicas of one template run it: known on every rank."""

    plan: Plan
    """of these replicas"""
    assignment: Assignment
    values: dict[Node, CrossingValue]

    def at(self, numbers: Numbers) -> TemplateGraph:
        """This graph for batches of these lengths."""
        values = {node: value.at(numbers) for node, value in self.values.items()}
        return replace(self, values=values)

    @property
    def edges(self) -> set[tuple[int, int]]:
        """(source stage, destination stage) of everything that crosses."""
        return {(source, destination) for _, source, destination in self.assignment.crossings}

    def schedule(
        self, batch_size: int, num_micro_batch: int, is_training: bool
    ) -> scheduling.Schedule:
        """The schedule of the plan, or where that does not fit, one for this graph's own edges and
        this number of micro-batches.
        """
        plan = self.plan
        planned = {(each.source, each.destination) for each in plan.crossings}
        if is_training and num_micro_batch == plan.num_micro_batch and self.edges == planned:
            return plan.schedule
        gradient_edges = {
            (source, destination)
            for node, source, destination in self.assignment.crossings
            if node in self.assignment.gradients
        }
        graph = scheduling.StageGraph(
            tuple(stage.virtual_device for stage in plan.stages),
            tuple(sorted(self.edges)),
            tuple(sorted(gradient_edges)) if is_training else (),
        )
        if is_training:
            return schedule_of_plan(plan, graph, batch_size, num_micro_batch)
        return scheduling.build_forward_only(graph, num_micro_batch)

    def transfers(
        self, schedule: scheduling.Schedule, batch_size: int
    ) -> dict[int, list[QueuedTransfer]]:
        """The sends and receives of every rank of these replicas, in its order."""
        samples = SampleMap(self.plan, batch_size, schedule.num_micro_batch)
        found = {}
        for index, device in enumerate(self.plan.virtual_devices):
            for rank in device.all_ranks:
                bridges = build_bridges(self.plan, self.assignment, self.values, samples, rank)
                found[rank] = transfers_of(bridges, schedule, index)
        return found


@dataclass
class Lowered:
    """This rank's part of one graph."""

    plan: Plan
    """of the replicas that are like this rank's"""
    assignment: Assignment
    """in these replicas"""
    prepared: CapturedModel
    chunks: dict[int, Chunk]
    values: dict[Node, CrossingValue]
    ranks: Ranks
    graphs: tuple[TemplateGraph, ...]
    """the graph in the replicas of every template"""
    numbers: Numbers = field(default_factory=dict)
    """the lengths that shapes of messages are for"""

    def at(self, numbers: Numbers) -> Lowered:
        """This program for batches of these lengths: the graphs compute sizes from the batch, only
        messages need them beforehand.
        """
        changed = replace(
            self,
            chunks={stage: chunk.at(numbers) for stage, chunk in self.chunks.items()},
            values={node: value.at(numbers) for node, value in self.values.items()},
            graphs=tuple(graph.at(numbers) for graph in self.graphs),
            numbers=numbers,
        )
        for name in ("first_use", "trained", "lending", "inputs"):  # no size is in these
            changed.__dict__[name] = getattr(self, name)
        return changed

    @property
    def own_graph(self) -> TemplateGraph:
        return TemplateGraph(self.plan, self.assignment, self.values)

    def outputs_of_stage(self, stage: int) -> list[Node]:
        """Outputs of the model that this stage computes, in the order of its results."""
        result_stage = self.assignment.result_stage
        return [node for node in self.prepared.outputs if result_stage[node] == stage]

    @cached_property
    def first_use(self) -> dict[str, int]:
        """Place in the graph where each parameter is first read."""
        found: dict[str, int] = {}
        for place, node in enumerate(self.prepared.captured.graph.nodes):
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    found.setdefault(str(source.target), place)
        return found

    @cached_property
    def trained(self) -> frozenset[str]:
        """Parameters that a loss term reaches backwards: exactly those that local training would
        give a gradient.
        """
        reached: set[Node] = set()
        waiting = [node for node in self.prepared.terms if node in self.assignment.gradients]
        while waiting:
            node = waiting.pop()
            if node not in reached:
                reached.add(node)
                waiting.extend(
                    source for source in node.all_input_nodes if source in self.assignment.gradients
                )
        return frozenset(str(node.target) for node in reached if node.op == "get_attr")

    @cached_property
    def lending(self) -> frozenset[int]:
        """Stages that hand on values which may lie in the memory of a parameter: a slice of it, or
        one expanded over the samples.
        """
        found = set()
        for node, source, _ in self.assignment.crossings:
            if self.values[node].batch_dim is None or _is_view_of_parameter(node):
                found.add(source)
        return frozenset(found)

    @cached_property
    def inputs(self) -> BatchInputs:
        """Brings mini-batches to this rank."""
        return BatchInputs(self.plan, self.prepared, self.chunks, self.ranks, self._gives_rows())

    def num_empty(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Denominators of the loss that are zero in this mini-batch (the number of labels that
        count, say), as a number on the device; None on ranks that hold none of them.
        """
        whole = tensors[len(self.prepared.captured.inputs) :]
        are_zero = [tensor.reshape(()) == 0 for tensor in whole if tensor.numel() == 1]
        return torch.stack(are_zero).sum() if are_zero else None

    @property
    def has_sparse_gradients(self) -> bool:
        """Whether the model has embeddings with sparse gradients."""
        nodes = self.prepared.captured.compute_nodes()
        return any("embedding" in aten_name(node) and argument(node, "sparse") for node in nodes)

    def _gives_rows(self) -> bool | None:
        """Whether this rank is one of those that give every sample once, where all ranks put the
        rows of a mini-batch together: those of the first stage of each replica that reads the
        batch, and on a grid, which has all rows on every place, the first of it. None where
        replicas are alike, and put rows together stage by stage.
        """
        if len(self.graphs) == 1:
            return None
        if self.ranks.rank not in self.plan.ranks:
            return False
        captured = self.prepared.captured
        placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
        batch = set(placeholders[: len(captured.inputs)])
        first = next(
            stage
            for stage, part in enumerate(self.assignment.slices)
            if not batch.isdisjoint(part.inputs)
        )
        device, _, place = self.plan.place_of_rank(self.ranks.rank)
        is_grid = self.plan.virtual_devices[device].grid is not None
        return self.plan.stages[first].virtual_device == device and (place == 0 or not is_grid)

    def program(self, schedule: scheduling.Schedule, batch_size: int, seed: int) -> Program:
        """What this rank does for one mini-batch of that size."""
        if self.ranks.rank not in self.plan.ranks:
            return self._nothing(batch_size)
        samples = SampleMap(self.plan, batch_size, schedule.num_micro_batch)
        device, replica, place = self.plan.place_of_rank(self.ranks.rank)
        crossings = self.assignment.crossings
        batched = [tensor.batched for tensor in self.prepared.captured.inputs]
        num_whole = sum(
            node.op == "placeholder" for node in self.prepared.captured.graph.nodes
        ) - len(batched)
        return Program(
            actions=schedule.orders[device],
            arrived_by=scheduling.arrived_by(schedule.stage_graph, schedule.orders, device),
            chunks=self.chunks,
            source_of={
                (destination, self.values[node].index): source
                for node, source, destination in crossings
            },
            bridges=build_bridges(
                self.plan, self.assignment, self.values, samples, self.ranks.rank
            ),
            samples=[
                samples.runs(m, replica, device)[place] for m in range(schedule.num_micro_batch)
            ],
            edges=[
                samples.devices(m, replica, device)[place] for m in range(schedule.num_micro_batch)
            ],
            batched=[*batched, *([False] * num_whole)],
            batch_size=batch_size,
            num_micro_batch=schedule.num_micro_batch,
            device=self.ranks.device,
            seed_parts=(
                seed,
                self.plan.first_replica + replica,
                place if self.plan.virtual_devices[device].grid is None else 0,
            ),
        )

    def _nothing(self, batch_size: int) -> Program:
        """The program of a rank that the plan leaves out."""
        return Program(
            actions=(),
            arrived_by={},
            chunks={},
            source_of={},
            bridges=Bridges({}, {}, {}),
            samples=[],
            edges=[],
            batched=[],
            batch_size=batch_size,
            num_micro_batch=self.plan.num_micro_batch,
            device=self.ranks.device,
            seed_parts=(0, 0, 0),
        )


def _is_view_of_parameter(node: Node) -> bool:
    while node.all_input_nodes and (op_name(node) in CASTS | FREE or op_name(node) == "getitem"):
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


Assign = Callable[[Plan, CapturedGraph, Mapping[Node, ValueKind]], Assignment]
"""gives the stage of every operation of a graph in the replicas of a plan of one template"""


def lower(
    job_plan: Plan,
    assign: Assign,
    prepared: CapturedModel,
    weights: Mapping[str, Tensor],
    ranks: Ranks,
    groups: StageGroups,
    is_planned: bool,
    blocks: BlockWeights | None = None,
) -> Lowered:
    """Builds the chunks of this rank. `is_planned`: the plan was made for these operations, at this
    length or another. `blocks`: weights that are not always here.
    """
    graphs = []
    for view in job_plan.by_template:
        assignment = assign(view, prepared.captured, prepared.kinds)
        values = crossing_values(prepared.captured, assignment)
        graphs.append(TemplateGraph(view, assignment, values))
        _refuse_rows_out_of_order(view, assignment, prepared, len(job_plan.by_template))
    own = graphs[job_plan.template_of_rank(ranks.rank)]
    plan = own.plan
    assignment = own.assignment
    _fill_whole_buffers(prepared, weights)
    outputs: dict[int, list[Node]] = {}
    for node in prepared.outputs:
        outputs.setdefault(assignment.result_stage[node], []).append(node)
    generators = ranks.generators  # on every rank, whether or not it has a grid
    chunks = {}
    for stage in plan.stages_of_rank(ranks.rank):
        terms = [node for node in prepared.terms if assignment.result_stage[node] == stage]
        device = plan.stages[stage].virtual_device
        regions = _regions(plan, assignment, prepared, stage, is_planned)
        if plan.virtual_devices[device].grid is not None:
            planned = next(sharding for sharding in plan.shardings if sharding.stage == stage)
            members = plan.virtual_devices[device].ranks[plan.place_of_rank(ranks.rank)[1]]
            communication = RealCommunication(
                groups.grid(device),
                ranks.backend_among(members),
                draws_alike=len({generators[rank] for rank in members}) == 1,
            )
            on_grid = OnGrid(weights, planned, is_planned, communication, regions, blocks)
            chunks[stage] = build_sharded_chunk(
                prepared, assignment, stage, terms, outputs.get(stage, ()), on_grid
            )
            continue
        around = Surroundings(weights, groups.stage(stage), regions, blocks)
        chunks[stage] = build_chunk(
            prepared.captured, assignment, stage, terms, outputs.get(stage, ()), around
        )
    return Lowered(plan, assignment, prepared, chunks, own.values, ranks, tuple(graphs))


def _regions(
    plan: Plan, assignment: Assignment, prepared: CapturedModel, stage: int, is_planned: bool
) -> Regions:
    """Operations of a stage that are recomputed in backward, with their regions: those that the
    plan lists, and for another graph of the model (an evaluation, one with outputs) as many.
    """
    planned = plan.stages[stage]
    if not is_planned:
        return regions_of_stage(
            prepared.captured,
            assignment.slices[stage].operations,
            assignment.gradients,
            counts_of(planned),
            plan.settings.recompute,
        )
    nodes = list(prepared.captured.compute_nodes())
    regions: dict[Node, Hashable] = {}
    for region, places in enumerate(planned.recomputed):
        regions |= dict.fromkeys((nodes[place] for place in places), region)
    return regions


def _refuse_rows_out_of_order(
    plan: Plan, assignment: Assignment, prepared: CapturedModel, num_templates: int
) -> None:
    """A value whose rows are not sample after sample cannot be cut between devices, nor its parts
    put together. The same on all ranks.
    """
    advice = "Put the samples outermost (`transpose` before `reshape`)"
    for node, source, destination in assignment.crossings:
        counts = [
            plan.virtual_devices[plan.stages[stage].virtual_device].num_devices
            for stage in (source, destination)
        ]
        if node.meta.get("rows_out_of_order") and counts[0] != counts[1]:
            raise ValueError(
                f"a value whose rows are not sample after sample goes from {counts[0]} to "
                f"{counts[1]} devices, which would have to cut it "
                f"({user_line(node)}). {advice}, or give both parts the same number of devices"
            )
    for node in prepared.outputs:
        num_parts = len(plan.ranks_of_stage(assignment.result_stage[node])) * plan.num_micro_batch
        num_parts *= num_templates
        if node.meta.get("rows_out_of_order") and num_parts > 1:
            raise ValueError(
                "an output of the model has rows that are not sample after sample "
                f"({user_line(node)}). {advice}"
            )


def _fill_whole_buffers(prepared: CapturedModel, weights: Mapping[str, Tensor]) -> None:
    """Buffers that whole-mini-batch values read (class weights) get their real values."""
    whole = prepared.loss.whole_graph
    for attribute, name in prepared.loss.whole_buffers.items():
        assert whole is not None
        if name in weights:
            whole.register_buffer(attribute, weights[name])
