"""Regions that are recomputed for almost nothing: cheap operations with the product that saves
their result.

A product (linear, convolution) saves what it multiplies, and what it multiplies is often the result
of something that costs little: an activation function, a norm, a copy. In the region

    cheap operations ... product                                                   (1)

nothing is saved but what enters it. In backward only the cheap operations run again: torch saves
the inputs of a product before it computes it, and ends a recomputation when it has all that was
saved (`early_stop` of `torch.utils.checkpoint`).

Such a region frees, of what its stage saves,

    storages that only its own operations save - those that enter it and nobody else saves   (2)

and begins where that is most. A residual sum, whose result is read behind the region as well, stays
outside by itself: it would have to be saved with what it sums.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence

from torch.fx import Node

from whale.costs.costs import NodeCost
from whale.costs.saved import Saved
from whale.operations.nodes import sums_over_devices

LONGEST = 24
"""cheap operations in front of a product that are looked at: a gelu that is written out has 8"""


def cheap_regions(
    operations: Sequence[Node],
    free: Sequence[Node],
    costs: Mapping[Node, NodeCost],
    saved: Saved,
) -> list[list[Node]]:
    """Regions of a stage by line (1) that free something, those that free most first. `free`: of
    the operations those that may be in regions, in graph order.
    """
    num_savers: Counter[int] = Counter()
    for node in operations:
        num_savers.update(saved.of_node.get(node, ()))
    found: list[tuple[float, list[Node]]] = []
    start = 0  # of the cheap operations in front of this one
    for place, node in enumerate(free):
        if is_cheap(node, costs):
            continue
        if _saves_inputs_only(node, saved) and not sums_over_devices(node):
            best_bytes = 0.0
            best: list[Node] = []
            for first in range(place - 1, max(start, place - LONGEST) - 1, -1):
                run = list(free[first : place + 1])
                freed = _freed_bytes(run, num_savers, saved) if _is_whole(run) else 0.0
                if freed > best_bytes:
                    best_bytes = freed
                    best = run
            if best:
                found.append((best_bytes, best))
        start = place + 1
    return [run for _, run in sorted(found, key=lambda each: -each[0])]


def is_cheap(node: Node, costs: Mapping[Node, NodeCost]) -> bool:
    """Whether an operation multiplies nothing, and may run twice: running statistics and sums over
    devices belong to the forward alone.
    """
    return not costs[node].flop and not sums_over_devices(node)


def _saves_inputs_only(product: Node, saved: Saved) -> bool:
    """Else it would have to run again for what it makes and saves."""
    inputs: set[int] = set()
    for source in product.all_input_nodes:
        inputs |= saved.result_of_node.get(source, frozenset())
    return saved.of_node.get(product, frozenset()) <= inputs


def _is_whole(run: Sequence[Node]) -> bool:
    """Whether no list is cut from its parts."""
    members = set(run)
    if run[0].target is operator.getitem:
        return False
    for node in run:
        for user in node.users:
            if user.target is operator.getitem and user not in members:
                return False
    return True


def _freed_bytes(run: Sequence[Node], num_savers: Mapping[int, int], saved: Saved) -> float:
    """Line (2), for each sample."""
    members = set(run)
    inside: Counter[int] = Counter()
    entering: set[int] = set()
    for node in run:
        inside.update(saved.of_node.get(node, ()))
        for source in node.all_input_nodes:
            if source not in members:
                entering |= saved.result_of_node.get(source, frozenset())
    gone = []
    for storage, number in inside.items():
        if number == num_savers[storage] and storage not in entering:
            gone.append(storage)
    new = [storage for storage in entering if not num_savers.get(storage)]
    return saved.bytes_of(gone).sample_bytes - saved.bytes_of(new).sample_bytes
