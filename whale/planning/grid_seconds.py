"""The work of a stage on a grid by the one cost model (`costs/costs.py`), so that a grid can be
compared with devices that share samples.

The solver (`sharding/solve.py`) ranks layouts by FLOP and moved bytes alone, with a backward of two
forwards: what every layout has in common (launches, what a backward really moves) changes no choice.
It does change the step:

    seconds = solver's seconds + sum over operations of (cost model - solver)(share of the operation)

where the share is the largest fraction of it that one device of the grid has.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from whale.cluster.cluster import DeviceKind
from whale.costs.costs import (
    BACKWARD_PER_FORWARD,
    NodeCost,
    backward_bytes,
    backward_factors,
    backward_seconds,
    seconds,
)
from whale.plans.sharding import Sharding
from whale.sharding.terms import Terms


def with_cost_model(
    sharding: Sharding, terms: Terms, kinds: Collection[DeviceKind], dtype: str
) -> Sharding:
    """The sharding with the seconds of a micro-batch that the cost model gives on the slowest of
    these kinds. `terms`: what it was solved with.
    """
    space = terms.space
    costs = terms.costs
    by_node = terms.node_costs
    gradients = space.program.gradients
    chosen = space.chosen(sharding)
    known: dict[tuple[object, ...], list[float]] = {}
    totals = [0.0] * len(kinds)
    solved = 0.0
    for node in space.operations:
        cost = by_node[node]
        share = terms.share(node, chosen[node]) if node in chosen else 1.0
        passes = 1 + BACKWARD_PER_FORWARD if node in gradients else 1.0
        work = cost.flop / costs.flop_per_s + cost.moved_bytes / costs.memory_bytes_per_s
        solved += share * passes * work
        factors = backward_factors(node, cost, gradients)
        moved = share * backward_bytes(node, by_node, gradients)
        key = (cost, share, factors, moved)
        if key not in known:
            known[key] = [_seconds(cost, share, factors, moved, kind, dtype) for kind in kinds]
        totals = [total + more for total, more in zip(totals, known[key], strict=True)]
    # messages stay, whatever the work
    least = max(0.0, sharding.seconds - solved)
    return replace(sharding, seconds=least + max(totals, default=0.0))


def _seconds(
    cost: NodeCost,
    share: float,
    factors: tuple[float, float],
    moved_back: float,
    kind: DeviceKind,
    dtype: str,
) -> float:
    """Forward and backward of a part of an operation."""
    part = replace(cost, flop=share * cost.flop, moved_bytes=share * cost.moved_bytes)
    forward = seconds(part, kind, dtype)
    return forward + sum(backward_seconds(part, factors, kind, dtype, moved_back))
