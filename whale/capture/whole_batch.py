"""Values that need the inputs of the whole mini-batch: token counts, mask sums, number of samples.

They are computed before a step by a graph of their own, which holds no parameter. The captured
graph, which sees a part of the samples, gets them as further placeholders `whole_0, whole_1, ...`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from whale.capture.graph import CapturedGraph, user_line
from whale.capture.sample_states import Irregular, PerSample, Size, expression
from whale.capture.samples import SampleFlow
from whale.capture.sizes import build_size
from whale.operations.nodes import op_name

aten = torch.ops.aten


class WholeBatch:
    """Builds both sides: each public method returns the placeholder for one value, and adds the
    operations that compute it to the graph of the whole mini-batch.
    """

    def __init__(self, captured: CapturedGraph, flow: SampleFlow) -> None:
        self.captured = captured
        self.flow = flow
        self.buffers: dict[str, str] = {}
        """attribute of the finished module -> buffer of the model that belongs there"""
        self.order = {node: index for index, node in enumerate(captured.graph.nodes)}
        self._graph = Graph()
        self._module = torch.nn.Module()
        self._sources: list[Node] = []
        self._num_attributes = 0
        self._placeholders: dict[Any, Node] = {}
        self._copies: dict[Node, Node] = {}
        for node in captured.placeholders:
            if not node.meta.get("whole"):
                self._copies[node] = self._graph.placeholder(node.name)

    def finish(self) -> GraphModule:
        """Module: tensors of the whole mini-batch -> values of `whole_0, whole_1, ...`."""
        self._graph.output(tuple(self._sources))
        return GraphModule(self._module, self._graph, "WholeMiniBatch")

    # --- placeholders

    def num_samples(self) -> Node:
        return self._placeholder(
            "samples",
            "number of samples",
            lambda: self._as_tensor(self._samples(), torch.int64),
            self._fake(torch.int64),
        )

    def num_rows(self, mask: Node) -> Node:
        """Number of rows that a mask picks."""
        text = f"number of rows picked by `{mask.name}` ({user_line(mask)})"
        return self._placeholder(
            ("rows", mask), text, lambda: self._rows(mask), self._fake(torch.int64)
        )

    def class_counts(self, args: dict[str, Any]) -> Node:
        """Number of targets (), or the number of each class (C,) where classes have weights. `args`
        are the arguments of the class loss.
        """
        weight = args["weight"]
        ignored = args["ignore_index"]
        shape = () if weight is None else tuple(weight.meta["val"].shape)
        what = "number of targets" if weight is None else "class weights of the targets"
        return self._placeholder(
            (args["target"], ignored, shape),
            f"{what} that are not {ignored}",
            lambda: self._targets(args["target"], ignored, shape),
            self._fake(torch.int64, shape),
        )

    def value(self, node: Node) -> Node:
        """The value of a node of the captured graph in the whole mini-batch. Numbers become tensors
        of no dims.
        """
        value = node.meta["val"]
        text = f"`{node.name}` ({user_line(node)})"
        if isinstance(value, torch.Tensor):
            return self._placeholder(node, text, lambda: self._copy(node), value)
        is_size = isinstance(self.flow.states[node], Size)
        if is_size and expression(value) == self.captured.batch_symbol:
            return self.num_samples()
        dtype = torch.float64 if isinstance(value, torch.SymFloat | float) else torch.int64
        return self._placeholder(
            node, text, lambda: self._as_tensor(self._copy(node), dtype), self._fake(dtype)
        )

    def _placeholder(self, key: Any, text: str, source: Callable[[], Node], value: Any) -> Node:
        if key not in self._placeholders:
            with self.captured.graph.inserting_after(self.captured.placeholders[-1]):
                node = self.captured.graph.placeholder(f"whole_{len(self._sources)}")
            node.meta.update(val=value, whole=True, whole_text=text)
            self._sources.append(source())
            self._placeholders[key] = node
        return self._placeholders[key]

    def _fake(self, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Any:
        return self.captured.batched_input.meta["val"].new_empty(shape, dtype=dtype)

    # --- the graph of the whole mini-batch

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._graph.call_function(target, args, kwargs)

    def _samples(self) -> Node:
        return self._call(aten.sym_size.int, self._copies[self.captured.batched_input], 0)

    def _as_tensor(self, number: Node, dtype: torch.dtype) -> Node:
        return self._call(
            aten.new_full.default,
            self._copies[self.captured.batched_input],
            [],
            number,
            dtype=dtype,
        )

    def _rows(self, mask: Node) -> Node:
        return self._call(aten.sum.default, self._copy(mask))

    def _targets(self, target: Node, ignored: int, shape: tuple[int, ...]) -> Node:
        """Counts of the targets that are not ignored: in all (), or of each class (C,)."""
        targets = self._call(aten.to.dtype, self._copy(target), torch.int64)
        valid = self._call(aten.ne.Scalar, targets, ignored)
        if not shape:
            return self._call(aten.sum.default, valid)
        zeros = self._call(aten.new_zeros.default, targets, list(shape), dtype=torch.int64)
        # an ignored target counts 0 in class 0: it may be outside of the classes
        classes = self._call(aten.flatten.using_ints, self._call(aten.mul.Tensor, targets, valid))
        ones = self._call(aten.flatten.using_ints, self._call(aten.to.dtype, valid, torch.int64))
        return self._call(aten.scatter_add.default, zeros, 0, classes, ones)

    def _copy(self, node: Node) -> Node:
        """The copy of a node of the captured graph, with copies of all that it needs."""
        needed = {node}
        waiting = [node]
        while waiting:
            current = waiting.pop()
            if _is_size(current):
                continue  # taken from the batch, whatever tensor it was read from
            for operand in current.all_input_nodes:
                if operand not in needed and operand not in self._copies:
                    needed.add(operand)
                    waiting.append(operand)
        for current in sorted(needed - self._copies.keys(), key=self.order.__getitem__):
            self._copies[current] = self._copy_one(current)
        return self._copies[node]

    def _copy_one(self, node: Node) -> Node:
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        if not _is_size(node):
            return self._graph.node_copy(node, self._copies.__getitem__)
        size = expression(node)
        if size.free_symbols - self.captured.symbols:
            return self._number_of_rows(node)
        found = build_size(self._graph, size, self._bases(), node)
        if found is None:
            raise ValueError(
                f"the size {size} ({user_line(node)}) is no plain arithmetic on the sizes of the "
                "batch's tensors, so it is not known for the whole mini-batch"
            )
        return found if isinstance(found, Node) else self._call(int, found)

    def _bases(self) -> dict[sympy.Symbol, Node]:
        """The number of samples and the lengths of the whole mini-batch."""
        bases = {self.captured.batch_symbol: self._samples()}
        placeholders = self.captured.placeholders
        for length in self.captured.lengths:
            tensor, dim = length.places[0]
            source = self._copies[placeholders[tensor]]
            bases[length.symbol] = self._call(aten.sym_size.int, source, dim)
        return bases

    def _attribute(self, name: str) -> Node:
        self._num_attributes += 1
        attribute = f"state_{self._num_attributes}"
        value = self.captured.constants.get(name)
        if value is None:
            state = self.captured.state[name]
            self.buffers[attribute] = name
            value = torch.empty(state.shape, dtype=state.dtype, device="meta")
        self._module.register_buffer(attribute, value)
        return self._graph.get_attr(attribute)

    def _number_of_rows(self, size: Node) -> Node:
        """A size that a mask decides, as a Python number."""
        state = self.flow.of(size.args[0])
        assert isinstance(state, PerSample) and isinstance(state.outer, Irregular)
        assert state.outer.mask is not None
        (symbol,) = expression(size).free_symbols
        rows = self._call(aten.item.default, self._rows(state.outer.mask))
        return self._call(operator.mul, rows, int(expression(size) / symbol))


def _is_size(node: Node) -> bool:
    return op_name(node) in ("sym_size", "sym_numel")
