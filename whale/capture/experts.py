"""Products of tokens with the weights of their experts, taken out of the sorted order that models
compute them in.

A mixture of experts that does not write batched einsums sorts its tokens by expert, multiplies runs
of rows with `grouped_mm` and puts the results back; another way is to copy the weights of its
expert for every token and to call `bmm`. Sorted rows belong to no sample any more, and copied
weights are large. This pass gives both the same form, in the order of the tokens:

    y = grouped_mm(x[order], weight, ends) ... y[inverse of order]                            (1)
    y = bmm(weight[expert of each row], x)                                                    (2)
                                            ->   y = expert_mm(x, weight, expert of each row)

In (1) whatever stands between must treat rows one by one; where something else reads sorted rows,
the graph stays as it is. In (2) the numbers are read as indexing does: negative ones count from the
end, others outside are an error.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import Target, map_arg

from whale.capture.expert_product import EXPERT_MM
from whale.capture.graph import insert_call
from whale.capture.ops import remove_dead
from whale.operations.nodes import argument, op_name
from whale.operations.operation import Label, Operation, Shapes
from whale.operations.table import CASTS, CREATORS, GROUPED_PRODUCTS, HISTOGRAMS, row_of

aten = torch.ops.aten


# --- the pass


def use_expert_mm(graph: Graph, shapes: Shapes) -> int:
    """Rewrites (1) and (2); returns the number of products that are `expert_mm` now."""
    for node in list(graph.nodes):
        if op_name(node) in ("sort", "argsort") and _is_plain_sort(node):
            _Sorted(graph, node, shapes).take_out()
    numbers: dict[tuple[Node, int], Node] = {}
    for node in list(graph.nodes):
        if op_name(node) == "bmm":
            _use_no_copies(graph, node, numbers)
    remove_dead(graph)
    return sum(op_name(node) == "expert_mm" for node in graph.nodes)


def _is_plain_sort(node: Node) -> bool:
    numbers = node.args[0].meta["val"]  # type: ignore[union-attr]
    is_list_of_integers = numbers.ndim == 1 and not numbers.is_floating_point()
    return is_list_of_integers and not argument(node, "descending")


class _Sorted:
    """One order of rows, and everything that is computed in it. The twin of a sorted value is the
    same value in the order of the tokens.
    """

    def __init__(self, graph: Graph, sort: Node, shapes: Shapes) -> None:
        self.graph = graph
        self.shapes = shapes
        self.sort = sort
        self.experts: Node = sort.args[0]  # type: ignore[assignment]
        self.made: list[Node] = []
        self.twins: dict[Node, Node] = {}
        self.repeated: dict[Node, int] = {}
        """row numbers divided by a constant: every row of a tensor is taken so often"""
        self.inverses: set[Node] = set()
        self.results: dict[Node, Node] = {}
        """back in the order of the tokens -> the same from the twins"""
        self.counts: list[Node] = []
        self.orders: set[Node] = set()
        if op_name(sort) == "argsort":
            self.orders.add(sort)
        else:
            self.orders |= {user for user in sort.users if user.args[1] == 1}
            self.twins |= {user: self.experts for user in sort.users if user.args[1] == 0}

    def take_out(self) -> None:
        """Replaces the results, if every sorted value is understood and there is a product among
        them; otherwise removes the twins again.
        """
        nodes = list(self.graph.nodes)
        is_understood = all(self._understand(node) for node in nodes[nodes.index(self.sort) + 1 :])
        has_product = any(op_name(node) == "expert_mm" for node in self.made)
        unused = set(self.made)
        if is_understood and has_product:
            for node, twin in self.results.items():
                node.replace_all_uses_with(twin)
            for node in self.counts:
                node.args = (self.twins[node.args[0]], *node.args[1:])  # type: ignore[index]
            unused |= self.twins.keys() | self.results.keys()
        for node in reversed(list(self.graph.nodes)):
            if node in unused and not node.users and node is not self.experts:
                self.graph.erase_node(node)

    def _understand(self, node: Node) -> bool:
        """Whether a node has nothing to do with the order, or something that is known here; its
        twin is made then.
        """
        if node in self.orders or node in self.twins:
            return True
        sources = node.all_input_nodes
        row_numbers = self.orders | self.repeated.keys() | self.inverses
        of_order = [source for source in sources if source in row_numbers]
        if not of_order and self.twins.keys().isdisjoint(sources):
            return True
        name = op_name(node)
        if name in CREATORS and sources == of_order:
            return True
        if name == "index":
            return self._understand_index(node)
        if of_order:
            return self._understand_order(node, name)
        if name in GROUPED_PRODUCTS:
            return self._understand_product(node)
        if name in HISTOGRAMS and node.args[0] in self.twins:
            self.counts.append(node)
            return True
        if not self._is_row_by_row(node):
            return False
        self._make(
            node, node.target, map_arg(node.args, self._twin), map_arg(node.kwargs, self._twin)
        )
        return True

    def _understand_order(self, node: Node, name: str) -> bool:
        if name == "floor_divide" and node.args[0] in self.orders and isinstance(node.args[1], int):
            self.repeated[node] = node.args[1]
            return True
        if name == "index_put":  # every row number is written once
            indices = argument(node, "indices")
            values = argument(node, "values")
            self.inverses.add(node)
            return set(indices) <= self.orders and values.target is aten.arange.default
        if name == "argsort" and node.args[0] in self.orders:
            self.inverses.add(node)
            return True
        return False

    def _understand_index(self, node: Node) -> bool:
        source = argument(node, "self")
        indices = argument(node, "indices")
        index = indices[0]
        if len(indices) != 1 or index is None:
            return False
        if index in self.inverses and source in self.twins:
            self.results[node] = self.twins[source]
        elif source in self.twins or source in self.orders:
            return False
        elif index in self.orders:
            self.twins[node] = source
        elif index in self.repeated:
            self._make(node, aten.repeat_interleave.self_int, (source, self.repeated[index], 0), {})
        elif index in self.twins:
            self._make(node, node.target, (source, [self.twins[index]]), {})
        else:
            return False
        return True

    def _understand_product(self, node: Node) -> bool:
        x, weight, ends = (*node.args, *node.kwargs.values())[:3]
        if x not in self.twins or not isinstance(weight, Node) or not isinstance(ends, Node):
            return False
        if weight.meta["val"].ndim != 3 or not _counts_rows(ends, {self.experts, *self.twins}):
            return False
        source = _untransposed(weight)
        rows = self._twin(x)  # type: ignore[arg-type]
        self._make(node, EXPERT_MM, (rows, source or weight, self.experts, source is not None), {})
        return True

    def _is_row_by_row(self, node: Node) -> bool:
        """Whether an operation treats the rows of its sorted inputs one by one, and gives rows:
        they run along one letter of its row in the table, which no other input has.
        """
        if node.target is operator.getitem:
            return node.args[0] in self.twins
        rule = row_of(node).dims
        op = Operation(node, self.shapes)
        dims = rule(op) if rule is not None else None
        if dims is None:
            return False
        first_dims: set[tuple[Label, int]] = set()
        others: set[Label] = set()
        for source, labels, shape in zip(op.inputs, dims.inputs, op.shapes, strict=True):
            if source in self.twins:
                first_dims.add((labels[0], shape[0]))
                others |= set(labels[1:])
            else:  # a dim of size 1 is broadcast over the rows
                others |= {label for label, size in zip(labels, shape, strict=True) if size != 1}
        results = zip(dims.outputs, op.outputs, strict=True)
        first_dims |= {(labels[0], shape[0]) for labels, shape in results if shape}
        if len(first_dims) != 1 or () in op.outputs:
            return False
        ((letter, _),) = first_dims
        return letter not in {None, *others, *dims.sums, *dims.local}

    def _twin(self, node: Node) -> Node:
        return self.twins.get(node, node)

    def _make(self, node: Node, target: Target, args: Any, kwargs: Any) -> None:
        """Makes the twin of a node."""
        twin = insert_call(node, target, tuple(args), dict(kwargs), like=node)
        self.twins[node] = twin
        self.made.append(twin)


def _counts_rows(ends: Node, experts: set[Node]) -> bool:
    """Whether these are running sums of how many rows each expert has."""
    while op_name(ends) in CASTS:
        ends = ends.args[0]  # type: ignore[assignment]
    if op_name(ends) != "cumsum":
        return False
    found: Any = ends.args[0]
    while op_name(found) in (*CASTS, "sum"):
        found = found.args[0]
    if op_name(found) not in (*HISTOGRAMS, "one_hot"):
        return False
    source = found.args[0]
    while source not in experts and op_name(source) in CASTS:
        source = source.args[0]
    num_experts = ends.meta["val"].shape[0]
    bins = [num_experts, 0, num_experts - 1]
    is_histogram = op_name(found) != "histc" or list(found.args[1:]) == bins
    return source in experts and is_histogram


def _untransposed(weight: Node) -> Node | None:
    """What was transposed to get these matrices."""
    if op_name(weight) != "transpose":
        return None
    source, *dims = weight.args
    is_matrix_transpose = {int(dim) % 3 for dim in dims} == {1, 2}  # type: ignore[arg-type]
    return source if is_matrix_transpose else None  # type: ignore[return-value]


def _is_one(size: Any) -> bool:
    """Asked of a size with the batch's symbol in it, `==` would fix the size of the batch."""
    return isinstance(size, int) and size == 1


def _use_no_copies(graph: Graph, node: Node, numbers: dict[tuple[Node, int], Node]) -> None:
    """Rewrites (2): a product of one row with each of the copied matrices. `numbers`: the numbers
    of experts that earlier products have read.
    """
    if len(node.all_input_nodes) != 2:
        return
    left, right = node.all_input_nodes
    for copies, x, row_dim in ((left, right, 2), (right, left, 1)):
        if not _copies_matrices(copies) or not _is_one(x.meta["val"].shape[row_dim]):
            continue
        weight = argument(copies, "self")
        (experts,) = argument(copies, "indices")
        rows: Any = x.args[0]
        if op_name(x) != "unsqueeze" or argument(x, "dim") % 3 != row_dim:
            rows = insert_call(node, aten.squeeze.dim, (x, row_dim), like=node)
        read = experts, weight.meta["val"].shape[0]
        if read not in numbers:
            numbers[read] = _read_numbers(node, *read)
        args = (rows, weight, numbers[read], row_dim == 2)
        product = insert_call(node, EXPERT_MM, args, like=node)
        for user in list(node.users):
            if op_name(user) == "squeeze" and argument(user, "dim") in (row_dim, row_dim - 3):
                user.replace_all_uses_with(product)
                graph.erase_node(user)
        if node.users:
            result = insert_call(node, aten.unsqueeze.default, (product, row_dim), like=node)
            node.replace_all_uses_with(result)
        graph.erase_node(node)
        return


def _read_numbers(node: Node, experts: Node, num_experts: int) -> Node:
    """`arange(num_experts)[experts]`: from 0 on, with torch's error for those that do not exist."""
    numbers = experts.meta["val"]
    options = {"dtype": numbers.dtype, "device": numbers.device}
    with numbers.fake_mode:
        every = insert_call(node, aten.arange.default, (num_experts,), options, like=node)
    return insert_call(node, aten.index.Tensor, (every, [experts]), like=node)


def _copies_matrices(node: Node) -> bool:
    """`weight[numbers]` with weight [experts, .., ..] and numbers [rows]."""
    if op_name(node) != "index":
        return False
    weight = argument(node, "self")
    indices = argument(node, "indices")
    shape = weight.meta["val"].shape
    if len(indices) != 1 or len(shape) != 3 or not all(isinstance(size, int) for size in shape):
        return False
    numbers = indices[0].meta["val"]
    return numbers.ndim == 1 and numbers.dtype in (torch.int32, torch.int64)
