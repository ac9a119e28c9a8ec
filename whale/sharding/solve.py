"""The cheapest layouts of a stage on a grid.

Variables: the option of every operation and the stored layout of every parameter, on all axes. Objective, seconds of one micro-batch:

    work        seconds of an operation x the largest share of it on one device                       -> _work
    exchanges   every value in every other layout that somebody needs, once each                      -> _exchanges
    gradients   sums over the devices that hold the same weights, once in a mini-batch                -> _stored
    memory      a price for every byte of weights that is stored                                      -> _stored

It is minimised exactly by eliminating variables (eliminate.py), z first (the samples), then x and y together, until nothing improves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, prod
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from whale.profiling.costs import NodeCost, node_costs
from whale.sharding.dims import Value, tensor_of, value_of
from whale.sharding.eliminate import Array, Tables, TooWide
from whale.sharding.exchange_costs import GridCosts, sent_bytes
from whale.sharding.grid import Grid
from whale.sharding.layout import Layout
from whale.sharding.operation import SAME, Option, Placement, Shapes
from whale.sharding.sharding import ORDER, Sharding
from whale.sharding.space import Space, StageProgram, numel_bytes

BACKWARD = 2.0
"""work of a backward in units of its forward"""
MOST_SHARING = 3
"""readers of one value whose shared exchanges are counted together"""
MOST_ENTRIES = 400_000
"""of one table of readers"""
MOST_SWEEPS = 3
NORM_SUMS = 2
"""numbers that a norm or a loss over a cut dim exchanges for each row, each way"""
State = tuple[Option, ...] | tuple[Placement, ...]
"""of a variable, by axis of the block: options of an operation, or placements of something stored or received"""


def solve(
    program: StageProgram,
    grid: Grid,
    num_samples: int,
    costs: GridCosts | None = None,
    fixed: Mapping[str, Layout] | None = None,
    space: Space | None = None,
) -> Sharding:
    """The cheapest sharding for micro-batches of `num_samples`. `fixed`: parameters whose layout is given. `space`: if already made."""
    return Solver(space or Space(program), grid, num_samples, costs or GridCosts(), fixed or {}).solve()


class Solver:
    def __init__(self, space: Space, grid: Grid, num_samples: int, costs: GridCosts, fixed: Mapping[str, Layout]) -> None:
        self.space, self.grid, self.num_samples, self.costs, self.fixed = space, grid, num_samples, costs, fixed
        program = space.program
        self.shapes = Shapes(program.captured.batch_symbol, num_samples)
        self.node_costs: Mapping[Node, NodeCost] = _costs_of(program, num_samples)
        self.variables: list[Node] = [*space.parameters, *program.received, *space.operations]
        self.number = {node: place for place, node in enumerate(self.variables)}
        self.chosen: dict[Node, dict[str, Option]] = {node: {} for node in space.operations}
        self.placed: dict[Node, dict[str, Placement]] = {node: {} for node in (*space.parameters, *program.received)}
        self.readers = self._readers()
        self.wanted = space.wanted()
        self._unit_costs: dict[tuple[object, ...], tuple[Array, Array]] = {}
        self._known: dict[tuple[object, ...], Any] = {}
        """what was computed for operations alike: equal layers of a model cost the work of one"""
        self.sort = {node: self._sort(node) for node in self.variables}

    def _sort(self, node: Node) -> int:
        """A number that operations, parameters or received values have in common when all their costs are the same."""
        space = self.space
        gradient = node in space.program.gradients
        key: tuple[object, ...]
        if node in space.operations:
            op, cost = space.operations[node], self.node_costs[node]
            cuts = tuple(space.granules.cuts(value, self.num_samples) for value in (*space.inputs_of(node), *space.outputs_of(node)))
            states = tuple(tuple(option.name for option in space.axis_options(node, axis)) for axis in self.grid.axes)
            key = (op.name, space.options[node], cuts, states, cost, gradient, op.node.meta.get("val") is None, space.is_product(node))
        elif node in space.parameters:
            options = tuple(space.stored_options(node, axis, self.fixed.get(str(node.target))) for axis in self.grid.axes)
            key = (options, space.granules.cuts((node, 0), self.num_samples), node.meta["val"].dtype, gradient)
        else:
            key = (space.fixed_source(node), self.shapes.of(node.meta["val"]), node.meta["val"].dtype, gradient)
        number: int = self._known.setdefault(("sort", key), len(self._known))
        return number

    def _once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _readers(self) -> dict[Value, list[tuple[Node, int]]]:
        """(operation, slot) that read each value which something decides here."""
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node, op in self.space.operations.items():
            for slot, source in enumerate(op.inputs):
                value = value_of(source)
                if value[0] in self.number:
                    found.setdefault(value, []).append((node, slot))
        return found

    # ------------------------------------------------------------------------------------------------------------- the sweeps

    def solve(self) -> Sharding:
        from whale.sharding.describe import describe

        blocks = [block for block in (("z",), tuple(axis for axis in ("x", "y") if axis in self.grid.axes)) if set(block) & set(self.grid.axes)]
        best = float("inf")
        for _ in range(MOST_SWEEPS if len(blocks) > 1 else 1):
            before = ({n: dict(c) for n, c in self.chosen.items()}, {n: dict(p) for n, p in self.placed.items()})
            total = best
            for block in blocks:
                total = self._choose(block)
            if total >= best * (1 - 1e-9):
                self.chosen, self.placed = before
                break
            best = total
        return describe(self, 0.0 if best == float("inf") else best)

    def _choose(self, block: Sequence[str]) -> float:
        """The best options on these axes, the others as they are; gives the total cost."""
        try:
            return self._choose_together(block)
        except TooWide:
            if len(block) == 1:
                raise
            for axis in block:
                total = self._choose_together((axis,))
            return total

    def _choose_together(self, block: Sequence[str]) -> float:
        states = [self._once((block, self.sort[node], "states"), lambda n=node: self._states(n, block)) for node in self.variables]  # type: ignore[misc]
        tables = Tables([len(found) for found in states])
        for number, node in enumerate(self.variables):
            key = (block, self.sort[node], self._elsewhere(node, block))
            if node in self.chosen:
                tables.add([number], self._once(key, lambda n=node, s=states[number]: self._work(n, block, s)))  # type: ignore[misc]
            elif node in self.placed and node.op == "get_attr":
                tables.add([number], self._once(key, lambda n=node, s=states[number]: self._stored(n, block, s)))  # type: ignore[misc]
        for value in {**self.readers, **{value_of(node): None for node, _ in self.wanted if value_of(node)[0] in self.number}}:
            self._exchanges(value, block, states, tables)
        chosen, total = tables.solve()
        for number, node in enumerate(self.variables):
            state = states[number][chosen[number]]
            if node in self.chosen:
                self.chosen[node].update(zip(block, state))  # type: ignore[arg-type]
            else:
                self.placed[node].update(zip(block, state))  # type: ignore[arg-type]
        return total

    def _elsewhere(self, node: Node, block: Sequence[str]) -> tuple[object, ...]:
        """What is chosen for a node on the other axes."""
        if node in self.chosen:
            return tuple((axis, option.name) for axis, option in sorted(self.chosen[node].items()) if axis not in block)
        return tuple((axis, placement) for axis, placement in sorted(self.placed[node].items()) if axis not in block)

    def _states(self, node: Node, block: Sequence[str]) -> Sequence[State]:
        if node in self.chosen:
            return self.space.joint_options(node, block, self.grid)
        if node in self.space.program.received:
            return [(self.space.fixed_source(node),) * len(block)]
        result: list[tuple[Placement, ...]] = [()]
        for axis in block:
            result = [
                (*before, placement)
                for before in result
                for placement in self.space.stored_options(node, axis, self.fixed.get(str(node.target)))
            ]
        return result

    # -------------------------------------------------------------------------------------------------------------- the terms

    def _work(self, node: Node, block: Sequence[str], states: Sequence[State]) -> Array:
        cost = self.node_costs[node]
        seconds = cost.flop / self.costs.flop_per_s + cost.moved_bytes / self.costs.memory_bytes_per_s
        if node in self.space.program.gradients:
            seconds *= 1 + BACKWARD
        others = {axis: option for axis, option in self.chosen[node].items() if axis not in block}
        result = np.empty(len(states))
        for place, state in enumerate(states):
            options: dict[str, Option] = {**others, **dict(zip(block, state))}  # type: ignore[arg-type]
            result[place] = seconds * self.share(node, options) + self._inside(node, options)
        return result

    def share(self, node: Node, options: Mapping[str, Option]) -> float:
        """The largest part of an operation's work that one device has."""
        along: dict[str, list[int]] = {}
        counts: dict[str, int] = {}
        values = (*self.space.inputs_of(node), *self.space.outputs_of(node))
        for axis in ORDER:
            option = options.get(axis)
            if option is None or not option.is_cut:
                continue
            along.setdefault(option.name, []).append(self.grid.size(axis))
            if option.name not in counts:
                value, dim = next((v, p) for v, p in zip(values, (*option.inputs, *option.outputs)) if isinstance(p, int))
                counts[option.name] = self.space.granules.cuts(value, self.num_samples)[dim].count
        return prod(_largest_share(counts[name], tuple(sizes)) for name, sizes in along.items())

    def _inside(self, node: Node, options: Mapping[str, Option]) -> float:
        """Messages inside an operation: sums of rows for norms and losses over a cut dim."""
        axes = [axis for axis, option in options.items() if option.local in ("norm", "softmax", "class loss", "batch norm")]
        if not axes:
            return 0.0
        shape = self.shapes.of(tensor_of((self.space.operations[node].inputs[0], 0)))
        width = shape[-1] if options[axes[0]].local != "batch norm" else prod(shape) // max(shape[1], 1)
        rows = prod(shape) / max(width, 1) * self.space.operations[node].inputs[0].meta["val"].dtype.itemsize
        rows *= prod(1 / self.grid.size(axis) for axis, option in options.items() if option.is_cut and not option.local)
        return sum(2 * (self.costs.latency_s + 2 * NORM_SUMS * rows / self.costs.rate(axis)) for axis in axes)

    def _stored(self, node: Node, block: Sequence[str], states: Sequence[State]) -> Array:
        """Sums of gradients over equal holders, and the price of memory."""
        num_bytes = float(numel_bytes((node, 0), self.shapes))
        trained = node in self.space.program.gradients
        others = {axis: placement for axis, placement in self.placed[node].items() if axis not in block}
        cuts = self.space.granules.cuts((node, 0), self.num_samples)
        result = np.zeros(len(states))
        for place, state in enumerate(states):
            placements: dict[str, Placement] = {**others, **dict(zip(block, state))}  # type: ignore[arg-type]
            held = num_bytes
            for dim, cut in enumerate(cuts):
                sizes = tuple(self.grid.size(axis) for axis in ORDER if placements.get(axis) == dim)
                held *= _largest_share(cut.count, sizes) if sizes else 1.0
            result[place] = held * self.costs.memory_price * self.costs.state_per_weight
            for axis, placement in placements.items():
                size = self.grid.size(axis)
                if placement == SAME and trained and size > 1:
                    result[place] += 2 * held * (size - 1) / size / self.costs.rate(axis) / self.costs.num_micro_batch
        return result

    def _exchanges(self, value: Value, block: Sequence[str], states: Sequence[Sequence[State]], tables: Tables) -> None:
        """Tables of a value's changes of layout: those of readers that may share one stand together."""
        producer = self.number[value[0]]
        readers = self.readers.get(value, [])
        fixed = [placement for node, placement in self.wanted if value_of(node) == value]
        names = {node: place for place, node in enumerate(dict.fromkeys(node for node, _ in readers))}
        listed = tuple((names[node], self.sort[node], slot, self._elsewhere(node, block)) for node, slot in readers)
        key = (block, self.sort[value[0]], value[1], self._elsewhere(value[0], block), listed, tuple(fixed))
        variables = [producer, *(self.number[node] for node in names)]
        for places, costs in self._once(key, lambda: self._exchange_tables(value, block, states, names, fixed)):
            tables.add([variables[place] for place in places], costs)

    def _exchange_tables(
        self, value: Value, block: Sequence[str], states: Sequence[Sequence[State]], names: Mapping[Node, int], fixed: Sequence[Placement]
    ) -> list[tuple[list[int], Array]]:
        """(variables as places among producer and readers, costs)."""
        source_others = self._others(value, block)
        changes = _Changes(
            [(*self._placements(value, state), *source_others.values()) for state in states[self.number[value[0]]]],
            (*block, *source_others),
            float(numel_bytes(value, self.shapes)),
            value[0] in self.space.program.gradients,
        )
        uses: dict[int, list[list[tuple[Placement, ...]]]] = {}
        for node, slot in self.readers.get(value, []):
            others = tuple(option.inputs[slot] for axis, option in sorted(self.chosen[node].items()) if axis not in block)
            found = [(*(option.inputs[slot] for option in state), *others) for state in states[self.number[node]]]  # type: ignore[union-attr]
            uses.setdefault(names[node] + 1, []).append(found)
        num_states = {place: len(found[0]) for place, found in uses.items()}
        groups = _grouped(num_states, MOST_ENTRIES // max(len(changes.sources), 1))
        wanted: list[list[tuple[int, list[tuple[Placement, ...]]]]] = [
            [(place, targets) for place in group for targets in uses[place]] for group in groups
        ]
        wanted += [[(0, [(placement,) * len(changes.axes)])] for placement in fixed]
        result = [self._table(changes, each, num_states) for each in wanted]
        return [table for table in result if table is not None]

    def _table(
        self, changes: _Changes, uses: Sequence[tuple[int, Sequence[tuple[Placement, ...]]]], num_states: Mapping[int, int]
    ) -> tuple[list[int], Array] | None:
        """Costs of one value for some of its readers; place 0 is the producer itself (a result that is wanted in one way)."""
        distinct = list(dict.fromkeys(target for _, targets in uses for target in targets))
        per_byte, latency = self._costs_between(tuple(changes.sources), tuple(distinct), changes.axes, changes.gradient)
        costs = per_byte * changes.num_bytes + latency  # [sources, distinct targets]
        if not costs.any():
            return None
        places = [0, *dict.fromkeys(place for place, _ in uses if place)]
        numbers = {target: number for number, target in enumerate(distinct)}
        sizes = [len(changes.sources), *(num_states[place] for place in places[1:])]
        total = np.zeros(sizes)
        before: list[npt.NDArray[np.intp]] = []
        for place, targets in uses:
            shape = [1] * len(places)
            shape[places.index(place)] = len(targets)
            at = np.broadcast_to(np.array([numbers[target] for target in targets]).reshape(shape), [1, *sizes[1:]])
            term = costs[:, at[0]]
            for earlier in before:
                term = np.where(earlier == at, 0.0, term)  # the same exchange serves both
            before.append(at)
            total = total + term
        return places, total

    def _costs_between(
        self, sources: tuple[tuple[Placement, ...], ...], targets: tuple[tuple[Placement, ...], ...], axes: tuple[str, ...], gradient: bool
    ) -> tuple[Array, Array]:
        key = (sources, targets, axes, gradient)
        if key not in self._unit_costs:
            sizes = [self.grid.size(axis) for axis in axes]
            per_byte, latency = np.zeros((len(sources), len(targets))), np.zeros((len(sources), len(targets)))
            for i, source in enumerate(sources):
                for j, target in enumerate(targets):
                    sent = sent_bytes(1.0, source, target, sizes, gradient)
                    per_byte[i, j] = sum(number / self.costs.rate(axis) for number, axis in zip(sent, axes))
                    latency[i, j] = self.costs.latency_s * (1 + gradient) if any(sent) else 0.0
            self._unit_costs[key] = (per_byte, latency)
        return self._unit_costs[key]

    def _others(self, value: Value, block: Sequence[str]) -> dict[str, Placement]:
        """How a value lies on the axes that are not chosen now."""
        node, place = value
        if node in self.chosen:
            return {axis: option.outputs[place] for axis, option in sorted(self.chosen[node].items()) if axis not in block}
        return {axis: placement for axis, placement in sorted(self.placed[node].items()) if axis not in block}

    def _placements(self, value: Value, state: State) -> tuple[Placement, ...]:
        return tuple(one.outputs[value[1]] if isinstance(one, Option) else one for one in state)

    # -------------------------------------------------------------------------------------------------------------- the result

    def source_of(self, value: Value) -> dict[str, Placement]:
        """How a value lies on the axes of the grid."""
        if value[0] in self.number:
            return self._others(value, ())
        return dict.fromkeys(self.grid.axes, self.space.fixed_source(value[0]))


@dataclass(frozen=True)
class _Changes:
    """One value that others read: its possible layouts and what it weighs."""

    sources: list[tuple[Placement, ...]]
    axes: tuple[str, ...]
    num_bytes: float
    gradient: bool


def _grouped(num_states: Mapping[int, int], room: int) -> list[list[int]]:
    """Readers in groups that fit one table."""
    groups: list[list[int]] = []
    for reader in num_states:
        last = groups[-1] if groups else []
        if last and len(last) < MOST_SHARING and prod(num_states[one] for one in (*last, reader)) <= room:
            last.append(reader)
        else:
            groups.append([reader])
    return groups


@lru_cache(maxsize=65536)
def _largest_share(count: int, sizes: tuple[int, ...]) -> float:
    """Of so many granules, cut by one axis after the other."""
    *_, left = accumulate(sizes, lambda held, size: ceil(held / size), initial=count)
    return left / count if count else 1.0


def _costs_of(program: StageProgram, num_samples: int) -> Mapping[Node, NodeCost]:
    return node_costs(program.captured, num_samples)


__all__ = ["Solver", "solve"]
