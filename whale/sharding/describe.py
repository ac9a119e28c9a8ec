"""A solved stage as data: names of options, stored layouts, patterns in words, bytes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from torch.fx import Node

from whale.capture.graph import module_name
from whale.capture.kinds import op_name
from whale.sharding.dims import Value, value_of
from whale.sharding.exchange_costs import sent_bytes
from whale.sharding.grid import AXES
from whale.sharding.layout import Layout
from whale.sharding.operation import PARTIAL, SAME, Option, Placement
from whale.sharding.sharding import ORDER, ShardedOperation, Sharding
from whale.sharding.space import Space, numel_bytes

if TYPE_CHECKING:
    from whale.sharding.solve import Solver

WORDS = {"n": "column", "k": "row", "heads": "by heads", "v": "by vocabulary", "classes": "by classes", "h": "by width", "h0": "by width"}


def describe(solver: Solver, seconds: float) -> Sharding:
    """The result of a solver."""
    space, grid = solver.space, solver.grid
    index = {node: place for place, node in enumerate(space.program.captured.graph.nodes)}
    choices = {
        index[node]: tuple(chosen[axis].name if axis in chosen else "" for axis in AXES) for node, chosen in solver.chosen.items()
    }
    uses = needed_layouts(solver)
    operations, replicated = [], []
    sent = _sent_by_reader(solver)
    for node, chosen in solver.chosen.items():
        what = f"{module_name(node) or 'model'}: {op_name(node)}"
        pattern = _pattern(space, node, chosen)
        cost = solver.node_costs[node]
        if cost.flop or sent.get(node):
            operations.append(ShardedOperation(index[node], what, pattern, sent.get(node, 0.0)))
        if cost.moved_bytes and len(space.options[node]) == 1 and grid.axes:
            replicated.append(what)
    stored = {str(node.target): _stored_layout(solver, node, uses) for node in space.parameters}
    held = [
        sum(layout.local_count(grid, place) * _itemsize(space, name) for name, layout in stored.items()) for place in range(grid.num_devices)
    ]
    return Sharding(
        grid=grid,
        choices=choices,  # type: ignore[arg-type]
        stored=stored,
        operations=tuple(operations),
        replicated=tuple(replicated),
        seconds=seconds,
        sum_seconds=sum(_sum_seconds(solver, node, stored[str(node.target)]) for node in space.parameters),
        sent_bytes=sum(sent.values()),
        weight_bytes=max(held, default=0.0),
    )


def _sum_seconds(solver: Solver, node: Node, layout: Layout) -> float:
    """Of the gradients of a parameter over the devices that hold the same part, for one micro-batch."""
    grid, costs = solver.grid, solver.costs
    if node not in solver.space.program.gradients:
        return 0.0
    largest = layout.largest_count(grid) * node.meta["val"].dtype.itemsize
    along = sum((grid.size(axis) - 1) / grid.size(axis) / costs.rate(axis) for axis in layout.same_on(grid))
    return 2 * largest * along / costs.num_micro_batch


def _itemsize(space: Space, name: str) -> int:
    return space.program.captured.state[name].dtype.itemsize


def needed_layouts(solver: Solver) -> dict[Value, list[dict[str, Placement]]]:
    """Every layout in which a value is read, each once, in the order of its readers."""
    found: dict[Value, list[dict[str, Placement]]] = {}
    for value, readers in solver.readers.items():
        for node, slot in readers:
            target = {axis: option.inputs[slot] for axis, option in solver.chosen[node].items()}
            if target not in found.setdefault(value, []):
                found[value].append(target)
    return found


def _stored_layout(solver: Solver, node: Node, uses: Mapping[Value, list[dict[str, Placement]]]) -> Layout:
    """Axes that cut a parameter only to store it stand innermost."""
    placements = solver.placed[node]
    fixed = solver.fixed.get(str(node.target))
    if fixed is not None:
        return fixed
    used = {axis for axis in placements for target in uses.get((node, 0), []) if target[axis] == placements[axis]}
    stored = frozenset(axis for axis, placement in placements.items() if placement != SAME and axis not in used)
    cuts = solver.space.granules.cuts((node, 0), solver.num_samples)
    return layout_of(cuts, placements, stored)


def layout_of(cuts: tuple, placements: Mapping[str, Placement], stored: frozenset[str] = frozenset()) -> Layout:  # type: ignore[type-arg]
    """A layout from its placement on each axis: axes in the order z, y, x, and last those that only store."""
    order = [*(axis for axis in ORDER if axis not in stored), *(axis for axis in ORDER if axis in stored)]
    axes = tuple(tuple(axis for axis in order if placements.get(axis, SAME) == dim) for dim in range(len(cuts)))
    return Layout(cuts, axes, frozenset(axis for axis in order if placements.get(axis) == PARTIAL), stored)


def _sent_by_reader(solver: Solver) -> dict[Node, float]:
    """Bytes of the exchanges that each operation is the first to need."""
    axes = solver.grid.axes
    sizes = [solver.grid.size(axis) for axis in axes]
    total: dict[Node, float] = {}
    for value, readers in solver.readers.items():
        source = solver.source_of(value)
        seen: list[list[Placement]] = []
        for node, slot in readers:
            target = [solver.chosen[node][axis].inputs[slot] for axis in axes]
            if target in seen:
                continue
            seen.append(target)
            sent = sent_bytes(
                numel_bytes(value, solver.shapes), [source[axis] for axis in axes], target, sizes, value[0] in solver.space.program.gradients
            )
            total[node] = total.get(node, 0.0) + sum(sent)
    for node, placement in solver.wanted:
        value = value_of(node)
        if value[0] in solver.number:
            source = solver.source_of(value)
            sent = sent_bytes(numel_bytes(value, solver.shapes), [source[axis] for axis in axes], [placement] * len(axes), sizes, True)
            if value[0] in total or sum(sent):
                total[value[0]] = total.get(value[0], 0.0) + sum(sent)
    return total


def _pattern(space: Space, node: Node, chosen: Mapping[str, Option]) -> str:
    """`column over y, by samples over z`."""
    said: dict[str, list[str]] = {}
    for axis in AXES:
        if axis in chosen:
            option = chosen[axis]
            word = "by samples" if space.cuts_samples(node, option) else WORDS.get(option.name, f"dim {option.name}")
            word = {"whole": "whole"}.get(option.name, word) if option.is_cut or option.name == "whole" else "partial sums"
            said.setdefault(word, []).append(axis)
    return ", ".join(f"{word} over {''.join(axes)}" for word, axes in said.items()) or "whole"


__all__ = ["describe", "layout_of", "prod"]
