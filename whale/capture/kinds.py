"""What every value of the captured graph depends on: nothing, the batch, the parameters, or both
(docs/internals.md section 1).
"""

from __future__ import annotations

from enum import Enum

import torch
from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.operations.nodes import named_args, op_name, trains_batch_norm
from whale.operations.table import is_random


class ValueKind(Enum):
    """What a value depends on, which says where it may live (docs/internals.md section 1)."""

    CONSTANT = "constant"
    INPUT = "input"
    WEIGHT = "weight"
    ACTIVATION = "activation"


def value_kinds(captured: CapturedGraph) -> dict[Node, ValueKind]:
    """The kind of every value.

    A buffer that this graph never updates is CONSTANT. A buffer that it updates (running
    statistics, moving averages) is ACTIVATION: its value belongs to the stage that updates it, as
    do the values made from it.
    """
    updated = set(captured.buffer_updates) | _running_statistics(captured)
    kinds: dict[Node, ValueKind] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            kinds[node] = ValueKind.INPUT
        elif node.op == "get_attr":
            kinds[node] = _state_kind(captured, str(node.target), updated)
        elif node.op == "call_function":
            kinds[node] = _result_kind(node, {kinds[operand] for operand in node.all_input_nodes})
    return kinds


def _state_kind(captured: CapturedGraph, name: str, updated: set[str]) -> ValueKind:
    if captured.state[name].kind == "parameter":
        return ValueKind.WEIGHT
    return ValueKind.ACTIVATION if name in updated else ValueKind.CONSTANT


def _result_kind(node: Node, operands: set[ValueKind]) -> ValueKind:
    if isinstance(node.meta.get("val"), torch.SymInt | int) and op_name(node).startswith(
        ("sym_size", "sym_numel", "sym_stride")
    ):
        return ValueKind.INPUT  # the size of an activation is known from the batch
    if (
        is_random(node)
        or trains_batch_norm(node)
        or ValueKind.ACTIVATION in operands
        or {ValueKind.INPUT, ValueKind.WEIGHT} <= operands
    ):
        return ValueKind.ACTIVATION
    for kind in (ValueKind.WEIGHT, ValueKind.INPUT):
        if kind in operands:
            return kind
    return ValueKind.CONSTANT


def _running_statistics(captured: CapturedGraph) -> set[str]:
    """Names of the buffers that a batch norm in training mode updates by itself."""
    names: set[str] = set()
    for node in captured.compute_nodes():
        if trains_batch_norm(node):
            args = named_args(node)
            for value in (args.get("running_mean"), args.get("running_var")):
                if isinstance(value, Node) and value.op == "get_attr":
                    names.add(str(value.target))
    return names
