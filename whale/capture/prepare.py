"""The last step of a capture: sizes, kinds of values, and the loss taken apart, so that the graph
can be planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import sympy
from torch.fx import Node

from whale.capture.clean import Capture
from whale.capture.graph import CapturedGraph, user_line
from whale.capture.kinds import ValueKind, value_kinds
from whale.capture.lengths import Conditions, Numbers, conditions_of, copy_graph
from whale.capture.losses import (
    LossPlan,
    NotAdditive,
    TermInfo,
    find_problem,
    rewrite_loss,
    rewrite_outputs,
    weigh_loss,
)
from whale.capture.sample_states import Mixed, PerSample, Shared, Summed, batch_dim
from whale.capture.samples import SampleFlow, ancestors
from whale.capture.sizes import normalise_sizes

LOSS = "the loss"
MIXED = "made of all samples together"


@dataclass
class CapturedModel:
    """A capture whose results are loss terms (training) or output tensors (evaluation)."""

    capture: Capture
    kinds: dict[Node, ValueKind]
    loss: LossPlan
    num_terms: int
    """the first results of the graph are terms of the loss"""
    not_additive: NotAdditive | None = None
    """set when the graph may run only on one device with one micro-batch"""
    output_leaves: list[Node | str] = field(default_factory=list)
    """evaluation: for each tensor of the model's output its node, or LOSS, or MIXED for one that is
    made of all samples together
    """
    summed_outputs: frozenset[Node] = frozenset()
    """output nodes whose values for the parts of the mini-batch add up to the output"""
    warnings: tuple[str, ...] = ()
    """about outputs, shown when outputs are asked for"""
    conditions: Conditions | None = None
    """which lengths and sizes of the mini-batch the graph holds for; None: looked at elsewhere"""

    @property
    def captured(self) -> CapturedGraph:
        return self.capture.captured

    @property
    def terms(self) -> list[Node]:
        return self.captured.results[: self.num_terms]

    @property
    def outputs(self) -> list[Node]:
        """Tensors of the model's output that are made of samples or weights, each once."""
        return list(dict.fromkeys(node for node in self.output_leaves if isinstance(node, Node)))

    def at(self, numbers: Numbers) -> CapturedModel:
        """The model with these numbers as lengths: what is planned, and what a grid is lowered
        from. The graph has the same operations in the same order.
        """
        changed = self._copied(*copy_graph(self.captured, numbers))
        return replace(changed, conditions=None)

    def in_canonical_order(self) -> CapturedModel:
        """The model with its operations in an order that depends on nothing but what they compute:
        each result depth first. Two traces of one model whose code goes through a `set`
        become equal.
        """
        captured = self.captured
        whole = [node for node in captured.placeholders if node.meta.get("whole")]
        texts = sorted(whole, key=lambda node: str(node.meta["whole_text"]))
        fixed = [node for node in captured.placeholders if not node.meta.get("whole")] + texts
        states = captured.graph.find_nodes(op="get_attr")
        fixed += sorted(states, key=lambda node: str(node.target))
        updates = [node for _, node in sorted(captured.buffer_updates.items())]
        order = depth_first([*captured.results, *updates], fixed)
        changed = self._copied(*copy_graph(captured, {}, [*order, captured.output]))
        if self.loss.whole_graph is not None and texts != whole:
            module = deepcopy(self.loss.whole_graph)
            output = module.graph.output_node()
            values = output.args[0]
            output.args = (tuple(values[whole.index(node)] for node in texts),)  # type: ignore[index]
            module.recompile()
            changed = replace(changed, loss=replace(changed.loss, whole_graph=module))
        return changed

    def _copied(self, captured: CapturedGraph, copies: dict[Node, Node]) -> CapturedModel:
        """The model around a copy of its graph."""
        leaves: list[Node | str] = []
        for leaf in self.output_leaves:
            leaves.append(copies[leaf] if isinstance(leaf, Node) else leaf)
        reductions = tuple(copies[node] for node in self.loss.reductions)
        return replace(
            self,
            capture=replace(self.capture, captured=captured),
            kinds={copies[node]: kind for node, kind in self.kinds.items() if node in copies},
            loss=replace(self.loss, reductions=reductions),
            output_leaves=leaves,
            summed_outputs=frozenset(copies[node] for node in self.summed_outputs),
        )

    def longest(self, declared: Mapping[str, int]) -> dict[sympy.Symbol, int]:
        """The lengths to plan for: the longest that the user declared, by name, else those of the
        sample batch.
        """
        return {
            length.symbol: declared.get(length.name, length.size)
            for length in self.captured.lengths
        }

    def term_texts(self) -> tuple[str, ...]:
        return tuple(" / ".join(_words(term)) for term in self.loss.terms)


def depth_first(roots: Sequence[Node], fixed: Sequence[Node]) -> list[Node]:
    """`fixed` nodes, then all that the roots need, each behind its operands in their order."""
    order = dict.fromkeys(fixed)
    waiting = list(reversed(roots))
    while waiting:
        node = waiting[-1]
        missing = [each for each in node.all_input_nodes if each not in order]
        if missing:
            waiting.extend(reversed(missing))
            continue
        order[node] = None
        waiting.pop()
    return list(order)


def _words(term: TermInfo) -> list[str]:
    return [term.what, " x ".join(term.denominators)] if term.denominators else [term.what]


def prepare(capture: Capture, num_micro_batch: int, loss_per_micro_batch: bool) -> CapturedModel:
    """Takes the loss apart, in the way that the number of micro-batches allows."""
    captured = capture.captured
    # sizes first: read from the batch, they are known on every stage and tie nothing to a tensor
    normalise_sizes(captured)
    kinds = value_kinds(captured)
    flow = SampleFlow(captured, kinds)
    _mark_rows_out_of_order(flow)
    outputs = _Outputs(captured, capture.has_loss)
    loss = outputs.rewrite(flow)
    problem = loss.not_additive
    # with one micro-batch all parts run at the same time, so that devices can share batch sums
    if problem is not None and num_micro_batch == 1:
        loss = outputs.rewrite(SampleFlow(captured, kinds, all_reduce=True))
        if loss.not_additive is None:
            captured.notes.append(
                f"the loss is not a sum over samples ({problem.line}): its batch sums are "
                "all-reduced inside the forward"
            )
    not_additive = None
    if loss.not_additive is not None and loss_per_micro_batch:
        captured.notes.append(
            f"loss_per_micro_batch: the loss ({loss.not_additive.line}) is taken on each part of "
            "a micro-batch alone"
        )
        loss = weigh_loss(captured, SampleFlow(captured, kinds))
    elif loss.not_additive is not None:
        remaining = find_problem(captured, SampleFlow(captured, kinds, all_reduce=True))
        not_additive = replace(loss.not_additive, needs_all_samples=remaining is not None)
        loss = LossPlan(terms=(TermInfo("the whole loss", not_additive.line, ()),))
    leaves = outputs.leaves(all_samples_in_one_place=not_additive is not None)
    return CapturedModel(
        capture,
        value_kinds(captured),  # again: rewriting has added operations and placeholders
        loss,
        len(loss.terms),
        not_additive,
        leaves,
        frozenset(outputs.summed),
        outputs.warnings,
        # last: taking the loss apart may ask more of sizes than the forward did
        conditions_of(captured),
    )


class _Outputs:
    """The results of an evaluation besides the loss, while the loss is taken apart. Training has
    none.
    """

    def __init__(self, captured: CapturedGraph, has_loss: bool) -> None:
        self.captured = captured
        self.loss = captured.results[:has_loss]
        self.all = captured.results[has_loss:]
        self.now = {node: node for node in self.all if node not in self.loss}
        """output -> the node that holds it after rewriting"""
        self.exact: set[Node] = {
            node for node in self.now if batch_dim(node, captured.batch_symbol) is not None
        }
        """outputs that can be put together from parts"""
        self.summed: set[Node] = set()
        """nodes whose parts add up to the output"""
        self.mixing: set[Node] = set()
        """outputs in which samples depend on each other"""
        self.warnings: tuple[str, ...] = ()

    def rewrite(self, flow: SampleFlow) -> LossPlan:
        """Takes the loss apart, and with it each output without a batch dim that is linear in sums
        and means over the samples. A loss that is not additive leaves the graph as it was, without
        the outputs as results."""
        captured = self.captured
        self.mixing = set()
        together: list[Node] = []
        apart: list[Node] = []
        for node in self.now:
            state = flow.states[node]
            if isinstance(state, Mixed):
                self.mixing.add(node)
            if isinstance(state, Shared) and not flow.all_reduce:
                self.exact.add(node)
            if node in self.exact or isinstance(state, Mixed | PerSample):
                apart.append(node)
            else:
                together.append(node)
        captured.output.args = ((*self.loss, *together),)
        flow.live = ancestors(captured.output)
        rewrite = rewrite_loss if self.loss else rewrite_outputs
        loss = rewrite(captured, flow, keep=apart)
        if loss.not_additive is not None:
            captured.output.args = (tuple(self.loss),)
            return loss
        num_terms = len(loss.terms)
        rewritten = captured.results[num_terms:]
        self.now |= zip(together, rewritten, strict=True)
        for node in together:
            new = self.now[node]
            if new.meta["val"].dtype == node.meta["val"].dtype:
                self.exact.add(node)
            if isinstance(flow.states[node], Summed):
                self.summed.add(new)
        captured.output.args = (tuple(captured.results[:num_terms]),)
        return loss

    def leaves(self, all_samples_in_one_place: bool) -> list[Node | str]:
        """Returns `CapturedModel.output_leaves`; its nodes become results of the graph."""
        found: list[Node | str] = []
        for node in self.all:
            if node in self.loss:
                found.append(LOSS)
            elif node in self.exact or all_samples_in_one_place:
                found.append(self.now[node])
                if node in self.mixing and not all_samples_in_one_place:
                    self.warnings += (
                        f"the output at {user_line(node)} mixes samples: it is that of each device "
                        "and micro-batch alone",
                    )
            else:
                found.append(MIXED)
                self.warnings += (
                    f"the output at {user_line(node)} is None: parts of the samples do not add up "
                    "to it",
                )
        nodes = dict.fromkeys(node for node in found if isinstance(node, Node))
        self.captured.output.args = ((*self.captured.results, *nodes),)
        return found


def _mark_rows_out_of_order(flow: SampleFlow) -> None:
    """Sets `meta["rows_out_of_order"]` of values whose rows are not sample after sample, so that
    they can be neither sliced nor put together.
    """
    for node, state in flow.states.items():
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, PerSample) and part.outer != 1:
                node.meta["rows_out_of_order"] = True
