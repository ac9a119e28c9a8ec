"""Names and arguments of the nodes of a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.fx.operator_schemas import normalize_function

from whale.compat import schema

OpOverload = type(torch.ops.aten.add.Tensor)


def op_name(node: Node) -> str:
    """Name of the operation without overload and without the `_` of in-place forms: `add` for
    `aten.add_.Tensor`.
    """
    if node.op != "call_function":
        return ""
    target = node.target
    name = str(getattr(getattr(target, "overloadpacket", target), "__name__", target))
    return name.rstrip("_") if not name.startswith("__") else name.strip("_")


def aten_name(node: Node) -> str:
    """Name as aten spells it, `add_` for `aten.add_.Tensor`, and `''` for what is no aten
    operation.
    """
    if (
        node.op != "call_function"
        or not isinstance(node.target, OpOverload)
        or node.target.namespace != "aten"
    ):
        return ""
    return str(node.target).split(".")[1]


def argument(node: Node, name: str) -> Any:
    """What an aten node gets as argument `name`, the default of the schema included; None where the
    operation has no such argument.
    """
    for index, declared in enumerate(schema(node.target).arguments):
        if declared.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[index] if index < len(node.args) else declared.default_value
    return None


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


def tensor_nodes(value: Any) -> list[Node]:
    """Nodes inside an argument that hold tensors, in order."""
    found: list[Node] = []
    map_arg(
        value,
        lambda node: found.append(node) if isinstance(node.meta.get("val"), torch.Tensor) else None,
    )
    return found


def written_names(node: Node) -> list[str]:
    """Names of the arguments that the schema of this node says it writes."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    return [each.name for each in schema(node.target).arguments if is_written(each)]


def is_written(declared: Any) -> bool:
    """Whether the schema says that this argument of an operation is written."""
    return declared.alias_info is not None and declared.alias_info.is_write


def trains_batch_norm(node: Node) -> bool:
    """Whether this node is a batch norm that takes its statistics from the batch."""
    if "batch_norm" not in op_name(node):
        return False
    args = named_args(node)
    return bool(args.get("training", args.get("train", True)))


def sums_over_devices(node: Node) -> bool:
    """Whether the devices that share a micro-batch all-reduce sums inside of this operation: batch
    statistics, or the batch sums of a loss that is not additive.
    """
    return trains_batch_norm(node) or "all_reduce" in node.meta
