"""Writing through a view: the operation that puts a view's new value into the tensor that it is a
view of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from whale.operations.nodes import argument, aten_name

aten = torch.ops.aten

RESHAPES = (
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "view_as",
    "reshape_as",
    "squeeze",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
)
SELF_INVERSE = ("transpose", "t", "swapaxes", "swapdims", "numpy_T", "mT")
SPLITS = ("split", "split_with_sizes", "chunk", "tensor_split")


def view_inverse(
    view: Node, parent: Node, value: Node, sizes: Callable[[Node], list[int | Node]]
) -> tuple[Any, tuple[Any, ...]] | None:
    """Operation and arguments that give `parent` with `value` in the place of its view `view`; None
    where we know no such operation.
    """
    before: torch.Tensor = parent.meta["val"]
    name = aten_name(view)
    dim = argument(view, "dim") if aten_name(view) else None
    if view.target is operator.getitem:
        return _part_inverse(view, parent, value)
    if name == "select":
        return aten.select_scatter.default, (parent, value, dim, argument(view, "index"))
    if name == "slice":
        return aten.slice_scatter.default, (
            parent,
            value,
            dim,
            *(argument(view, each) for each in ("start", "end", "step")),
        )
    if (
        name == "narrow"
        and isinstance(argument(view, "start"), int)
        and isinstance(argument(view, "length"), int)
    ):
        start = argument(view, "start")
        assert dim is not None
        start = start + before.shape[dim] if start < 0 else start
        return aten.slice_scatter.default, (
            parent,
            value,
            dim,
            start,
            start + argument(view, "length"),
        )
    if name == "diagonal":
        return aten.diagonal_scatter.default, (
            parent,
            value,
            *(argument(view, each) for each in ("offset", "dim1", "dim2")),
        )
    if name in SELF_INVERSE:
        return view.target, (value, *view.args[1:])
    if name in ("movedim", "moveaxis"):
        return view.target, (value, argument(view, "destination"), argument(view, "source"))
    if name == "permute":
        order = [each % before.ndim for each in argument(view, "dims")]
        return aten.permute.default, (value, [order.index(each) for each in range(before.ndim)])
    if name == "unsqueeze":
        return aten.squeeze.dim, (value, dim)
    if name == "alias" or (name in ("expand", "expand_as") and same_form(view.meta["val"], before)):
        return aten.alias.default, (value,)
    if name in RESHAPES and view.meta["val"].dtype == before.dtype:
        return aten.reshape.default, (value, sizes(parent))
    return None


def _part_inverse(view: Node, parent: Node, value: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The same for one part of a split: `view` is a getitem."""
    parts, index = view.args
    assert isinstance(parts, Node) and isinstance(index, int)
    if aten_name(parts) == "unbind":
        return aten.select_scatter.default, (parent, value, argument(parts, "dim"), index)
    if aten_name(parts) in SPLITS:
        dim = argument(parts, "dim")
        lengths = [
            part.shape[dim] for part in parts.meta["val"][: index % len(parts.meta["val"]) + 1]
        ]
        if all(isinstance(length, int) for length in lengths):
            return aten.slice_scatter.default, (parent, value, dim, sum(lengths[:-1]), sum(lengths))
    return None


def same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of one shape, symbolic sizes included."""
    return one.ndim == other.ndim and bool(one.shape == other.shape)
