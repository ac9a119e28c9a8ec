"""Looks operations up in the table, and names the families that several packages ask for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

# these modules register their rows when they are imported
from whale.operations import products, reductions, timed, views  # noqa: F401
from whale.operations.elementwise import dropout, pointwise
from whale.operations.nodes import named_args, op_name
from whale.operations.row import TABLE, Row, not_linear


def names_of_kind(*kinds: str) -> frozenset[str]:
    """Names of all operations of these kinds."""
    return frozenset(name for name, each in TABLE.items() if each.kind in kinds)


CASTS = names_of_kind("cast")
CASTS_IN_PLACE = frozenset({"to", "type_as"})
"""casts that hand back their input, and cost nothing, when the dtype stays; others always copy"""
VIEWS = names_of_kind("view")
PERMUTES = names_of_kind("permute")
EXPANDS = names_of_kind("expand")
SPLITS = names_of_kind("split")
CREATORS = names_of_kind("create")
NEW_LIKE = frozenset(name for name in CREATORS if name.startswith("new_"))
"""creators whose second argument is a size"""
COUNTERS = names_of_kind("count")
"""creators whose values say the position"""
DROPOUTS = names_of_kind("dropout")
POOLINGS = names_of_kind("pool")
POINTWISE_LOSSES = names_of_kind("loss")
CLASS_LOSSES = names_of_kind("class loss")
AFFINE = frozenset(name for name, each in TABLE.items() if each.affine is not not_linear)
"""operations that may add something to a sum over the samples, which must count once"""
LAYERS = frozenset(name for name, each in TABLE.items() if each.layer)
FREE = frozenset(name for name, each in TABLE.items() if each.free)


def timed_as(name: str) -> str | None:
    """The measured operation whose time an operation is taken to need, where one does about the
    same to memory.
    """
    known = TABLE.get(name)
    return known.timed_as if known is not None else None


def row_of(node: Node) -> Row:
    """The row of a node's operation: elementwise where torch or the table says so, and an empty row
    for what is unknown.
    """
    name = op_name(node)
    known = TABLE.get(name, Row(name))
    if known.dims is None and is_pointwise(node):
        return replace(known, dims=pointwise)
    return known


def is_pointwise(node: Node) -> bool:
    """Whether a node treats every entry on its own, operands broadcast to one shape."""
    if isinstance(node.meta.get("val"), list | tuple):
        return False  # `torch.where(mask)` gives indices
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    known = TABLE.get(op_name(node))
    return known is not None and (known.kind == "pointwise" or known.dims is dropout)


def is_random(node: Node) -> bool:
    """Whether this node draws random numbers (dropout that is off does not)."""
    if node.op != "call_function":
        return False
    known = TABLE.get(op_name(node))
    if known is None or known.random is None:
        return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    probability, trains = known.random
    args = named_args(node)
    if probability is not None and not args.get(probability, 1.0):
        return False
    return trains is None or args.get(trains) is not False
