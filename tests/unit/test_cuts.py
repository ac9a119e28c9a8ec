"""Cutting a chain into stages: against trying every cut, and within its time limit."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import many
from whale.planning.cuts import StageMemory, cut
from whale.plans.shares import NotEnoughMemory


def objective(
    starts: tuple[int, ...],
    times: list[int],
    crossing_times: list[int],
    speeds: list[int],
    weights: list[int] | None = None,
) -> tuple[Fraction, int]:
    """(slowest stage, total crossing), in exact arithmetic and from the definition."""
    bounds = [*starts, len(times)]
    weights = [0, *(weights or [1] * (len(starts) - 1)), 0]
    crossing = [
        weight * crossing_times[bound] if weight else 0
        for weight, bound in zip(weights, bounds, strict=True)
    ]
    slowest = Fraction(0)
    for stage, (first, last) in enumerate(pairwise(bounds)):
        slowest = max(
            slowest,
            Fraction(sum(times[first:last]), speeds[stage]) + crossing[stage] + crossing[stage + 1],
        )
    return slowest, sum(crossing)


@st.composite
def problems(
    draw: st.DrawFn, with_speeds: bool
) -> tuple[list[int], list[int], list[bool], int, list[int]]:
    size = draw(st.integers(1, 10))
    times = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    if draw(
        st.booleans()
    ):  # one long operation: many cuts tie for the slowest stage, and the second objective decides
        times[draw(st.integers(0, size - 1))] = 40
    crossing_times = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    allowed = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    num_stages = draw(st.integers(1, sum(allowed[1:]) + 1))
    speeds = (
        draw(st.lists(st.integers(1, 7), min_size=num_stages, max_size=num_stages))
        if with_speeds
        else [1] * num_stages
    )
    return times, crossing_times, allowed, num_stages, speeds


def check_against_brute_force(
    problem: tuple[list[int], list[int], list[bool], int, list[int]], pass_speeds: bool
) -> None:
    times, crossing_times, allowed, num_stages, speeds = problem
    found = cut(
        np.array(times),
        np.array(crossing_times),
        num_stages,
        np.array(allowed),
        speeds if pass_speeds else None,
    )
    points = [point for point in range(1, len(times)) if allowed[point]]
    best = min(
        objective((0, *inner), times, crossing_times, speeds)
        for inner in combinations(points, num_stages - 1)
    )
    assert objective(found.starts, times, crossing_times, speeds) == best
    assert found.slowest == pytest.approx(float(best[0]), rel=1e-9)
    assert found.total_crossing == best[1]
    assert len(found.starts) == num_stages and set(found.starts[1:]) <= set(points)


def test_operations_that_take_no_time() -> None:
    """Only messages take time, so the lower bound of the bisection is 0: it must still end."""
    problem = ([0, 0, 0], [0, 3, 2], [False, True, True], 2, [1, 1])
    check_against_brute_force(problem, pass_speeds=False)


@settings(max_examples=300)
@given(problem=problems(with_speeds=False))
def test_equals_brute_force(
    problem: tuple[list[int], list[int], list[bool], int, list[int]],
) -> None:
    check_against_brute_force(problem, pass_speeds=False)


@settings(max_examples=300)
@given(problem=problems(with_speeds=True))
def test_equals_brute_force_with_speeds(
    problem: tuple[list[int], list[int], list[bool], int, list[int]],
) -> None:
    check_against_brute_force(problem, pass_speeds=True)


@settings(max_examples=300)
@given(problem=problems(with_speeds=True), data=st.data())
def test_equals_brute_force_with_different_links(
    problem: tuple[list[int], list[int], list[bool], int, list[int]], data: st.DataObject
) -> None:
    times, crossing_times, allowed, num_stages, speeds = problem
    weights = data.draw(
        st.lists(st.integers(0, 5), min_size=num_stages - 1, max_size=num_stages - 1)
    )
    found = cut(
        np.array(times),
        np.array(crossing_times),
        num_stages,
        np.array(allowed),
        speeds,
        boundary_weights=weights,
    )
    points = [point for point in range(1, len(times)) if allowed[point]]
    best = min(
        objective((0, *inner), times, crossing_times, speeds, weights)
        for inner in combinations(points, num_stages - 1)
    )
    assert objective(found.starts, times, crossing_times, speeds, weights) == best


def test_the_cheaper_of_two_equal_cuts() -> None:
    # the last operation sets the slowest stage to 10; the first cut may be anywhere before it
    found = cut(np.array([1.0, 1.0, 1.0, 10.0]), np.array([0.0, 3.0, 2.0, 0.0]), 3)
    assert found.starts == (0, 2, 3)
    assert (found.slowest, found.total_crossing) == (10.0, 2.0)


def test_equal_layers_are_cut_evenly() -> None:
    # 49 operations: 25 / 24 and 17 / 17 / 15 in EPL's tests are as good as ours in the slowest
    # stage
    assert cut(np.ones(49), np.zeros(49), 2).slowest == 25
    assert cut(np.ones(49), np.zeros(49), 3).slowest == 17
    assert cut(np.ones(12), np.zeros(12), 4).starts == (0, 3, 6, 9)


def test_a_faster_device_gets_more() -> None:
    assert cut(np.ones(12), np.zeros(12), 2, speeds=[2.0, 1.0]).starts == (0, 8)


def test_numbers_far_apart() -> None:
    """Nanoseconds beside seconds: rounding must not hide the small ones."""
    times = np.array([1e-9, 2e-9, 1.0, 1e-9])
    assert cut(times, np.array([0, 5e-10, 1e-10, 2e-10]), 2).starts == (0, 2)


@pytest.mark.parametrize("one_long", [False, True])
def test_4000_positions_64_stages(one_long: bool) -> None:
    random = np.random.default_rng(0)
    times = random.random(4000)
    crossing_times = random.random(4000)
    if (
        one_long
    ):  # nearly every cut is as good for the slowest stage: most work for the second objective
        times[2000] = 3000.0
    found = cut(times, crossing_times, 64)
    assert found.slowest >= times.max()


@st.composite
def problems_with_memory(
    draw: st.DrawFn,
) -> tuple[list[list[int]], list[int], list[bool], list[list[int]], list[int]]:
    """Times and bytes of every operation on every stage; capacities about what some cut needs, so
    that many are tight.
    """
    size = draw(st.integers(1, 8))
    allowed = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    num_stages = draw(st.integers(1, min(4, sum(allowed[1:]) + 1)))
    table = st.lists(
        st.lists(st.integers(0, 6), min_size=size, max_size=size),
        min_size=num_stages,
        max_size=num_stages,
    )
    times = draw(table)
    num_bytes = draw(table)
    crossing_times = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    points = [point for point in range(1, size) if allowed[point]]
    starts = (0, *sorted(draw(st.permutations(points))[: num_stages - 1]), size)
    used = [
        sum(num_bytes[stage][first:last]) for stage, (first, last) in enumerate(pairwise(starts))
    ]
    spare = draw(st.lists(st.integers(-1, 3), min_size=num_stages, max_size=num_stages))
    capacities = [max(0, most + more) for most, more in zip(used, spare, strict=True)]
    return times, crossing_times, allowed, num_bytes, capacities


memory_outcomes = {"free": 0, "tight": 0, "refused": 0}


@settings(max_examples=many(3000))
@given(problem=problems_with_memory())
def test_equals_brute_force_under_memory(
    problem: tuple[list[list[int]], list[int], list[bool], list[list[int]], list[int]],
) -> None:
    times, crossing_times, allowed, num_bytes, capacities = problem
    size = len(crossing_times)
    num_stages = len(times)

    def objective_of(starts: tuple[int, ...]) -> tuple[int, int]:
        slowest = 0
        for stage, (first, last) in enumerate(pairwise([*starts, size])):
            crossing = (crossing_times[first] if first else 0) + (
                crossing_times[last] if last < size else 0
            )
            slowest = max(slowest, sum(times[stage][first:last]) + crossing)
        return slowest, sum(crossing_times[start] for start in starts[1:])

    def fits(starts: tuple[int, ...]) -> bool:
        bounds = enumerate(pairwise([*starts, size]))
        return all(
            sum(num_bytes[stage][first:last]) <= capacities[stage]
            for stage, (first, last) in bounds
        )

    points = [point for point in range(1, size) if allowed[point]]
    every = [(0, *inner) for inner in combinations(points, num_stages - 1)]
    best = min((objective_of(starts) for starts in every if fits(starts)), default=None)
    memory = StageMemory(np.array(num_bytes, dtype=float), np.array(capacities, dtype=float))
    arguments = (np.array(times), np.array(crossing_times), num_stages, np.array(allowed))
    if best is None:
        memory_outcomes["refused"] += 1
        with pytest.raises(
            NotEnoughMemory, match=f"no cut into {num_stages} stages fits into memory"
        ):
            cut(*arguments, memory=memory)
        return
    memory_outcomes["free" if best == min(map(objective_of, every)) else "tight"] += 1
    found = cut(*arguments, memory=memory)
    assert fits(found.starts)
    assert objective_of(found.starts) == best
    assert found.slowest == pytest.approx(best[0], rel=1e-9) and found.total_crossing == best[1]


def test_the_memory_cases_are_of_all_sorts() -> None:
    """Runs after the test above: a generator that only makes easy cases would prove nothing."""
    if not sum(memory_outcomes.values()):
        pytest.skip("the brute-force test did not run")
    assert min(memory_outcomes.values()) > many(3000) // 30, memory_outcomes


def test_4000_positions_16_stages_tight_memory() -> None:
    """Against a bound by hand: equal operations, 3 of 16 stages with a third of the memory of the
    others.
    """
    size = 4000
    num_stages = 16
    capacities = np.full(num_stages, 300.0)
    capacities[[0, 5, 11]] = 100.0
    found = cut(
        np.ones(size),
        np.zeros(size),
        num_stages,
        memory=StageMemory(np.ones((num_stages, size)), capacities),
    )
    assert found.slowest == pytest.approx(
        -(-(size - 300) // 13)
    )  # the small ones are full, the others share the rest
    assert "memory moved the cuts (slowest without limits: 250 s)" in found.reason


def test_too_little_memory_says_how_much_is_missing() -> None:
    memory = StageMemory(np.full((2, 5), 1e9), np.array([2e9, 2e9]))
    said = r"no cut into 2 stages fits into memory: stages of 2.00 GB each leave operations 4 to 4 .* need 1.00 GB more"
    with pytest.raises(NotEnoughMemory, match=said):
        cut(np.ones(5), np.zeros(5), 2, memory=memory)


def test_too_many_stages() -> None:
    allowed = np.array([True, False, True, True])
    with pytest.raises(
        ValueError,
        match=r"asked for 4 stages, but the model can be cut at 2 points: at most 3 stages",
    ):
        cut(np.ones(4), np.zeros(4), 4, allowed)


def test_the_reason_has_the_numbers() -> None:
    reason = cut(np.array([1.0, 2.0, 4.0]), np.array([9.0, 0.5, 0.25]), 2).reason
    assert (
        "2 stages of 3 operations" in reason
        and "stage 1 (operations 2 to 2) with 4.25 s" in reason
        and "250 ms in all" in reason
    )


@pytest.mark.parametrize(
    ("times", "crossing_times", "speeds", "message"),
    [
        ([1.0, -1.0], [0.0, 0.0], None, "operation time is negative"),
        ([1.0, 1.0], [0.0, float("nan")], None, "crossing time"),
        ([1.0, 1.0], [0.0], None, "as many crossing times"),
        ([1.0, 1.0], [0.0, 0.0], [1.0], "must be 2 positive numbers"),
        ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0], "must be 2 positive numbers"),
        ([], [], None, "at least 1 operation"),
    ],
)
def test_bad_arguments_are_refused(
    times: list[float], crossing_times: list[float], speeds: list[float] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cut(np.array(times), np.array(crossing_times), 2, speeds=speeds)
