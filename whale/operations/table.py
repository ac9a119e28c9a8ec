"""Looks operations up in the table, and names the families that several packages ask for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.fx import Node

# these modules register their rows when they are imported
from whale.operations import products, reductions, views  # noqa: F401
from whale.operations.elementwise import dropout, pointwise
from whale.operations.nodes import named_args, op_name
from whale.operations.row import TABLE, Row, not_linear


def names_with(fact: str, value: Any) -> frozenset[str]:
    """Names of all operations whose rows say this."""
    return frozenset(name for name, each in TABLE.items() if getattr(each, fact) == value)


CASTS = names_with("kind", "cast")
CASTS_IN_PLACE = names_with("returns", "same format")
"""casts that hand back their input, and cost nothing, when the dtype stays; others always copy"""
VIEWS = names_with("kind", "view")
PERMUTES = names_with("kind", "permute")
EXPANDS = names_with("kind", "expand")
SPLITS = names_with("kind", "split")
CREATORS = names_with("kind", "create")
NEW_LIKE = frozenset(name for name in CREATORS if name.startswith("new_"))
"""creators whose second argument is a size"""
COUNTERS = names_with("kind", "count")
"""creators whose values say the position"""
HISTOGRAMS = names_with("kind", "histogram")
GROUPED_PRODUCTS = names_with("kind", "grouped product")
DROPOUTS = names_with("returns", "off")
POOLINGS = names_with("kind", "pool")
POINTWISE_LOSSES = names_with("kind", "loss")
CLASS_LOSSES = names_with("kind", "class loss")
AFFINE = frozenset(TABLE) - names_with("affine", not_linear)
"""operations that may add something to a sum over the samples, which must count once"""
LAYERS = names_with("layer", True)
FREE = names_with("free", True)


def row_named(name: str) -> Row:
    """The row of this name; an empty one where there is none."""
    found = TABLE.get(name)
    return Row(name) if found is None else found


def row_of(node: Node) -> Row:
    """The row of a node's operation: elementwise where torch or the table says so, and an empty row
    for what is unknown.
    """
    name = op_name(node)
    known = row_named(name)
    if known.dims is None and is_pointwise(node):
        return _pointwise_row(name)
    return known


@cache
def _pointwise_row(name: str) -> Row:
    """The row of an operation that only torch calls elementwise."""
    return replace(row_named(name), dims=pointwise)


def is_pointwise(node: Node) -> bool:
    """Whether a node treats every entry on its own, operands broadcast to one shape."""
    if isinstance(node.meta.get("val"), list | tuple):
        return False  # `torch.where(mask)` gives indices
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    known = row_named(op_name(node))
    return known.kind == "pointwise" or known.dims is dropout


def is_random(node: Node) -> bool:
    """Whether this node draws random numbers (dropout that is off does not)."""
    if node.op != "call_function":
        return False
    switches = row_named(op_name(node)).random
    if switches is None:
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    probability, trains = switches
    args = named_args(node)
    if probability is not None and not args.get(probability, 1.0):
        return False
    return trains is None or args.get(trains) is not False
