"""What every value of the captured graph depends on: nothing, the batch, the parameters, or both
(docs/internals.md section 1).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch.fx import Node
from torch.fx.operator_schemas import normalize_function

from whale.capture.graph import CapturedGraph


class Kind(Enum):
    """Where a value may live: see the table in docs/internals.md section 1."""

    CONSTANT = "constant"
    INPUT = "input"
    WEIGHT = "weight"
    ACTIVATION = "activation"


def op_name(node: Node) -> str:
    """Name of the operation without overload and without the `_` of in-place forms: `add` for
    `aten.add_.Tensor`.
    """
    if node.op != "call_function":
        return ""
    target = node.target
    name = str(getattr(getattr(target, "overloadpacket", target), "__name__", target))
    return name.rstrip("_") if not name.startswith("__") else name.strip("_")


def named_args(node: Node) -> dict[str, Any]:
    """Arguments of an aten operation by name, defaults included (the first one, `self` in aten, is
    `input`).
    """
    if node.op != "call_function":
        return {}
    pair = normalize_function(
        node.target,  # type: ignore[arg-type]
        node.args,
        node.kwargs,
        normalize_to_only_use_kwargs=True,
    )
    if pair is None:
        return {str(index): value for index, value in enumerate(node.args)} | dict(node.kwargs)
    return dict(pair.kwargs)


# operations that draw random numbers only when their probability is above zero (name of that
# argument)
# and the model trains (name of that argument, or None)
RANDOM_IF = {
    "dropout": ("p", "train"),
    "alpha_dropout": ("p", "train"),
    "feature_dropout": ("p", "train"),
    "feature_alpha_dropout": ("p", "train"),
    "native_dropout": ("p", "train"),
    "scaled_dot_product_attention": ("dropout_p", None),
    "lstm": ("dropout", "train"),
    "gru": ("dropout", "train"),
    "rnn_tanh": ("dropout", "train"),
    "rnn_relu": ("dropout", "train"),
    "rrelu": (None, "training"),
    "rrelu_with_noise": (None, "training"),
}


def is_random(node: Node) -> bool:
    """Whether this node draws random numbers (dropout that is off does not)."""
    if node.op != "call_function":
        return False
    rule = RANDOM_IF.get(op_name(node))
    if rule is None:
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    probability, trains = rule
    args = named_args(node)
    return (probability is None or bool(args.get(probability, 1.0))) and (
        trains is None or args.get(trains) is not False
    )


def trains_batch_norm(node: Node) -> bool:
    """Whether this node is a batch norm that takes its statistics from the batch."""
    if "batch_norm" not in op_name(node):
        return False
    args = named_args(node)
    return bool(args.get("training", args.get("train", True)))


def value_kinds(captured: CapturedGraph) -> dict[Node, Kind]:
    """The kind of every value.

    A buffer that this graph never updates is CONSTANT. A buffer that it updates (running
    statistics, moving averages) is ACTIVATION: its value belongs to the stage that updates it, as
    do the values made from it.
    """
    updated = set(captured.buffer_updates) | _running_statistics(captured)
    kinds: dict[Node, Kind] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            kinds[node] = Kind.INPUT
        elif node.op == "get_attr":
            kinds[node] = _state_kind(captured, str(node.target), updated)
        elif node.op == "call_function":
            kinds[node] = _result_kind(node, {kinds[operand] for operand in node.all_input_nodes})
    return kinds


def _state_kind(captured: CapturedGraph, name: str, updated: set[str]) -> Kind:
    if captured.state[name].kind == "parameter":
        return Kind.WEIGHT
    return Kind.ACTIVATION if name in updated else Kind.CONSTANT


def _result_kind(node: Node, operands: set[Kind]) -> Kind:
    if isinstance(node.meta.get("val"), torch.SymInt | int) and op_name(node).startswith(
        ("sym_size", "sym_numel", "sym_stride")
    ):
        return Kind.INPUT  # the size of an activation is known from the batch
    if (
        is_random(node)
        or trains_batch_norm(node)
        or Kind.ACTIVATION in operands
        or {Kind.INPUT, Kind.WEIGHT} <= operands
    ):
        return Kind.ACTIVATION
    for kind in (Kind.WEIGHT, Kind.INPUT):
        if kind in operands:
            return kind
    return Kind.CONSTANT


def _running_statistics(captured: CapturedGraph) -> set[str]:
    """Names of the buffers that a batch norm in training mode updates by itself."""
    names: set[str] = set()
    for node in captured.compute_nodes():
        if trains_batch_norm(node):
            args = named_args(node)
            found = (args.get("running_mean"), args.get("running_var"))
            names.update(
                str(value.target)
                for value in found
                if isinstance(value, Node) and value.op == "get_attr"
            )
    return names
