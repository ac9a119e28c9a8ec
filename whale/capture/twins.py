"""The out-of-place twin of an operation that writes: `add` for `add_`, `exp` for `exp(out=...)`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.fx import Node

from whale.capture.graph import module_name, user_line
from whale.compat import schema
from whale.operations.nodes import aten_name, is_written, written_names

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
NOT_DATA = (
    "set_",
    "resize_",
    "resize_as_",
    "as_strided_",
    "requires_grad_",
    "retain_grad",
    "record_stream",
)
"""operations that change a tensor object in ways that a graph of values cannot say"""


def refuse(node: Node, why: str, way_out: str = "use the out-of-place form") -> NoReturn:
    raise ValueError(
        f"`{node.target}` in module `{module_name(node)}` ({user_line(node)}) {why}: {way_out}"
    )


def twin_of(node: Node) -> Any:
    """The operation without a write that computes what this in-place (or out=) operation writes."""
    _, name, overload = str(node.target).split(".")
    key = f"{name}.{overload}"
    written = written_names(node)
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
        wanted = [each for each in wanted if each not in written]
    packet = getattr(aten, name, None)
    # the overload of the same name first
    overloads = (
        sorted(packet.overloads(), key=lambda each: each != overload) if packet is not None else []
    )
    for candidate in (getattr(packet, each) for each in overloads):
        arguments = schema(candidate).arguments
        # the first argument is called `self` or `input`
        if [each.name for each in arguments][1:] == wanted[1:] and not any(
            is_written(each) for each in arguments
        ):
            return candidate
    refuse(node, "has no out-of-place twin")
