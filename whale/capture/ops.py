"""Facts about the operations of a captured graph: what does one write, does it hand back its own
input, can it carry a gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from whale.dtypes import is_differentiable
from whale.operations.nodes import OpOverload, argument, aten_name, written_names
from whale.operations.table import CREATORS, DROPOUTS, row_named

NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
FINAL_VALUE = "final_value"
"""key in `meta` of the nodes that hold the value of a buffer after the forward"""


def tensors(node: Node) -> list[torch.Tensor]:
    """The fake tensors that this node gives."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def share_memory(first: Node, second: Node) -> bool:
    """Whether the fake values of two nodes of an exported graph are views of one storage."""
    return any(
        one.untyped_storage() is other.untyped_storage()
        for one in tensors(first)
        for other in tensors(second)
    )


def returned_argument(node: Node) -> Node | None:
    """The argument that this node returns as the same tensor object, not as a new view:
    `x.to(x.dtype)`, dropout with p = 0, ...
    """
    value = node.meta.get("val")
    source = node.args[0] if node.args else None
    if (
        not isinstance(source, Node)
        or not isinstance(value, torch.Tensor)
        or not isinstance(source.meta.get("val"), torch.Tensor)
    ):
        return None
    before: torch.Tensor = source.meta["val"]
    when = row_named(aten_name(node)).returns
    if when == "off":
        same = argument(node, "p") == 0 or not argument(node, "train")
    elif when == "same format":
        same = not argument(node, "copy") and _same_format(node, before, value)
    elif when == "same memory":
        same = share_memory(source, node)
    elif when == "real":
        same = not before.is_complex()
    elif when == "same shape":
        same = before.ndim == value.ndim and bool(before.shape == value.shape)
    else:
        same = when == "always"
    return source if same else None


def _same_format(node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    asked = argument(node, "memory_format")
    if (before.dtype, before.device, before.layout) != (after.dtype, after.device, after.layout):
        return False
    return asked in (None, torch.preserve_format) or before.is_contiguous(memory_format=asked)


def could_carry_gradient(node: Node, carriers: Collection[Node]) -> bool:
    """Whether a gradient can flow into this node, given which of its inputs it can flow into. Never
    wrongly False.
    """
    if node.op in ("placeholder", "get_attr"):
        return any(each.requires_grad for each in tensors(node))
    if node.op != "call_function" or not any(map(is_differentiable, tensors(node))):
        return False
    name = aten_name(node)
    if name in ("detach", "detach_") or name in CREATORS or name.startswith("new_"):
        return False
    return any(source in carriers for source in node.all_input_nodes)


def gradient_carriers(graph: Graph) -> set[Node]:
    """All nodes of a functional graph that a gradient can flow into: what depends on a trainable
    parameter and is not detached.
    """
    carriers: set[Node] = set()
    for node in graph.nodes:
        if could_carry_gradient(node, carriers):
            carriers.add(node)
    return carriers


def updates_statistics(node: Node) -> bool:
    """Whether this node writes running statistics, which its schema does not say."""
    switch = row_named(aten_name(node)).statistics
    return switch is not None and bool(argument(node, switch))


def is_removable(node: Node) -> bool:
    """Whether nobody would notice if this node, without users, were gone: it writes nothing and
    draws no random numbers.
    """
    if node.op != "call_function" or node.users:
        return False
    if isinstance(node.target, OpOverload):
        draws = torch.Tag.nondeterministic_seeded in node.target.tags or aten_name(node) in DROPOUTS
        return (
            not written_names(node)
            and not updates_statistics(node)
            and not draws
            and node.target.namespace == "aten"
        )
    return node.target is operator.getitem or isinstance(node.meta.get("val"), NUMBERS)


def remove_dead(graph: Graph) -> None:
    """Removes nodes without users, except those with an effect and final values of buffers."""
    for node in reversed(list(graph.nodes)):
        if is_removable(node) and not node.meta.get(FINAL_VALUE):
            graph.erase_node(node)
