"""The work of a stage on a grid by the one cost model (`costs/costs.py`), so that a grid can be
compared with devices that share samples.

The solver (`sharding/solve.py`) ranks layouts by FLOP and moved bytes alone, with a backward of two
forwards: what every layout has in common (launches, what a backward really moves) changes no
choice. It does change the step:

    seconds = solver's seconds + sum over operations of (cost model - solver)(share)

where the share of an operation is the fraction of it that a device of the grid has: on an even axis
the largest of all, on an uneven one that of its place. The slowest place counts. Fast products are
no fast memory, so how unevenly an axis should cut follows from the seconds of the whole stage on
each kind (`seconds_by_kind`), not from FLOP/s.

Layers that were measured on such a grid take what was measured, in place of their work and of all
messages that they take part in (`measured_grids.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from torch.fx import Node

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
from whale.plans.sharding import FORWARD_PART, Sharding
from whale.sharding.chosen import ChosenLayouts
from whale.sharding.terms import Terms

Place = tuple[DeviceKind, tuple[tuple[str, float], ...]]
"""a device of a grid: its kind, and of every uneven axis how many times an even part it has"""


@dataclass(frozen=True)
class MeasuredPart:
    """A layer of a stage whose seconds on this very grid were measured, messages included."""

    module: str
    nodes: frozenset[Node]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Measured:
    """What was measured of a stage on a grid."""

    parts: tuple[MeasuredPart, ...] = ()
    scale: Mapping[DeviceKind, Mapping[Node, float]] = field(default_factory=dict)
    """by kind, how many times longer than the cost model says an operation takes"""


NOT_MEASURED = Measured()


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
    sharding: Sharding,
    terms: Terms,
    places: Collection[Place],
    dtype: str,
    measured: Measured = NOT_MEASURED,
) -> Sharding:
    """The sharding with the seconds of a micro-batch that measured layers and the cost model give
    at the slowest of these places. `terms`: what it was solved with.
    """
    in_parts = {node for part in measured.parts for node in part.nodes}
    solved, by_place = _work_seconds(sharding, terms, list(places), dtype, measured, in_parts)
    if in_parts:
        # messages of measured layers are in their times
        solved += ChosenLayouts(sharding, terms).message_seconds(in_parts)
    # other messages stay, whatever the work
    least = max(0.0, sharding.seconds - solved)
    modelled = least + max(by_place, default=0.0)
    forward = sum(part.forward_s for part in measured.parts)
    backward = sum(part.backward_s for part in measured.parts)
    # the all-reduces of gradients are neither forward nor backward
    alone = modelled - sharding.sum_seconds
    total = alone + forward + backward
    return replace(
        sharding,
        seconds=modelled + forward + backward,
        forward_part=(FORWARD_PART * alone + forward) / total if total > 0 else FORWARD_PART,
        measured=tuple(part.module for part in measured.parts),
    )


def seconds_by_kind(
    sharding: Sharding,
    terms: Terms,
    kinds: Sequence[DeviceKind],
    dtype: str,
    measured: Measured = NOT_MEASURED,
) -> list[float]:
    """Seconds of the work of an even part on each of these kinds, without messages."""
    places: list[Place] = [(kind, ()) for kind in kinds]
    return _work_seconds(sharding, terms, places, dtype, measured)[1]


def part_seconds(
    nodes: Iterable[Node],
    share: float,
    costs: Mapping[Node, NodeCost],
    gradients: Container[Node],
    place: tuple[DeviceKind, str],
) -> float:
    """Seconds of this share of all these operations, forward and backward, by the cost model.
    `place`: the kind of device and the dtype of products.
    """
    total = 0.0
    for node in nodes:
        factors = backward_factors(node, costs[node], gradients)
        moved = backward_bytes(node, costs, gradients)
        total += _seconds(costs[node], share, factors, share * moved, *place)
    return total


def _work_seconds(
    sharding: Sharding,
    terms: Terms,
    places: Sequence[Place],
    dtype: str,
    measured: Measured,
    without: Container[Node] = (),
) -> tuple[float, list[float]]:
    """(what the solver counts for the work, what the cost model gives it at each place).
    `without`: operations that only the first of these counts.
    """
    space = terms.space
    costs = terms.costs
    by_node = terms.node_costs
    gradients = space.program.gradients
    chosen = space.chosen(sharding)
    scales = [measured.scale.get(kind, {}) for kind, _ in places]
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
        if node in without:
            continue
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
        for number, scale in enumerate(scales):
            totals[number] += known[key][number] * scale.get(node, 1.0)
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
