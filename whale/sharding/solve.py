"""The cheapest layouts of a stage on a grid.

Variables: the option of every operation and the stored layout of every parameter, on all axes.
Objective, seconds of one micro-batch:

    work        seconds of an operation x the largest share of it on one device                       -> Terms.work
    exchanges   every value in every other layout that somebody needs, once each                      -> Terms.exchanges
    gradients   sums over the devices that hold the same weights, once in a mini-batch                -> Terms.stored
    memory      a price for every byte of weights that is stored                                      -> Terms.stored

It is minimised exactly by eliminating variables (eliminate.py): z first (the samples), then x and y
together, then z again. Operations of one sort (those of equal layers) have the same tables, which
are made once; of many equal layers three are looked at (repeats.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from whale.costs.costs import node_costs
from whale.plans.grid import Grid
from whale.plans.layout import Layout
from whale.plans.sharding import Sharding
from whale.sharding.describe import describe
from whale.sharding.dims import Value, value_of
from whale.sharding.eliminate import Array, Tables, TooWide
from whale.sharding.options import Option, Placement
from whale.sharding.redistribution_costs import GridCosts
from whale.sharding.repeats import Repeats
from whale.sharding.space import Space, StageProgram
from whale.sharding.terms import Choice, Lying, Terms, output_of

NEVER = 1e9
"""seconds: a choice that is not allowed"""


def solve(
    program: StageProgram,
    grid: Grid,
    num_samples: int,
    costs: GridCosts | None = None,
    fixed: Mapping[str, Layout] | None = None,
    space: Space | None = None,
    every_layer: bool = False,
) -> Sharding:
    """The cheapest sharding for micro-batches of `num_samples`. `fixed`: parameters whose layout is
    given. `space`: if already made. `every_layer`: looks at all of many equal layers."""
    solver = Solver(
        space or Space(program), grid, num_samples, costs or GridCosts(), fixed or {}, every_layer
    )
    return describe(solver, solver.choose())


def predict_seconds(
    space: Space,
    grid: Grid,
    num_samples: int,
    costs: GridCosts,
    fixed: Mapping[str, Layout] | None = None,
) -> float:
    """About what `solve` would give, in a fraction of its time: nothing is described. To rank grids
    by.
    """
    return Solver(space, grid, num_samples, costs, fixed or {}).choose(again=False)


@dataclass(frozen=True)
class _Read:
    """One value and who reads it."""

    value: Value
    producer: Node
    readers: tuple[Node, ...]
    """each once"""
    slots: tuple[tuple[int, int], ...]
    """(which of the readers, at which of its inputs)"""
    wanted: tuple[Placement, ...]
    """as a result of the stage it must lie like this"""
    key: tuple[object, ...]
    """equal for values alike, read by operations alike"""
    times: int = 1
    """how often its exchanges count"""


class Solver:
    """Chooses for all variables of a stage."""

    def __init__(
        self,
        space: Space,
        grid: Grid,
        num_samples: int,
        costs: GridCosts,
        fixed: Mapping[str, Layout],
        every_layer: bool = False,
    ) -> None:
        self.space = space
        self.grid = grid
        self.num_samples = num_samples
        self.fixed = fixed
        program = space.program
        self.terms = Terms(
            space, grid, num_samples, costs, space.node_costs(num_samples, node_costs)
        )
        self.parameters = frozenset(space.parameters)
        self._known: dict[tuple[object, ...], Any] = {}
        self.repeats = (
            Repeats()
            if every_layer
            else space.repeats(num_samples, self.terms.node_costs, self.fixed)
        )
        everything: list[Node] = [*space.parameters, *program.received, *space.operations]
        self.variables = [node for node in everything if node not in self.repeats.alike]
        self.number = {node: place for place, node in enumerate(self.variables)}
        self.times = [self.repeats.times.get(node, 1) for node in self.variables]
        self.chosen: dict[Node, dict[str, Choice]] = {node: {} for node in everything}
        self.sort = {node: self._sort(node) for node in self.variables}
        self._reads_kept = self._reads(self.repeats)
        self.leaves = frozenset(
            self.number[read.producer]
            for read in self._reads_kept
            if read.producer in self.parameters and len(read.readers) == 1 and not read.wanted
        )
        """parameters that one operation reads: chosen with it"""

    def _sort(self, node: Node) -> int:
        """A number that operations, parameters or received values have in common when all their
        costs are the same.
        """
        space = self.space
        axes = self.grid.axes
        gradient = node in space.program.gradients
        key: tuple[object, ...]
        if node in space.operations:
            key = ("operation", space.signatures(self.num_samples, self.terms.node_costs)[node])
        elif node in self.parameters:
            options = tuple(
                space.stored_options(node, axis, self.fixed.get(str(node.target))) for axis in axes
            )
            key = (
                options,
                space.granules.cuts((node, 0), self.num_samples),
                node.meta["val"].dtype,
                gradient,
            )
        else:
            key = (
                space.fixed_source(node),
                self.terms.shapes.of(node.meta["val"]),
                node.meta["val"].dtype,
                gradient,
            )
        number: int = self._known.setdefault(("sort", key), len(self._known))
        return number

    @cached_property
    def reads(self) -> list[_Read]:
        """Of all operations, those that are left out too."""
        return self._reads(Repeats()) if self.repeats.alike else self._reads_kept

    def _reads(self, repeats: Repeats) -> list[_Read]:
        """Of all operations but those that are left out."""
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node, op in self.space.operations.items():
            if node in repeats.alike:
                continue
            for slot, source in enumerate(op.inputs):
                value = repeats.of(value_of(source))
                readers = found.setdefault(value, []) if value[0] in self.chosen else []
                if value == value_of(source) or all(
                    reader is not node for reader, _ in readers
                ):  # else counted with layer 1
                    readers.append((node, slot))
        wanted: dict[Value, list[Placement]] = {}
        for node, placement in self.space.wanted():
            value = repeats.of(value_of(node))
            if value[0] in self.chosen:
                wanted.setdefault(value, []).append(placement)
        reads = []
        for value in {**found, **wanted}:
            readers_of = tuple(dict.fromkeys(node for node, _ in found.get(value, [])))
            place = {node: number for number, node in enumerate(readers_of)}
            slots = tuple((place[node], slot) for node, slot in found.get(value, []))
            results = tuple(wanted.get(value, []))
            key: tuple[object, ...] = ()
            if value[0] in self.sort and all(node in self.sort for node in readers_of):
                whole = (
                    self.sort[value[0]],
                    value[1],
                    tuple(self.sort[node] for node in readers_of),
                    slots,
                    results,
                )
                key = (self._once(("read", whole), lambda: len(self._known)),)
            reads.append(
                _Read(
                    value,
                    value[0],
                    readers_of,
                    slots,
                    results,
                    key,
                    repeats.weight(value[0], readers_of),
                )
            )
        return reads

    def _once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    # -------------------------------------------------------------------------------------------------------------
    # the sweeps

    def choose(self, again: bool = True) -> float:
        """Chooses everything; gives the seconds of one micro-batch. `again`: z once more when x and
        y are known.
        """
        axes = self.grid.axes
        samples = ("z",) if "z" in axes else ()
        weights = tuple(axis for axis in "xy" if axis in axes)
        total = (
            float(sum(self.terms.work(node, [{}])[0] for node in self.space.operations))
            if not axes
            else 0.0
        )
        for block in (samples, weights, samples if again and weights else ()):
            if block:
                total = self._choose(block)
        for node, other in self.repeats.alike.items():
            self.chosen[node] = self.chosen[other]
        return total

    def _choose(self, block: tuple[str, ...]) -> float:
        """The best options on these axes, the others as they are; gives the total cost."""
        try:
            return self._choose_together(block)
        except TooWide:
            if len(block) == 1:
                raise
            for axis in block:
                total = self._choose_together((axis,))
            return total

    def _choose_together(self, block: tuple[str, ...]) -> float:
        others = [
            tuple((axis, choice) for axis, choice in self.chosen[node].items() if axis not in block)
            for node in self.variables
        ]
        keys = [
            (block, self.sort[node], *((a, c.name if isinstance(c, Option) else c) for a, c in o))
            for node, o in zip(self.variables, others)
        ]
        states = [
            self._once((*key, "states"), lambda i=i: self._states(i, block, others[i]))  # type: ignore[misc]
            for i, key in enumerate(keys)
        ]
        costs = [
            self._once(key, lambda i=i: self._own_costs(i, states[i]))  # type: ignore[misc]
            for i, key in enumerate(keys)
        ]
        active = {
            number: place
            for place, number in enumerate(n for n in range(len(states)) if n not in self.leaves)
        }
        tables = Tables([len(states[number]) for number in active])
        for number, place in active.items():
            tables.add([place], costs[number] * self.times[number])
        follow: list[tuple[int, int, npt.NDArray[np.intp]]] = []
        for read in self._reads_kept:
            numbers = [self.number[read.producer], *(self.number[node] for node in read.readers)]
            key = (read.key, *(keys[number] for number in numbers))
            found = self._once(
                key,
                lambda r=read, n=numbers: self._exchanges(r, [states[i] for i in n]),  # type: ignore[misc]
            )
            if numbers[0] in self.leaves:
                best, places = self._once(
                    (*key, "leaf"),
                    lambda n=numbers, f=found: _without_first(costs[n[0]], f, len(states[n[1]])),  # type: ignore[misc]
                )
                tables.add([active[numbers[1]]], best * read.times)
                follow.append((numbers[0], numbers[1], places))
                continue
            if self.repeats.ties(read.producer, read.readers):
                self._tie(tables, numbers[0], active, states)
            for places, table in found:
                tables.add([active[numbers[place]] for place in places], table * read.times)
        chosen, total = tables.solve()
        choice = {number: chosen[place] for number, place in active.items()}
        choice |= {leaf: int(places[choice[reader]]) for leaf, reader, places in follow}
        for number, node in enumerate(self.variables):
            self.chosen[node] = dict(states[number][choice[number]])
        return total

    def _tie(
        self,
        tables: Tables,
        first: int,
        active: Mapping[int, int],
        states: Sequence[Sequence[Mapping[str, Choice]]],
    ) -> None:
        """The operation of layer 0 does as that of layer 1 does (repeats.py, line 2)."""
        second = self.number[self.repeats.following[self.variables[first]]]
        if len(states[first]) == len(states[second]):
            tables.add(
                [active[first], active[second]],
                np.where(np.eye(len(states[first]), dtype=bool), 0.0, NEVER),
            )

    def _own_costs(self, number: int, states: Sequence[Mapping[str, Choice]]) -> Array:
        """Of one variable alone."""
        node = self.variables[number]
        if node in self.space.operations:
            return self.terms.work(node, states)  # type: ignore[arg-type]
        return self.terms.stored(node, states) if node in self.parameters else np.zeros(len(states))  # type: ignore[arg-type]

    def _states(
        self, number: int, block: tuple[str, ...], others: Sequence[tuple[str, Choice]]
    ) -> list[Mapping[str, Choice]]:
        """All choices of a variable on these axes, each with what is chosen on the others."""
        node = self.variables[number]
        joint: list[tuple[Choice, ...]]
        if node in self.space.operations:
            joint = list(self.space.joint_options(node, block, dict(others)))  # type: ignore[arg-type]
        elif node in self.parameters:
            joint = [()]
            for axis in block:
                options = self.space.stored_options(node, axis, self.fixed.get(str(node.target)))
                joint = [(*before, option) for before in joint for option in options]
        else:
            joint = [(self.space.fixed_source(node),) * len(block)]
        return [dict(sorted((*others, *zip(block, choice)))) for choice in joint]

    def _exchanges(self, read: _Read, states: Sequence[Sequence[Mapping[str, Choice]]]) -> Any:
        """Tables of one value. `states`: of its producer, then of its readers."""
        axes = tuple(states[0][0])
        sources = [
            tuple(output_of(choice, read.value[1]) for choice in state.values())
            for state in states[0]
        ]
        uses: dict[int, list[list[Lying]]] = {}
        for reader, slot in read.slots:
            uses.setdefault(reader + 1, []).append(
                [tuple(c.inputs[slot] for c in s.values()) for s in states[reader + 1]]  # type: ignore[union-attr]
            )
        wanted = [(placement,) * len(axes) for placement in read.wanted]
        return self.terms.exchanges(self.terms.change(read.value, axes, sources), uses, wanted)

    # --------------------------------------------------------------------------------------------------------------
    # the result

    def lies(self, value: Value) -> dict[str, Placement]:
        """How a value lies on the axes of the grid."""
        if value[0] in self.chosen:
            return {
                axis: output_of(choice, value[1]) for axis, choice in self.chosen[value[0]].items()
            }
        return dict.fromkeys(self.grid.axes, self.space.fixed_source(value[0]))

    def needed(self, node: Node, slot: int) -> dict[str, Placement]:
        """How an operation needs one of its inputs."""
        return {axis: option.inputs[slot] for axis, option in self.chosen[node].items()}  # type: ignore[union-attr]


def _without_first(
    costs: Array, tables: Sequence[tuple[list[int], Array]], num_readers: int
) -> tuple[Array, npt.NDArray[np.intp]]:
    """The cheapest choice of a variable for each choice of its only reader: (costs, choices)."""
    total = np.repeat(costs[:, None], num_readers, axis=1)
    for _, table in tables:
        total = total + table
    return total.min(axis=0), total.argmin(axis=0)
