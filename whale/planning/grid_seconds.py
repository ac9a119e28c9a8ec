"""The work of a stage on a grid by the one cost model (`costs/costs.py`), so that a grid can be
compared with devices that share samples.

The solver (`sharding/solve.py`) ranks layouts by FLOP and moved bytes alone, with a backward of two
forwards: what every layout has in common (launches, what a backward really moves) changes no choice.
It does change the step:

    seconds = solver's seconds + sum over operations of (cost model - solver)(share of the operation)

where the share is the fraction of it that a device of the grid has: on an even axis the largest of
all, on an uneven one that of its place. The slowest place counts. Fast products are no fast memory, so
how unevenly an axis should cut follows from the seconds of the whole stage on each kind
(`seconds_by_kind`), not from FLOP/s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import prod

from whale.cluster.cluster import DeviceKind
from whale.costs.costs import (
    BACKWARD_PER_FORWARD,
    NodeCost,
    backward_bytes,
    backward_factors,
    backward_seconds,
    seconds,
)
from whale.plans.grid import Grid
from whale.plans.sharding import Sharding
from whale.sharding.terms import Terms

Place = tuple[DeviceKind, tuple[tuple[str, float], ...]]
"""a device of a grid: its kind, and of every uneven axis how many times an even part it has"""


def places_of(kinds: Sequence[DeviceKind], grid: Grid) -> set[Place]:
    """The places of a grid that differ. `kinds`: by place."""
    found = set()
    for place, kind in enumerate(kinds):
        parts = []
        for axis, weights in grid.work.items():
            own = weights[grid.coordinate(place, axis)]
            parts.append((axis, own * len(weights) / sum(weights)))
        found.add((kind, tuple(parts)))
    return found


def with_cost_model(
    sharding: Sharding, terms: Terms, places: Collection[Place], dtype: str
) -> Sharding:
    """The sharding with the seconds of a micro-batch that the cost model gives at the slowest of
    these places. `terms`: what it was solved with.
    """
    solved, by_place = _work_seconds(sharding, terms, list(places), dtype)
    # messages stay, whatever the work
    least = max(0.0, sharding.seconds - solved)
    return replace(sharding, seconds=least + max(by_place, default=0.0))


def seconds_by_kind(
    sharding: Sharding, terms: Terms, kinds: Sequence[DeviceKind], dtype: str
) -> list[float]:
    """Seconds of the work of an even part on each of these kinds, without messages."""
    return _work_seconds(sharding, terms, [(kind, ()) for kind in kinds], dtype)[1]


def _work_seconds(
    sharding: Sharding, terms: Terms, places: Sequence[Place], dtype: str
) -> tuple[float, list[float]]:
    """(what the solver counts for the work, what the cost model gives it at each place)"""
    space = terms.space
    costs = terms.costs
    by_node = terms.node_costs
    gradients = space.program.gradients
    chosen = space.chosen(sharding)
    known: dict[tuple[object, ...], list[float]] = {}
    totals = [0.0] * len(places)
    solved = 0.0
    for node in space.operations:
        cost = by_node[node]
        options = chosen.get(node, {})
        share = terms.share(node, options) if options else 1.0
        passes = 1 + BACKWARD_PER_FORWARD if node in gradients else 1.0
        work = cost.flop / costs.flop_per_s + cost.moved_bytes / costs.memory_bytes_per_s
        solved += share * passes * work
        factors = backward_factors(node, cost, gradients)
        moved = backward_bytes(node, by_node, gradients)
        cut = tuple(axis for axis, option in options.items() if option.is_cut)
        key = (cost, share, cut, factors, moved)
        if key not in known:
            found = []
            for kind, parts in places:
                own = min(1.0, share * prod(part for axis, part in parts if axis in cut))
                found.append(_seconds(cost, own, factors, own * moved, kind, dtype))
            known[key] = found
        totals = [total + more for total, more in zip(totals, known[key], strict=True)]
    return solved, totals


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
