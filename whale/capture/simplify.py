"""The pass that removes from a captured graph what costs time and changes nothing.

The order of the clean-up passes is `inline_regions`, `drop_asserts`, `make_functional`, `simplify`.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from whale.capture.causal import use_is_causal
from whale.capture.ops import FINAL_VALUE, gradient_carriers, remove_dead, returned_argument
from whale.operations.nodes import argument, aten_name

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
NEED_STRIDES = ("view_as_complex", "as_strided")
"""operations that fail on other strides than those of the eager model"""


def simplify(graph: Graph) -> None:
    """Removes what costs time and changes nothing from a functional graph: operations that only
    hand on their input.

    Final values of buffers, which `make_functional` marks, stay as they are though no node of the
    graph uses them.
    """
    carriers = gradient_carriers(graph)
    keep_strides = any(
        aten_name(node) in NEED_STRIDES or str(node.target) == "aten.view.dtype"
        for node in graph.nodes
    )
    other_strides: set[Node] = set()
    for node in list(graph.nodes):
        if (
            not keep_strides
            and _skip_reshape(node)
            and not node.args[0].meta["val"].is_contiguous()
        ):  # type: ignore[union-attr]
            other_strides.update(node.users)
        equal = None if node.meta.get(FINAL_VALUE) else _equal_node(node, carriers)
        if equal is None or (
            aten_name(node) == "cat" and keep_strides and not equal.meta["val"].is_contiguous()
        ):
            continue
        if aten_name(node) == "cat" and not equal.meta["val"].is_contiguous():
            other_strides.update(node.users)
        node.replace_all_uses_with(equal)
        graph.erase_node(node)
    _relax_views(graph, other_strides)
    use_is_causal(graph)
    remove_dead(graph)


def _skip_reshape(node: Node) -> bool:
    """Takes the shape in one step where a tensor is reshaped twice and nobody else wants the shape
    between; says whether it did.
    """
    source = node.args[0] if node.args else None
    if (
        node.target not in RESHAPES
        or not isinstance(source, Node)
        or source.target not in RESHAPES
        or len(source.users) > 1
    ):
        return False
    if source.meta.get(FINAL_VALUE):
        return False
    node.target = torch.ops.aten.reshape.default
    node.args = (source.args[0], *node.args[1:])
    return True


def _relax_views(graph: Graph, changed: set[Node]) -> None:
    """Behind tensors that now have other strides (a cat always gave a contiguous one) `view` may
    need to copy: `reshape` does.
    """
    changed = set(changed)
    for node in graph.nodes:
        if node in changed or any(source in changed for source in node.all_input_nodes):
            changed.add(node)
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default


def _equal_node(node: Node, carriers: set[Node]) -> Node | None:
    """An argument of this node that has the same value and gradient, or None."""
    name = aten_name(node)
    if name == "cat":
        return _shorten_cat(node)
    if name in ("alias", "lift_fresh_copy"):
        return node.all_input_nodes[0]
    if name == "detach":
        source = node.all_input_nodes[0]
        return None if source in carriers else source
    if node.target in (*RESHAPES, torch.ops.aten.expand.default):
        source = node.all_input_nodes[0]
        return source if _same_shape(source, node) else None
    # contiguous changes strides, which some kernels care about, so it stays
    return None if name == "contiguous" else returned_argument(node)


def _same_shape(first: Node, second: Node) -> bool:
    """Whether the shapes are equal for every size of the batch. As text: comparing a symbol with a
    number would fix the batch's size.
    """
    return [str(size) for size in first.meta["val"].shape] == [
        str(size) for size in second.meta["val"].shape
    ]


def _shorten_cat(node: Node) -> Node | None:
    """Drops the empty 1-D parts that old caches begin with; a cat of one part is that part."""
    parts: list[Node] = argument(node, "tensors")
    full = [part for part in parts if tuple(part.meta["val"].shape) != (0,)]
    # an empty part can still decide the dtype of the result
    if not full or any(part.meta["val"].dtype != node.meta["val"].dtype for part in full):
        return None
    if len(full) == 1:
        return full[0]
    if len(full) < len(parts):
        node.args = (full, *node.args[1:])
    return None
