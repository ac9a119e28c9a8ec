"""Whole tensors as parts on a grid, and back: what the tests of `split` compare with. numpy only,
element by element.
"""

from __future__ import annotations

import numpy as np

from whale.plans.grid import Grid
from whale.plans.layout import Layout


def index(layout: Layout, grid: Grid, place: int) -> tuple[np.ndarray, ...]:
    """The part of the whole tensor at a place, as numpy picks it."""
    return picked([layout.ranges(grid, place, dim) for dim in range(len(layout.cuts))])


def picked(ranges) -> tuple[np.ndarray, ...]:
    return np.ix_(*[np.array([i for a, b in dim for i in range(a, b)], int) for dim in ranges])


def local_parts(value: np.ndarray, layout: Layout, grid: Grid) -> list[np.ndarray]:
    """Parts that mean this value; where it is a partial sum, random terms (whole numbers, so that
    sums are exact).
    """
    random = np.random.default_rng(0)
    partial = [axis for axis in grid.axes if axis in layout.partial]
    coordinates = [
        tuple(grid.coordinate(place, axis) for axis in partial) for place in range(grid.num_devices)
    ]
    terms = {
        key: random.integers(-50, 50, value.shape).astype(float) for key in sorted(set(coordinates))
    }
    last = max(terms)
    terms[last] = value - sum(term for key, term in terms.items() if key != last)
    return [
        np.asarray(terms[key][index(layout, grid, place)]) for place, key in enumerate(coordinates)
    ]


def meaning(parts: list[np.ndarray], layout: Layout, grid: Grid) -> np.ndarray:
    """The whole value; every device must hold a part of the right shape, and equal ones where the
    layout says so.
    """
    value = np.full(layout.shape, np.nan)
    for place, part in enumerate(parts):
        assert part.shape == layout.local_shape(grid, place)
        total = sum(
            (parts[other] for other in grid.subgroup(place, sorted(layout.partial))),
            np.zeros(part.shape),
        )
        where = index(layout, grid, place)
        known = value[where]
        assert ((known == total) | np.isnan(known)).all()
        value[where] = total
    return value
