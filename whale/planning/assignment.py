"""Where every operation runs: a plan applied to a captured graph. The planner makes one; ranks make
the same one again from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from whale.capture.graph import CapturedGraph, user_line
from whale.capture.kinds import Kind
from whale.costs.costs import value_bytes
from whale.planning.stages import (
    RECOMPUTED,
    StageSlice,
    live_operations,
    place_weights,
    slice_stages,
)
from whale.plans.plan import Plan


@dataclass(frozen=True)
class Assignment:
    """A plan applied to one captured graph: what lowering needs beside the plan itself."""

    stage_of: Mapping[Node, int]
    result_stage: Mapping[Node, int]
    """stage of every result (loss term, output, buffer update)"""
    slices: tuple[StageSlice, ...]
    crossings: tuple[tuple[Node, int, int], ...]
    """(value, stage that has it, stage that needs it)"""
    gradients: frozenset[Node]
    """values that carry a gradient"""


def apply_plan(plan: Plan, captured: CapturedGraph, kinds: Mapping[Node, Kind]) -> Assignment:
    """The assignment of a plan that was made for this very graph."""
    nodes = list(captured.compute_nodes())
    if len(nodes) != len(plan.stage_of_operation):
        raise ValueError(
            f"the plan places {len(plan.stage_of_operation)} operations, the model has "
            f"{len(nodes)}: make the plan again"
        )
    stage_of = {
        node: stage
        for node, stage in zip(nodes, plan.stage_of_operation, strict=True)
        if stage != RECOMPUTED
    }
    results = dict(
        zip(captured.output.all_input_nodes, (term.stage for term in plan.loss_terms), strict=True)
    )
    return _finish(captured, stage_of, results, len(plan.stages))


def follow_plan(plan: Plan, captured: CapturedGraph, kinds: Mapping[Node, Kind]) -> Assignment:
    """An assignment for another graph of the same model (evaluation, another sequence length):
    operations go where their weights are.
    """
    stage_of: dict[Node, int] = {}
    for node in live_operations(captured):
        if kinds[node] is not Kind.ACTIVATION:
            continue
        latest = max((stage_of[p] for p in node.all_input_nodes if p in stage_of), default=0)
        for name, is_direct in state_behind(node, kinds):
            holders = [stage for stage in plan.holders.get(name, ()) if stage >= latest]
            if not holders and is_direct and name in plan.holders:
                raise ValueError(
                    f"{name} is on stage {plan.holders[name]}, but this graph uses it after stage "
                    f"{latest} ({user_line(node)}): "
                    f"the model calls its parts in another order here than in training"
                )
            latest = min(holders, default=latest)
        stage_of[node] = latest
    return make_assignment(
        captured, kinds, stage_of, len(plan.stages), plan.num_micro_batch, plan.holders
    )


def state_behind(node: Node, kinds: Mapping[Node, Kind]) -> list[tuple[str, bool]]:
    """(parameter or buffer, whether it must be on the same stage) that an operation reads, also
    through values that are not ACTIVATION.

    A parameter behind a WEIGHT value need not be there: the value may be sent.
    """
    names: dict[str, bool] = {}
    waiting = [(source, True) for source in node.all_input_nodes]
    seen: set[Node] = set()
    while waiting:
        source, is_direct = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.op == "get_attr":
            names[str(source.target)] = names.get(str(source.target), False) or is_direct
        elif source.op == "call_function" and kinds[source] is not Kind.ACTIVATION:
            waiting.extend(
                (each, is_direct and kinds[source] is not Kind.WEIGHT)
                for each in source.all_input_nodes
            )
    return sorted(names.items())


def make_assignment(
    captured: CapturedGraph,
    kinds: Mapping[Node, Kind],
    stage_of: dict[Node, int],
    num_stages: int,
    num_micro_batch: int,
    holders: Mapping[str, tuple[int, ...]] | None = None,
) -> Assignment:
    def micro_batch_bytes(node: Node) -> int:
        return value_bytes(node, captured.batch_symbol, captured.batch_size)

    results = place_weights(captured, kinds, stage_of, micro_batch_bytes, num_micro_batch, holders)
    return _finish(captured, stage_of, results, num_stages)


def _finish(
    captured: CapturedGraph, stage_of: dict[Node, int], results: dict[Node, int], num_stages: int
) -> Assignment:
    for value in captured.buffer_updates.values():
        results.setdefault(value, stage_of.get(value, 0))
    slices = slice_stages(num_stages, results, stage_of)
    crossings = tuple(
        (node, stage_of[node], stage) for stage, part in enumerate(slices) for node in part.received
    )
    return Assignment(stage_of, results, slices, crossings, carries_gradient(captured))


def carries_gradient(captured: CapturedGraph) -> frozenset[Node]:
    """Floating-point values that depend on a trainable parameter other than through `detach`."""
    found: set[Node] = set()
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            if captured.state[str(node.target)].trainable:
                found.add(node)
        elif node.op == "call_function" and node.target is not torch.ops.aten.detach.default:
            value = node.meta.get("val")
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            if (
                isinstance(first, torch.Tensor)
                and first.is_floating_point()
                and any(a in found for a in node.all_input_nodes)
            ):
                found.add(node)
    return frozenset(found)
