"""The cheapest layouts of a stage on a grid.

    variables    the option of every operation, the stored layout of every parameter, on all axes
    minimise     seconds of one micro-batch
        work             seconds of an operation x the largest share on one device  -> Terms.work
        redistribution   every value in every other layout that somebody needs,
                         once each                                                  -> Terms.reads
        gradients        all-reduce over the devices that hold the same weights,
                         once in a mini-batch                                       -> Terms.stored
        memory           a price for every byte of weights that is stored           -> Terms.stored
    subject to   z cuts samples; x and y cut different dims of a product's weight   -> space.py
                 parameters that other stages share lie as `fixed` says

z comes first (the samples), then x and y together, then z again                    -> Solver.choose
The minimum is exact for each of these blocks, by eliminating variables (eliminate.py), unless that
takes too large a table.

Operations of one class (the same operation in equal layers) have the same tables, which are made
once; of many equal layers three are looked at (repeats.py). So a GPT of 96 layers has the variables
of three: its first, one that stands for the 94 in the middle and counts as often, and its last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from whale.costs.costs import node_costs
from whale.plans.grid import Grid
from whale.plans.layout import Layout
from whale.plans.sharding import Sharding
from whale.sharding.describe import Solution, describe
from whale.sharding.dims import Value, value_of
from whale.sharding.eliminate import Array, Tables, TooWide
from whale.sharding.options import Option, Placement
from whale.sharding.redistribution_costs import GridCosts
from whale.sharding.repeats import Repeats
from whale.sharding.space import Space, StageProgram
from whale.sharding.terms import AxisChoice, Read, State, Terms

NEVER = 1e9
"""seconds of a choice that is not allowed"""


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
    given. `space`: of the program, if already made. `every_layer`: looks at all of many equal
    layers.
    """
    terms = _terms(space or Space(program), grid, num_samples, costs or GridCosts())
    return describe(Solver(terms, fixed or {}, every_layer).solution())


def predict_seconds(
    space: Space,
    grid: Grid,
    num_samples: int,
    costs: GridCosts,
) -> float:
    """About the seconds that `solve` would give, in a fraction of its time: to rank grids by."""
    return Solver(_terms(space, grid, num_samples, costs), {}).choose(again=False)


def _terms(space: Space, grid: Grid, num_samples: int, costs: GridCosts) -> Terms:
    return Terms(space, grid, num_samples, costs, space.node_costs(num_samples, node_costs))


@dataclass(frozen=True)
class _Variable:
    """The choices of one operation, parameter or received value on some axes."""

    states: list[State]
    """each with what is already chosen on the other axes"""
    costs: Array
    """(states,): seconds of the variable alone"""
    key: tuple[object, ...]
    """equal for variables with the same states and costs"""


@dataclass(frozen=True)
class _ReadTables:
    """Costs of one value and its readers."""

    tables: list[tuple[list[int], Array]]
    """(positions among producer and readers, costs)"""
    of_leaf: tuple[Array, npt.NDArray[np.intp]] | None
    """of a producer that is chosen with its only reader, by the reader's choice: (least costs,
    the producer's choice)
    """


class Solver:
    """Chooses for all variables of a stage."""

    def __init__(
        self, terms: Terms, fixed: Mapping[str, Layout], every_layer: bool = False
    ) -> None:
        self.terms = terms
        self.space = terms.space
        self.grid = terms.grid
        self.num_samples = terms.num_samples
        self.fixed = fixed
        space = self.space
        self.parameters = frozenset(space.parameters)
        self.repeats = Repeats()
        if not every_layer:
            self.repeats = space.repeats(self.num_samples, terms.node_costs, fixed)
        everything = [*space.parameters, *space.program.received, *space.operations]
        self.variables = [node for node in everything if node not in self.repeats.alike]
        self.number = {node: index for index, node in enumerate(self.variables)}
        self.times = [self.repeats.times.get(node, 1) for node in self.variables]
        self.chosen: dict[Node, State] = {node: {} for node in everything}
        # caches: equal layers have equal variables and equal reads
        self._class_numbers: dict[tuple[object, ...], int] = {}
        self._read_keys: dict[tuple[object, ...], int] = {}
        self._known_variables: dict[tuple[object, ...], _Variable] = {}
        self._known_tables: dict[tuple[object, ...], _ReadTables] = {}
        self.class_of = {node: self._class_number(node) for node in self.variables}
        self.reads = self._reads(self.repeats)
        self.leaves = frozenset(
            self.number[read.producer] for read in self.reads if self._is_leaf(read)
        )
        """parameters that one operation reads: chosen with it"""

    def _is_leaf(self, read: Read) -> bool:
        """Whether one operation, and no result of the program, reads this parameter."""
        return read.producer in self.parameters and len(read.readers) == 1 and not read.wanted

    def _class_number(self, node: Node) -> int:
        """A number that operations, parameters or received values have in common when all their
        costs are the same.
        """
        space = self.space
        key: tuple[object, ...]
        if node in space.operations:
            key = ("operation", space.signatures(self.num_samples, self.terms.node_costs)[node])
        else:
            gradient = node in space.program.gradients
            dtype = node.meta["val"].dtype
            if node in self.parameters:
                fixed = self.fixed.get(str(node.target))
                options = tuple(space.stored_options(node, axis, fixed) for axis in self.grid.axes)
                key = (options, space.granules.cuts((node, 0), self.num_samples), dtype, gradient)
            else:
                shape = self.terms.shapes.of(node.meta["val"])
                key = (space.fixed_source(node), shape, dtype, gradient)
        return self._class_numbers.setdefault(key, len(self._class_numbers))

    def _reads(self, repeats: Repeats) -> list[Read]:
        """Every value that is read or wanted, but for operations that are left out."""
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node, op in self.space.operations.items():
            if node in repeats.alike:
                continue
            for slot, source in enumerate(op.inputs):
                value = repeats.of(value_of(source))
                if value[0] not in self.chosen:
                    continue
                readers = found.setdefault(value, [])
                is_own = value == value_of(source)
                # a read of a layer that is left out is counted with layer 1
                if is_own or all(reader is not node for reader, _ in readers):
                    readers.append((node, slot))
        wanted: dict[Value, list[Placement]] = {}
        for node, placement in self.space.wanted():
            value = repeats.of(value_of(node))
            if value[0] in self.chosen:
                wanted.setdefault(value, []).append(placement)
        return [
            self._read(value, found.get(value, []), tuple(wanted.get(value, [])), repeats)
            for value in {**found, **wanted}
        ]

    def _read(
        self,
        value: Value,
        uses: Sequence[tuple[Node, int]],
        wanted: tuple[Placement, ...],
        repeats: Repeats,
    ) -> Read:
        producer, result = value
        readers = tuple(dict.fromkeys(node for node, _ in uses))
        position = {node: number for number, node in enumerate(readers)}
        slots = tuple((position[node], slot) for node, slot in uses)
        key = None
        if producer in self.class_of and all(node in self.class_of for node in readers):
            classes = tuple(self.class_of[node] for node in readers)
            all_of_it = (self.class_of[producer], result, classes, slots, wanted)
            key = self._read_keys.setdefault(all_of_it, len(self._read_keys))
        return Read(value, readers, slots, wanted, key, repeats.weight(producer, readers))

    def solution(self) -> Solution:
        """The best choices for all operations, those that are left out too."""
        seconds = self.choose()
        reads = self._reads(Repeats()) if self.repeats.alike else self.reads
        return Solution(self.terms, self.fixed, self.chosen, reads, seconds)

    # ---- the sweeps

    def choose(self, again: bool = True) -> float:
        """Chooses everything; gives the seconds of one micro-batch. `again`: z once more when x and
        y are known.
        """
        axes = self.grid.axes
        samples = ("z",) if "z" in axes else ()
        weights = tuple(axis for axis in "xy" if axis in axes)
        total = 0.0
        if not axes:
            total = float(sum(self.terms.work(node, [{}])[0] for node in self.space.operations))
        for block in (samples, weights, samples if again and weights else ()):
            if block:
                total = self._choose(block)
        for node, other in self.repeats.alike.items():
            self.chosen[node] = self.chosen[other]
        return total

    def _choose(self, block: tuple[str, ...]) -> float:
        """Chooses the best options on these axes, the others as they are; gives the total cost."""
        try:
            return self._choose_together(block)
        except TooWide:
            if len(block) == 1:
                return self._choose_together(block, is_exact=False)
            for axis in block:
                total = self._choose((axis,))
            return total

    def _choose_together(self, block: tuple[str, ...], is_exact: bool = True) -> float:
        variables = [self._variable(node, block) for node in self.variables]
        active = [number for number in range(len(variables)) if number not in self.leaves]
        in_tables = {number: position for position, number in enumerate(active)}
        tables = Tables([len(variables[number].states) for number in active])
        for number in active:
            tables.add([in_tables[number]], variables[number].costs * self.times[number])
        following: list[tuple[int, int, npt.NDArray[np.intp]]] = []
        for read in self.reads:
            numbers = [self.number[node] for node in (read.producer, *read.readers)]
            found = self._read_tables(read, [variables[number] for number in numbers])
            if found.of_leaf is not None:
                costs, choices = found.of_leaf
                tables.add([in_tables[numbers[1]]], costs * read.times)
                following.append((numbers[0], numbers[1], choices))
                continue
            if self.repeats.ties(read.producer, read.readers):
                second = self.number[self.repeats.following[read.producer]]
                _tie(tables, (in_tables[numbers[0]], in_tables[second]))
            for positions, table in found.tables:
                places = [in_tables[numbers[position]] for position in positions]
                tables.add(places, table * read.times)
        found_choices, total = tables.solve(is_exact)
        choice = dict(zip(active, found_choices, strict=True))
        for leaf, reader, choices in following:
            choice[leaf] = int(choices[choice[reader]])
        for number, node in enumerate(self.variables):
            self.chosen[node] = dict(variables[number].states[choice[number]])
        return total

    def _variable(self, node: Node, block: tuple[str, ...]) -> _Variable:
        others = {axis: each for axis, each in self.chosen[node].items() if axis not in block}
        names = [
            (axis, each.name if isinstance(each, Option) else each) for axis, each in others.items()
        ]
        key = (block, self.class_of[node], *names)
        if key not in self._known_variables:
            states = self._states(node, block, others)
            if node in self.space.operations:
                costs = self.terms.work(node, states)  # type: ignore[arg-type]
            elif node in self.parameters:
                costs = self.terms.stored(node, states)  # type: ignore[arg-type]
            else:
                costs = np.zeros(len(states))
            self._known_variables[key] = _Variable(states, costs, key)
        return self._known_variables[key]

    def _states(
        self, node: Node, block: tuple[str, ...], others: Mapping[str, AxisChoice]
    ) -> list[State]:
        """All choices of a variable on these axes, each with what is chosen on the others."""
        joint: list[tuple[AxisChoice, ...]]
        if node in self.space.operations:
            joint = list(self.space.joint_options(node, block, others))  # type: ignore[arg-type]
        elif node in self.parameters:
            joint = [()]
            for axis in block:
                options = self.space.stored_options(node, axis, self.fixed.get(str(node.target)))
                joint = [(*before, option) for before in joint for option in options]
        else:
            joint = [(self.space.fixed_source(node),) * len(block)]
        states = []
        for choices in joint:
            on_block = zip(block, choices, strict=True)
            states.append(dict(sorted((*others.items(), *on_block), key=lambda each: each[0])))
        return states

    def _read_tables(self, read: Read, variables: Sequence[_Variable]) -> _ReadTables:
        """`variables`: the producer, then the readers."""
        key = (read.key, *(variable.key for variable in variables))
        if key not in self._known_tables:
            tables = self.terms.reads(read, [variable.states for variable in variables])
            of_leaf = None
            if self.number[read.producer] in self.leaves:
                of_leaf = _without_producer(variables[0].costs, tables, len(variables[1].states))
            self._known_tables[key] = _ReadTables(tables, of_leaf)
        return self._known_tables[key]


def _tie(tables: Tables, pair: tuple[int, int]) -> None:
    """Two variables with equal options get the same (repeats.py, line 2)."""
    num_choices = [tables.num_choices[each] for each in pair]
    if num_choices[0] == num_choices[1]:
        tables.add(pair, np.where(np.eye(num_choices[0], dtype=bool), 0.0, NEVER))


def _without_producer(
    costs: Array, tables: Sequence[tuple[list[int], Array]], num_readers: int
) -> tuple[Array, npt.NDArray[np.intp]]:
    """The cheapest choice of a producer for each choice of its only reader: (costs, choices)."""
    total = np.repeat(costs[:, None], num_readers, axis=1)
    for _, table in tables:
        total = total + table
    return total.min(axis=0), total.argmin(axis=0)
