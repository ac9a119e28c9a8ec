"""Products of tokens with the weights of their experts, taken out of the sorted order that models
compute them in.

A mixture of experts that does not write batched einsums sorts its tokens by expert, multiplies runs
of rows with `grouped_mm` and puts the results back; another way is to copy the weights of its
expert for every token and to call `bmm`. Sorted rows belong to no sample any more, and copied
weights are large. This pass gives both the same form, in the order of the tokens:

    y = grouped_mm(x[order], weight, ends) ... y[inverse of order]   ->   expert_mm(x, weight, expert of each row)             (1)
    bmm(weight[expert of each row], x)                               ->   expert_mm(x, weight, expert of each row)             (2)

In (2) the numbers are read as indexing does: negative ones count from the end, others outside are
an error.

In (1) whatever stands between must treat rows one by one; where something else reads sorted rows,
the graph stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Target, map_arg

from whale.capture.ops import remove_dead
from whale.operations.nodes import argument, op_name

aten = torch.ops.aten
GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
CASTS = ("to", "_to_copy", "clone", "contiguous", "detach", "alias")
LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")
ORDERLESS = ("histc", "bincount")
"""give the same for rows in any order"""
ALONG_DIM = (
    "chunk",
    "split",
    "split_with_sizes",
    "unsqueeze",
    "squeeze",
    "softmax",
    "sum",
    "mean",
    "select",
    "slice",
    "glu",
)
"""treat rows one by one unless they work along dim 0"""


# ---------------------------------------------------------------------------------------------------------------------
# the product


@torch.library.custom_op("whale::expert_mm", mutates_args=())
def expert_mm(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    """Row i of x [rows, K] times the matrix [K, N] of expert `experts[i]`: weight [experts, K, N],
    or [experts, N, K] if transposed. A row whose expert is not among them gives 0. Result: [rows,
    N]."""
    matrices = weight.transpose(1, 2) if transposed else weight
    result = x.new_zeros(len(x), matrices.shape[2])
    for rows, matrix in zip(rows_by_expert(experts, len(weight)), matrices):
        result[rows] = x[rows] @ matrix
    return result


@expert_mm.register_fake
def _(x: Tensor, weight: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, experts, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, experts)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight, experts = ctx.saved_tensors
    of_x = torch.zeros_like(x)
    of_weight = torch.zeros_like(weight)
    for expert, rows in enumerate(rows_by_expert(experts, len(weight))):
        matrix = weight[expert] if ctx.transposed else weight[expert].T  # [N, K]
        of_x[rows] = gradient[rows] @ matrix
        of_weight[expert] = (
            gradient[rows].T @ x[rows] if ctx.transposed else x[rows].T @ gradient[rows]
        )
    return of_x, of_weight, None, None


expert_mm.register_autograd(_backward, setup_context=_save)


def rows_by_expert(experts: Tensor, num_experts: int) -> Sequence[Tensor]:
    """For each expert the numbers of its rows, in order."""
    order = experts.argsort(stable=True)
    starts = torch.searchsorted(
        experts[order], torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype)
    ).tolist()
    return [order[start:stop] for start, stop in zip(starts, starts[1:])]


# ------------------------------------------------------------------------------------------------------------------------
# the pass


def use_expert_mm(graph: Graph) -> int:
    """Lines (1) and (2); gives the number of products that are written as `expert_mm` now."""
    for node in list(graph.nodes):
        if op_name(node) in ("sort", "argsort") and _is_plain_sort(node):
            _Sorted(graph, node).take_out()
    numbers: dict[tuple[Node, int], Node] = {}
    for node in list(graph.nodes):
        if op_name(node) == "bmm":
            _use_no_copies(graph, node, numbers)
    remove_dead(graph)
    return sum(op_name(node) == "expert_mm" for node in graph.nodes)


def _is_plain_sort(node: Node) -> bool:
    numbers = node.args[0].meta["val"]  # type: ignore[union-attr]
    return (
        numbers.ndim == 1 and not numbers.is_floating_point() and not argument(node, "descending")
    )


class _Sorted:
    """One order of rows, and everything that is computed in it. The twin of a sorted value is the
    same value in the order of the tokens.
    """

    def __init__(self, graph: Graph, sort: Node) -> None:
        self.graph = graph
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
        them.
        """
        nodes = list(self.graph.nodes)
        is_understood = all(self._understand(node) for node in nodes[nodes.index(self.sort) + 1 :])
        has_product = any(op_name(node) == "expert_mm" for node in self.made)
        if is_understood and has_product:
            for node, twin in self.results.items():
                node.replace_all_uses_with(twin)
            for node in self.counts:
                node.args = (self.twins[node.args[0]], *node.args[1:])  # type: ignore[index]
        waiting = [*nodes, *self.made] if is_understood and has_product else self.made
        places = {node: place for place, node in enumerate(self.graph.nodes)}
        for node in sorted(
            {*self.twins, *self.results, *self.made} & set(waiting),
            key=places.__getitem__,
            reverse=True,
        ):
            if not node.users and node is not self.experts:
                self.graph.erase_node(node)

    def _understand(self, node: Node) -> bool:
        """Whether a node has nothing to do with the order, or something that is known here; its
        twin is made then.
        """
        if node in self.orders or node in self.twins:
            return True
        sources = node.all_input_nodes
        of_order = [
            source
            for source in sources
            if source in self.orders or source in self.repeated or source in self.inverses
        ]
        if not of_order and not any(source in self.twins for source in sources):
            return True
        name = op_name(node)
        if name in LIKE and sources == of_order:
            return True
        if name == "index":
            return self._understand_index(node)
        if of_order:
            return self._understand_order(node, name)
        if name in GROUPED:
            return self._understand_product(node)
        if name in ORDERLESS and node.args[0] in self.twins:
            self.counts.append(node)
            return True
        if not _is_row_by_row(node, name, self.twins):
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
        if (
            x not in self.twins
            or not isinstance(weight, Node)
            or not isinstance(ends, Node)
            or len(weight.meta["val"].shape) != 3
        ):
            return False
        if not _counts_rows(ends, {self.experts, *self.twins}):
            return False
        source = _untransposed(weight)
        self._make(
            node,
            expert_mm_op(),
            (self.twins[x], source or weight, self.experts, source is not None),  # type: ignore[index]
            {},
        )
        return True

    def _twin(self, node: Node) -> Node:
        return self.twins.get(node, node)

    def _make(self, node: Node, target: Target, args: Any, kwargs: Any) -> None:
        """The twin of a node."""
        self.twins[node] = _insert(self.graph, node, target, args, kwargs)
        self.made.append(self.twins[node])


def expert_mm_op() -> Any:
    return torch.ops.whale.expert_mm.default


def _insert(graph: Graph, node: Node, target: Target, args: Any, kwargs: Any | None = None) -> Node:
    """A new operation in front of another one, at whose place in the model it stands."""
    with graph.inserting_before(node):
        made = graph.create_node("call_function", target, tuple(args), dict(kwargs or {}))
    made.meta = {key: value for key, value in node.meta.items() if key != "val"}
    values = map_arg((made.args, made.kwargs), lambda source: source.meta["val"])
    with torch.no_grad():
        made.meta["val"] = target(*values[0], **values[1])  # type: ignore[operator]
    return made


def _counts_rows(ends: Node, experts: set[Node]) -> bool:
    """Whether these are running sums of how many rows each expert has."""
    while op_name(ends) in CASTS:
        ends = ends.args[0]  # type: ignore[assignment]
    if op_name(ends) != "cumsum":
        return False
    found: Any = ends.args[0]
    while op_name(found) in (*CASTS, "sum"):
        found = found.args[0]
    if op_name(found) not in (*ORDERLESS, "one_hot"):
        return False
    source = found.args[0]
    while source not in experts and op_name(source) in CASTS:
        source = source.args[0]
    num_experts = ends.meta["val"].shape[0]
    is_histogram = op_name(found) != "histc" or list(found.args[1:]) == [
        num_experts,
        0,
        num_experts - 1,
    ]
    return source in experts and is_histogram


def _untransposed(weight: Node) -> Node | None:
    """What was transposed to get these matrices."""
    if op_name(weight) != "transpose" or {int(dim) % 3 for dim in weight.args[1:]} != {1, 2}:  # type: ignore[arg-type]
        return None
    return weight.args[0]  # type: ignore[return-value]


def _is_row_by_row(node: Node, name: str, twins: dict[Node, Node]) -> bool:
    """Whether an operation treats the rows of its sorted inputs one by one, and gives rows."""
    if (
        node.target is operator.getitem
        or name in CASTS
        or (name in ("dropout", "linear") and node.args[0] in twins)
    ):
        return all(source in twins or name == "linear" for source in node.all_input_nodes)
    first: Any = node.args[0]
    if name in ALONG_DIM:
        rank = len(first.meta["val"].shape) + (name == "unsqueeze")
        dims = argument(node, "dim")
        found = dims if isinstance(dims, list | tuple) else [dims]
        return bool(found) and all(isinstance(dim, int) and dim % rank != 0 for dim in found)
    if name in ("layer_norm", "rms_norm"):
        return first in twins and len(argument(node, "normalized_shape")) < len(
            first.meta["val"].shape
        )
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    rank = len(node.meta["val"].shape)
    shapes = {
        source: source.meta["val"].shape
        for source in node.all_input_nodes
        if isinstance(source.meta["val"], Tensor)
    }
    return all(
        len(shape) == rank if source in twins else len(shape) < rank or _is_one(shape[0])
        for source, shape in shapes.items()
    )


def _is_one(size: Any) -> bool:
    """Asked of a size with the batch's symbol in it, `==` would fix the size of the batch."""
    return isinstance(size, int) and size == 1


def _use_no_copies(graph: Graph, node: Node, numbers: dict[tuple[Node, int], Node]) -> None:
    """Line (2): a product of one row for each of the copied matrices. `numbers`: those of the
    experts that products before have read.
    """
    left, right = node.all_input_nodes if len(node.all_input_nodes) == 2 else (node, node)
    for copies, x, row_dim in ((left, right, 2), (right, left, 1)):
        if not _copies_matrices(copies) or not _is_one(x.meta["val"].shape[row_dim]):
            continue
        weight = argument(copies, "self")
        (experts,) = argument(copies, "indices")
        has_rows = op_name(x) == "unsqueeze" and argument(x, "dim") % 3 == row_dim
        rows = x.args[0] if has_rows else _insert(graph, node, aten.squeeze.dim, (x, row_dim))
        read = experts, weight.meta["val"].shape[0]
        if read not in numbers:
            numbers[read] = _read_numbers(graph, node, *read)
        product = _insert(graph, node, expert_mm_op(), (rows, weight, numbers[read], row_dim == 2))
        for user in list(node.users):
            if op_name(user) == "squeeze" and argument(user, "dim") in (row_dim, row_dim - 3):
                user.replace_all_uses_with(product)
                graph.erase_node(user)
        if node.users:
            node.replace_all_uses_with(
                _insert(graph, node, aten.unsqueeze.default, (product, row_dim))
            )
        graph.erase_node(node)
        return


def _read_numbers(graph: Graph, node: Node, experts: Node, num_experts: int) -> Node:
    """`arange(num_experts)[experts]`: from 0 on, with torch's error for those that do not exist."""
    numbers = experts.meta["val"]
    with numbers.fake_mode:
        every = _insert(
            graph,
            node,
            aten.arange.default,
            (num_experts,),
            {"dtype": numbers.dtype, "device": numbers.device},
        )
    return _insert(graph, node, aten.index.Tensor, (every, [experts]))


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
