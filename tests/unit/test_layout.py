"""Layouts: every element is held exactly as often as its axes say, in order, whatever the sizes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import many
from whale.plans.grid import Grid
from whale.plans.layout import Cut, Layout, whole

grids = st.tuples(*[st.integers(1, 3)] * 3)


@given(
    grids,
    st.integers(0, 7),
    st.integers(1, 3),
    st.integers(1, 3),
    st.permutations(["x", "y", "z"]),
    st.integers(0, 3),
    st.data(),
)
@settings(max_examples=many(300), deadline=None)
def test_every_element_is_held_by_exactly_the_devices_of_its_other_axes(
    shape, count, unit, segments, order, used, data
) -> None:
    weights = {
        axis: tuple(
            data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(any))
        )
        for axis, size in zip("xyz", shape, strict=True)
    }
    grid = Grid(*shape, work=weights)
    layout = Layout((Cut(count, unit, segments),), (tuple(order[:used]),))
    held = np.zeros(count * unit * segments, int)
    for place in range(grid.num_devices):
        mine = [index for a, b in layout.ranges(grid, place, 0) for index in range(a, b)]
        assert mine == sorted(set(mine)) and len(mine) == layout.local_shape(grid, place)[0]
        held[mine] += 1
    same = np.prod(
        [size for axis, size in zip("xyz", shape, strict=True) if axis not in order[:used]]
    )
    assert (held == same).all()


def test_granules_and_segments_stay_whole() -> None:
    fused = Layout(
        (Cut(count=3, unit=4, segments=2),), (("y",),)
    )  # two times three heads of four entries
    assert fused.ranges(Grid(1, 2, 1), 0, 0) == ((0, 8), (12, 20))
    assert fused.ranges(Grid(1, 2, 1), 1, 0) == ((8, 12), (20, 24))


def test_a_gradient_is_partial_where_the_tensor_is_the_same() -> None:
    grid = Grid(2, 2, 2)
    layout = Layout((Cut(4), Cut(6)), (("z",), ()), partial=frozenset("x"))
    assert layout.same_on(grid) == ("y",)
    assert (
        layout.conjugate(grid).partial == {"y"} and layout.conjugate(grid).conjugate(grid) == layout
    )


def test_places_count_x_fastest() -> None:
    grid = Grid(2, 3, 4)
    assert [grid.coordinate(1, axis) for axis in "xyz"] == [1, 0, 0]
    assert [grid.coordinate(2 * 3, axis) for axis in "xyz"] == [0, 0, 1]
    assert grid.subgroup(0, ["y"]) == (0, 2, 4) and whole([Cut(5)]).same_places(grid, 7) == tuple(
        range(24)
    )
