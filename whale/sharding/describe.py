"""A solved stage as data: names of options, stored layouts, patterns in words, bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch.fx import Node

from whale.capture.graph import module_name
from whale.operations.nodes import op_name
from whale.operations.table import CLASS_LOSSES, POINTWISE_LOSSES
from whale.plans.grid import AXES, Grid
from whale.plans.layout import Cut, Layout
from whale.plans.sharding import ORDER, Gathered, ShardedOperation, Sharding
from whale.sharding.dims import Value
from whale.sharding.options import SAME, TRAVEL, Option, Placement
from whale.sharding.redistribution_costs import sent_bytes
from whale.sharding.space import Space, layout_of, numel_bytes
from whale.sharding.terms import Read, State, Terms, output_of

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
"""operations that the plan lists although they neither multiply nor, often, send: whether
they are cut is what a user asks
"""


@dataclass(frozen=True)
class Solution:
    """What the solver chose for one stage."""

    terms: Terms
    fixed: Mapping[str, Layout]
    """layouts of parameters that were given"""
    chosen: Mapping[Node, State]
    reads: Sequence[Read]
    """all values that are read"""
    seconds: float

    @property
    def space(self) -> Space:
        return self.terms.space

    @property
    def grid(self) -> Grid:
        return self.terms.grid

    def options(self, node: Node) -> Mapping[str, Option]:
        """Option of an operation on each axis."""
        return self.chosen[node]  # type: ignore[return-value]

    def lies(self, value: Value) -> dict[str, Placement]:
        """How a value lies on the axes of the grid."""
        node, result = value
        if node in self.chosen:
            return {axis: output_of(choice, result) for axis, choice in self.chosen[node].items()}
        return dict.fromkeys(self.grid.axes, self.space.fixed_source(node))

    def needed(self, node: Node, slot: int) -> dict[str, Placement]:
        """How an operation needs one of its inputs."""
        return {axis: option.inputs[slot] for axis, option in self.options(node).items()}

    def has_gradient(self, node: Node) -> bool:
        """Whether a value carries a gradient."""
        return node in self.space.program.gradients


def describe(solution: Solution) -> Sharding:
    """The solution as a plan holds it."""
    space = solution.space
    terms = solution.terms
    index = {node: place for place, node in enumerate(space.program.captured.graph.nodes)}
    choices: dict[int, tuple[str, str, str]] = {}
    operations = []
    replicated = []
    sent = _sent_by_reader(solution)
    for node in space.operations:
        chosen = solution.options(node)
        x, y, z = (chosen[axis].name if axis in chosen else "" for axis in AXES)
        choices[index[node]] = (x, y, z)
        what = f"{module_name(node) or 'model'}: {op_name(node)}"
        cost = terms.node_costs[node]
        sent_bytes_of = sent.get(node, 0.0)
        exchanged = terms.exchanged_bytes(node, chosen)
        if cost.flop or sent_bytes_of or exchanged or op_name(node) in LISTED:
            words = pattern(space, node, chosen)
            operations.append(ShardedOperation(index[node], what, words, sent_bytes_of, exchanged))
        can_be_cut = any(option.is_cut for option in space.options[node])
        if cost.output_bytes > _itemsize(node) and not can_be_cut and solution.grid.axes:
            replicated.append(what)
    stored = {str(node.target): _stored_layout(solution, node) for node in space.parameters}
    return Sharding(
        grid=solution.grid,
        choices=choices,
        stored=stored,
        operations=tuple(operations),
        replicated=tuple(replicated),
        seconds=solution.seconds,
        sum_seconds=_sum_seconds(solution, stored),
        sent_bytes=sum(sent.values()),
        weight_bytes=_most_stored(solution, stored),
        work=_work(solution),
        gathered=_gathered(solution),
    )


def _itemsize(node: Node) -> int:
    """Bytes of one number of its (first) result."""
    held = node.meta["val"]
    first = held[0] if isinstance(held, list | tuple) else held
    return int(first.dtype.itemsize)


def _sum_seconds(solution: Solution, stored: Mapping[str, Layout]) -> float:
    """Seconds of the all-reduces of all gradients over the devices that hold the same shards, for
    one micro-batch.
    """
    grid = solution.grid
    space = solution.space
    trained = [str(node.target) for node in space.parameters if solution.has_gradient(node)]
    state = space.program.captured.state
    alike = Counter((stored[name], state[name].dtype.itemsize) for name in trained)
    total = 0.0
    for (layout, size), number in alike.items():
        held_bytes = size * layout.largest_count(grid)
        total += number * solution.terms.sum_seconds(held_bytes, layout.same_on(grid))
    return total / solution.terms.costs.num_micro_batch


def _work(solution: Solution) -> tuple[float, ...]:
    """Fraction of the FLOP of all operations at each place: a device without a head, say, does
    nothing of the attention.
    """
    terms = solution.terms
    grid = solution.grid
    # an operation's work is cut as a tensor of the dims that its options cut
    flop: dict[Layout, float] = {}
    for node in solution.space.operations:
        cuts: dict[str, Cut] = {}
        axes: dict[str, list[str]] = {}
        chosen = solution.options(node)
        for axis in ORDER:
            option = chosen.get(axis)
            if option is None or not option.is_cut:
                continue
            if option.name not in cuts:
                value, dim = terms.cut_value(node, option)
                cuts[option.name] = solution.space.granules.cuts(value, terms.num_samples)[dim]
            axes.setdefault(option.name, []).append(axis)
        layout = Layout(tuple(cuts.values()), tuple(tuple(each) for each in axes.values()))
        flop[layout] = flop.get(layout, 0.0) + terms.node_costs[node].flop
    total = sum(flop.values())
    if not total:
        return ()
    by_place = []
    for place in range(grid.num_devices):
        parts = [
            number * layout.local_count(grid, place) / max(1, prod(layout.shape))
            for layout, number in flop.items()
        ]
        by_place.append(sum(parts) / total)
    return tuple(by_place)


def _most_stored(solution: Solution, stored: Mapping[str, Layout]) -> float:
    """Bytes of weights on the device that has most."""
    grid = solution.grid
    state = solution.space.program.captured.state
    alike = Counter((layout, state[name].dtype.itemsize) for name, layout in stored.items())

    def stored_at(place: int) -> int:
        return sum(
            number * size * layout.local_count(grid, place)
            for (layout, size), number in alike.items()
        )

    return max(stored_at(place) for place in range(grid.num_devices))


def _stored_layout(solution: Solution, node: Node) -> Layout:
    """The layout of a parameter. Axes that cut it only to store it stand innermost."""
    fixed = solution.fixed.get(str(node.target))
    if fixed is not None:
        return fixed
    space = solution.space
    value = (node, 0)
    placements = solution.lies(value)
    in_use: set[str] = set()
    for reader in node.users:
        if reader not in space.operations:
            continue
        for slot, each in enumerate(space.inputs_of(reader)):
            if each == value:
                needed = solution.needed(reader, slot)
                in_use |= {axis for axis in placements if needed[axis] == placements[axis]}
    cutting = {axis for axis, placement in placements.items() if placement != SAME}
    cuts = space.granules.cuts(value, solution.terms.num_samples)
    return layout_of(cuts, placements, frozenset(cutting - in_use))


def _sent_by_reader(solution: Solution) -> dict[Node, float]:
    """Bytes of the redistributions that each operation is the first to need; those of a result of
    the stage, of panels and of tokens that travel belong to the operation that makes it.
    """
    terms = solution.terms
    axes = solution.grid.axes
    sizes = [solution.grid.size(axis) for axis in axes]
    total: defaultdict[Node, float] = defaultdict(float)
    for node in solution.space.program.summa:
        if node in solution.space.operations:
            total[node] += sum(terms.panel_bytes(node, solution.options(node)).values())
    for read in solution.reads:
        lies = solution.lies(read.value)
        source = [lies[axis] for axis in axes]
        num_bytes = numel_bytes(read.value, terms.shapes)
        gradient = solution.has_gradient(read.producer)
        is_parameter = read.producer.op == "get_attr"
        targets = []
        for reader, slot in read.slots:
            needed = solution.needed(read.readers[reader], slot)
            targets.append((read.readers[reader], [needed[axis] for axis in axes]))
        for placement in read.wanted:
            targets.append((read.producer, [placement] * len(axes)))
        seen = [source]
        for node, target in targets:
            if target not in seen:
                seen.append(target)
                sent = sent_bytes(num_bytes, source, target, sizes, gradient, is_parameter)
                total[node] += sum(sent)
    for node in solution.space.operations:
        for number in terms.travelling_bytes(node, solution.options(node)).values():
            total[node] += number
    return {node: number for node, number in total.items() if number}


def _gathered(solution: Solution) -> Gathered:
    """Copies of values that are cut along an axis where an operation with a gradient needs them the
    same: it saves the gathered copy for backward.
    """
    terms = solution.terms
    costs = terms.costs
    axes = solution.grid.axes
    sizes = [solution.grid.size(axis) for axis in axes]
    per_sample = fixed = seconds = 0.0
    for read in solution.reads:
        lies = solution.lies(read.value)
        source = [lies[axis] for axis in axes]
        num_bytes = numel_bytes(read.value, terms.shapes)
        is_parameter = read.producer.op == "get_attr"
        seen: list[list[Placement]] = []
        for reader, slot in read.slots:
            node = read.readers[reader]
            needed = solution.needed(node, slot)
            target = [needed[axis] for axis in axes]
            is_gathered = any(
                isinstance(before, int) and after == SAME
                for before, after in zip(source, target, strict=True)
            )
            if target in seen or not is_gathered or not solution.has_gradient(node):
                continue
            seen.append(target)
            cutting = [
                size for size, each in zip(sizes, target, strict=True) if isinstance(each, int)
            ]
            held = num_bytes * prod(1 / size for size in cutting)
            if is_parameter:
                fixed += held
            else:
                per_sample += held / terms.num_samples
            sent = sent_bytes(num_bytes, source, target, sizes, False, is_parameter)
            seconds += costs.latency_s + sum(
                number / costs.rate(axis) for axis, number in zip(axes, sent, strict=True)
            )
    return Gathered(per_sample, fixed, seconds)


def pattern(space: Space, node: Node, chosen: Mapping[str, Option]) -> str:
    """How an operation runs, in words: `column over y, by samples over z`."""
    axes_of: dict[str, list[str]] = {}
    for axis in AXES:
        if axis in chosen:
            axes_of.setdefault(_word(space, node, chosen[axis]), []).append(axis)
    return ", ".join(f"{word} over {''.join(axes)}" for word, axes in axes_of.items()) or "whole"


def _word(space: Space, node: Node, option: Option) -> str:
    if option.local == "summa":
        return "SUMMA"
    if not option.is_cut:
        return "whole" if option.name == "whole" else "partial sums"
    if option.apart:
        return WORDS[option.name]
    if space.cuts_samples(node, option):
        return "by samples"
    return WORDS.get(option.name, f"dim {option.name}")
