"""The cheapest joint choice of many variables whose costs are tables over few of them each.

    minimise  sum over tables t of  t[choices of its variables]

Variables are eliminated one after the other: all tables of a variable are summed, the smallest
entry along it stays and its place is kept. The next variable is always the one that leaves the
smallest table. Walking back gives every choice: the result is the optimum. Equal layers of a model
give equal tables; each is computed once.

Where many variables hang together (a weight that every time step of a loop reads), even the
smallest table may be too large. Then the variable with most tables is settled first, by the least
that each of its choices costs in them, and the rest is solved: a good choice, not always the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
LARGEST_TABLE = 6_000_000
"""entries; above that `TooWide`"""


class TooWide(Exception):
    """The tables would not fit: choose for fewer axes at a time, or settle variables before."""


@dataclass(frozen=True, eq=False)
class Table:
    variables: tuple[int, ...]
    costs: Array


class Tables:
    """Costs of a problem under construction. Arrays with equal entries are one object."""

    def __init__(self, num_choices: Sequence[int]) -> None:
        self.num_choices = tuple(num_choices)
        self.tables: list[Table] = []
        self._known: dict[tuple[Any, ...], Array] = {}
        self._results: dict[tuple[Any, ...], tuple[Array, npt.NDArray[np.intp]]] = {}

    def add(self, variables: Sequence[int], costs: Array) -> None:
        """Adds a table; a variable may not stand twice in it."""
        assert costs.shape == tuple(self.num_choices[variable] for variable in variables), (
            costs.shape,
            variables,
        )
        key = (costs.shape, costs.tobytes())
        self.tables.append(Table(tuple(variables), self._known.setdefault(key, costs)))

    def solve(self, is_exact: bool = True) -> tuple[list[int], float]:
        """(choice of each variable, total cost). `is_exact`: `TooWide` where the optimum would need
        too large a table; otherwise some variables are settled before.
        """
        of: dict[int, dict[int, Table]] = {
            variable: {} for variable in range(len(self.num_choices))
        }
        for table in self.tables:
            for variable in table.variables:
                of[variable][id(table)] = table
        constant = sum(float(table.costs) for table in self.tables if not table.variables)
        heap = [(self._size_without(variable, of), variable) for variable in of]
        heapq.heapify(heap)
        order: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []
        done: set[int] = set()
        while heap:
            size, variable = heapq.heappop(heap)
            if variable in done:
                continue
            now = self._size_without(variable, of)
            if now > size:
                heapq.heappush(heap, (now, variable))
                continue
            if not is_exact and now * self.num_choices[variable] > LARGEST_TABLE:
                settled, choice, number = self._settle(variable, of)
                constant += number
                order.append((settled, (), np.array(choice)))
                done.add(settled)
                for other in of:
                    heapq.heappush(heap, (self._size_without(other, of), other))
                continue
            done.add(variable)
            rest, costs, places = self._eliminate(variable, list(of.pop(variable).values()), of)
            order.append((variable, rest, places))
            if not rest:
                constant += float(costs)
                continue
            left = Table(rest, costs)
            for other in rest:
                of[other][id(left)] = left
                heapq.heappush(heap, (self._size_without(other, of), other))
        chosen = [0] * len(self.num_choices)
        for variable, rest, places in reversed(order):
            chosen[variable] = int(places[tuple(chosen[other] for other in rest)])
        return chosen, constant

    def _settle(self, variable: int, of: dict[int, dict[int, Table]]) -> tuple[int, int, float]:
        """(variable, choice, costs that are known by it) of the one with most tables around
        `variable`. Its tables are cut to the choice.
        """
        around = {other for table in of[variable].values() for other in table.variables}
        settled = max(sorted(around), key=lambda other: len(of[other]))
        tables = list(of.pop(settled).values())
        least = np.zeros(self.num_choices[settled])
        for table in tables:
            axis = table.variables.index(settled)
            others = tuple(each for each in range(table.costs.ndim) if each != axis)
            least += table.costs.min(axis=others)
        choice = int(least.argmin())
        constant = 0.0
        for table in tables:
            rest = tuple(other for other in table.variables if other != settled)
            cut = np.asarray(table.costs.take(choice, table.variables.index(settled)))
            if not rest:
                constant += float(cut)
                continue
            left = Table(rest, self._known.setdefault((cut.shape, cut.tobytes()), cut))
            for other in rest:
                del of[other][id(table)]
                of[other][id(left)] = left
            self.tables.append(left)  # its id stays its own
        return settled, choice, constant

    def _size_without(self, variable: int, of: Mapping[int, Mapping[int, Table]]) -> int:
        around = {other for table in of[variable].values() for other in table.variables} - {
            variable
        }
        return prod(self.num_choices[other] for other in around)

    def _eliminate(
        self, variable: int, tables: list[Table], of: Mapping[int, dict[int, Table]]
    ) -> tuple[tuple[int, ...], Array, npt.NDArray[np.intp]]:
        rest = tuple(
            dict.fromkeys(
                other for table in tables for other in table.variables if other != variable
            )
        )
        place = {other: number for number, other in enumerate((*rest, variable))}
        for table in tables:
            for other in table.variables:
                if other != variable:
                    del of[other][id(table)]
        key = tuple(
            sorted(
                (tuple(place[other] for other in table.variables), id(table.costs))
                for table in tables
            )
        )
        shape = tuple(self.num_choices[other] for other in (*rest, variable))
        found = self._results.get((shape, key))
        if found is None:
            if prod(shape) > LARGEST_TABLE:
                raise TooWide(f"a table of {prod(shape):,} entries")
            total: Any = np.zeros(shape)
            for table in tables:
                total = total + _spread(table, place, len(shape))
            costs = total.min(axis=-1)
            found = self._results[shape, key] = (
                self._known.setdefault((costs.shape, costs.tobytes()), costs),
                total.argmin(axis=-1),
            )
        return rest, *found


def _spread(table: Table, place: Mapping[int, int], rank: int) -> Array:
    """The table's costs with its variables at their places among all."""
    order = sorted(range(len(table.variables)), key=lambda number: place[table.variables[number]])
    costs = table.costs.transpose(order)
    shape = [1] * rank
    for number, size in zip(order, costs.shape):
        shape[place[table.variables[number]]] = size
    return costs.reshape(shape)
