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

from whale.capture.graph import size_for
from whale.compat import schema
from whale.operations.nodes import argument, aten_name, written_names

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
    mask = argument(attention, "attn_mask")
    length = argument(attention, "query").meta["val"].shape[-2]
    num_keys = argument(attention, "key").meta["val"].shape[-2]
    # a symbolic length is never asked: a comparison would fix it
    if not isinstance(mask, Node) or not isinstance(length, int) or not isinstance(num_keys, int):
        return False
    value = mask.meta["val"]
    if length != num_keys or value.dtype != torch.bool or value.shape[-2:] != (length, length):
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
        draws = torch.Tag.nondeterministic_seeded in getattr(source.target, "tags", ())
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
            symbols = size.node.expr.free_symbols
            values[source] = size_for(size, dict.fromkeys(symbols, batch_size))
        else:
            args, kwargs = map_arg((source.args, source.kwargs), values.__getitem__)
            values[source] = source.target(*args, **kwargs)  # type: ignore[operator]
    return values[node]  # type: ignore[no-any-return]


def _replace_mask(attention: Node) -> None:
    names = [declared.name for declared in schema(attention.target).arguments]
    given = {name: argument(attention, name) for name in names}
    attention.args = tuple(given.pop(name) for name in ("query", "key", "value"))
    attention.kwargs = {**given, "attn_mask": None, "is_causal": True}
