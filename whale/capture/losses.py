"""The loss as a sum of terms, each a sum over samples divided by values of the whole mini-batch.

    loss = sum over terms of   numerator(samples) / denominators(whole mini-batch)

(docs/internals.md section 2). `SampleFlow` (capture/samples.py) proves that the
loss is linear in sums and means over the samples. `rewrite_loss` then changes the graph:

1. lift      a value that depends on the inputs of all samples becomes a placeholder `whole_k`
             (capture/whole_batch.py)
2. leaves    the reductions over the samples that the loss is made of:
             mean -> mean x samples here / samples in all;
             class mean -> sum / number (or weight) of the targets of the whole mini-batch;
             row mean -> sum / elements of the rows that a mask picks from the whole mini-batch
3. addends   what has no samples (weight penalties, constants) is multiplied by
             samples here / samples in all, so that it counts once
4. split     sums are taken apart: one output for each term, so that every term stays on the stage
             that computes it
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from whale.capture.graph import CapturedGraph, insert_call, user_line
from whale.capture.kinds import ValueKind
from whale.capture.sample_states import Irregular, Mixed, PerSample, Shared, Summed, Whole
from whale.capture.samples import SampleFlow
from whale.capture.whole_batch import WholeBatch
from whale.operations.nodes import named_args, op_name
from whale.operations.reductions import SUM
from whale.operations.table import AFFINE, CASTS, VIEWS

aten = torch.ops.aten
ONCE = "does not depend on samples, counted once"


@dataclass(frozen=True)
class NotAdditive:
    """Why the losses of parts of the mini-batch do not add up to its loss."""

    line: str
    reason: str
    needs_all_samples: bool = False
    """all-reducing batch sums between devices would not help either"""

    @property
    def message(self) -> str:
        if self.needs_all_samples:
            fix = (
                'Try: "num_micro_batch": 1 with this part on one device, which then has all '
                "samples in one place"
            )
        else:
            fix = (
                'Try: "num_micro_batch": 1 (sums and means over the batch are then all-reduced '
                "between devices inside the forward)"
            )
        return (
            f"the loss is not a sum over samples: {self.reason}\n  at {self.line}\n"
            f'{fix}, or "loss_per_micro_batch": true to accept a loss computed on each part alone.'
        )


@dataclass(frozen=True)
class TermInfo:
    """One term of the loss in words, for the plan."""

    what: str
    line: str
    denominators: tuple[str, ...]


@dataclass(frozen=True)
class LossPlan:
    """What rewriting did."""

    terms: tuple[TermInfo, ...] = ()
    """one for each term among the graph's outputs; empty when the loss is not additive"""
    whole_graph: GraphModule | None = None
    """tensors of the whole mini-batch, in the order of the batch -> values of `whole_0, whole_1,
    ...`; holds no parameter
    """
    whole_buffers: dict[str, str] = field(default_factory=dict)
    """attribute of `whole_graph` -> buffer of the model whose value must be put there before it
    runs (it is on `meta` until then)
    """
    reductions: tuple[Node, ...] = ()
    """only with an all-reduce flow: nodes whose values the runtime all-reduces over all parts
    inside the forward (and in backward)
    """
    not_additive: NotAdditive | None = None


def find_problem(captured: CapturedGraph, flow: SampleFlow) -> NotAdditive | None:
    """Why the loss, the graph's first result, is not additive; None when it is."""
    loss = captured.results[0]
    state = flow.states[loss]
    if isinstance(state, Mixed):
        return NotAdditive(user_line(state.origin), state.reason)
    if isinstance(state, PerSample):
        return NotAdditive(
            user_line(loss), "it has one value for each sample; take its mean or sum"
        )
    return None


def rewrite_loss(
    captured: CapturedGraph, flow: SampleFlow, keep: Collection[Node] = ()
) -> LossPlan:
    """Changes the graph so that its first outputs, summed over disjoint parts of the mini-batch,
    give exactly the loss. A loss that is not additive leaves the graph as it was. Nodes in `keep`
    stay, though nothing in the graph uses them.

    With `flow.all_reduce`, the nodes in `LossPlan.reductions` (they also carry
    `meta["all_reduce"] = "sum"`) must be all-reduced over all parts during the forward; the outputs
    are then shares of the loss in the same way.
    """
    problem = find_problem(captured, flow)
    if problem is not None:
        return LossPlan(not_additive=problem)
    return _Rewriter(captured, flow, keep).run(has_loss=True)


def rewrite_outputs(
    captured: CapturedGraph, flow: SampleFlow, keep: Collection[Node] = ()
) -> LossPlan:
    """Does the same for a graph whose results are outputs of the model and no loss."""
    return _Rewriter(captured, flow, keep).run(has_loss=False)


def weigh_loss(captured: CapturedGraph, flow: SampleFlow) -> LossPlan:
    """Replaces the loss by that of the samples at hand, weighted by their share of the mini-batch,
    for `loss_per_micro_batch`. Not the local loss.
    """
    rewriter = _Rewriter(captured, flow)
    (loss,) = captured.results
    term = rewriter.count_once(loss, captured.output, "the loss of each part alone")
    captured.output.args = ((term,),)
    return rewriter.finish((rewriter.info[term],))


class _Rewriter:
    """One rewriting of one graph."""

    def __init__(
        self, captured: CapturedGraph, flow: SampleFlow, keep: Collection[Node] = ()
    ) -> None:
        self.captured = captured
        self.flow = flow
        self.graph = captured.graph
        self.whole = WholeBatch(captured, flow)
        self.info: dict[Node, TermInfo] = {}
        """result of a rewritten leaf or addend -> what it is"""
        self.replaced: list[Node] = []
        """nodes that may have lost their last user"""
        self.keep = {*keep, *captured.buffer_updates.values()}
        """nodes that stay without users"""
        self._num_samples_here: Node | None = None

    def run(self, has_loss: bool) -> LossPlan:
        """The graph's first result is the loss; further ones (of evaluation) stay one node each."""
        leaves = []
        for leaf in self.flow.leaves:
            if leaf in self.flow.live and self.flow.kinds[leaf] is ValueKind.ACTIVATION:
                leaves.append(leaf)
        self._lift(leaves)
        reductions = tuple(self._rewrite_leaf(leaf) for leaf in leaves)
        for node in list(self.flow.live):
            if isinstance(self.flow.states[node], Summed):
                self._scale_addends(node)
        terms = self._make_terms() if has_loss else ()
        self._prune()
        if not (has_loss and self.flow.all_reduce):
            return self.finish(terms)
        for node in reductions:
            node.meta["all_reduce"] = "sum"
        return self.finish(terms, reductions)

    def finish(self, terms: tuple[TermInfo, ...], reductions: tuple[Node, ...] = ()) -> LossPlan:
        return LossPlan(terms, self.whole.finish(), self.whole.buffers, reductions)

    def _make_terms(self) -> tuple[TermInfo, ...]:
        """Replaces the loss among the graph's results by its terms."""
        output = self.captured.output
        loss, *others = self.captured.results
        if not self.flow.all_reduce and self._adds_up(loss):
            parts = self._split(loss)
        else:
            parts = [self.count_once(loss, output)]
        terms = []
        for term, times in Counter(parts).items():
            terms.append(self._times(term, times))
        output.args = ((*terms, *others),)
        return tuple(self._describe(term) for term in terms)

    # --- new nodes

    def _at_end(self, target: Any, part: Node, other: Any) -> Node:
        """`target(part, other)` at the end of the graph."""
        return insert_call(self.captured.output, target, (part, other), like=part)

    def _times(self, term: Node, factor: float) -> Node:
        return term if factor == 1 else self._at_end(aten.mul.Tensor, term, factor)

    def _samples_here(self) -> Node:
        if self._num_samples_here is None:
            batched = self.captured.batched_input
            with self.graph.inserting_after(self.captured.placeholders[-1]):
                size = self.graph.call_function(aten.sym_size.int, (batched, 0))
            size.meta["val"] = batched.meta["val"].shape[0]
            self._num_samples_here = size
        return self._num_samples_here

    def _fraction_of(self, value: Node, before: Node, like: Node) -> Node:
        """value x samples here / samples in all; divided first, so that half precision does not
        overflow.
        """
        share = insert_call(before, aten.div.Tensor, (value, self.whole.num_samples()), like=like)
        return insert_call(before, aten.mul.Tensor, (share, self._samples_here()), like=like)

    def count_once(self, value: Any, user: Node, what: str = ONCE) -> Node:
        """Scales an addend without samples (node or number) of `user`, so that it counts once in
        all.
        """
        if isinstance(value, Node):
            node = self._fraction_of(value, user, value)
            line = user_line(value)
        else:
            args = (self.whole.num_samples(), user.meta["val"].dtype)
            total = insert_call(user, aten.to.dtype, args, like=user)
            one = insert_call(user, aten.reciprocal.default, (total,), like=user)
            share = insert_call(user, aten.mul.Tensor, (one, self._samples_here()), like=user)
            node = insert_call(user, aten.mul.Tensor, (share, value), like=user)
            line = user_line(user)
        self.info[node] = TermInfo(what, line, ("number of samples",))
        return node

    # --- step 1: lift

    def _lift(self, leaves: list[Node]) -> None:
        """Values of the whole mini-batch are copied from the untouched graph first, then all uses
        change.
        """
        uses: list[tuple[Node, Node]] = []
        for node in self.flow.live:
            uses += [(node, operand) for operand in self.flow.whole_operands(node)]
        for node in self.captured.results:
            if isinstance(self.flow.states[node], Whole):
                uses.append((self.captured.output, node))
        order = self.whole.order
        uses.sort(key=lambda use: (order[use[1]], order[use[0]]))
        lifted = {operand: self.whole.value(operand) for _, operand in uses}
        for leaf in leaves:
            if self.flow.leaves[leaf] == "class mean":
                self.whole.class_counts(named_args(leaf))
            elif self.flow.leaves[leaf] == "row mean":
                self.whole.num_rows(self._mask(leaf))
        for user, operand in uses:
            new = lifted[operand]
            if isinstance(operand.meta["val"], torch.SymFloat | float):
                # a Python float never widens the tensor that it meets; our float64 would
                new = insert_call(user, aten.to.dtype, (new, user.meta["val"].dtype), like=user)
                self.flow.states[new] = Shared()
            user.replace_input_with(operand, new)
            self.replaced.append(operand)

    # --- step 2: leaves

    def _is_wanted(self, node: Node) -> bool:
        """Whether a node is a result of the graph, or goes into one."""
        return node in self.flow.live or node.op == "output"

    def _rewrite_leaf(self, leaf: Node) -> Node:
        """Returns the node that now holds this leaf's sum over the samples at hand."""
        how = self.flow.leaves[leaf]
        name = op_name(leaf)
        line = user_line(leaf)
        if how == "sum":
            self.info[leaf] = TermInfo(f"{name}, summed over the samples", line, ())
            return leaf
        users = list(filter(self._is_wanted, leaf.users))
        after = leaf.next
        if how == "mean":
            new = self._fraction_of(leaf, after, leaf)
            over = "samples"
            denominator = "number of samples"
        else:
            rewrite = self._class_mean if how == "class mean" else self._row_mean
            new, count = rewrite(leaf, after)
            over = "targets" if how == "class mean" else "rows"
            denominator = str(count.meta["whole_text"])
            self.replaced.append(leaf)
        self.info[new] = TermInfo(f"{name}, mean over the {over}", line, (denominator,))
        for user in users:
            user.replace_input_with(leaf, new)
        return new

    def _class_mean(self, leaf: Node, after: Node) -> tuple[Node, Node]:
        """(sum / number or weight of the targets of the whole mini-batch, placeholder of that)."""
        args = named_args(leaf)
        counts = self.whole.class_counts(args)
        summed = self._with_sum(leaf, args, after)
        total = counts
        if args["weight"] is not None:
            weighted = insert_call(after, aten.mul.Tensor, (args["weight"], counts), like=leaf)
            total = insert_call(after, aten.sum.default, (weighted,), like=leaf)
        return insert_call(after, aten.div.Tensor, (summed, total), like=leaf), counts

    def _row_mean(self, leaf: Node, after: Node) -> tuple[Node, Node]:
        """(sum / (rows of the whole mini-batch x elements of a row), placeholder of the rows)."""
        args = named_args(leaf)
        rows = self.whole.num_rows(self._mask(leaf))
        shape = args["input"].meta["val"].shape
        if "reduction" in args:
            shape = torch.broadcast_shapes(shape, args["target"].meta["val"].shape)
            reduced = list(range(len(shape)))
            summed = self._with_sum(leaf, args, after)
        else:
            reduced = [dim % len(shape) for dim in args.get("dim") or range(len(shape))]
            operands = (args["input"], reduced, args.get("keepdim", False))
            summed = insert_call(after, aten.sum.dim_IntList, operands, like=leaf)
        row = math.prod(shape[dim] for dim in reduced if isinstance(shape[dim], int))
        share = insert_call(after, aten.div.Tensor, (summed, rows), like=leaf)
        share = insert_call(after, aten.div.Tensor, (share, row), like=leaf)
        for dim in reduced:
            size = self._length_node(args["input"], dim, after)
            if size is not None:
                share = insert_call(after, aten.div.Tensor, (share, size), like=leaf)
        return share, rows

    def _length_node(self, tensor: Node, dim: int, before: Node) -> Node | None:
        """A node for the size of a dim that is a length; None for any other dim."""
        size = tensor.meta["val"].shape[dim]
        symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else frozenset()
        if not symbols or symbols & self.flow.symbols:
            return None
        return insert_call(before, aten.sym_size.int, (tensor, dim), like=before, value=size)

    def _with_sum(self, leaf: Node, args: dict[str, Any], after: Node) -> Node:
        summing = tuple((args | {"reduction": SUM}).values())
        return insert_call(after, leaf.target, summing, like=leaf)

    def _mask(self, leaf: Node) -> Node:
        """The mask that picked the rows of this mean."""
        for operand in leaf.all_input_nodes:
            state = self.flow.of(operand)
            if isinstance(state, PerSample) and isinstance(state.outer, Irregular):
                if state.outer.mask:
                    return state.outer.mask
        raise AssertionError(f"{leaf.name} is a mean over rows that no mask picked")

    # --- step 3: addends

    def _scale_addends(self, node: Node) -> None:
        """Scales what this node adds to sums over samples and has no samples itself."""
        name = op_name(node)
        if name not in AFFINE or node in self.flow.leaves:
            return
        args = named_args(node)
        keys = ("tensors",) if name in ("stack", "cat") else ("input", "other")
        changed = {key: self._scaled_addend(args[key], node) for key in keys}
        if all(changed[key] == args[key] for key in keys):
            return
        alpha = args.get("alpha", 1)
        node.kwargs = {}
        if name == "where":
            node.args = (args["condition"], *changed.values())
        elif name in ("stack", "cat"):
            node.args = (changed["tensors"], args["dim"])
        else:  # tensors on both sides now: a + alpha b, a - alpha b, b - alpha a
            node.target = getattr(aten, name).Tensor
            node.args = tuple(changed.values())
            node.kwargs = {} if alpha == 1 else {"alpha": alpha}

    def _scaled_addend(self, value: Any, user: Node) -> Any:
        if isinstance(value, list | tuple):
            return [self._scaled_addend(each, user) for each in value]
        if isinstance(value, Node):
            is_shared = value.meta.get("whole") or isinstance(
                self.flow.states.get(value), Shared | Whole
            )
            if value in self.info or not is_shared:
                return value
        elif value == 0:
            return value
        return self.count_once(value, user)

    # --- step 4: split

    def _adds_up(self, value: Any) -> bool:
        return isinstance(value, Node) and (
            value in self.info or isinstance(self.flow.states.get(value), Summed)
        )

    def _split(self, node: Node) -> list[Node]:
        """Nodes that add up to `node`."""
        if node in self.info or not isinstance(self.flow.states.get(node), Summed):
            return [node]
        name = op_name(node)
        args = named_args(node)
        first = args.get("input")
        if name in ("add", "sub", "subtract", "rsub"):
            return self._split_sum(node, name, args)
        if name in ("mul", "div", "neg") or name in CASTS | VIEWS:
            return self._split_scaled(node, first if self._adds_up(first) else args.get("other"))
        is_list = isinstance(first, Node) and op_name(first) in ("stack", "cat")
        if name in ("sum", "mean") and is_list and node.meta["val"].dim() == 0:
            return self._split_list(node, first, name == "mean")  # type: ignore[arg-type]
        return [node]

    def _split_sum(self, node: Node, name: str, args: dict[str, Any]) -> list[Node]:
        whole = node.meta["val"]
        alpha = args.get("alpha", 1)
        factors = {"add": (1, alpha), "rsub": (-alpha, 1)}.get(name, (1, -alpha))
        weighted = []
        for operand, factor in zip((args["input"], args["other"]), factors, strict=True):
            if isinstance(operand, Node):
                value = operand.meta["val"]
                if value.shape != whole.shape or value.dtype != whole.dtype:
                    return [node]
                weighted.append((operand, factor))
            elif operand != 0:
                return [node]
        terms: list[Node] = []
        for operand, factor in weighted:
            terms += [self._times(part, factor) for part in self._split(operand)]
        return terms

    def _split_scaled(self, node: Node, operand: Any) -> list[Node]:
        """Terms of an operation that is linear in `operand`: the operation on each of its terms."""
        if not isinstance(operand, Node) or operand.meta["val"].numel() != 1:
            return [node]
        parts = self._split(operand)
        if len(parts) == 1:
            return [node]
        return [self._with_operand(node, operand, part) for part in parts]

    def _with_operand(self, node: Node, old: Node, new: Node) -> Node:
        """A copy of `node` at the end of the graph that reads `new` instead of `old`."""
        with self.graph.inserting_before(self.captured.output):
            return self.graph.node_copy(node, lambda each: new if each is old else each)

    def _split_list(self, node: Node, listed: Node, mean: bool) -> list[Node]:
        terms: list[Node] = []
        count = listed.meta["val"].numel()
        for source in named_args(listed)["tensors"]:
            if source.meta["val"].dim():
                summed = insert_call(self.captured.output, aten.sum.default, (source,), like=source)
                self.flow.states[summed] = Summed(node)
                parts = [summed]
            else:
                parts = self._split(source)
            for part in parts:
                terms.append(self._at_end(aten.div.Tensor, part, count) if mean else part)
        return terms

    # --- the end

    def _describe(self, term: Node) -> TermInfo:
        """What a term is: its leaves, and all whole-mini-batch values that it is divided or
        multiplied by.
        """
        seen = {term}
        waiting = [term]
        leaves = []
        words = []
        while waiting:
            node = waiting.pop()
            if node.meta.get("whole"):
                words.append(str(node.meta["whole_text"]))
            if node in self.info:
                leaves.append(self.info[node])
                continue
            if isinstance(self.flow.states.get(node), PerSample | Whole):
                continue
            waiting += [operand for operand in node.all_input_nodes if operand not in seen]
            seen.update(node.all_input_nodes)
        if not leaves:
            return TermInfo(op_name(term), user_line(term), tuple(words))
        what = "; ".join(dict.fromkeys(leaf.what for leaf in leaves))
        denominators: list[str] = []
        for leaf in leaves:
            denominators += leaf.denominators
        return TermInfo(what, leaves[0].line, tuple(dict.fromkeys(denominators + words)))

    def _prune(self) -> None:
        """Erases replaced nodes that nothing uses any more, and what only they used."""
        waiting = self.replaced
        erased: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node in erased or node.users or node in self.keep or node.op != "call_function":
                continue
            waiting += node.all_input_nodes
            self.graph.erase_node(node)
            erased.add(node)
