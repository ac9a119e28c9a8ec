"""What stands for a write in a graph of values: the out-of-place twin of an operation (`add` for
`add_`, `exp` for `exp(out=...)`), and the operation that puts a view's new value into the tensor
that it is a view of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.fx import Node

from whale.capture.graph import module_name, user_line
from whale.compat import schema
from whale.names import names_of
from whale.operations.nodes import argument, aten_name, is_written, written_names
from whale.operations.table import SPLITS

aten = torch.ops.aten

RENAMED = {
    "bernoulli_.float": aten.bernoulli.p,
    "float_power_.Tensor": aten.float_power.Tensor_Tensor,
    "floor_divide_.Tensor": aten.floor_divide.default,
    "normal_.default": aten.normal_functional.default,
    "pow_.Tensor": aten.pow.Tensor_Tensor,
    "transpose_.default": aten.transpose.int,
}
"""twins under another name"""
DATA_TAG = "data"
"""on the operation that stands for `.data`, in the meta data of the export"""
OTHER_THAN_DATA = (
    "`with torch.no_grad(): buffer.copy_(y)` for a buffer, the out-of-place form for any other "
    "tensor (`F.linear(x, self.weight * self.mask)`); update weights outside of the model"
)
"""what to write instead of a write to `.data`"""
NOT_DATA = names_of("set_ resize_ resize_as_ as_strided_ requires_grad_ retain_grad record_stream")
"""operations that change a tensor object in ways that a graph of values cannot say"""
RESHAPES = names_of(
    "view reshape flatten unflatten view_as reshape_as squeeze atleast_1d atleast_2d atleast_3d"
)
SELF_INVERSE = names_of("transpose t swapaxes swapdims numpy_T mT")


def refuse(node: Node, why: str, advice: str = "use the out-of-place form") -> NoReturn:
    operation = node.target if str(node.target).startswith("aten.") else node.name
    raise ValueError(
        f"`{operation}` in module `{module_name(node)}` ({user_line(node)}) {why}. Try: {advice}"
    )


def twin_of(node: Node) -> Any:
    """The operation without a write that computes what this in-place (or out=) operation writes."""
    _, name, overload = str(node.target).split(".")
    key = f"{name}.{overload}"
    if not aten_name(node) or name in NOT_DATA:
        refuse(
            node,
            "changes a tensor in a way that has no out-of-place form here",
            "write it without this call",
        )
    if key in RENAMED:
        return RENAMED[key]
    wanted = [each.name for each in schema(node.target).arguments]
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    elif name.startswith("__i"):
        name = "__" + name[3:]
    else:
        written = written_names(node)
        wanted = [each for each in wanted if each not in written]
    packet = getattr(aten, name, None)
    if packet is not None:
        # the overload of the same name first
        for each in sorted(packet.overloads(), key=lambda each: each != overload):
            candidate = getattr(packet, each)
            arguments = schema(candidate).arguments
            # the first argument is called `self` or `input`
            same_names = [argument.name for argument in arguments][1:] == wanted[1:]
            if same_names and not any(map(is_written, arguments)):
                return candidate
    refuse(node, "has no out-of-place twin")


def view_inverse(
    view: Node, parent: Node, value: Node, sizes: Callable[[Node], list[int | Node]]
) -> tuple[Any, tuple[Any, ...]] | None:
    """Operation and arguments that give `parent` with `value` in the place of its view `view`; None
    where we know no such operation. `sizes` gives the shape of a node as arguments.
    """
    if view.target is operator.getitem:
        return _part_inverse(view, parent, value)
    before: torch.Tensor = parent.meta["val"]
    name = aten_name(view)

    def given(*names: str) -> list[Any]:
        return [argument(view, each) for each in names]

    if name == "select":
        return aten.select_scatter.default, (parent, value, *given("dim", "index"))
    if name == "slice":
        return aten.slice_scatter.default, (parent, value, *given("dim", "start", "end", "step"))
    if name == "narrow":
        dim, start, length = given("dim", "start", "length")
        known = all(isinstance(each, int) for each in (start, length, before.shape[dim]))
        if known:
            start = start + before.shape[dim] if start < 0 else start
            return aten.slice_scatter.default, (parent, value, dim, start, start + length)
    if name == "diagonal":
        return aten.diagonal_scatter.default, (parent, value, *given("offset", "dim1", "dim2"))
    if name in SELF_INVERSE:
        return view.target, (value, *view.args[1:])
    if name in ("movedim", "moveaxis"):
        return view.target, (value, *given("destination", "source"))
    if name == "permute":
        order = [each % before.ndim for each in argument(view, "dims")]
        return aten.permute.default, (value, [order.index(each) for each in range(before.ndim)])
    if name == "unsqueeze":
        return aten.squeeze.dim, (value, *given("dim"))
    if name == "alias" or (name in ("expand", "expand_as") and same_form(view.meta["val"], before)):
        return aten.alias.default, (value,)
    if name in RESHAPES and view.meta["val"].dtype == before.dtype:
        return aten.reshape.default, (value, sizes(parent))
    return None


def _part_inverse(view: Node, parent: Node, value: Node) -> tuple[Any, tuple[Any, ...]] | None:
    """(operation, arguments) of the inverse of one part of a split, whose getitem `view` is."""
    parts, index = view.args
    assert isinstance(parts, Node) and isinstance(index, int)
    if aten_name(parts) == "unbind":
        return aten.select_scatter.default, (parent, value, argument(parts, "dim"), index)
    if aten_name(parts) in SPLITS:
        dim = argument(parts, "dim")
        values = parts.meta["val"]
        lengths = [part.shape[dim] for part in values[: index % len(values) + 1]]
        if all(isinstance(length, int) for length in lengths):
            return aten.slice_scatter.default, (parent, value, dim, sum(lengths[:-1]), sum(lengths))
    return None


def same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one shape, symbolic sizes included."""
    return one.ndim == other.ndim and bool(one.shape == other.shape)
