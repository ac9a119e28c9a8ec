"""Inlines the sub-graphs that `torch.export` makes of `no_grad`, `enable_grad` and `autocast`
blocks, and drops assertions.

A no-grad block needs no mode at run time when every tensor that enters it is detached. The one trap
is a tensor *object* that goes through the block: `x.to(x.dtype)` or `x.mul_(2)` inside it return x
itself, which keeps its gradient, and export lets all later uses of x read this result. So each
value inside a block has two faces: `raw`, the object as the code outside sees it, and `seen`, the
value for operations inside.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch.fx import Graph, GraphModule, Node

from whale.capture.functional import METADATA_WRITES
from whale.capture.graph import TRACE_KEYS, module_name, user_line
from whale.capture.ops import is_removable, returned_argument
from whale.dtypes import is_differentiable
from whale.operations.nodes import argument, aten_name, written_names

ASSERT_PREFIXES = ("_assert_", "sym_constrain_range")


class Faces(NamedTuple):
    """One value of a region; `raw` and `seen` differ only for tensors that enter a no-grad region
    from outside.
    """

    raw: Any
    seen: Any


@dataclass(frozen=True)
class Region:
    """What the nodes of one sub-graph run under."""

    call: Node
    """the node of the outermost region, in the graph that we inline into: everything goes before it
    """
    caller: Node
    """the node of this region, whose tags its nodes inherit"""
    grad: bool
    autocast: tuple[Any, ...] | None

    def look(self, raw: Any) -> Faces:
        """Both faces of a value that comes into this region from one with gradients."""
        return Faces(raw, raw if self.grad else _detach(raw, self.call))


def inline_regions(graph_module: GraphModule) -> None:
    """Inlines all `wrap_with_set_grad_enabled` and `wrap_with_autocast` nodes, in place; any other
    higher-order operation is refused.
    """
    graph = graph_module.graph
    regions = [node for node in graph.nodes if _is_higher_order(node)]
    if not regions:
        return
    for node in regions:
        with graph.inserting_before(node):
            top = Region(call=node, caller=node, grad=True, autocast=None)
            results = _inline_call(
                node, graph_module, [Faces(each, each) for each in node.args], top
            )
        for user in list(node.users):
            assert user.target is operator.getitem, (
                f"{user.name} reads {node.name} otherwise than by getitem"
            )
            user.replace_all_uses_with(results[user.args[1]].raw)
            graph.erase_node(user)
        graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        body = _attribute(graph_module, str(node.target))
        if not node.users and isinstance(body, GraphModule):
            graph.erase_node(node)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()


def drop_asserts(graph: Graph) -> None:
    """Removes assertions on tensors and sizes, and what only they used."""
    for node in list(graph.nodes):
        if aten_name(node).startswith(ASSERT_PREFIXES):
            _erase_with_sources(graph, node)


def _erase_with_sources(graph: Graph, node: Node) -> None:
    waiting = [node]
    while waiting:
        dead = waiting.pop()
        sources = dead.all_input_nodes
        graph.erase_node(dead)
        waiting += [source for source in sources if is_removable(source)]


def _is_higher_order(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "namespace", None) == "higher_order"


def _attribute(owner: GraphModule, path: str) -> Any:
    value: Any = owner
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _inline_call(
    node: Node, owner: GraphModule, arguments: list[Faces], outside: Region
) -> list[Faces]:
    """Inlines one higher-order node of `owner`, called inside the region `outside`; gives the faces
    of its outputs for `outside`.
    """
    kind = str(node.target)
    if kind == "wrap_with_set_grad_enabled":
        inside = Region(outside.call, node, bool(arguments[0].raw), outside.autocast)
        operands = arguments[1:]
    elif kind == "wrap_with_autocast":
        inside = Region(outside.call, node, outside.grad, tuple(each.raw for each in arguments[:4]))
        operands = arguments[4:]
    else:
        _refuse(node, kind)
    body = _attribute(owner, str(operands[0].raw.target))
    operands = operands[1:]
    if inside.grad != outside.grad:
        operands = [inside.look(each.raw) for each in operands]
    results = _inline_body(body, operands, inside)
    if inside.grad != outside.grad:
        results = [outside.look(each.raw) for each in results]
    return results


def _inline_body(body: GraphModule, operands: list[Faces], region: Region) -> list[Faces]:
    """Copies the nodes of a sub-graph before `region.call`; gives the faces of its outputs, still
    as the region sees them.
    """
    faces: dict[Node, Faces] = {}
    waiting = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            faces[node] = next(waiting)
        elif node.op == "output":
            return _faces_of(node.args[0], faces)
        elif node.op == "get_attr":
            assert isinstance(_attribute(body, str(node.target)), GraphModule), (
                f"{node.target} was not lifted out of a region"
            )
            faces[node] = Faces(node, node)
        elif _is_higher_order(node):
            inner = _inline_call(node, body, _faces_of(node.args, faces), region)
            faces[node] = Faces(inner, inner)
        elif node.target is operator.getitem and isinstance(faces[node.args[0]].raw, list):
            faces[node] = faces[node.args[0]].raw[node.args[1]]
        else:
            faces[node] = _inline_node(node, faces, region)
    raise AssertionError("a sub-graph without output")


def _faces_of(values: Any, faces: dict[Node, Faces]) -> list[Faces]:
    return [faces[each] if isinstance(each, Node) else Faces(each, each) for each in values]


def _inline_node(node: Node, faces: dict[Node, Faces], region: Region) -> Faces:
    """Copies one ordinary operation into the outer graph."""
    same = returned_argument(node)
    # `x.to(x.dtype)` is the object x: no operation; its gradient continues outside of the region
    if same is not None and faces[same].raw is not faces[same].seen:
        return faces[same]
    through = []  # what this node writes to outside of the region
    for name in written_names(node):
        written = argument(node, name)
        if isinstance(written, Node) and faces[written].raw is not faces[written].seen:
            through.append(written)
    if through and aten_name(node) in METADATA_WRITES:
        return region.look(_copy(node, {each: face.raw for each, face in faces.items()}, region))
    copy = _copy(node, {each: face.seen for each, face in faces.items()}, region)
    if through and aten_name(node) != "detach_":
        # the result of x.mul_(2) is the object x, whose gradient a no-grad block does not cut
        return Faces(faces[through[0]].raw, copy)
    return Faces(copy, copy)


def _copy(node: Node, values: dict[Node, Any], region: Region) -> Node:
    copy = region.call.graph.node_copy(node, lambda each: values[each])
    if region.autocast is not None:
        copy.meta["autocast"] = region.autocast
    _inherit(copy, region.caller)
    _inherit(copy, region.call)
    return copy


def _inherit(node: Node, caller: Node) -> None:
    """Tags and places that the node lacks come from the call of its region."""
    for key in TRACE_KEYS:
        if not node.meta.get(key) and caller.meta.get(key):
            node.meta[key] = caller.meta[key]


def _detach(value: Any, call: Node) -> Any:
    """`value.detach()` before `call`, for anything that could carry a gradient."""
    fake = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(fake, torch.Tensor) or not is_differentiable(fake):
        return value
    node = call.graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta["val"] = fake.detach()
    _inherit(node, call)
    return node


def _refuse(node: Node, kind: str) -> NoReturn:
    raise ValueError(
        f"`{kind}` in module `{module_name(node)}` ({user_line(node)}) holds a sub-graph that "
        "Whale cannot place on devices. Try: "
        "write it without control flow on tensors, for example with torch.where"
    )
