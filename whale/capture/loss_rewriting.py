"""Changes the graph so that its outputs are the terms of the loss: the four steps that stand on top
of capture/losses.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from whale.capture.graph import CapturedGraph, user_line
from whale.capture.kinds import Kind
from whale.capture.loss_plan import LossPlan, TermInfo
from whale.capture.sample_states import (
    Irregular,
    PerSample,
    Shared,
    Size,
    Summed,
    Whole,
    expression,
)
from whale.capture.samples import SampleFlow
from whale.capture.whole_batch import WholeGraph
from whale.operations.nodes import named_args, op_name
from whale.operations.table import CASTS, VIEWS

aten = torch.ops.aten
SUM = 2
"""value of `reduction` in aten's loss functions"""
ONCE = "does not depend on samples, counted once"
MADE_FROM = ("stack_trace", "nn_module_stack", "custom", "autocast", "seq_nr")
"""what a new node takes over from the node that it replaces"""


def results(captured: CapturedGraph) -> list[Node]:
    return list(captured.output.args[0])  # type: ignore[arg-type,union-attr]


def loss_node(captured: CapturedGraph) -> Node:
    return results(captured)[0]


def live_leaves(flow: SampleFlow) -> list[Node]:
    return [
        leaf for leaf in flow.leaves if leaf in flow.live and flow.kinds[leaf] is Kind.ACTIVATION
    ]


class Rewriter:
    """One rewriting of one graph."""

    def __init__(self, captured: CapturedGraph, flow: SampleFlow) -> None:
        self.captured = captured
        self.flow = flow
        self.graph = captured.graph
        self.whole = WholeGraph(captured, flow)
        self.whole_nodes: dict[Any, Node] = {}
        """what -> its `whole_k` placeholder"""
        self.leaf_info: dict[Node, TermInfo] = {}
        """result of a rewritten leaf or addend -> what it is"""
        self.local: Node | None = None
        self.replaced: list[Node] = []

    def run(self) -> LossPlan:
        """The graph's first result is the loss; further ones (of evaluation) stay one node each."""
        reductions = self._make_sums()
        loss, *others = results(self.captured)
        summed = not self.flow.all_reduce and self._adds_up(loss)
        terms = self._split(loss) if summed else [self.scaled(loss, loss)]
        terms = [
            term
            if times == 1
            else self._call(aten.mul.Tensor, (term, times), term, self.captured.output)
            for term, times in Counter(terms).items()
        ]
        infos = tuple(self._describe(term) for term in terms)
        self.captured.output.args = ((*terms, *others),)
        self._prune(self.replaced)
        if not self.flow.all_reduce:
            return LossPlan(infos, self.whole.finish(), self.whole.buffers)
        for node in reductions:
            node.meta["all_reduce"] = "sum"
        return LossPlan(infos, self.whole.finish(), self.whole.buffers, reductions)

    def run_without_loss(self) -> LossPlan:
        self._make_sums()
        self._prune(self.replaced)
        return LossPlan((), self.whole.finish(), self.whole.buffers)

    def _make_sums(self) -> tuple[Node, ...]:
        """Steps 1 to 3, after which every Summed value is a plain sum over parts; the nodes that
        hold the leaves.
        """
        leaves = live_leaves(self.flow)
        self._lift()
        reductions = tuple(self._rewrite_leaf(leaf) for leaf in leaves)
        for node in [node for node in self.flow.live if isinstance(self.flow.states[node], Summed)]:
            self._scale_addends(node)
        return reductions

    # ------------------------------------------------------------------------------------------------------------
    # new nodes

    def _call(self, target: Any, args: tuple[Any, ...], like: Node, before: Node) -> Node:
        """A new node with a fake value, standing where `like` stands in the user's model."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        node.meta.update({key: like.meta[key] for key in MADE_FROM if key in like.meta})
        values = torch.fx.node.map_arg(args, lambda operand: operand.meta["val"])
        with torch.no_grad():
            node.meta["val"] = target(*values)
        return node

    def _placeholder(self, key: Any, source: Node, value: Any, text: str) -> Node:
        if key not in self.whole_nodes:
            last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                node = self.graph.placeholder(f"whole_{len(self.whole.outputs)}")
            node.meta.update(val=value, whole=True, whole_text=text)
            self.whole.outputs.append(source)
            self.whole_nodes[key] = node
        return self.whole_nodes[key]

    def _fake(self, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Any:
        return self.whole.anchor.meta["val"].new_empty(shape, dtype=dtype)  # type: ignore[union-attr]

    def _samples_in_all(self) -> Node:
        if "samples" not in self.whole_nodes:
            source = self.whole.as_tensor(self.whole.samples(), torch.int64)
            self._placeholder("samples", source, self._fake(torch.int64), "number of samples")
        return self.whole_nodes["samples"]

    def _samples_here(self) -> Node:
        if self.local is None:
            last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
            anchor = self.whole.anchor
            assert anchor is not None
            with self.graph.inserting_after(last):
                self.local = self.graph.call_function(aten.sym_size.int, (anchor, 0))
            self.local.meta["val"] = anchor.meta["val"].shape[0]
        return self.local

    def _fraction_of(self, value: Node, before: Node, like: Node) -> Node:
        """value x samples here / samples in all; divided first, so that half precision does not
        overflow.
        """
        share = self._call(aten.div.Tensor, (value, self._samples_in_all()), like, before)
        return self._call(aten.mul.Tensor, (share, self._samples_here()), like, before)

    def scaled(self, value: Any, user: Node, what: str = ONCE) -> Node:
        """An addend without samples (node or number), so that it counts once in all."""
        before = self.captured.output if value is user else user
        if isinstance(value, Node):
            node = self._fraction_of(value, before, value)
        else:
            dtype = user.meta["val"].dtype
            total = self._call(aten.to.dtype, (self._samples_in_all(), dtype), user, before)
            one = self._call(aten.reciprocal.default, (total,), user, before)
            share = self._call(aten.mul.Tensor, (one, self._samples_here()), user, before)
            node = self._call(aten.mul.Tensor, (share, value), user, before)
        self.leaf_info[node] = TermInfo(
            what, user_line(value if isinstance(value, Node) else user), ("number of samples",)
        )
        return node

    # ----------------------------------------------------------------------------------------------------------------
    # steps

    def _lift(self) -> None:
        """Step 1. Sources are copied from the untouched graph first, then all uses change."""
        uses = [
            (node, operand) for node in self.flow.live for operand in self.flow.whole_operands(node)
        ]
        uses += [
            (self.captured.output, node)
            for node in results(self.captured)
            if isinstance(self.flow.states[node], Whole)
        ]
        order = self.whole.order
        uses.sort(key=lambda use: (order[use[1]], order[use[0]]))
        lifted = {operand: self._lifted(operand) for _, operand in uses}
        for leaf in live_leaves(self.flow):
            if self.flow.leaves[leaf] == "class mean":
                self._class_counts(named_args(leaf))
            elif self.flow.leaves[leaf] == "row mean":
                self._rows(self._mask(leaf))
        for user, operand in uses:
            new = lifted[operand]
            if isinstance(
                operand.meta["val"], torch.SymFloat | float
            ):  # a Python float never widens its tensor; float64 would
                new = self._call(aten.to.dtype, (new, user.meta["val"].dtype), user, user)
                self.flow.states[new] = Shared()
            user.replace_input_with(operand, new)
            self.replaced.append(operand)

    def _lifted(self, operand: Node) -> Node:
        value = operand.meta["val"]
        source = self.whole.copy(operand)
        text = f"`{operand.name}` ({user_line(operand)})"
        if isinstance(value, torch.Tensor):
            return self._placeholder(operand, source, value, text)
        if (
            isinstance(self.flow.states[operand], Size)
            and expression(value) == self.captured.batch_symbol
        ):
            return self._samples_in_all()
        dtype = torch.float64 if isinstance(value, torch.SymFloat | float) else torch.int64
        return self._placeholder(
            operand, self.whole.as_tensor(source, dtype), self._fake(dtype), text
        )

    def _class_counts(self, args: dict[str, Any]) -> Node:
        """The placeholder for the number of targets (or for the number of each class, where classes
        have weights).
        """
        weight = args["weight"]
        ignored = args["ignore_index"]
        shape = () if weight is None else tuple(weight.meta["val"].shape)
        key = (args["target"], ignored, shape)
        if key not in self.whole_nodes:
            text = (
                f"number of targets that are not {ignored}"
                if weight is None
                else f"class weights of the targets that are not {ignored}"
            )
            self._placeholder(
                key, self.whole.class_counts(args), self._fake(torch.int64, shape), text
            )
        return self.whole_nodes[key]

    def _rewrite_leaf(self, leaf: Node) -> Node:
        """Step 2: the node that now holds this leaf's sum over the samples at hand."""
        how = self.flow.leaves[leaf]
        name = op_name(leaf)
        line = user_line(leaf)
        if how == "sum":
            self.leaf_info[leaf] = TermInfo(f"{name}, summed over the samples", line, ())
            return leaf
        users = [
            user for user in leaf.users if user in self.flow.live or user is self.captured.output
        ]
        after = leaf.next
        if how == "mean":
            new = self._fraction_of(leaf, after, leaf)
            self.leaf_info[new] = TermInfo(
                f"{name}, mean over the samples", line, ("number of samples",)
            )
        else:
            new, text = (
                self._class_mean(leaf, after)
                if how == "class mean"
                else self._row_mean(leaf, after)
            )
            self.leaf_info[new] = TermInfo(
                f"{name}, mean over the {'targets' if how == 'class mean' else 'rows'}",
                line,
                (text,),
            )
            self.replaced.append(leaf)
        for user in users:
            user.replace_input_with(leaf, new)
        return new

    def _class_mean(self, leaf: Node, after: Node) -> tuple[Node, str]:
        args = named_args(leaf)
        weight = args["weight"]
        count = self._class_counts(args)
        text = str(count.meta["whole_text"])
        summed = self._call(leaf.target, tuple((args | {"reduction": SUM}).values()), leaf, after)
        if weight is not None:
            weighted = self._call(aten.mul.Tensor, (weight, count), leaf, after)
            count = self._call(aten.sum.default, (weighted,), leaf, after)
        return self._call(aten.div.Tensor, (summed, count), leaf, after), text

    def _mask(self, leaf: Node) -> Node:
        """The mask that picked the rows of this mean."""
        states = [self.flow.of(operand) for operand in leaf.all_input_nodes]
        return next(
            s.outer.mask
            for s in states
            if isinstance(s, PerSample) and isinstance(s.outer, Irregular) and s.outer.mask
        )

    def _rows(self, mask: Node) -> Node:
        if ("rows", mask) not in self.whole_nodes:
            text = f"number of rows picked by `{mask.name}` ({user_line(mask)})"
            self._placeholder(("rows", mask), self.whole.rows(mask), self._fake(torch.int64), text)
        return self.whole_nodes[("rows", mask)]

    def _row_mean(self, leaf: Node, after: Node) -> tuple[Node, str]:
        """Sum / (rows of the whole mini-batch x elements of a row)."""
        args = named_args(leaf)
        count = self._rows(self._mask(leaf))
        if "reduction" in args:
            shape = torch.broadcast_shapes(
                args["input"].meta["val"].shape, args["target"].meta["val"].shape
            )
            summed = self._call(
                leaf.target, tuple((args | {"reduction": SUM}).values()), leaf, after
            )
            reduced = list(range(len(shape)))
        else:
            shape = args["input"].meta["val"].shape
            reduced = [dim % len(shape) for dim in args.get("dim") or range(len(shape))]
            summed = self._call(
                aten.sum.dim_IntList,
                (args["input"], reduced, args.get("keepdim", False)),
                leaf,
                after,
            )
        row = math.prod(shape[dim] for dim in reduced if isinstance(shape[dim], int))
        share = self._call(aten.div.Tensor, (summed, count), leaf, after)
        return self._call(aten.div.Tensor, (share, row), leaf, after), str(count.meta["whole_text"])

    def _scale_addends(self, node: Node) -> None:
        """Step 3, for one node that adds values without samples to sums over samples."""
        name = op_name(node)
        args = named_args(node)
        if name not in ("add", "sub", "rsub", "stack", "cat", "where") or node in self.flow.leaves:
            return
        keys = {"stack": ("tensors",), "cat": ("tensors",)}.get(name, ("input", "other"))

        def scale(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [scale(one) for one in value]
            if value in self.leaf_info or (isinstance(value, Node) and not self._is_shared(value)):
                return value
            return value if value == 0 and not isinstance(value, Node) else self.scaled(value, node)

        changed = {key: scale(args[key]) for key in keys}
        if all(changed[key] == args[key] for key in keys):
            return
        if name == "where":
            node.args = (args["condition"], changed["input"], changed["other"])
            node.kwargs = {}
        elif name in ("stack", "cat"):
            node.args = (changed["tensors"], args["dim"])
            node.kwargs = {}
        else:
            self._replace_sum(
                node, name, (changed["input"], changed["other"]), args.get("alpha", 1)
            )

    def _replace_sum(self, node: Node, name: str, operands: tuple[Any, Any], alpha: Any) -> None:
        """a + alpha b, a - alpha b, or b - alpha a with tensors on both sides."""
        target = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "rsub": aten.rsub.Tensor}[name]
        node.target = target
        node.args = operands
        node.kwargs = {} if alpha == 1 else {"alpha": alpha}

    def _is_shared(self, node: Node) -> bool:
        state = self.flow.states.get(node)
        return bool(node.meta.get("whole")) or (isinstance(state, Shared | Whole))

    def _split(self, node: Node) -> list[Node]:
        """Step 4: nodes that add up to `node`."""
        if node in self.leaf_info or not isinstance(self.flow.states.get(node), Summed):
            return [node]
        name = op_name(node)
        args = named_args(node)
        first = args.get("input")
        other = args.get("other")
        if name in ("add", "sub", "rsub"):
            return self._split_sum(node, name, args)
        if name in ("mul", "div", "neg") or name in CASTS | VIEWS:
            operand = first if self._adds_up(first) else other
            parts = (
                self._split(operand)
                if isinstance(operand, Node) and operand.meta["val"].numel() == 1
                else []
            )
            return (
                [self._again(node, operand, part) for part in parts]
                if operand and len(parts) > 1
                else [node]
            )
        if (
            name in ("sum", "mean")
            and isinstance(first, Node)
            and op_name(first) in ("stack", "cat")
            and node.meta["val"].dim() == 0
        ):
            return self._split_list(node, first, name == "mean")
        return [node]

    def _adds_up(self, value: Any) -> bool:
        return isinstance(value, Node) and (
            value in self.leaf_info or isinstance(self.flow.states.get(value), Summed)
        )

    def _split_sum(self, node: Node, name: str, args: dict[str, Any]) -> list[Node]:
        operands = [args["input"], args["other"]]
        if any(not isinstance(one, Node) and one != 0 for one in operands):
            return [node]
        nodes = [one for one in operands if isinstance(one, Node)]
        if any(
            one.meta["val"].shape != node.meta["val"].shape
            or one.meta["val"].dtype != node.meta["val"].dtype
            for one in nodes
        ):
            return [node]
        alpha = args.get("alpha", 1)
        factors = {"add": (1, alpha), "sub": (1, -alpha), "rsub": (-alpha, 1)}[name]
        terms: list[Node] = []
        for operand, factor in zip(operands, factors, strict=True):
            parts = self._split(operand) if isinstance(operand, Node) else []
            terms += [
                part
                if factor == 1
                else self._call(aten.mul.Tensor, (part, factor), part, self.captured.output)
                for part in parts
            ]
        return terms

    def _split_list(self, node: Node, listed: Node, mean: bool) -> list[Node]:
        terms: list[Node] = []
        for source in named_args(listed)["tensors"]:
            summed = self._call(aten.sum.default, (source,), source, self.captured.output)
            self.flow.states[summed] = Summed(node)
            parts = [summed] if source.meta["val"].dim() else self._split(source)
            count = listed.meta["val"].numel()
            terms += [
                self._call(aten.div.Tensor, (part, count), part, self.captured.output)
                if mean
                else part
                for part in parts
            ]
            self.replaced.append(summed)
        return terms

    def _again(self, node: Node, operand: Node, part: Node) -> Node:
        """The operation of `node` on `part` instead of `operand`."""
        with self.graph.inserting_before(self.captured.output):
            return self.graph.node_copy(node, lambda one: part if one is operand else one)

    # --------------------------------------------------------------------------------------------------------------
    # the end

    def _describe(self, term: Node) -> TermInfo:
        """What a term is: its leaves, and all whole-mini-batch values that it is divided or
        multiplied by.
        """
        seen = {term}
        stack = [term]
        leaves = []
        words = []
        while stack:
            node = stack.pop()
            if node.meta.get("whole"):
                words.append(str(node.meta["whole_text"]))
            if node in self.leaf_info:
                leaves.append(self.leaf_info[node])
                continue
            if isinstance(self.flow.states.get(node), PerSample | Whole):
                continue
            stack += [operand for operand in node.all_input_nodes if operand not in seen]
            seen.update(node.all_input_nodes)
        if not leaves:
            return TermInfo(op_name(term), user_line(term), tuple(words))
        denominators = dict.fromkeys(
            [word for leaf in leaves for word in leaf.denominators] + words
        )
        return TermInfo(
            "; ".join(dict.fromkeys(leaf.what for leaf in leaves)),
            leaves[0].line,
            tuple(denominators),
        )

    def _prune(self, candidates: Iterable[Node]) -> None:
        """Erases replaced nodes that nothing uses any more, and what only they used."""
        kept = set(self.captured.buffer_updates.values())
        stack = list(candidates)
        erased: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in erased or node.users or node in kept or node.op != "call_function":
                continue
            stack += node.all_input_nodes
            self.graph.erase_node(node)
            erased.add(node)
