"""From a clean capture to a graph that can be planned: sizes, kinds of values, and the loss taken apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from whale.capture.capture import Capture
from whale.capture.graph import CapturedGraph
from whale.capture.kinds import Kind, value_kinds
from whale.capture.losses import LossPlan, NotAdditive, TermInfo, rewrite_loss
from whale.capture.sizes import normalise_sizes

aten = torch.ops.aten


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

    @property
    def captured(self) -> CapturedGraph:
        return self.capture.captured

    @property
    def terms(self) -> list[Node]:
        return _results(self.captured)[: self.num_terms]

    @property
    def outputs(self) -> list[Node]:
        """Results that the user asked for, one for each tensor of the model's output (the same node may stand there twice)."""
        return _results(self.captured)[self.num_terms :]

    def term_texts(self) -> tuple[str, ...]:
        return tuple(f"{term.what} / {' x '.join(term.denominators)}" if term.denominators else term.what for term in self.loss.terms)


def prepare(capture: Capture, num_micro_batch: int, loss_per_micro_batch: bool) -> Prepared:
    """Takes the loss apart, in the way that the number of micro-batches allows."""
    captured = capture.captured
    inputs = [node for node in captured.graph.nodes if node.op == "placeholder"]
    batched = next(node for node, tensor in zip(inputs, captured.inputs, strict=True) if tensor.batched)
    normalise_sizes(captured.graph, captured.batch_symbol, batched)
    outputs = _results(captured)
    if not capture.has_loss:
        return Prepared(capture, value_kinds(captured), LossPlan(), 0)
    extra = outputs[1:]
    captured.output.args = ((outputs[0],),)
    kinds = value_kinds(captured)
    loss = rewrite_loss(captured, kinds)
    problem = loss.not_additive
    if problem is not None and num_micro_batch == 1:
        loss = rewrite_loss(captured, kinds, all_reduce=True)
        if loss.not_additive is None:
            captured.notes.append(f"the loss is not a sum over samples ({problem.line}): its batch sums are all-reduced inside the forward")
    only_whole = None
    if loss.not_additive is not None:
        if loss_per_micro_batch:
            _weigh_by_samples(captured, outputs[0], batched)
            captured.notes.append(f"loss_per_micro_batch: the loss ({problem.line if problem else ''}) is taken on each part of a micro-batch alone")
        else:
            only_whole = loss.not_additive
        loss = LossPlan(terms=(TermInfo("the whole loss", loss.not_additive.line, ()),))
    terms = _results(captured)
    captured.output.args = ((*terms, *extra),)
    return Prepared(capture, value_kinds(captured), loss, len(terms), only_whole)


def _weigh_by_samples(captured: CapturedGraph, loss: Node, batched: Node) -> None:
    """Makes the result `loss x samples here / samples in the mini-batch`; the mini-batch size is fed as `whole_0`."""
    raise ValueError("not additive")


def _results(captured: CapturedGraph) -> list[Node]:
    return list(captured.output.args[0])  # type: ignore[arg-type,union-attr]
