"""Sizes: every integer in the graph becomes a plain expression of the batch size, so that no size
ever crosses a cut.

`aten.sym_size.int(hidden, 0)` would tie the reader to the stage that has `hidden`;
`sym_size(input_ids, 0)` is known everywhere.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from whale.capture.graph import CapturedGraph, user_line
from whale.operations.nodes import op_name


def normalise_sizes(graph: Graph, batch_symbol: sympy.Symbol, batched_input: Node) -> None:
    """Rewrites every integer node as arithmetic on dim 0 of `batched_input`; leaves data-dependent
    sizes alone.
    """
    with graph.inserting_after(batched_input):
        base = graph.call_function(torch.ops.aten.sym_size.int, (batched_input, 0))
    base.meta["val"] = batched_input.meta["val"].shape[0]
    known: dict[sympy.Expr, Node | int] = {batch_symbol: base}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if (
            node is base
            or node.op != "call_function"
            or not isinstance(value, (int, torch.SymInt))
            or isinstance(value, bool)
        ):
            continue
        expression = sympy.Integer(value) if isinstance(value, int) else value.node.expr
        if expression.free_symbols - {batch_symbol}:
            continue
        if expression not in known:
            with graph.inserting_before(node):
                replacement = _build(graph, expression, base, node)
            if replacement is None:
                continue
            known[expression] = replacement
        node.replace_all_uses_with(known[expression])  # type: ignore[arg-type]
        graph.erase_node(node)
    if not base.users:
        graph.erase_node(base)


def _build(graph: Graph, expression: sympy.Expr, base: Node, like: Node) -> Node | int | None:
    """Nodes that compute the expression, or None for forms that do not occur in practice (the old
    node stays then).
    """
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return base
    functions: dict[Any, Any] = {sympy.Add: operator.add, sympy.Mul: operator.mul}
    function = functions.get(expression.func)
    if function is None:
        return None
    parts = [_build(graph, part, base, like) for part in expression.args]
    result = parts[0]
    for part in parts[1:]:
        if result is None or part is None:
            return None
        result = graph.call_function(function, (result, part))
        result.meta["val"] = like.meta["val"]
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


def refuse_unknown_sizes(captured: CapturedGraph) -> None:
    """A plan needs every shape as an expression of the batch size; the rows that a mask picks are
    known only when the batch is there.
    """
    for node in captured.compute_nodes():
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            sizes = value.shape if isinstance(value, torch.Tensor) else ()
            if any(
                isinstance(size, torch.SymInt)
                and size.node.expr.free_symbols - {captured.batch_symbol}
                for size in sizes
            ):
                name = op_name(node).strip("_0123456789")
                said = "x[mask]" if name == "index" else name
                raise ValueError(
                    f"the shape of `{said}` depends on what the tensors hold ({user_line(node)}), "
                    "and a plan, with `split` or without, "
                    f"needs every shape. Try: {_ADVICE.get(name, _MASKED)}"
                )
