"""A mask that says nothing but "no word sees a later one" becomes `is_causal` again.

While it is traced, a model cannot know that its mask is only this and writes it out, which makes
attention slower than in the eager model. Models of `transformers` also look for several texts
packed into one sample, in positions that they made themselves; then the mask takes its shape from
the batch, though every sample has the same one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from whale.compat import schema
from whale.operations.nodes import OpOverload, argument, aten_name, written_names

BATCH_SIZES = (2, 3, 5)
"""a mask whose shape depends on the batch is computed for these"""


def use_is_causal(graph: Graph) -> None:
    """Replaces causal masks by `is_causal`; all layers of a model mostly share one mask, which is
    then looked at once.
    """
    known: dict[Any, bool] = {}
    for node in graph.nodes:
        if aten_name(node) == "scaled_dot_product_attention":
            mask = argument(node, "attn_mask")
            if mask not in known:
                known[mask] = _has_causal_mask(node)
            if known[mask]:
                _replace_mask(node)


def _has_causal_mask(attention: Node) -> bool:
    """Whether the mask depends on no data and is true up to the diagonal and false above it, the
    same for all samples and heads.
    """
    mask, query, key = (argument(attention, name) for name in ("attn_mask", "query", "key"))
    length = query.meta["val"].shape[-2]
    num_keys = key.meta["val"].shape[-2]
    if (
        not isinstance(mask, Node)
        or not isinstance(length, int)
        or not isinstance(num_keys, int)
        or length != num_keys
    ):
        return False
    if mask.meta["val"].dtype != torch.bool or mask.meta["val"].shape[-2:] != (length, length):
        return False
    needed = _made_from_numbers(mask)
    if needed is None:
        return False
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return all(bool((_value(mask, needed, size).cpu() == causal).all()) for size in BATCH_SIZES)


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
        draws = (
            isinstance(source.target, OpOverload)
            and torch.Tag.nondeterministic_seeded in source.target.tags
        )
        if source.op != "call_function" or draws or written_names(source):
            return None
        waiting.extend(source.all_input_nodes)
    return needed


def _value(node: Node, needed: set[Node], batch_size: int) -> torch.Tensor:
    """What the node gives in a batch of this size."""
    values: dict[Node, Any] = {}
    for source in node.graph.nodes:
        if source not in needed:
            continue
        size = source.meta.get("val")
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            values[source] = int(
                expression.subs(dict.fromkeys(expression.free_symbols, batch_size))
            )
        else:
            args, kwargs = map_arg((source.args, source.kwargs), values.__getitem__)
            values[source] = source.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]  # type: ignore[no-any-return]


def _replace_mask(attention: Node) -> None:
    given = {
        declared.name: argument(attention, declared.name)
        for declared in schema(attention.target).arguments
    }
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    attention.args = (query, key, value)
    attention.kwargs = {**given, "attn_mask": None, "is_causal": True}
