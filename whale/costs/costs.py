"""What each node of the captured graph costs, and how long that takes on a device.

The one cost model, used by planner, simulator and emulator. Of a device that `whale profile`
measured: what it measured, by operation and size (`calibration.py`). Of any other, with the figures
of its data sheet:

    seconds = flop / flop_per_s + moved_bytes / bytes_per_s.                                   (1)

FLOPs are counted by `flops.py`. Moved bytes are what an operation reads and writes: inputs +
outputs. A view moves nothing; a lookup (embedding, gather) reads only what it gives out. The
backward of a product is one product of the same size for each of its two operands that gets a
gradient; that of any other operation does about twice the work of its forward.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from whale.capture.graph import CapturedGraph
from whale.cluster.cluster import DeviceKind
from whale.costs.measured import measured_seconds
from whale.operations.flops import Value, flop
from whale.operations.nodes import op_name
from whale.operations.table import CASTS_IN_PLACE, FREE, row_of

BACKWARD_PER_FORWARD = 2.0
"""work of a backward in units of its forward, for operations that depend on parameters"""


@dataclass(frozen=True)
class NodeCost:
    """Cost of one node's forward."""

    flop: float
    moved_bytes: float
    output_bytes: int
    operation: str = ""
    """`aten.linear`; empty for what runs nothing: inputs, weights, sizes"""


def seconds(cost: NodeCost, kind: DeviceKind, dtype: str = "fp32") -> float:
    """How long the forward of a node takes on such a device: as measured, or line (1). `dtype`: in
    which its products are computed.
    """
    measured = (
        measured_seconds(kind, cost.operation, cost.flop, cost.moved_bytes, False)
        if cost.operation
        else None
    )
    at_best = cost.flop / kind.rate(dtype) + cost.moved_bytes / kind.bytes_per_s
    if measured is None:
        return at_best
    # measured in float32: a product in another dtype is faster by the ratio of the rates
    return measured * kind.rate("fp32") / kind.rate(dtype) if cost.flop else measured


def backward_seconds(
    cost: NodeCost, factors: tuple[float, float], kind: DeviceKind, dtype: str
) -> tuple[float, float]:
    """How long the backward takes: for the gradients of its inputs, and of its weights. `factors`:
    those of `backward_factors`.
    """
    inputs, weights = factors
    if not inputs and not weights:
        return 0.0, 0.0
    measured = (
        measured_seconds(kind, cost.operation, cost.flop, cost.moved_bytes, True)
        if cost.operation
        else None
    )
    if measured is None:
        forward = seconds(cost, kind, dtype)
        return inputs * forward, weights * forward
    if cost.flop:
        measured *= kind.rate("fp32") / kind.rate(dtype)
    # measured with gradients of everything: each operand of a product is half of it
    each = measured / BACKWARD_PER_FORWARD
    return inputs * each, weights * each


def backward_factors(node: Node, cost: NodeCost, gradients: Container[Node]) -> tuple[float, float]:
    """Work of a node's backward in units of its forward: for the gradients of its inputs, and of
    its weights (which can be done later).

    `gradients`: values that carry a gradient.
    """
    if node not in gradients:
        return 0.0, 0.0
    factors = row_of(node).factors
    if factors is None or not cost.flop:
        return BACKWARD_PER_FORWARD, 0.0
    operands = []
    for operand in node.args[factors[0] : factors[1] + 1]:
        if isinstance(operand, Node) and operand in gradients:
            operands.append(operand)
    weights = sum(operand.op == "get_attr" for operand in operands)
    return float(len(operands) - weights), float(weights)


def split_input(node: Node, gradients: Container[Node]) -> Node | None:
    """The input that is kept until the weight gradient of this layer is computed; None where
    nothing is put off.
    """
    row = row_of(node)
    if not row.layer or row.factors is None or len(node.args) <= max(row.factors):
        return None
    source, weight = (node.args[place] for place in row.factors)
    is_layer = (
        isinstance(source, Node)
        and source in gradients
        and isinstance(weight, Node)
        and weight.op == "get_attr"
    )
    return source if is_layer and weight in gradients else None  # type: ignore[return-value]


def node_costs(captured: CapturedGraph, batch_size: int) -> dict[Node, NodeCost]:
    """Forward cost of every node but the output, for a batch of that size. Inputs, weights and
    constants only have bytes.
    """
    values: dict[Node, Any] = {}
    costs: dict[Node, NodeCost] = {}
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        values[node] = _concrete(node.meta.get("val"), captured.batch_symbol, batch_size)
        costs[node] = _cost(node, values)
    return costs


def value_bytes(node: Node, symbol: sympy.Symbol, batch_size: int) -> int:
    """Bytes of a node's value, all tensors of a tuple together; a number has none."""
    return _num_bytes(_concrete(node.meta.get("val"), symbol, batch_size))


def concrete_shape(
    shape: torch.Size | tuple[int | torch.SymInt, ...], symbol: sympy.Symbol, value: int
) -> tuple[int, ...]:
    """The shape with the batch symbol replaced by a number."""
    return tuple(
        _evaluate(size.node.expr, symbol, value) if isinstance(size, torch.SymInt) else size
        for size in shape
    )


@lru_cache(maxsize=65536)  # a graph holds few different expressions, each in thousands of shapes
def _evaluate(expression: sympy.Expr, symbol: sympy.Symbol, value: int) -> int:
    number = expression.subs(symbol, value)
    if number.free_symbols:
        names = ", ".join(sorted(map(str, number.free_symbols)))
        raise ValueError(
            f"the size {expression} depends on {names}, and not only on the batch symbol "
            f"{symbol}; its cost is unknown"
        )
    return int(number)


def _cost(node: Node, values: dict[Node, Any]) -> NodeCost:
    output = values[node]
    output_bytes = _num_bytes(output)
    # the name without the overload; size arithmetic and getitem are Python functions and have none
    packet = getattr(node.target, "overloadpacket", None)
    if node.op != "call_function" or packet is None:
        return NodeCost(0.0, 0.0, output_bytes)
    name = str(packet)
    if not output_bytes:  # sizes (`aten.sym_size`) have no bytes
        return NodeCost(0.0, 0.0, output_bytes)
    short_name = op_name(node)
    if short_name in FREE:
        return NodeCost(0.0, 0.0, output_bytes, name)
    if short_name in CASTS_IN_PLACE and node.args and values[node.args[0]].dtype == output.dtype:  # type: ignore[index]
        return NodeCost(0.0, 0.0, output_bytes, name)
    arguments = map_arg(node.args, values.__getitem__)
    keywords = map_arg(node.kwargs, values.__getitem__)
    # an operation reads each of its tensors once, also `x * x`
    read_bytes = sum(_num_bytes(values[source]) for source in node.all_input_nodes)
    row = row_of(node)
    if row.lookup:  # reads of the table as many bytes as it writes
        read_bytes += output_bytes - _num_bytes(arguments[0])  # type: ignore[index]
    return NodeCost(
        flop(node, row.flop, arguments, keywords, output),
        float(read_bytes + output_bytes),
        output_bytes,
        name,
    )


def _concrete(value: Any, symbol: sympy.Symbol, batch_size: int) -> Any:
    """A node's fake value with every tensor as a `Value` and every size as a number."""
    if isinstance(value, torch.Tensor):
        return Value(concrete_shape(value.shape, symbol, batch_size), value.dtype)
    if isinstance(value, (tuple, list)):
        return type(value)(_concrete(element, symbol, batch_size) for element in value)
    if isinstance(value, torch.SymInt):
        return _evaluate(value.node.expr, symbol, batch_size)
    return value


def _num_bytes(value: Any) -> int:
    if isinstance(value, Value):
        return value.num_bytes
    if isinstance(value, (tuple, list)):
        return sum(_num_bytes(element) for element in value)
    return 0
