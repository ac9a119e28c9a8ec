"""The tables of the slow tests cover every pair of values that the full table has."""

from __future__ import annotations

from itertools import product

from tests.pairs import covering_rows, pairs_of


def test_every_pair_occurs() -> None:
    rows = [row for row in product("abc", range(4), (True, False)) if row != ("a", 0, True)]
    chosen = [("b", 1, True)]
    found = covering_rows(rows, chosen)
    wanted = {pair for row in rows for pair in pairs_of(row)}
    assert wanted == {pair for row in [*found, *chosen] for pair in pairs_of(row)}
    assert len(found) <= 13  # 12 pairs of letter and number, one is chosen already; 23 rows in all


def test_nothing_is_left_to_add() -> None:
    rows = list(product("ab", range(2)))
    assert covering_rows(rows, rows) == []
