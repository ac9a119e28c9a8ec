"""Regions whose activations are not saved but recomputed in backward.

Three may ask for it: the user with `torch.utils.checkpoint` in the model, the config with names of
modules, and the planner where memory is short (`recompute_choice.py`). A region is a run of
operations of one stage in graph order. It saves what enters it; its backward begins with its
forward, so a backward costs one forward more and needs memory for the activations of one region.

The planner cuts a stage into R regions of about the same bytes, at points where little is alive (in
a transformer: between layers, where only the residual stream is), and has the first r of them
recomputed. The plan lists the operations of these regions; R and r say how other graphs of the
model (an evaluation) are cut.

Where activations are at home elsewhere and memory there is short, regions that cost almost nothing
come first (`cheap_regions.py`).

Never in a region: batch statistics and sums over devices, whose running values and messages belong
to the forward alone. Values that depend on no weight (masks, positions) stay outside as well; they
cost nothing to keep.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import NamedTuple

from torch.fx import Node

from whale.capture.graph import CapturedGraph
from whale.capture.guards import RECOMPUTE_TAG
from whale.costs.backward_workspace import live_between
from whale.costs.costs import NodeCost, sample_bytes
from whale.costs.saved import Saved
from whale.names import nearest
from whale.operations.nodes import sums_over_devices
from whale.planning.cheap_regions import cheap_regions
from whale.plans.replica import Stage

Regions = Mapping[Node, Hashable]
"""operation -> its region; operations that are not there save what they need"""


class Counts(NamedTuple):
    """What the planner recomputes of a stage."""

    num_regions: int = 0
    """into which it is cut"""
    num_recomputed: int = 0
    """of these, from the first on"""
    is_cheap: bool = False
    """they are those of `cheap_regions.py`, and not as large as each other"""


Recompute = bool | str | Sequence[str]
"""the config's: "auto", True, False, or names of modules"""


def regions_of_stage(
    captured: CapturedGraph,
    operations: Sequence[Node],
    gradients: Collection[Node],
    counts: Counts,
    wanted: Recompute,
    sizes: Mapping[Node, NodeCost] | None = None,
    saved: Saved | None = None,
) -> dict[Node, Hashable]:
    """All regions of a stage: the user's, those of the config's names, those of the planner.
    `sizes`, `saved`: costs for the sample batch, and what autograd saves, where they are known;
    cheap regions are as many of equal size where they are not.
    """
    names = [] if isinstance(wanted, (bool, str)) else list(wanted)
    asked = {
        node: region for node in operations if (region := _asked_region(node, names)) is not None
    }
    regions = _runs(operations, gradients, asked.get)
    if counts.num_recomputed:
        free = _free(operations, gradients, regions)
        if counts.is_cheap and sizes is not None and saved is not None:
            parts = cheap_regions(operations, free, sizes, saved)
        else:
            parts = cut_regions(free, counts.num_regions, captured, sizes)
        planned = {
            node: ("planned", index)
            for index, part in enumerate(parts[: counts.num_recomputed])
            for node in part
        }
        regions |= _runs(operations, gradients, planned.get)
    return regions


def counts_of(stage: Stage) -> Counts:
    """What the planner recomputes of a stage of a plan."""
    return Counts(stage.num_regions, stage.num_recomputed, stage.has_cheap_regions)


def _asked_region(node: Node, names: Sequence[str]) -> Hashable | None:
    tag = (node.meta.get("custom") or {}).get(RECOMPUTE_TAG)
    if tag is not None:
        return ("checkpoint", tag)
    for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items() if names else ():
        if name and any(fnmatchcase(name, pattern) for pattern in names):
            # the outermost; a module that is called twice has two keys
            return ("module", name, key)
    return None


def check_names(captured: CapturedGraph, wanted: Recompute) -> None:
    """Refuses a name in the config that matches no module."""
    names = [] if isinstance(wanted, (bool, str)) else list(wanted)
    stacks = (
        (node.meta.get("nn_module_stack") or {} for node in captured.compute_nodes())
        if names
        else ()
    )
    known = {str(name) for stack in stacks for name, _ in stack.values() if name}
    for pattern in names:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(
                f'"recompute": {pattern!r} matches no module of the model.{nearest(pattern, known)}'
            )


def _runs(
    operations: Sequence[Node],
    gradients: Collection[Node],
    region_of: Callable[[Node], Hashable | None],
) -> dict[Node, Hashable]:
    """Regions broken where something between may not be recomputed, so that each can be called
    as one block.
    """
    found: dict[Node, Hashable] = {}
    dependent: set[Node] = set()
    run: list[Node] = []
    current: Hashable | None = None
    number = 0
    for node in operations:
        if node in gradients or any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
        elif region_of(node) is None or region_of(node) == current:
            continue  # needs no weight: it can stand before the block
        region = None if sums_over_devices(node) else region_of(node)
        if region != current:
            found |= dict.fromkeys(run, (current, number)) if current is not None else {}
            run = []
            current = region
            number = number + 1
        if region is not None and node in dependent:
            run.append(node)
    return found | (dict.fromkeys(run, (current, number)) if current is not None else {})


def _free(operations: Sequence[Node], gradients: Collection[Node], taken: Regions) -> list[Node]:
    """Operations that the planner may put into regions."""
    dependent: set[Node] = set()
    for node in operations:
        if node in gradients or any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
    free = dependent.difference(taken)
    return [node for node in operations if node in free]


def cut_regions(
    operations: Sequence[Node],
    count: int,
    captured: CapturedGraph,
    sizes: Mapping[Node, NodeCost] | None = None,
) -> list[list[Node]]:
    """The operations in at most `count` runs of about the same bytes, each cut within half a run of
    its place where least is alive. A graph for all lengths is cut at those of its sample batch.
    """

    def size_of(node: Node) -> int:
        if sizes is not None:
            return sizes[node].output_bytes
        return sample_bytes(node, captured)

    alive = live_between(operations, size_of)
    before = list(accumulate(map(size_of, operations), initial=0))
    starts = [0]
    for number in range(1, count):
        goal = before[-1] * number / count
        reach = before[-1] / (2 * count)
        points = []
        for point in range(starts[-1] + 1, len(operations)):
            # a list is never cut from its parts
            is_whole = operations[point].target is not operator.getitem
            if is_whole and abs(before[point] - goal) <= reach:
                points.append(point)
        if points:
            starts.append(min(points, key=lambda point: (alive[point], abs(before[point] - goal))))
    return [
        list(operations[start:stop])
        for start, stop in zip(starts, [*starts[1:], len(operations)], strict=True)
    ]
