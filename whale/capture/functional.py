"""Turns every in-place operation of a captured graph into its out-of-place twin, with the aliases
that views make.

`torch.export`'s own functionalisation (`run_decompositions`) is no substitute: it breaks backward
through in-place operations and decomposes dropout.

How it works. The nodes are visited in order, and each of them reads the *present* value of its
arguments:

- Two nodes that are one tensor object (`x` and the result of `x.add_(1)`) are one `object`.
- A view knows its parent, and which value of the parent it was computed from; when the parent has a
  newer one, the view is made again.
- A write gives the written object a new value, its parent a new value by the matching scatter or
  inverse view, and so on up to the tensor that owns the memory. Nothing else is touched: other
  views notice by themselves.

Who shares memory with whom is read from the storages of the fake values, which `torch.export` keeps
as the eager model had them.

Gradients. A write through `detach` changes the data of a tensor behind the back of autograd.
Without a gradient on that tensor this is a plain update (buffers under `no_grad`). With one, the
tensor is *lost*: reading it again would need its new data with its old gradient, so it is refused
by name.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from whale.capture.graph import insert_call, user_line
from whale.capture.ops import (
    FINAL_VALUE,
    could_carry_gradient,
    returned_argument,
    share_memory,
    tensors,
    updates_statistics,
)
from whale.capture.out_of_place import (
    DATA_TAG,
    OTHER_THAN_DATA,
    refuse,
    same_form,
    twin_of,
    view_inverse,
)
from whale.compat import is_function_transform, schema
from whale.names import names_of
from whale.operations.nodes import argument, aten_name, written_names

aten = torch.ops.aten

METADATA_WRITES = names_of("squeeze_ unsqueeze_ t_ transpose_ swapdims_ swapaxes_ detach_")
"""in-place operations that change the tensor object and no data: the twin is a view"""
SCATTERS = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.diagonal_scatter.default,
)
"""operations that write a part of a tensor; their second to fourth arguments name dims"""
UNDIFFERENTIABLE = (aten.bernoulli.p, aten.normal_functional.default)
"""twins that raise in backward; their derivative is zero, so they get a detached argument"""


@dataclass(frozen=True)
class Lost:
    """The value of a tensor whose data was written past its gradient."""

    write: Node


Value = Node | Lost


def make_functional(graph: Graph, parameters: Collection[Node] = ()) -> dict[Node, Node]:
    """Rewrites `graph` in place without in-place operations; gives {written state tensor: node with
    its value after the forward}.

    State tensors are placeholders or get_attr nodes. Those in `parameters`, and those whose fake
    value requires a gradient, must not be written; a written input of the batch is among the
    results and the caller may forget it. Running statistics of batch_norm and instance_norm, which
    these operations write themselves, stay with them.
    """
    return _Functional(graph, frozenset(parameters)).run()


class _Functional:
    def __init__(self, graph: Graph, parameters: frozenset[Node]) -> None:
        self.graph = graph
        self.parameters = parameters
        self.object: dict[Node, Node] = {}
        """node -> the first node that is the same tensor object, where that is another one"""
        self.parents: dict[Node, tuple[Node, ...]] = {}
        """view -> the nodes that it shares memory with"""
        self.present: dict[Node, tuple[Value, tuple[Value, ...]]] = {}
        """object -> its present value, and the values of its parents that this was computed from"""
        self.arguments: dict[Node, tuple[Any, Any]] = {}
        """view -> its arguments as they were in the graph that we were given"""
        self.states: dict[int, Node] = {}
        """storage of a state tensor -> the first node that has it"""
        self.writes: dict[Node, Node] = {}
        """tensor that owns its memory -> the last operation that wrote there"""
        self.carriers: set[Node] = set()
        self.sizes: dict[str, Node] = {}
        """symbolic size -> a node that has it"""
        self.at: Node = next(iter(graph.nodes))
        """the node being visited; new nodes go before it"""

    def run(self) -> dict[Node, Node]:
        states = [node for node in self.graph.nodes if node.op in ("placeholder", "get_attr")]
        written: list[Node] = []
        for node in list(self.graph.nodes):
            self.at = node
            if node.op in ("placeholder", "get_attr"):
                self.note_state(node)
            elif written_names(node) and aten_name(node) not in METADATA_WRITES:
                self.write(node)
                written.append(node)
            else:
                self.visit(node)
        for node in reversed(written):
            self.graph.erase_node(node)
        final = {state: self.read(state) for state in states if self.value(state) is not state}
        for value in final.values():
            value.meta[FINAL_VALUE] = True
        return final

    # --- visiting

    def note_state(self, node: Node) -> None:
        """A parameter, buffer or input. Two of them may be one tensor under two names."""
        self.note(node)
        for fake in tensors(node):
            twin = self.states.setdefault(id(fake.untyped_storage()), node)
            if twin is not node and same_form(twin.meta["val"], fake):
                self.object[node] = twin
            elif twin is not node:
                self.note_view(node, [twin])

    def visit(self, node: Node) -> None:
        """An operation that writes no data."""
        if is_function_transform(node):
            refuse(
                node,
                "is part of a `torch.func` transform (vmap, grad)",
                "write it with batched operations such as `einsum` or `bmm`, a gradient inside of "
                "forward by its formula",
            )
        if written_names(node):
            self.check_object_of_graph(node)
            node.target = twin_of(node)
        self.check_statistics(node)
        sources = node.all_input_nodes
        same = returned_argument(node)
        self.arguments[node] = (node.args, node.kwargs)
        if self.parents or self.object:  # otherwise there is nothing that could have changed
            node.args, node.kwargs = map_arg((node.args, node.kwargs), self.read)
        self.note(node)
        if same is not None:
            self.object[node] = self.first(same)
        elif node.target is operator.getitem and sources[0] not in self.parents:
            pass  # one of several new tensors
        elif aten_name(node) != "lift_fresh_copy":
            # that one is a copy, though its fake value shares memory with the constant
            self.note_view(node, [source for source in sources if share_memory(source, node)])

    def note(self, node: Node) -> None:
        """Notes what other nodes need to know of a node that is now in the rewritten graph."""
        if tensors(node):
            self.present[node] = (node, ())
        if could_carry_gradient(node, self.carriers):
            self.carriers.add(node)
        if isinstance(node.meta.get("val"), torch.SymInt):
            self.sizes.setdefault(str(node.meta["val"]), node)

    def note_view(self, node: Node, parents: list[Node]) -> None:
        if parents:
            self.parents[node] = tuple(parents)
            self.present[node] = (node, tuple(self.value(parent) for parent in parents))

    def check_object_of_graph(self, node: Node) -> None:
        owner = self.first(node.all_input_nodes[0])
        if owner.op != "call_function" and aten_name(node) != "detach_":
            refuse(node, f"changes the shape of `{owner.target}` itself")

    def check_statistics(self, node: Node) -> None:
        if updates_statistics(node):
            for name in ("running_mean", "running_var"):
                state = argument(node, name)
                if isinstance(state, Node) and self.value(state) is not state:
                    refuse(
                        node,
                        f"gets {name} after the forward has written to it",
                        "leave running statistics to the normalisation layer",
                    )

    # --- reading

    def first(self, node: Node) -> Node:
        return self.object.get(node, node)

    def read(self, node: Node) -> Node:
        """The node that has the present value of `node`."""
        value = self.value(node)
        if isinstance(value, Lost):
            refuse(
                value.write,
                "changes a tensor that carries a gradient past that gradient (no_grad or "
                f"detach), and {user_line(self.at)} uses it again",
                "clone it before the change, or make the change where gradients are on",
            )
        return value

    def value(self, node: Node) -> Value:
        node = self.first(node)
        if node not in self.present:  # a number
            return node
        value, seen = self.present[node]
        if node not in self.parents:
            return value
        parents = tuple(self.value(parent) for parent in self.parents[node])
        if any(new is not old for new, old in zip(parents, seen, strict=True)):
            value = self.make_again(node, value, parents)
            self.present[node] = (value, parents)
        return value

    def make_again(self, view: Node, old: Value, parents: tuple[Value, ...]) -> Value:
        """The view, of the present values of its parents."""
        lost = next((parent for parent in parents if isinstance(parent, Lost)), None)
        if lost is not None:
            return lost
        if aten_name(view) == "detach" and old in self.carriers:
            # a gradient was written through this view, then other data behind its back
            return Lost(self.last_write(view))
        if view.op != "call_function":
            refuse(
                self.at,
                f"needs `{view.target}`, a view of another tensor of the model that was written",
                "register one of them",
            )
        args, kwargs = map_arg(self.arguments[view], self.read)
        return self.add(view.target, args, kwargs, like=view, value=view.meta["val"])

    def last_write(self, view: Node) -> Node:
        while view in self.parents:
            view = self.first(self.parents[view][0])
        return self.writes[view]

    # --- writing

    def write(self, node: Node) -> None:
        """An in-place operation: its twin gives the new value of what it writes."""
        target = argument(node, written_names(node)[0])
        if len(written_names(node)) > 1 or not isinstance(target, Node):
            refuse(node, "writes several tensors at once")
        args, kwargs = map_arg((node.args, node.kwargs), self.read)
        value = self.new_value(node, list(args), dict(kwargs))
        self.store(target, self.fit(value, target.meta["val"], node), node)
        self.object[node] = self.first(target)

    def new_value(self, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Node:
        """What the in-place `node` computes, out of place."""
        if aten_name(node) == "copy_":
            return self.over(args[0], self.copied(args[1], args[0], node), node)
        twin = twin_of(node)
        # defaults are written out: those of the twin may differ
        args += [
            each.default_value
            for each in schema(node.target).arguments[len(args) :]
            if not each.kwarg_only
        ]
        if twin in UNDIFFERENTIABLE and args[0] in self.carriers:
            args[0] = self.add(aten.detach.default, (args[0],), like=node)
        kwargs = {name: value for name, value in kwargs.items() if name not in written_names(node)}
        value = self.add(twin, tuple(args), kwargs, like=node)
        if "autocast" in value.meta:  # autocast leaves in-place operations alone
            device_type, dtype, _, cache = value.meta["autocast"]
            value.meta["autocast"] = (device_type, dtype, False, cache)
        return value

    def over(self, old: Node, value: Node, node: Node) -> Node:
        """`value` in place of all of `old`, whose gradient is 0, as in eager training: a parameter
        behind it has a gradient, and an optimizer with weight decay changes it.
        """
        if old not in self.carriers:
            return value
        everywhere = self.add(aten.ones_like.default, (old,), {"dtype": torch.bool}, like=node)
        return self.add(aten.where.self, (everywhere, value, old), like=node)

    def copied(self, source: Node, target: Node, node: Node) -> Node:
        """`source` with dtype, device and shape of `target`."""
        old = source.meta["val"]
        new = target.meta["val"]
        if old.device != new.device:
            source = self.add(aten.to.device, (source, new.device, new.dtype), like=node)
        elif old.dtype != new.dtype:
            source = self.add(aten.to.dtype, (source, new.dtype), like=node)
        if not same_form(source.meta["val"], new):
            source = self.add(aten.expand.default, (source, self.size_arguments(target)), like=node)
        return source

    def fit(self, value: Node, wanted: torch.Tensor, node: Node) -> Node:
        """`value` with the dtype of the tensor that it is written to, and strides that allow the
        same views.
        """
        if not same_form(value.meta["val"], wanted):
            refuse(
                node,
                f"changes the shape of a tensor from {list(wanted.shape)} to "
                f"{list(value.meta['val'].shape)}",
            )
        if value.meta["val"].dtype != wanted.dtype:
            value = self.add(aten.to.dtype, (value, wanted.dtype), like=node)
        # a contiguous tensor has every view that another one of this shape has
        if not value.meta["val"].is_contiguous() and value.meta["val"].stride() != wanted.stride():
            value = self.add(aten.contiguous.default, (value,), like=node)
        return value

    def store(self, target: Node, value: Value, node: Node) -> None:
        """Gives `target` a new value, and so everything whose memory it is a part of."""
        path: list[tuple[Node, Value]] = []
        owner = self.first(target)
        while owner in self.parents:
            if DATA_TAG in (owner.meta.get("custom") or {}):
                refuse(node, "writes to `.data`, behind the back of autograd", OTHER_THAN_DATA)
            path.append((owner, value))
            parent = self.parents[owner][0]
            shared = self.parents[owner]
            if owner.target is operator.getitem:
                # a part of a split: its parent is a list, the memory belongs to what was split
                shared = self.parents[parent]
                parent = shared[0]
            if len(shared) > 1:
                refuse(
                    owner,
                    "shares memory with several tensors, and one of its results is written in "
                    "place",
                )
            value = self.write_back(owner, parent, value, node)
            owner = self.first(parent)
        if owner in self.parameters or (owner.op != "call_function" and owner in self.carriers):
            # export leaves requires_grad on a buffer that a gradient was written to; eager training
            # fails on it in the second step
            refuse(
                node,
                f"writes in forward to `{owner.target}`, which is a parameter, or a buffer that "
                "keeps a gradient from step to step",
                "make a parameter a buffer or update it outside the model; update a buffer under "
                "torch.no_grad() or with detached values",
            )
        self.present[owner] = (value, ())
        self.writes[owner] = node
        for view, new in reversed(path):
            self.present[view] = (new, tuple(self.value(parent) for parent in self.parents[view]))

    def write_back(self, view: Node, parent: Node, value: Value, node: Node) -> Value:
        """The new value of `parent` after `value` was written to its view `view`."""
        old = self.value(parent)
        if isinstance(value, Lost) or isinstance(old, Lost):
            return value if isinstance(value, Lost) else old
        if aten_name(view) == "detach":
            if old in self.carriers:
                return Lost(node)
            if value in self.carriers:
                return self.add(aten.detach.default, (value,), like=node)
            return value
        call = view_inverse(view, old, value, self.size_arguments)
        if call is None:
            refuse(
                node,
                f"writes to the result of `{view.target}`, a view that Whale cannot write back "
                f"({user_line(view)})",
            )
        if old.meta["val"].is_complex() and call[0] in SCATTERS:
            return self.fit(self.scattered_complex(*call, like=node), parent.meta["val"], node)
        return self.fit(self.add(*call, like=node), parent.meta["val"], node)

    def scattered_complex(self, target: Any, args: tuple[Any, ...], like: Node) -> Node:
        """A scatter of complex values, which torch cannot differentiate, on pairs of real ones:
        these have one dim more, the last.
        """
        rank = args[0].meta["val"].ndim
        real = []
        for part in args[:2]:
            plain = self.add(aten.resolve_conj.default, (part,), like=like)
            real.append(self.add(aten.view_as_real.default, (plain,), like=like))
        places = list(args[2:])
        for place in (1, 2) if target is aten.diagonal_scatter.default else (0,):
            places[place] %= rank
        pairs = self.add(target, (*real, *places), like=like)
        return self.add(aten.view_as_complex.default, (pairs,), like=like)

    # --- new nodes

    def add(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        like: Node,
        value: Any = None,
    ) -> Node:
        """A new node before the one being visited, with the tags of `like`; its fake value is
        computed when it is not given.
        """
        node = insert_call(self.at, target, args, kwargs, like=like, value=value)
        self.note(node)
        return node

    def size_arguments(self, node: Node) -> list[int | Node]:
        """The shape of a node as arguments: numbers, and nodes for symbolic sizes."""
        sizes: list[int | Node] = []
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                sizes.append(size)
                continue
            known = self.sizes.get(str(size))
            if known is None:
                known = self.add(aten.sym_size.int, (node, dim), like=self.at, value=size)
            sizes.append(known)
        return sizes
