"""A solved stage as data: names of options, stored layouts, patterns in words, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from torch.fx import Node

from whale.capture.graph import module_name
from whale.operations.nodes import op_name
from whale.operations.table import CLASS_LOSSES, POINTWISE_LOSSES
from whale.plans.grid import AXES
from whale.plans.layout import Cut, Layout
from whale.plans.sharding import ORDER, Gathered, ShardedOperation, Sharding
from whale.sharding.dims import Value
from whale.sharding.options import PARTIAL, SAME, TRAVEL, Option, Placement
from whale.sharding.redistribution_costs import sent_bytes
from whale.sharding.space import Space, numel_bytes

if TYPE_CHECKING:
    from whale.sharding.solve import Solver

WORDS = {
    "n": "column",
    "k": "row",
    "heads": "by heads",
    "v": "by vocabulary",
    "classes": "by classes",
    "h": "by width",
    "h0": "by width",
    "experts": "by experts, the same tokens",
    TRAVEL: "by experts, tokens by all-to-all",
}
"""options in words; others are named by their dim"""
LISTED = CLASS_LOSSES | POINTWISE_LOSSES | {"embedding"}
"""rules of operations that the plan lists although they neither multiply nor, often, send: whether
they are cut is what a user asks
"""


def describe(solver: Solver, seconds: float) -> Sharding:
    """The result of a solver."""
    space = solver.space
    grid = solver.grid
    index = {node: place for place, node in enumerate(space.program.captured.graph.nodes)}
    choices: dict[int, tuple[str, str, str]] = {}
    operations = []
    replicated = []
    sent = _sent_by_reader(solver)
    for node in space.operations:
        chosen: dict[str, Option] = solver.chosen[node]  # type: ignore[assignment]
        choices[index[node]] = tuple(chosen[axis].name if axis in chosen else "" for axis in AXES)  # type: ignore[assignment]
        what = f"{module_name(node) or 'model'}: {op_name(node)}"
        cost = solver.terms.node_costs[node]
        told = solver.terms.told_bytes(node, chosen)
        if cost.flop or sent.get(node) or told or op_name(node) in LISTED:
            operations.append(
                ShardedOperation(
                    index[node], what, pattern(space, node, chosen), sent.get(node, 0.0), told
                )
            )
        if (
            cost.output_bytes > _itemsize(node)
            and not any(option.is_cut for option in space.options[node])
            and grid.axes
        ):
            replicated.append(what)
    stored = {str(node.target): _stored_layout(solver, node) for node in space.parameters}
    return Sharding(
        grid=grid,
        choices=choices,
        stored=stored,
        operations=tuple(operations),
        replicated=tuple(replicated),
        seconds=seconds,
        sum_seconds=_sum_seconds(solver, stored),
        sent_bytes=sum(sent.values()),
        weight_bytes=_most_stored(solver, stored),
        work=_work(solver),
        gathered=_gathered(solver),
    )


def _itemsize(node: Node) -> int:
    """Bytes of one number of its (first) result."""
    held = node.meta["val"]
    first = held[0] if isinstance(held, list | tuple) else held
    return int(first.dtype.itemsize)


def _sum_seconds(solver: Solver, stored: Mapping[str, Layout]) -> float:
    """Of the gradients of all parameters over the devices that hold the same parts, for one
    micro-batch.
    """
    grid = solver.grid
    costs = solver.terms.costs
    program = solver.space.program
    trained = [str(node.target) for node in solver.space.parameters if node in program.gradients]
    alike = Counter((stored[name], program.captured.state[name].dtype.itemsize) for name in trained)
    total = sum(
        number * solver.terms.sum_seconds(size * layout.largest_count(grid), layout.same_on(grid))
        for (layout, size), number in alike.items()
    )
    return total / costs.num_micro_batch


def _work(solver: Solver) -> tuple[float, ...]:
    """By place, its part of the FLOP of all operations: a device without a head, say, does nothing
    of the attention.
    """
    space = solver.space
    grid = solver.grid
    flop: dict[tuple[tuple[Cut, tuple[str, ...]], ...], float] = {}
    for node in space.operations:
        cuts: dict[str, tuple[Cut, list[str]]] = {}
        chosen: dict[str, Option] = solver.chosen[node]  # type: ignore[assignment]
        for axis in (axis for axis in ORDER if axis in chosen and chosen[axis].is_cut):
            if chosen[axis].name not in cuts:
                value, dim = solver.terms.cut_value(node, chosen[axis])
                cuts[chosen[axis].name] = space.granules.cuts(value, solver.num_samples)[dim], []
            cuts[chosen[axis].name][1].append(axis)
        key = tuple((cut, tuple(axes)) for cut, axes in cuts.values())
        flop[key] = flop.get(key, 0.0) + solver.terms.node_costs[node].flop
    total = sum(flop.values())
    by_place = []
    for place in range(grid.num_devices) if total else ():
        parts = (
            (Layout(tuple(cut for cut, _ in key), tuple(axes for _, axes in key)), number)
            for key, number in flop.items()
        )
        by_place.append(
            sum(
                number * part.local_count(grid, place) / max(1, prod(part.shape))
                for part, number in parts
            )
            / total
        )
    return tuple(by_place)


def _most_stored(solver: Solver, stored: Mapping[str, Layout]) -> float:
    """Bytes of weights on the device that has most."""
    state = solver.space.program.captured.state
    alike = Counter((layout, state[name].dtype.itemsize) for name, layout in stored.items())
    places = range(solver.grid.num_devices)
    return max(
        sum(
            number * size * layout.local_count(solver.grid, p)
            for (layout, size), number in alike.items()
        )
        for p in places
    )


def _stored_layout(solver: Solver, node: Node) -> Layout:
    """Axes that cut a parameter only to store it stand innermost."""
    fixed = solver.fixed.get(str(node.target))
    if fixed is not None:
        return fixed
    placements = solver.lies((node, 0))
    readers = [
        (reader, slot)
        for reader in node.users
        if reader in solver.space.operations
        for slot in _slots(solver.space, reader, (node, 0))
    ]
    used = {
        axis
        for axis, placement in placements.items()
        for reader, slot in readers
        if solver.needed(reader, slot)[axis] == placement
    }
    stored = frozenset(
        axis for axis, placement in placements.items() if placement != SAME and axis not in used
    )
    return layout_of(solver.space.granules.cuts((node, 0), solver.num_samples), placements, stored)


def _slots(space: Space, reader: Node, value: Value) -> list[int]:
    return [slot for slot, each in enumerate(space.inputs_of(reader)) if each == value]


def layout_of(
    cuts: tuple[Cut, ...], placements: Mapping[str, Placement], stored: frozenset[str] = frozenset()
) -> Layout:
    """A layout from its placement on each axis: axes in the order z, y, x, and last those that only
    store.
    """
    order = [
        *(axis for axis in ORDER if axis not in stored),
        *(axis for axis in ORDER if axis in stored),
    ]
    axes = tuple(
        tuple(axis for axis in order if placements.get(axis, SAME) == dim)
        for dim in range(len(cuts))
    )
    return Layout(
        cuts, axes, frozenset(axis for axis in order if placements.get(axis) == PARTIAL), stored
    )


def _sent_by_reader(solver: Solver) -> dict[Node, float]:
    """Bytes of the exchanges that each operation is the first to need; those of a result, and
    panels, belong to its own operation.
    """
    axes = solver.grid.axes
    sizes = [solver.grid.size(axis) for axis in axes]
    total: dict[Node, float] = {
        node: sum(solver.terms.panel_bytes(node, solver.chosen[node]).values())  # type: ignore[arg-type]
        for node in solver.space.program.summa
        if node in solver.space.operations
    }
    for read in solver.reads:
        lies = solver.lies(read.value)
        source = [lies[axis] for axis in axes]
        num_bytes = numel_bytes(read.value, solver.terms.shapes)
        kind = read.producer in solver.space.program.gradients, read.producer.op == "get_attr"
        needed = [
            (read.readers[reader], solver.needed(read.readers[reader], slot))
            for reader, slot in read.slots
        ]
        targets = [(node, [lying[axis] for axis in axes]) for node, lying in needed]
        targets += [(read.producer, [placement] * len(axes)) for placement in read.wanted]
        seen: list[list[Placement]] = [source]
        for node, target in targets:
            if target not in seen:
                seen.append(target)
                total[node] = total.get(node, 0.0) + sum(
                    sent_bytes(num_bytes, source, target, sizes, *kind)
                )
    for node in solver.space.operations:
        for number in solver.terms.travelling_bytes(node, solver.chosen[node]).values():  # type: ignore[arg-type]
            total[node] = total.get(node, 0.0) + number
    return {node: number for node, number in total.items() if number}


def _gathered(solver: Solver) -> Gathered:
    """Values that are cut along an axis where an operation with a gradient needs them the same: it
    keeps the gathered copy.
    """
    axes = solver.grid.axes
    costs = solver.terms.costs
    sizes = [solver.grid.size(axis) for axis in axes]
    per_sample = fixed = seconds = 0.0
    for read in solver.reads:
        lies = solver.lies(read.value)
        source = [lies[axis] for axis in axes]
        num_bytes = numel_bytes(read.value, solver.terms.shapes)
        is_parameter = read.producer.op == "get_attr"
        seen: list[list[Placement]] = []
        for reader, slot in read.slots:
            node = read.readers[reader]
            needed = solver.needed(node, slot)
            target = [needed[axis] for axis in axes]
            grows = any(
                isinstance(before, int) and after == SAME for before, after in zip(source, target)
            )
            if target in seen or not grows or node not in solver.space.program.gradients:
                continue
            seen.append(target)
            held = num_bytes * prod(
                1 / size for size, placement in zip(sizes, target) if isinstance(placement, int)
            )
            per_sample, fixed = (
                (per_sample, fixed + held)
                if is_parameter
                else (per_sample + held / solver.num_samples, fixed)
            )
            sent = sent_bytes(num_bytes, source, target, sizes, False, is_parameter)
            seconds += costs.latency_s + sum(
                number / costs.rate(axis) for axis, number in zip(axes, sent)
            )
    return Gathered(per_sample, fixed, seconds)


def pattern(space: Space, node: Node, chosen: Mapping[str, Option]) -> str:
    """`column over y, by samples over z`."""
    said: dict[str, list[str]] = {}
    for axis in AXES:
        if axis in chosen:
            said.setdefault(_word(space, node, chosen[axis]), []).append(axis)
    return ", ".join(f"{word} over {''.join(axes)}" for word, axes in said.items()) or "whole"


def _word(space: Space, node: Node, option: Option) -> str:
    if option.local == "summa":
        return "SUMMA"
    if not option.is_cut:
        return "whole" if option.name == "whole" else "partial sums"
    if option.apart:
        return WORDS[option.name]
    return (
        "by samples"
        if space.cuts_samples(node, option)
        else WORDS.get(option.name, f"dim {option.name}")
    )
