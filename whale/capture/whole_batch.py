"""The values that depend on the inputs of the whole mini-batch, as a graph of their own: it holds
no parameter and runs before a step.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from whale.capture.graph import CapturedGraph
from whale.capture.sample_states import Irregular, PerSample, expression
from whale.capture.samples import SampleFlow
from whale.operations.nodes import op_name

aten = torch.ops.aten


class WholeGraph:
    """Collects the parameter-free operations that compute whole-mini-batch values."""

    def __init__(self, captured: CapturedGraph, flow: SampleFlow) -> None:
        self.captured = captured
        self.flow = flow
        self.graph = Graph()
        self.module = torch.nn.Module()
        self.buffers: dict[str, str] = {}
        self.outputs: list[Node] = []
        self.order = {node: index for index, node in enumerate(captured.graph.nodes)}
        self.copies: dict[Node, Node] = {}
        for node in captured.graph.nodes:
            if node.op == "placeholder" and not node.meta.get("whole"):
                self.copies[node] = self.graph.placeholder(node.name)
        self.anchor = next((node for node in self.copies if _batched(node, captured)), None)

    def copy(self, node: Node) -> Node:
        """`node` and all it needs, from the captured graph."""
        needed = {node}
        stack = [node]
        while stack:
            current = stack.pop()
            if not self._is_size(current):
                new = [
                    operand
                    for operand in current.all_input_nodes
                    if operand not in needed and operand not in self.copies
                ]
                needed.update(new)
                stack.extend(new)
        for current in sorted(needed - self.copies.keys(), key=self.order.__getitem__):
            self.copies[current] = self._copy_one(current)
        return self.copies[node]

    def _is_size(self, node: Node) -> bool:
        """Sizes are taken from the batch, whatever tensor they were read from."""
        return op_name(node) in ("sym_size", "sym_numel")

    def _copy_one(self, node: Node) -> Node:
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if self._is_size(node):
            times = expression(node) / self.captured.batch_symbol
            if times.is_Integer:
                return (
                    self.graph.call_function(operator.mul, (self.samples(), int(times)))
                    if times > 1
                    else self.samples()
                )
            return self._number_of_rows(node)
        return self.graph.node_copy(node, self.copies.__getitem__)

    def _attribute(self, name: str) -> Node:
        attribute = name.replace(".", "_")
        state = self.captured.state[name]
        if name in self.captured.constants:
            value = self.captured.constants[name]
        else:
            self.buffers[attribute] = name
            value = torch.empty(state.shape, dtype=state.dtype, device="meta")
        self.module.register_buffer(attribute, value)
        return self.graph.get_attr(attribute)

    def _number_of_rows(self, size: Node) -> Node:
        """The number of rows that a mask picks from the whole mini-batch, as a number."""
        state = self.flow.of(size.args[0])
        assert (
            isinstance(state, PerSample)
            and isinstance(state.outer, Irregular)
            and state.outer.mask is not None
        )
        (symbol,) = expression(size).free_symbols
        rows = self.graph.call_function(aten.item.default, (self.rows(state.outer.mask),))
        return self.graph.call_function(operator.mul, (rows, int(expression(size) / symbol)))

    def rows(self, mask: Node) -> Node:
        return self.graph.call_function(aten.sum.default, (self.copy(mask),))

    def samples(self) -> Node:
        """The number of samples of the whole mini-batch."""
        assert self.anchor is not None, "a loss over samples needs a batched input"
        return self.graph.call_function(aten.sym_size.int, (self.copies[self.anchor], 0))

    def as_tensor(self, number: Node, dtype: torch.dtype) -> Node:
        like = self.copies[self.anchor]  # type: ignore[index]
        return self.graph.call_function(aten.new_full.default, (like, [], number), {"dtype": dtype})

    def class_counts(self, args: dict[str, Any]) -> Node:
        """How often each class is a target (C,), without those to ignore; without class weights: in
        all ().
        """
        target = self.graph.call_function(aten.to.dtype, (self.copy(args["target"]), torch.int64))
        valid = self.graph.call_function(aten.ne.Scalar, (target, args["ignore_index"]))
        if args["weight"] is None:
            return self.graph.call_function(aten.sum.default, (valid,))
        classes = args["weight"].meta["val"].shape[0]
        zeros = self.graph.call_function(
            aten.new_zeros.default, (target, [classes]), {"dtype": torch.int64}
        )
        known = self.graph.call_function(aten.mul.Tensor, (target, valid))
        places = self.graph.call_function(aten.flatten.using_ints, (known,))
        ones = self.graph.call_function(
            aten.flatten.using_ints,
            (self.graph.call_function(aten.to.dtype, (valid, torch.int64)),),
        )
        return self.graph.call_function(aten.scatter_add.default, (zeros, 0, places, ones))

    def finish(self) -> GraphModule:
        self.graph.output(tuple(self.outputs))
        return GraphModule(self.module, self.graph, "WholeMiniBatch")


def _batched(node: Node, captured: CapturedGraph) -> bool:
    value = node.meta["val"]
    return bool(value.shape) and captured.batch_symbol in expression(value.shape[0]).free_symbols
