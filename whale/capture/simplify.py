"""Facts about the operations of a captured graph, and the pass that removes the ones that cost time and change nothing.

The pass also turns a mask that is nothing but "no word sees a later one" back into `is_causal`: while it is traced, a model cannot know
this and writes the mask out, which makes attention slower than in the eager model.

The facts (what does this operation write, does it hand back its own input, can it carry a gradient) serve the other two clean-up
passes as well, `inline.py` and `functional.py`. The order is `inline_regions`, `drop_asserts`, `make_functional`, `simplify`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
FINAL_VALUE = "final_value"
"""key in `meta` of the nodes that hold the value of a buffer after the forward"""

OpOverload = type(torch.ops.aten.add.Tensor)

DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
CASTS = ("to", "type_as")
RETURN_SELF = ("positive", "lift_fresh")
RETURN_SELF_IF_REAL = ("real", "conj", "resolve_conj", "resolve_neg")
RETURN_SELF_IF_SAME_SHAPE = ("flatten", "atleast_1d", "atleast_2d", "atleast_3d")
FACTORIES_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
"""operations that take only the shape of their input"""
RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
NEED_STRIDES = ("view_as_complex", "as_strided")
"""operations that fail on other strides than those of the eager model"""
BATCH_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
"""operations that write running statistics when this argument is true, though their schema does not say so"""


def op_name(node: Node) -> str:
    """`add_` for aten.add_.Tensor, and `''` for what is no aten operation."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return ""
    return str(node.target).split(".")[1]


def schema(target: Any) -> torch.FunctionSchema:
    return target._schema  # compat: no public way from an operation to its schema


def argument(node: Node, name: str) -> Any:
    """What an aten node gets as argument `name`, the default of the schema included; None where the operation has no such argument."""
    for index, declared in enumerate(schema(node.target).arguments):
        if declared.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[index] if index < len(node.args) else declared.default_value
    return None


def written_names(node: Node) -> list[str]:
    """Names of the arguments that the schema of this node says it writes."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    return [each.name for each in schema(node.target).arguments if is_written(each)]


def is_written(declared: Any) -> bool:
    """Whether the schema says that this argument of an operation is written."""
    return declared.alias_info is not None and declared.alias_info.is_write


def tensors(node: Node) -> list[torch.Tensor]:
    """The fake tensors that this node gives."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def share_memory(first: Node, second: Node) -> bool:
    """Whether the fake values of two nodes of an exported graph are views of one storage."""
    return any(one.untyped_storage() is other.untyped_storage() for one in tensors(first) for other in tensors(second))


def returned_argument(node: Node) -> Node | None:
    """The argument that this node returns as the same tensor object, not as a new view: `x.to(x.dtype)`, dropout with p = 0, ..."""
    name, value = op_name(node), node.meta.get("val")
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not isinstance(value, torch.Tensor) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    before: torch.Tensor = source.meta["val"]
    if name in DROPOUTS:
        same = argument(node, "p") == 0 or not argument(node, "train")
    elif name in CASTS:
        same = not argument(node, "copy") and _same_format(node, before, value)
    elif name == "contiguous":
        same = share_memory(source, node)
    elif name in RETURN_SELF_IF_REAL:
        same = not before.is_complex()
    elif name in RETURN_SELF_IF_SAME_SHAPE:
        same = before.ndim == value.ndim and bool(before.shape == value.shape)
    else:
        same = name in RETURN_SELF
    return source if same else None


def _same_format(node: Node, before: torch.Tensor, after: torch.Tensor) -> bool:
    asked = argument(node, "memory_format")
    if (before.dtype, before.device, before.layout) != (after.dtype, after.device, after.layout):
        return False
    return asked in (None, torch.preserve_format) or before.is_contiguous(memory_format=asked)


def could_carry_gradient(node: Node, carriers: Collection[Node]) -> bool:
    """Whether a gradient can flow into this node, given which of its inputs it can flow into. Never wrongly False."""
    if node.op in ("placeholder", "get_attr"):
        return any(each.requires_grad for each in tensors(node))
    if node.op != "call_function" or not any(each.is_floating_point() or each.is_complex() for each in tensors(node)):
        return False
    name = op_name(node)
    if name in ("detach", "detach_") or name in FACTORIES_LIKE or name.startswith("new_"):
        return False
    return any(source in carriers for source in node.all_input_nodes)


def gradient_carriers(graph: Graph) -> set[Node]:
    """All nodes of a functional graph that a gradient can flow into: what depends on a trainable parameter and is not detached."""
    carriers: set[Node] = set()
    for node in graph.nodes:
        if could_carry_gradient(node, carriers):
            carriers.add(node)
    return carriers


def is_removable(node: Node) -> bool:
    """Whether nobody would notice if this node, without users, were gone: it writes nothing and draws no random numbers."""
    if node.op != "call_function" or node.users:
        return False
    if isinstance(node.target, OpOverload):
        statistics = BATCH_STATISTICS.get(op_name(node))
        updates_statistics = statistics is not None and bool(argument(node, statistics))
        draws = torch.Tag.nondeterministic_seeded in node.target.tags or op_name(node) in DROPOUTS
        return not written_names(node) and not updates_statistics and not draws and node.target.namespace == "aten"
    return node.target is operator.getitem or isinstance(node.meta.get("val"), NUMBERS)


def remove_dead(graph: Graph) -> None:
    """Removes nodes without users, except those with an effect and final values of buffers."""
    for node in reversed(list(graph.nodes)):
        if is_removable(node) and not node.meta.get(FINAL_VALUE):
            graph.erase_node(node)


def simplify(graph: Graph) -> None:
    """Removes what costs time and changes nothing from a functional graph: operations that only hand on their input.

    Final values of buffers, which `make_functional` marks, stay as they are though no node of the graph uses them.
    """
    carriers = gradient_carriers(graph)
    keep_strides = any(op_name(node) in NEED_STRIDES or str(node.target) == "aten.view.dtype" for node in graph.nodes)
    other_strides: set[Node] = set()
    for node in list(graph.nodes):
        if not keep_strides and _skip_reshape(node) and not node.args[0].meta["val"].is_contiguous():  # type: ignore[union-attr]
            other_strides.update(node.users)
        equal = None if node.meta.get(FINAL_VALUE) else _equal_node(node, carriers)
        if equal is None or (op_name(node) == "cat" and keep_strides and not equal.meta["val"].is_contiguous()):
            continue
        if op_name(node) == "cat" and not equal.meta["val"].is_contiguous():
            other_strides.update(node.users)
        node.replace_all_uses_with(equal)
        graph.erase_node(node)
    _relax_views(graph, other_strides)
    _find_causal_masks(graph)
    remove_dead(graph)


def _skip_reshape(node: Node) -> bool:
    """Takes the shape in one step where a tensor is reshaped twice and nobody else wants the shape between; says whether it did."""
    source = node.args[0] if node.args else None
    if node.target not in RESHAPES or not isinstance(source, Node) or source.target not in RESHAPES or len(source.users) > 1:
        return False
    if source.meta.get(FINAL_VALUE):
        return False
    node.target = torch.ops.aten.reshape.default
    node.args = (source.args[0], *node.args[1:])
    return True


def _relax_views(graph: Graph, changed: set[Node]) -> None:
    """Behind tensors that now have other strides (a cat always gave a contiguous one) `view` may need to copy: `reshape` does."""
    changed = set(changed)
    for node in graph.nodes:
        if node in changed or any(source in changed for source in node.all_input_nodes):
            changed.add(node)
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default


def _equal_node(node: Node, carriers: set[Node]) -> Node | None:
    """An argument of this node that has the same value and gradient, or None."""
    name = op_name(node)
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
    """Whether the shapes are equal for every size of the batch. As text: comparing a symbol with a number would fix the batch's size."""
    return [str(size) for size in first.meta["val"].shape] == [str(size) for size in second.meta["val"].shape]


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


def _find_causal_masks(graph: Graph) -> None:
    """Replaces causal masks by `is_causal`; all layers of a model mostly share one mask, which is then looked at once."""
    known: dict[Any, bool] = {}
    for node in graph.nodes:
        if op_name(node) == "scaled_dot_product_attention":
            mask = argument(node, "attn_mask")
            if mask not in known:
                known[mask] = _has_causal_mask(node)
            if known[mask]:
                _use_is_causal(node)


def _has_causal_mask(attention: Node) -> bool:
    """Whether the mask of this attention is a constant: true up to the diagonal, false above it, the same for all samples and heads."""
    mask, query, key = (argument(attention, name) for name in ("attn_mask", "query", "key"))
    length, num_keys = query.meta["val"].shape[-2], key.meta["val"].shape[-2]
    if not isinstance(mask, Node) or not isinstance(length, int) or not isinstance(num_keys, int) or length != num_keys:
        return False
    while op_name(mask) == "expand":  # over samples and heads; the size it takes may be the batch
        mask = mask.all_input_nodes[0]
    fake = mask.meta["val"]
    if fake.dtype != torch.bool or not all(isinstance(size, int) for size in fake.shape) or fake.numel() != length * length:
        return False
    value = _constant_value(mask) if fake.shape[-2:] == (length, length) else None
    return value is not None and torch.equal(value.cpu().reshape(length, length), torch.ones(length, length, dtype=torch.bool).tril())


def _constant_value(node: Node) -> torch.Tensor | None:
    """The value of a node that is computed from numbers alone, or None."""
    needed: set[Node] = set()
    waiting = [node]
    while waiting:
        source = waiting.pop()
        draws = isinstance(source.target, OpOverload) and torch.Tag.nondeterministic_seeded in source.target.tags
        if source.op != "call_function" or draws or written_names(source):
            return None
        needed.add(source)
        waiting.extend(other for other in source.all_input_nodes if other not in needed)
    values: dict[Node, Any] = {}
    for source in node.graph.nodes:
        if source in needed:
            args, kwargs = map_arg((source.args, source.kwargs), values.__getitem__)
            values[source] = source.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]  # type: ignore[no-any-return]


def _use_is_causal(attention: Node) -> None:
    given = {declared.name: argument(attention, declared.name) for declared in schema(attention.target).arguments}
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    attention.args, attention.kwargs = (query, key, value), {**given, "attn_mask": None, "is_causal": True}
