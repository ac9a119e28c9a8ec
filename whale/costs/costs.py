"""What each node of the captured graph costs, and how long that takes on a device.

The one cost model, used by planner, simulator and emulator. A device that `whale profile` measured
takes what was measured, by operation and size (`measured.py`). Any other takes, by the figures of
its data sheet and by how much of them is reached (`Efficiency` in `cluster/kinds.py`),

    seconds = flop / (e flop_per_s) + moved_bytes (1 / (m bytes_per_s) + 1 / c) + operation_s.  (1)

Which operations are products, views or lookups, and how many FLOP they take, is in the table of
operations (docs/operations.md). Moved bytes are what an operation reads and writes: inputs +
outputs. A view moves nothing; a lookup (embedding, gather) reads only what it gives out. The
backward of a product is one product of the same size for each of its two operands that gets a
gradient; what the backward of any other operation moves is in the table, too (docs/costs.md).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from whale.capture.graph import CapturedGraph
from whale.capture.lengths import Specialised
from whale.cluster.cluster import DeviceKind
from whale.costs.measured import measured_seconds
from whale.operations.flops import Value, flop
from whale.operations.nodes import op_name
from whale.operations.sizes import shape_at, size_at
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
    measured = _measured(cost, kind, backward=False)
    if measured is None:
        return _by_data_sheet(cost.flop, cost.moved_bytes, kind, dtype)
    # measured in float32: a product in another dtype is faster by the ratio of the rates
    return measured * kind.rate("fp32") / kind.rate(dtype) if cost.flop else measured


def _by_data_sheet(flop: float, moved_bytes: float, kind: DeviceKind, dtype: str) -> float:
    """Seconds by line (1); nothing for an operation that only makes a view."""
    if not flop and not moved_bytes:
        return 0.0
    product_s = flop / kind.reached_flop_per_s(dtype)
    return product_s + moved_bytes * kind.byte_s + kind.efficiency.operation_s


def backward_seconds(
    cost: NodeCost,
    factors: tuple[float, float],
    kind: DeviceKind,
    dtype: str,
    moved_bytes: float | None = None,
) -> tuple[float, float]:
    """How long the backward takes: for the gradients of its inputs, and of its weights. `factors`:
    those of `backward_factors`; `moved_bytes`: that of `backward_bytes`, where it is known.
    """
    inputs, weights = factors
    if not inputs and not weights:
        return 0.0, 0.0
    measured = _measured(cost, kind, backward=True)
    if measured is None and (cost.flop or moved_bytes is None):
        forward = seconds(cost, kind, dtype)
        return inputs * forward, weights * forward
    if measured is None:
        assert moved_bytes is not None
        return _by_data_sheet(0.0, moved_bytes, kind, dtype), 0.0
    if cost.flop:
        measured *= kind.rate("fp32") / kind.rate(dtype)
    # measured with gradients of everything: each operand of a product is half of it
    each = measured / BACKWARD_PER_FORWARD
    return inputs * each, weights * each


def _measured(cost: NodeCost, kind: DeviceKind, backward: bool) -> float | None:
    """Seconds that `whale profile` measured for such an operation; None where it did not."""
    if not cost.operation:
        return None
    return measured_seconds(kind, cost.operation, cost.flop, cost.moved_bytes, backward)


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


def backward_bytes(node: Node, costs: Mapping[Node, NodeCost], gradients: Container[Node]) -> float:
    """Bytes that the backward of an operation moves which is no product, by its row of the table.

    A value that several operations read gets as many gradients, which are added one after the
    other: two are read and one is written. Those of the parts of a split are put together.
    """
    if node not in gradients:
        return 0.0
    cost = costs[node]
    num_readers = sum(reader in gradients for reader in node.users)
    if isinstance(node.meta.get("val"), (tuple, list)):
        added = 2.0 * cost.output_bytes
    else:
        added = 3.0 * cost.output_bytes * max(0, num_readers - 1)
    passes = row_of(node).backward_passes
    if passes is None:
        return BACKWARD_PER_FORWARD * cost.moved_bytes + added
    num_operands = sum(
        source in gradients and costs[source].output_bytes == cost.output_bytes
        for source in node.all_input_nodes
    )
    return passes * cost.output_bytes * max(1, num_operands) + added


def split_input(node: Node, gradients: Container[Node]) -> Node | None:
    """The input that is saved until the weight gradient of this layer is computed; None where
    nothing is put off.
    """
    row = row_of(node)
    if not row.layer or row.factors is None or len(node.args) <= max(row.factors):
        return None
    source, weight = (node.args[place] for place in row.factors)
    if not isinstance(source, Node) or source not in gradients:
        return None
    is_weight = isinstance(weight, Node) and weight.op == "get_attr" and weight in gradients
    return source if is_weight else None


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


def sample_bytes(node: Node, captured: CapturedGraph) -> int:
    """Bytes of a node's value in the batch that the graph was captured with, its lengths
    included.
    """
    lengths = Specialised({length.symbol: length.size for length in captured.lengths})
    value = lengths.value(node.meta.get("val"))
    return _num_bytes(_concrete(value, captured.batch_symbol, captured.batch_size))


def _cost(node: Node, values: dict[Node, Any]) -> NodeCost:
    """Cost of one node; `values`: of all nodes up to it."""
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
    if short_name in CASTS_IN_PLACE and node.args:
        source: Value = values[node.args[0]]  # type: ignore[index]
        if source.dtype == output.dtype:
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
        return Value(shape_at(value.shape, symbol, batch_size), value.dtype)
    if isinstance(value, (tuple, list)):
        return type(value)(_concrete(element, symbol, batch_size) for element in value)
    if isinstance(value, torch.SymInt):
        return size_at(value, symbol, batch_size)
    return value


def _num_bytes(value: Any) -> int:
    """Bytes of a `Value`, or of all in a list; a number has none."""
    if isinstance(value, Value):
        return value.num_bytes
    if isinstance(value, (tuple, list)):
        return sum(_num_bytes(element) for element in value)
    return 0
