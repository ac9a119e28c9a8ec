"""Exchanges: for any two layouts of a tensor on any grid every device ends with what the target
says, and gets nothing that it has.
"""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout_parts import index, local_parts, meaning, picked
from tests.thorough import many
from whale.plans.grid import Grid
from whale.plans.layout import Cut, Layout, whole
from whale.sharding import redistribution
from whale.sharding.options import PARTIAL, SAME
from whale.sharding.redistribution import plan_redistribution
from whale.sharding.redistribution_costs import sent_bytes
from whale.sharding.redistribution_steps import RedistributionStep
from whale.sharding.space import layout_of


@st.composite
def grids(draw) -> Grid:
    shape = draw(
        st.sampled_from(
            [(2, 1, 1), (1, 3, 1), (2, 2, 1), (1, 2, 2), (2, 3, 1), (2, 2, 2), (3, 2, 2), (1, 1, 1)]
        )
    )
    weights = {
        axis: tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size).filter(any)))
        for axis, size in zip("xyz", shape)
        if draw(st.booleans())
    }
    return Grid(*shape, work=weights)


@st.composite
def layouts(draw, shape: tuple[int, ...]) -> Layout:
    """Any layout of a tensor of this shape: granules, segments, nested axes, partial sums."""
    cuts = []
    for size in shape:
        segments = draw(st.sampled_from([n for n in (1, 2, 3) if size % n == 0]))
        unit = draw(st.sampled_from([n for n in (1, 2, 3) if (size // segments) % n == 0]))
        cuts.append(Cut(size // segments // unit, unit, segments))
    axes: list[list[str]] = [[] for _ in shape]
    partial = set()
    for axis in draw(st.permutations("xyz")):
        role = draw(st.sampled_from(["same", "partial", *range(len(shape))]))
        if role == "partial":
            partial.add(axis)
        elif role != "same":
            axes[role].append(axis)
    return Layout(tuple(cuts), tuple(map(tuple, axes)), frozenset(partial))


@st.composite
def cases(draw) -> tuple[Grid, Layout, Layout]:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 4, 6, 7, 12]), max_size=3).map(tuple))
    return draw(grids()), draw(layouts(shape)), draw(layouts(shape))


def simulate(steps: list[RedistributionStep], parts: list[np.ndarray]) -> list[np.ndarray]:
    """One step at all places: every message that is sent is received once, by the place it was
    meant for.
    """
    waiting = {
        (step.place, block.place): parts[step.place][picked(block.ranges)]
        for step in steps
        for block in step.sends
    }
    results = []
    for step in steps:
        assert parts[step.place].shape == step.input_shape
        result = np.zeros(step.shape)
        for term in step.terms:
            seen = np.zeros(step.shape, int)
            for block in term:
                where = picked(block.ranges)
                result[where] += waiting.pop((block.place, step.place)).reshape(block.shape)
                seen[where] += 1
            assert (seen <= 1).all()
        results.append(result)
    assert not waiting
    return results


def run_plans(
    source: Layout, target: Layout, grid: Grid, parts: list[np.ndarray]
) -> list[np.ndarray]:
    hops = redistribution.route(source, target, grid, even_collectives=False)
    for first, second in zip(hops, hops[1:]):
        change = redistribution._Hop(first, second, grid)
        parts = simulate([change.step(place) for place in range(grid.num_devices)], parts)
    return parts


@given(cases())
@settings(max_examples=many(3000), deadline=None)
def test_every_device_ends_with_what_the_target_layout_says(case) -> None:
    grid, source, target = case
    value = np.random.default_rng(1).integers(-9, 9, source.shape).astype(float)
    parts = local_parts(value, source, grid)
    assert np.array_equal(meaning(parts, source, grid), value)
    assert np.array_equal(meaning(run_plans(source, target, grid, parts), target, grid), value)


@given(cases())
@settings(max_examples=many(1000), deadline=None)
def test_large_sums_in_two_steps(case) -> None:
    grid, source, target = case
    value = np.random.default_rng(1).integers(-9, 9, source.shape).astype(float)
    before = redistribution.TWO_STEPS_FROM
    redistribution.TWO_STEPS_FROM = 0
    try:
        assert np.array_equal(
            meaning(
                run_plans(source, target, grid, local_parts(value, source, grid)), target, grid
            ),
            value,
        )
    finally:
        redistribution.TWO_STEPS_FROM = before


@given(cases())
@settings(max_examples=many(1000), deadline=None)
def test_plans_of_all_places_fit_together_and_backward_is_the_transpose_in_bytes(case) -> None:
    grid, source, target = case
    plans = [plan_redistribution(source, target, grid, place) for place in range(grid.num_devices)]
    for place, plan in enumerate(plans):
        for step in (*plan.forward, *plan.backward):
            assert not step.places or place in step.places
            assert {block.place for block in step.sends} <= {place, *step.places}
            assert {block.place for term in step.terms for block in term} <= {place, *step.places}
            assert len(step.places) != 1
    for direction in ("forward", "backward"):
        steps = [
            [step.places for step in getattr(plan, direction) if step.places] for plan in plans
        ]
        for place, mine in enumerate(
            steps
        ):  # everyone who is waited for comes to the same calls, in the same order
            assert all(steps[other] == mine for places in mine for other in places), place
    if not source.partial and not target.partial:
        # gather <-> reduce-scatter, slice <-> pad: what came on the way there goes on the way back
        assert sum(sum(step.num_sent for step in plan.forward) for plan in plans) == sum(
            sum(step.num_sent for step in plan.backward) for plan in plans
        )


@given(cases())
@settings(max_examples=many(1000), deadline=None)
def test_without_sums_nothing_is_sent_that_the_receiver_has(case) -> None:
    """The fewest elements possible: what all devices need and do not have."""
    grid, source, target = case
    source = Layout(source.cuts, source.axes)
    target = Layout(target.cuts, target.axes)
    least = 0
    for place in range(grid.num_devices):
        needed = np.zeros(source.shape, bool)
        held = np.zeros(source.shape, bool)
        needed[index(target, grid, place)] = True
        held[index(source, grid, place)] = True
        least += int((needed & ~held).sum())
    plans = [
        plan_redistribution(source, target, grid, place, backward=False)
        for place in range(grid.num_devices)
    ]
    assert sum(plan.num_sent for plan in plans) == least


@given(cases())
@settings(max_examples=many(1000), deadline=None)
def test_elements_sent_are_counted_without_listing_the_messages(case) -> None:
    grid, source, target = case
    change = redistribution._Hop(source, target, grid)
    assert [change.num_sent(place) for place in range(grid.num_devices)] == [
        sum(block.count for block in change.step(place).sends if block.place != place)
        for place in range(grid.num_devices)
    ]


@pytest.mark.parametrize("g", [2, 3, 4, 8])
def test_bytes_of_the_collectives(g) -> None:
    """research/tensor3d.md 1.1: gather and reduce-scatter (g-1)/g of the whole, all-reduce twice
    that.
    """
    grid = Grid(1, g, 1)
    cuts = (Cut(24), Cut(7))
    shard = Layout(cuts, (("y",), ()))
    same = whole(cuts)
    partial = same.conjugate(grid)
    n = prod(same.shape)
    for source, target, pattern, sent in [
        (shard, same, "gather", (g - 1) * n // g),
        (partial, shard, "reduce-scatter", (g - 1) * n // g),
        (same, shard, "local", 0),
        (shard, partial, "local", 0),
        (same, partial, "local", 0),
        (partial, same, "all-reduce", (g - 1) * n),
        (shard, Layout(cuts, ((), ("y",))), "all-to-all", None),
    ]:
        (step,) = plan_redistribution(source, target, grid, 1).forward
        assert step.pattern == pattern and step.places == (
            tuple(range(g)) if pattern != "local" else ()
        )
        assert sent is None or step.num_sent == sent
    assert (
        plan_redistribution(same, same, grid, 0).is_identity
        and plan_redistribution(partial, partial, grid, 1).is_identity
    )


def test_a_large_all_reduce_scatters_and_gathers() -> None:
    grid = Grid(1, 4, 1)
    cuts = (Cut(1024), Cut(512))
    same = whole(cuts)
    plan = plan_redistribution(same.conjugate(grid), same, grid, 2)
    assert (
        [step.pattern for step in plan.forward]
        == ["reduce-scatter", "gather"]
        == [step.pattern for step in plan.backward]
    )
    assert plan.num_sent == 4 * 3 * 1024 * 512 // 4
    assert [
        step.pattern
        for step in plan_redistribution(
            same.conjugate(grid), same, grid, 2, even_collectives=True
        ).forward
    ] == ["all-reduce"]
    uneven = Grid(1, 4, 1, work={"y": (3, 1, 1, 1)})
    assert (
        plan_redistribution(same.conjugate(uneven), Layout(cuts, (("y",), ())), uneven, 2)
        .forward[0]
        .pattern
        == "all-to-all"
    )


def test_a_sum_that_moves_is_summed_first() -> None:
    """Terms along x of halves along y become halves along x: summing quarters first sends 3/4 of
    the tensor instead of all of it.
    """
    grid = Grid(2, 2, 1)
    cuts = (Cut(1024), Cut(512))
    n = 1024 * 512
    plans = [
        plan_redistribution(
            Layout(cuts, ((), ("y",)), frozenset("x")), Layout(cuts, ((), ("x",))), grid, place
        )
        for place in range(4)
    ]
    assert [len(plan.forward) for plan in plans] == [2] * 4
    assert max(sum(step.num_sent for step in plan.forward) for plan in plans) == 3 * n // 4


def test_equal_holders_on_the_own_line_send() -> None:
    """x is cut, y holds the same: whoever is on the receiver's y sends, so both y send equally
    much.
    """
    grid = Grid(2, 2, 1)
    cuts = (Cut(8),)
    for place in range(4):
        (step,) = plan_redistribution(
            Layout(cuts, (("x",),)), whole(cuts), grid, place, backward=False
        ).forward
        assert step.places == grid.subgroup(place, ["x"]) and step.num_sent == 4


def test_gathers_and_scatters_along_dim_0_need_no_copy() -> None:
    grid = Grid(1, 1, 4)
    cuts = (Cut(16), Cut(3))
    plan = plan_redistribution(Layout(cuts, (("z",), ())), whole(cuts), grid, 1)
    assert (
        plan.forward[0].is_in_order
        and plan.forward[0].is_made_of_runs
        and plan.backward[0].leaves_in_order
    )
    columns = plan_redistribution(Layout(cuts, ((), ("z",))), whole(cuts), grid, 1)
    assert not columns.forward[0].is_in_order


def test_different_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4,\) before and \(5,\) after"):
        plan_redistribution(whole([Cut(4)]), whole([Cut(5)]), Grid(1, 2, 1), 0)


PLACEMENTS = list(product([SAME, PARTIAL, 0, 1], repeat=3))


@pytest.mark.parametrize("source", PLACEMENTS[::5], ids=str)
def test_costs_are_the_bytes_of_the_plan(source) -> None:
    """Any two layouts on a 2 x 2 x 2 grid: exactly without sums; with sums, which may go by several
    ways, within a half.
    """
    grid = Grid(2, 2, 2)
    cuts = (Cut(8), Cut(8), Cut(1 << 14))
    for target in PLACEMENTS:
        if any(after == PARTIAL != before for before, after in zip(source, target)):
            continue
        layouts = [layout_of(cuts, dict(zip("xyz", lying))) for lying in (source, target)]
        plans = [plan_redistribution(*layouts, grid, place, backward=False) for place in range(8)]
        counted = max(plan.num_sent for plan in plans) / prod(layouts[0].shape)
        said = sum(sent_bytes(1.0, source, target, (2, 2, 2), gradient=False))
        if PARTIAL in source:
            assert counted / 1.5 <= said <= counted * 1.75, (target, said, counted)
        else:
            assert said == pytest.approx(counted), (target, said, counted)


def test_a_gather_of_the_outer_axis_moves_what_the_inner_one_cuts() -> None:
    """Rows cut by z and then by y; z gathers: place (z 0, y 0) has quarter 0 and needs 0 and 1,
    place (z 1, y 0) has 2 and needs 0 and 1, so whoever has quarter 1 sends it twice. Along the
    inner axis a gather sends one quarter."""
    assert sent_bytes(1.0, (0, 0), (0, SAME), (2, 2), gradient=False) == [0.0, 0.5]
    assert sent_bytes(1.0, (0, 0), (SAME, 0), (2, 2), gradient=False) == [0.25, 0.0]
    assert sent_bytes(1.0, (0, 0), (0, SAME), (2, 2), gradient=False, is_parameter=True) == [
        0.0,
        0.25,
    ], "stored shards lie innermost"
