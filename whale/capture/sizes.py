"""Sizes: every integer in the graph becomes a plain expression of the sizes of the batch's tensors,
so that no size ever crosses a cut.

`aten.sym_size.int(hidden, 0)` would tie the reader to the stage that has `hidden`;
`sym_size(input_ids, 0)` is known everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from whale.capture.errors import WRITE_EXPERTS
from whale.capture.graph import CapturedGraph, user_line
from whale.names import names_of
from whale.operations.nodes import op_name


def normalise_sizes(captured: CapturedGraph) -> None:
    """Rewrites every integer node as arithmetic on sizes of the batch's tensors: the number of
    samples, and lengths. Leaves data-dependent sizes alone.
    """
    graph = captured.graph
    placeholders = captured.placeholders
    bases = {captured.batch_symbol: _size_node(captured.batched_input, 0)}
    for length in captured.lengths:
        tensor, dim = length.places[0]
        bases[length.symbol] = _size_node(placeholders[tensor], dim)
    known: dict[sympy.Expr, Node | int] = dict(bases)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if (
            node in bases.values()
            or node.op != "call_function"
            or not isinstance(value, (int, torch.SymInt))
            or isinstance(value, bool)
        ):
            continue
        expression = sympy.Integer(value) if isinstance(value, int) else value.node.expr
        if expression.free_symbols - bases.keys():
            continue
        if expression not in known:
            with graph.inserting_before(node):
                replacement = build_size(graph, expression, bases, node)
            if replacement is None:
                continue
            known[expression] = replacement
        node.replace_all_uses_with(known[expression])  # type: ignore[arg-type]
        graph.erase_node(node)
    for base in bases.values():
        if not base.users:
            graph.erase_node(base)


def _size_node(tensor: Node, dim: int) -> Node:
    """A node for the size of a tensor of the batch, behind all of these."""
    graph = tensor.graph
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        node = graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
    node.meta["val"] = tensor.meta["val"].shape[dim]
    return node


_FUNCTIONS: dict[str, Any] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "Pow": operator.pow,
}
"""by the name of the sympy function: torch has classes of its own for some, which are private"""


def build_size(
    graph: Graph, expression: sympy.Expr, bases: Mapping[sympy.Symbol, Node], like: Node
) -> Node | int | None:
    """Nodes that compute the expression, or None for forms that do not occur in practice (the old
    node stays then).
    """
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return bases[expression]
    function = _FUNCTIONS.get(expression.func.__name__)
    is_power = expression.func is sympy.Pow
    if function is None or (is_power and not expression.args[1].is_positive):
        return None
    parts = [build_size(graph, part, bases, like) for part in expression.args]
    result = parts[0]
    for part in parts[1:]:
        if result is None or part is None:
            return None
        numbers = [
            each.meta.get("val") if isinstance(each, Node) else each for each in (result, part)
        ]
        result = graph.call_function(function, (result, part))
        if None not in numbers:
            result.meta["val"] = function(*numbers)
        result.meta["nn_module_stack"] = like.meta.get("nn_module_stack", {})
    return result


_MASKED = (
    "keep the full shape and mask it: `torch.where(mask, x, 0).sum() / mask.sum()` instead of "
    "`x[mask].mean()`"
)
_COUNTED = "count into a shape that is known: `F.one_hot(x, num_values).sum(0)`"
_ADVICE = {
    "nonzero": "keep the mask instead of its indices: `torch.where(mask, x, 0)`",
    "nonzero_numpy": "keep the mask instead of its indices: `torch.where(mask, x, 0)`",
    "where": "keep the mask instead of its indices: `torch.where(mask, x, 0)`",
    "repeat_interleave": (
        "say how long the result is (`output_size=`), a number that does not depend on the "
        "batch's values"
    ),
    "bincount": _COUNTED,
    "unique": _COUNTED,
}
"""by operation; others pick entries by a mask"""
_ROUTING = names_of("topk argmax argsort sort one_hot")
"""operations that choose experts for tokens"""
_PICKS = names_of("nonzero nonzero_numpy where index")


def _advice(node: Node, name: str) -> str:
    """What to write instead of an operation whose shape depends on values."""
    sources = node.all_input_nodes
    masks = [each for each in sources if getattr(each.meta["val"], "dtype", None) == torch.bool]
    if name in _PICKS and _is_routed(masks or sources[:1]):
        return WRITE_EXPERTS
    return _ADVICE.get(name, _MASKED)


def _is_routed(nodes: list[Node]) -> bool:
    """Whether one of these is computed from a choice among several, as that of experts."""
    waiting = list(nodes)
    seen = set(nodes)
    while waiting:
        node = waiting.pop()
        if op_name(node) in _ROUTING or (op_name(node) == "max" and len(node.args) > 1):
            return True
        waiting += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)
    return False


def refuse_unknown_sizes(captured: CapturedGraph) -> None:
    """A plan needs every shape as an expression of the batch size; the rows that a mask picks are
    known only when the batch is there.
    """
    for node in captured.compute_nodes():
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            sizes = value.shape if isinstance(value, torch.Tensor) else ()
            if any(
                isinstance(size, torch.SymInt) and size.node.expr.free_symbols - captured.symbols
                for size in sizes
            ):
                name = op_name(node).strip("_0123456789")
                said = "x[mask]" if name == "index" else name
                raise ValueError(
                    f"the shape of `{said}` depends on what the tensors hold ({user_line(node)}), "
                    "and a plan, with `split` or without, "
                    f"needs every shape. Try: {_advice(node, name)}"
                )
