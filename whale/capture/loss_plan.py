"""What taking a loss apart gives: its leaves, its terms in words, the graph of whole-mini-batch
values, or why it is not additive.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class NotAdditive:
    """Why parts of the mini-batch cannot simply be added up."""

    node: Node
    line: str
    reason: str
    needs_all_samples: bool = False
    """sharing batch sums between devices would not help either"""

    @property
    def message(self) -> str:
        way_out = 'Set "num_micro_batch" to 1 (sums and means over the batch are then shared between devices inside the forward)'
        if self.needs_all_samples:
            way_out = 'It needs all samples in one place: set "num_micro_batch" to 1 and run this part on one device'
        return (
            f"the loss is not a sum over samples: {self.reason}\n  at {self.line}\n"
            f'{way_out}, or set "loss_per_micro_batch": true to accept a loss computed on each part alone.'
        )


@dataclass(frozen=True)
class LossTerms:
    """An additive loss."""

    leaves: dict[Node, str]
    """the reductions over the samples that it is made of: `sum`, `mean` or `class mean`"""


@dataclass(frozen=True)
class TermInfo:
    """One term of the loss in words, for the plan."""

    what: str
    line: str
    denominators: tuple[str, ...]


@dataclass(frozen=True)
class LossPlan:
    """What `rewrite_loss` did."""

    terms: tuple[TermInfo, ...] = ()
    """one for each output of the graph; empty when the loss is not additive"""
    whole_graph: GraphModule | None = None
    """batch placeholders of the whole mini-batch in order -> values of `whole_0, whole_1, ...`;
    holds no parameter
    """
    whole_buffers: dict[str, str] = field(default_factory=dict)
    """attribute of `whole_graph` -> buffer of the model whose value must be put there before it
    runs (it is on `meta` until then)
    """
    reductions: tuple[Node, ...] = ()
    """only with `all_reduce`: nodes whose values the runtime sums over all parts inside the forward
    (backward: the same sum)
    """
    not_additive: NotAdditive | None = None
