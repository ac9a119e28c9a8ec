"""Reads the loss as a sum of terms, each a sum over the samples divided by what the inputs of the
whole mini-batch give.

    loss = sum over terms of   numerator(samples) / denominators(whole mini-batch)          (DESIGN section 6, docs/internals.md section 2)

`SampleFlow` (capture/samples.py) proves that the loss is linear in sums and means over the samples.
`rewrite_loss` then changes the graph (capture/loss_rewriting.py):

1. lift      a value that depends on the inputs of all samples becomes a placeholder `whole_k`, fed from the whole mini-batch
2. leaves    mean -> mean x samples here / samples in all; class mean -> sum / number (or weight) of the targets of the whole mini-batch
3. addends   what has no samples (weight penalties, constants) is multiplied by samples here / samples in all, so it counts once
4. split     sums are taken apart: one output for each term, so that every term stays on the stage that computes it
"""

from __future__ import annotations

from torch.fx import Node

from whale.capture.graph import CapturedGraph, user_line
from whale.capture.kinds import Kind
from whale.capture.loss_plan import LossPlan, LossTerms, NotAdditive, TermInfo
from whale.capture.loss_rewriting import Rewriter, live_leaves, loss_node
from whale.capture.sample_states import Mixed, PerSample
from whale.capture.samples import SampleFlow


def split_loss(captured: CapturedGraph, kinds: dict[Node, Kind]) -> LossTerms | NotAdditive:
    """Whether the loss is additive, and its leaves. Changes nothing."""
    flow = SampleFlow(captured, kinds)
    problem = _problem(captured, flow)
    return problem or LossTerms({leaf: flow.leaves[leaf] for leaf in live_leaves(flow)})


def batch_reductions(captured: CapturedGraph, kinds: dict[Node, Kind]) -> list[Node] | NotAdditive:
    """For one micro-batch: the sums and means over the samples after whose all-reduce everything
    else is exact. Changes nothing.

    `rewrite_loss(captured, kinds, all_reduce=True)` makes each of them a plain sum over parts.
    """
    flow = SampleFlow(captured, kinds, all_reduce=True)
    return _problem(captured, flow) or live_leaves(flow)


def rewrite_loss(
    captured: CapturedGraph,
    kinds: dict[Node, Kind],
    all_reduce: bool = False,
    flow: SampleFlow | None = None,
) -> LossPlan:
    """Changes the graph so that its outputs, summed over disjoint parts of the mini-batch, give
    exactly the loss.

    A loss that is not additive leaves the graph as it was. With `all_reduce`, the nodes in
    `LossPlan.reductions` (they also carry `meta["all_reduce"] = "sum"`) must be summed over all
    parts during the forward; the outputs are then shares of the loss in the same way. `flow`: of
    this very graph, when the caller has it.
    """
    flow = flow or SampleFlow(captured, kinds, all_reduce)
    problem = _problem(captured, flow)
    return LossPlan(not_additive=problem) if problem else Rewriter(captured, flow).run()


def rewrite_outputs(captured: CapturedGraph, flow: SampleFlow) -> LossPlan:
    """The same for a graph whose results are outputs of the model and no loss."""
    return Rewriter(captured, flow).run_without_loss()


def weigh_loss(captured: CapturedGraph, kinds: dict[Node, Kind]) -> LossPlan:
    """For `loss_per_micro_batch`: the loss of the samples at hand, weighted by their share of the
    mini-batch. Not the local loss.
    """
    rewriter = Rewriter(captured, SampleFlow(captured, kinds))
    loss = loss_node(captured)
    term = rewriter.scaled(loss, loss, "the loss of each part alone")
    captured.output.args = ((term,),)
    return LossPlan((rewriter.leaf_info[term],), rewriter.whole.finish(), rewriter.whole.buffers)


def _problem(captured: CapturedGraph, flow: SampleFlow) -> NotAdditive | None:
    loss = loss_node(captured)
    state = flow.states[loss]
    if isinstance(state, Mixed):
        return NotAdditive(state.origin, user_line(state.origin), state.reason)
    if isinstance(state, PerSample):
        return NotAdditive(
            loss, user_line(loss), "it has one value for each sample; take its mean or sum"
        )
    return None


__all__ = [
    "LossPlan",
    "LossTerms",
    "NotAdditive",
    "TermInfo",
    "batch_reductions",
    "rewrite_loss",
    "rewrite_outputs",
    "split_loss",
    "weigh_loss",
]
