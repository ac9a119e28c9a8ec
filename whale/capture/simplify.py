"""The pass that removes from a captured graph what costs time and changes nothing.

- Operations that only hand on their input are skipped.
- `x[mask] = value` becomes `where`, which leaves every row of `x` in its place: rows that a mask
  picks cannot be told apart by sample.
- Other names of `cat` become `cat`, the one that the table of operations and the rules know.
- A mask that takes its dtype or shape from a prediction (`mask.type_as(logits)`, `expand_as`) no
  longer reads the prediction: it depends on the batch alone, so its sum may divide the loss.
- A norm of all samples becomes the root of a sum of squares, and its square (`x.norm(2).pow(2)`)
  that sum: parts of the batch have sums that add up.
- A copy behind attention that only the attention kernel of some devices needs is left to `reshape`,
  so that the graph is the same for all of them.
- A mask that says nothing but "no token sees a later one" becomes `is_causal` again. While it is
  traced, a model cannot know that its mask is only this and writes it out, which makes attention
  slower than in the eager model. Models of `transformers` also look for several texts packed into
  one sample, in positions that they made themselves; then the mask takes its shape from the batch,
  though every sample has the same one.

The order of the clean-up passes is in `capture/clean.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from whale.capture.graph import insert_call
from whale.capture.ops import FINAL_VALUE, gradient_carriers, remove_dead, returned_argument
from whale.compat import pytree, schema
from whale.operations.nodes import argument, aten_name, written_names
from whale.operations.table import is_random, row_named
from whale.operations.views import reads_bits

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
BATCH_SIZES = (2, 3, 5)
"""a mask whose shape depends on the batch is computed for these"""
LONGEST_TRIAL = 4099
"""masks of longer texts are not computed to see what they are: one takes 16 MB"""
NO_LIMIT = 2**31
"""larger numbers in a mask stand for "to the end" """


def simplify(graph: Graph, lengths: Mapping[sympy.Symbol, int] = MappingProxyType({})) -> None:
    """Removes what costs time and changes nothing from a functional graph: operations that only
    hand on their input. `lengths`: symbols besides the batch, with their sizes in the sample.

    Final values of buffers, which `make_functional` marks, stay as they are though no node of the
    graph uses them.
    """
    carriers = gradient_carriers(graph)
    keep_strides = any(
        row_named(aten_name(node)).reads_strides or reads_bits(node) for node in graph.nodes
    )
    other_strides: set[Node] = set()
    for node in list(graph.nodes):
        _use_where(node)
        _use_cat(node)
        _read_one(node, carriers)
        _use_sum_of_squares(node, carriers)
        if not keep_strides and _skip_reshape(node):
            if not node.args[0].meta["val"].is_contiguous():  # type: ignore[union-attr]
                other_strides.update(node.users)
        equal = None if node.meta.get(FINAL_VALUE) else _equal_node(node, carriers)
        if equal is None and not keep_strides and _is_copy_of_attention(node):
            other_strides.update(node.users)
            equal = node.all_input_nodes[0]
        if equal is None:
            continue
        # a `cat` always gives a contiguous tensor, its only part may be none
        if aten_name(node) == "cat" and not equal.meta["val"].is_contiguous():
            if keep_strides:
                continue
            other_strides.update(node.users)
        node.replace_all_uses_with(equal)
        graph.erase_node(node)
    _relax_views(graph, other_strides)
    _use_is_causal(graph, lengths)
    remove_dead(graph)


def _use_cat(node: Node) -> None:
    """Makes `cat` of another name for it, unless that gives its parts a dim first."""
    dim = row_named(aten_name(node)).joined_along
    if dim is None:
        return
    rank = node.meta["val"].dim()
    if all(source.meta["val"].dim() == rank for source in node.all_input_nodes):
        node.target = torch.ops.aten.cat.default
        # one dim alone: `hstack` joins along it
        node.args = (argument(node, "tensors"), min(dim, rank - 1))
        node.kwargs = {}


def _read_one(node: Node, carriers: set[Node]) -> None:
    """Makes `to` of `type_as` and `expand` of `expand_as` where a tensor without gradient takes
    its dtype or shape from one that has a gradient.
    """
    if aten_name(node) not in ("type_as", "expand_as"):
        return
    x = argument(node, "self")
    other = argument(node, "other")
    if x in carriers or other not in carriers:
        return
    if aten_name(node) == "type_as":
        node.target = torch.ops.aten.to.dtype
        node.args = (x, other.meta["val"].dtype)
    else:
        sizes: list[Any] = []
        for dim, size in enumerate(other.meta["val"].shape):
            if not isinstance(size, int):
                place = (other, dim)
                size = insert_call(node, torch.ops.aten.sym_size.int, place, like=node, value=size)
            sizes.append(size)
        node.target = torch.ops.aten.expand.default
        node.args = (x, sizes)
    node.kwargs = {}


def _use_sum_of_squares(norm: Node, carriers: set[Node]) -> None:
    """Makes a norm of everything in a tensor that has samples the root of a sum of squares, and of
    its square the sum. Not in half precision, where a square is less exact than a norm.
    """
    if aten_name(norm) != "linalg_vector_norm":
        return
    x = argument(norm, "self")
    value = x.meta["val"]
    if (
        argument(norm, "ord") != 2
        or argument(norm, "dim")
        or argument(norm, "keepdim")
        or value.dtype not in (torch.float32, torch.float64)
        or norm.meta["val"].dtype != value.dtype
        or all(isinstance(size, int) for size in value.shape)
    ):
        return
    square = insert_call(norm, torch.ops.aten.square.default, (x,), like=norm)
    total = insert_call(norm, torch.ops.aten.sum.default, (square,), like=norm)
    for user in list(norm.users):
        is_square = aten_name(user) == "square" or (
            aten_name(user) == "pow" and argument(user, "exponent") == 2
        )
        if is_square and user.meta["val"].dtype == value.dtype:
            user.replace_all_uses_with(total)
    # no gradient at 0, as that of a norm
    least = torch.finfo(value.dtype).tiny
    clamped = insert_call(norm, torch.ops.aten.clamp.default, (total, least), like=norm)
    if norm in carriers:
        carriers.update((square, total, clamped))
    norm.target = torch.ops.aten.sqrt.default
    norm.args = (clamped,)
    norm.kwargs = {}


def _use_where(node: Node) -> None:
    """Makes `where` of a write to what a mask picks, unless it writes another value to each row."""
    if aten_name(node) != "index_put" or argument(node, "accumulate"):
        return
    indices = argument(node, "indices")
    mask = indices[-1]
    if any(index is not None for index in indices[:-1]) or mask.meta["val"].dtype != torch.bool:
        return
    x = node.args[0]
    value = argument(node, "values")
    assert isinstance(x, Node)
    num_inner = x.meta["val"].ndim - mask.meta["val"].ndim - len(indices) + 1  # dims of one row
    outer = value.meta["val"].shape[: max(0, value.meta["val"].ndim - num_inner)]
    if any(not isinstance(size, int) or size != 1 for size in outer):
        return
    for _ in range(num_inner):
        mask = insert_call(node, torch.ops.aten.unsqueeze.default, (mask, -1), like=node)
    before = node.meta["val"]
    node.target = torch.ops.aten.where.self
    node.args = (mask, value, x)
    node.kwargs = {}
    with torch.no_grad():
        node.meta["val"] = torch.where(mask.meta["val"], value.meta["val"], x.meta["val"])
    if before.is_contiguous() and not node.meta["val"].is_contiguous():
        users = list(node.users)
        after = insert_call(node.next, torch.ops.aten.contiguous.default, (node,), like=node)
        for user in users:
            user.replace_input_with(node, after)


def _skip_reshape(node: Node) -> bool:
    """Takes the shape in one step where a tensor is reshaped twice and nobody else wants the shape
    between; says whether it did.
    """
    source = node.args[0] if node.args else None
    if node.target not in RESHAPES or not isinstance(source, Node):
        return False
    is_wanted = len(source.users) > 1 or source.meta.get(FINAL_VALUE)
    if source.target not in RESHAPES or is_wanted:
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
    if aten_name(node) == "cat":
        return _shorten_cat(node)
    row = row_named(aten_name(node))
    if row.equals:
        source = node.all_input_nodes[0]
        same = {
            "always": True,
            "no gradient": source not in carriers,
            "same shape": _same_shape(source, node) and not reads_bits(node),
        }
        return source if same[row.equals] else None
    # contiguous changes strides, which some kernels care about, so it stays
    return None if row.returns == "same memory" else returned_argument(node)


def _is_copy_of_attention(node: Node) -> bool:
    """Whether this is a `contiguous` between the heads of attention and a reshape that joins them.

    The kernel decides in which order attention's result lies in memory, and so whether the copy is
    one: kernels of CPUs and of GPUs differ, and on some the call does not even show in the graph.
    """
    if aten_name(node) != "contiguous" or any(user.target not in RESHAPES for user in node.users):
        return False
    heads = node.all_input_nodes[0]
    return aten_name(heads) in ("transpose", "permute") and (
        aten_name(heads.all_input_nodes[0]) == "scaled_dot_product_attention"
    )


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


# --- causal masks


def _use_is_causal(graph: Graph, lengths: Mapping[sympy.Symbol, int]) -> None:
    """Replaces causal masks by `is_causal`; all layers of a model mostly share one mask, which is
    then looked at once.
    """
    known: dict[Any, bool] = {}
    for node in graph.nodes:
        if aten_name(node) == "scaled_dot_product_attention":
            mask = argument(node, "attn_mask")
            if mask not in known:
                known[mask] = _has_causal_mask(node, lengths)
            if known[mask]:
                _replace_mask(node)


def _has_causal_mask(attention: Node, lengths: Mapping[sympy.Symbol, int]) -> bool:
    """Whether the mask depends on no data and is true up to the diagonal and false above it, the
    same for all samples and heads.
    """
    mask = argument(attention, "attn_mask")
    if not isinstance(mask, Node) or mask.meta["val"].dtype != torch.bool:
        return False
    # as text: a comparison of symbols would fix them
    length = argument(attention, "query").meta["val"].shape[-2]
    num_keys = argument(attention, "key").meta["val"].shape[-2]
    shape = mask.meta["val"].shape[-2:]
    if {str(length)} != {str(size) for size in (num_keys, *shape)} or len(shape) < 2:
        return False
    needed = _made_from_numbers(mask)
    if needed is None:
        return False
    for numbers in _trials(needed, lengths):
        size = _number(length, numbers, 0)
        if not 0 < size <= LONGEST_TRIAL:
            return False
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        for batch_size in BATCH_SIZES:
            if not bool((_value(mask, needed, numbers, batch_size).cpu() == causal).all()):
                return False
    return True


def _trials(
    needed: set[Node], lengths: Mapping[sympy.Symbol, int]
) -> list[dict[sympy.Symbol, int]]:
    """Lengths at which a mask is computed: that of the sample and, where lengths are symbols, a
    short one and one beyond every number in the mask: a window of 512 tokens is causal up to 512.
    """
    if not lengths:
        return [{}]
    largest = max(lengths.values())
    for node in needed:
        for number in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(number, int) and number < NO_LIMIT:
                largest = max(largest, abs(number))
    return [dict(lengths), dict.fromkeys(lengths, 3), dict.fromkeys(lengths, 2 * largest + 1)]


def _made_from_numbers(node: Node) -> set[Node] | None:
    """The nodes that this one is computed from, or None if data, weights or random numbers are
    among them. Sizes of the batch may be.
    """
    needed: set[Node] = set()
    waiting = [node]
    while waiting:
        source = waiting.pop()
        if source in needed:
            continue
        needed.add(source)
        if isinstance(source.meta.get("val"), torch.SymInt):
            continue
        if source.op != "call_function" or is_random(source) or written_names(source):
            return None
        waiting.extend(source.all_input_nodes)
    return needed


def _number(size: Any, numbers: Mapping[sympy.Symbol, int], batch_size: int) -> int:
    """A size with these lengths and so many samples."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    symbols = {symbol: numbers.get(symbol, batch_size) for symbol in expression.free_symbols}
    return int(expression.subs(symbols))


def _value(
    node: Node, needed: set[Node], numbers: Mapping[sympy.Symbol, int], batch_size: int
) -> torch.Tensor:
    """What the node gives in a batch of this size, with these lengths."""
    values: dict[Node, Any] = {}
    for source in node.graph.nodes:
        if source not in needed:
            continue
        size = source.meta.get("val")
        if isinstance(size, torch.SymInt):
            values[source] = _number(size, numbers, batch_size)
        else:
            args, kwargs = map_arg((source.args, source.kwargs), values.__getitem__)
            values[source] = source.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]  # type: ignore[no-any-return]


def _replace_mask(attention: Node) -> None:
    names = [declared.name for declared in schema(attention.target).arguments]
    given = {name: argument(attention, name) for name in names}
    attention.args = tuple(given.pop(name) for name in ("query", "key", "value"))
    attention.kwargs = {**given, "attn_mask": None, "is_causal": True}
