"""Calls in the graph of a chunk that bring blocks of weights before they are read (ZeRO-3,
offloaded weights; docs/memory.md).

In front of an operation that reads weights of other blocks than the one before it stands `need`;
behind every reader `need_in_backward` puts the same call in front of its backward. An operation
reads a weight directly, or through values that are computed from weights alone: such a value may be
a view that lies in the weight's memory.

A region is recomputed in the midst of the backward of one of its operations, when that takes its
first saved tensor: behind its `need`. The blocks of the region may take the slots of its weights;
they are brought again behind the recomputation (`region_contexts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node

from whale.compat import StopRecomputation

aten = torch.ops.aten
Blocks = tuple[int, ...]
"""blocks that one operation reads, in order"""


class Bringer(Protocol):
    """What brings blocks (`runtime/residence.py`)."""

    def need(self, *blocks: int) -> None: ...


@dataclass(frozen=True)
class BlockWeights:
    """Weights that are not always here."""

    residence: Bringer
    block_of: Mapping[str, int]
    slot_of: Sequence[int]
    stays: bool = False
    """a block that was brought stays: backward need not bring it again"""


@dataclass
class Use:
    """One place in a forward at which blocks must be here."""

    blocks: Blocks
    region: int | None
    """the region that is recomputed in backward, if it is in one"""


@dataclass
class Readers:
    """Which operations of a stage read which blocks, and the order of their uses so far."""

    of_node: dict[Node, Blocks]
    lies_in: dict[Node, Blocks] = field(default_factory=dict)
    """values that nothing but weights went into: the blocks in whose memory they may lie"""
    leaving: set[Node] = field(default_factory=set)
    """those of them that leave the stage: at its end their memory may hold other weights"""
    uses: list[Use] = field(default_factory=list)
    region: int | None = None
    last: Blocks | None = None
    """blocks that are here at this place of the graph for certain"""
    stays: bool = False
    """what was brought is here in backward, too"""

    def enter(self, region: int | None) -> None:
        """Forgets which blocks are here: a region also runs in backward."""
        self.region = region
        self.last = None

    def before(self, graph: Graph, node: Node, residence: Node | None) -> None:
        self.bring(graph, self.of_node.get(node, ()), residence)

    def bring(self, graph: Graph, blocks: Blocks, residence: Node | None) -> None:
        """Puts the call that brings these blocks, unless they are here for certain."""
        if not blocks or residence is None:
            return
        if self.last is None or not set(blocks) <= set(self.last):
            graph.call_function(need, (residence, blocks))
            self.last = blocks
            self.uses.append(Use(blocks, self.region))

    def behind(self, graph: Graph, node: Node, result: Node, residence: Node | None) -> None:
        blocks = self.of_node.get(node, ())
        if blocks and residence is not None and not self.stays:
            graph.call_function(need_in_backward, (residence, blocks, result))

    def own_memory(self, graph: Graph, node: Node, copy: Node) -> Node:
        """The result of an operation, copied at once where it is one of `leaving`."""
        if node not in self.leaving:
            return copy
        clone = graph.call_function(aten.clone.default, (copy,))
        clone.meta = dict(copy.meta)
        return clone


def need(residence: Bringer, blocks: Blocks) -> None:
    """Returns when these blocks are here."""
    residence.need(*blocks)


def need_in_backward(residence: Bringer, blocks: Blocks, result: Any) -> None:
    """Before the backward of the operation that gave this result, its blocks are brought again."""
    region = _open[-1] if _open else None

    def bring(gradients: Any) -> None:
        residence.need(*blocks)
        if region is not None:
            region.reading = blocks

    # one of several results may be all that the loss uses: the state of an LSTM, not its outputs
    nodes: list[Any] = []
    for each in result if isinstance(result, (tuple, list)) else (result,):
        node = each.grad_fn if isinstance(each, Tensor) else None
        if node is not None and node not in nodes:
            nodes.append(node)
            node.register_prehook(bring)


class _RegionForward:
    """One forward of a region that is recomputed in backward."""

    def __init__(self) -> None:
        self.reading: Blocks = ()
        """blocks of its operation whose backward began last"""

    def __enter__(self) -> None:
        _open.append(self)

    def __exit__(self, *raised: Any) -> None:
        _open.pop()


class _Recomputation:
    """The recomputation of a region, in the midst of the backward of one of its operations."""

    def __init__(self, residence: Bringer, forward: _RegionForward) -> None:
        self._residence = residence
        self._forward = forward

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *raised: Any) -> None:
        # torch ends it by an exception when all that was saved is there
        is_done = kind is None or issubclass(kind, StopRecomputation)
        if is_done and self._forward.reading:
            self._residence.need(*self._forward.reading)


_open: list[_RegionForward] = []
"""regions whose forward runs now, the innermost last"""


def region_contexts(residence: Bringer) -> tuple[_RegionForward, _Recomputation]:
    """The contexts in which the forward of a region and its recomputation run (`context_fn` of
    `torch.utils.checkpoint`).
    """
    forward = _RegionForward()
    return forward, _Recomputation(residence, forward)


def readers_of(
    state: Iterable[Node], operations: Iterable[Node], weights: BlockWeights | None
) -> Readers | None:
    """The readers of a stage; raises ValueError where one operation reads blocks that take turns in
    one buffer.
    """
    if weights is None:
        return None
    behind: dict[Node, Blocks] = {}  # of values that come from weights alone
    for node in state:
        block = weights.block_of.get(str(node.target))
        behind[node] = () if block is None else (block,)
    lies_in = dict(behind)
    found: dict[Node, Blocks] = {}
    for node in operations:
        sources = _tensor_sources(node)
        blocks: dict[int, None] = {}
        for source in sources:
            blocks.update(dict.fromkeys(behind.get(source, ())))
        if all(source in behind for source in sources):
            behind[node] = tuple(blocks)
        if sources and all(source in lies_in for source in sources):
            lies_in[node] = tuple(sorted(blocks))
        if blocks:
            found[node] = tuple(sorted(blocks))
            refuse_shared_slots(node, found[node], weights)
    return Readers(found, lies_in, stays=weights.stays)


def _tensor_sources(node: Node) -> list[Node]:
    """Inputs of an operation that are tensors, or lists of them (`chunk`, `unbind`)."""
    found = []
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        parts = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(part, Tensor) for part in parts):
            found.append(source)
    return found


def refuse_shared_slots(node: Node, blocks: Blocks, weights: BlockWeights) -> None:
    """Raises ValueError where one operation reads blocks that take turns in one buffer."""
    slots = [weights.slot_of[block] for block in blocks]
    if len(set(slots)) < len(slots):
        names = [
            next(name for name, own in weights.block_of.items() if own == block) for block in blocks
        ]
        raise ValueError(
            f"`{node.name}` reads parameters of several layers at once ({', '.join(names)}), which "
            'under "zero": 3 or with weights that live elsewhere are not here at the same time. '
            'Try: "zero": 2, and no "weights" in "offload"'
        )


def backward_uses(uses: Sequence[Use]) -> list[Blocks]:
    """The order of uses in the backward of a forward with these: the other way round; regions that
    are recomputed run forward first.
    """
    found: list[Blocks] = []
    place = len(uses)
    while place:
        region = uses[place - 1].region
        start = place - 1
        while region is not None and start and uses[start - 1].region == region:
            start -= 1
        part = [use.blocks for use in uses[start:place]]
        if region is not None:
            found += part
        found += part[::-1]
        place = start
    return found
