"""From a clean capture to a graph that can be planned: sizes, kinds of values, and the loss taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from whale.capture.capture import Capture
from whale.capture.graph import CapturedGraph
from whale.capture.kinds import Kind, value_kinds
from whale.capture.losses import LossPlan, NotAdditive, TermInfo, batch_reductions, rewrite_loss, weigh_loss
from whale.capture.sample_states import PerSample, batch_dim
from whale.capture.samples import SampleFlow
from whale.capture.sizes import normalise_sizes

LOSS = "the loss"
MIXED = "made of all samples together"


@dataclass
class Prepared:
    """A capture whose results are loss terms (training) or output tensors (evaluation)."""

    capture: Capture
    kinds: dict[Node, Kind]
    loss: LossPlan
    num_terms: int
    """the first results of the graph are terms of the loss"""
    only_whole: NotAdditive | None = None
    """set when the graph may run only on one device with one micro-batch"""
    output_leaves: list[Node | str] = field(default_factory=list)
    """evaluation: for each tensor of the model's output its node, or LOSS, or MIXED for one that is made of all samples together"""

    @property
    def captured(self) -> CapturedGraph:
        return self.capture.captured

    @property
    def terms(self) -> list[Node]:
        return _results(self.captured)[: self.num_terms]

    @property
    def outputs(self) -> list[Node]:
        """Tensors of the model's output that are made of samples or weights, each once."""
        return list(dict.fromkeys(node for node in self.output_leaves if isinstance(node, Node)))

    def term_texts(self) -> tuple[str, ...]:
        return tuple(f"{term.what} / {' x '.join(term.denominators)}" if term.denominators else term.what for term in self.loss.terms)


def prepare(capture: Capture, num_micro_batch: int, loss_per_micro_batch: bool) -> Prepared:
    """Takes the loss apart, in the way that the number of micro-batches allows."""
    captured = capture.captured
    inputs = [node for node in captured.graph.nodes if node.op == "placeholder"]
    batched = next(node for node, tensor in zip(inputs, captured.inputs, strict=True) if tensor.batched)
    normalise_sizes(captured.graph, captured.batch_symbol, batched)
    results = _results(captured)
    if not capture.has_loss:
        kinds = value_kinds(captured)
        _mark_rows_out_of_order(SampleFlow(captured, kinds))
        return Prepared(capture, kinds, LossPlan(), 0, output_leaves=_leaves(captured, kinds, results))
    loss_node, outputs = results[0], results[1:]
    captured.output.args = ((loss_node,),)
    keeper = _keep(captured, [node for node in outputs if node is not loss_node])
    kinds = value_kinds(captured)
    flow = SampleFlow(captured, kinds)
    _mark_rows_out_of_order(flow)
    loss = rewrite_loss(captured, kinds, flow=flow)
    problem = loss.not_additive
    if problem is not None and num_micro_batch == 1:
        loss = rewrite_loss(captured, kinds, all_reduce=True)
        if loss.not_additive is None:
            captured.notes.append(f"the loss is not a sum over samples ({problem.line}): its batch sums are all-reduced inside the forward")
    only_whole = None
    if loss.not_additive is not None and loss_per_micro_batch:
        captured.notes.append(f"loss_per_micro_batch: the loss ({loss.not_additive.line}) is taken on each part of a micro-batch alone")
        loss = weigh_loss(captured, kinds)
    elif loss.not_additive is not None:
        shared = batch_reductions(captured, kinds)
        only_whole = replace(loss.not_additive, needs_all_samples=isinstance(shared, NotAdditive))
        loss = LossPlan(terms=(TermInfo("the whole loss", only_whole.line, ()),))
    terms = _results(captured)
    kept = iter(_release(captured, keeper))
    kinds = value_kinds(captured)
    leaves = _leaves(captured, kinds, [next(kept) if node is not loss_node else LOSS for node in outputs])
    captured.output.args = ((*terms, *dict.fromkeys(node for node in leaves if isinstance(node, Node))),)
    return Prepared(capture, kinds, loss, len(terms), only_whole, leaves)


def _mark_rows_out_of_order(flow: SampleFlow) -> None:
    """`meta["rows_out_of_order"]`: values whose rows are not sample after sample, so that they can be neither sliced nor put together."""
    for node, state in flow.states.items():
        parts = state if isinstance(state, tuple) else (state,)
        if any(isinstance(part, PerSample) and part.outer != 1 for part in parts):
            node.meta["rows_out_of_order"] = True


def _keep(captured: CapturedGraph, nodes: list[Node]) -> Node:
    """A node that uses these, so that taking the loss apart does not remove them."""
    with captured.graph.inserting_before(captured.output):
        keeper = captured.graph.call_function(tuple, (nodes,))
    keeper.meta["val"] = ()
    return keeper


def _release(captured: CapturedGraph, keeper: Node) -> list[Node]:
    nodes = list(keeper.args[0])  # type: ignore[arg-type]
    captured.graph.erase_node(keeper)
    return nodes  # type: ignore[return-value]


def _leaves(captured: CapturedGraph, kinds: dict[Node, Kind], nodes: Sequence[Node | str]) -> list[Node | str]:
    """Outputs that can be put together from parts: with a batch dim, or without samples at all."""
    leaves: list[Node | str] = []
    for node in nodes:
        mixed = isinstance(node, Node) and kinds[node] is Kind.ACTIVATION and batch_dim(node, captured.batch_symbol) is None
        leaves.append(MIXED if mixed else node)
    return leaves


def _results(captured: CapturedGraph) -> list[Node]:
    return list(captured.output.args[0])  # type: ignore[arg-type,union-attr]
