"""Tables that cover every pair of values instead of every combination.

Most faults depend on one or two settings: a table in which every schedule meets every model, every
model every number of devices and so on finds them with a twentieth of the rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])
Pair = tuple[int, Hashable, int, Hashable]
"""column, value, another column, its value"""


def covering_rows(rows: Sequence[Row], chosen: Iterable[Row] = ()) -> list[Row]:
    """Rows of the full table, fewest first found, in which every pair of values occurs that occurs
    in the full table and not yet in the `chosen` rows.

    Greedy: each time the row with most pairs that are still missing; of several the first, so the
    table is the same in every run.
    """
    missing = {pair for row in rows for pair in pairs_of(row)}
    for row in chosen:
        missing -= pairs_of(row)
    found: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        found.append(best)
    return found


def pairs_of(row: Row) -> set[Pair]:
    """All pairs of values in one row."""
    columns = combinations(range(len(row)), 2)
    return {(first, row[first], second, row[second]) for first, second in columns}
