"""Cutting a chain into stages: against trying every cut, and within its time limit."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whale.planning.cuts import cut


def objective(starts: tuple[int, ...], times: list[int], crossing_times: list[int], speeds: list[int]) -> tuple[Fraction, int]:
    """(slowest stage, total crossing), in exact arithmetic and from the definition."""
    bounds = [*starts, len(times)]
    slowest = Fraction(0)
    for stage, (first, last) in enumerate(pairwise(bounds)):
        crossing = (crossing_times[first] if first else 0) + (crossing_times[last] if last < len(times) else 0)
        slowest = max(slowest, Fraction(sum(times[first:last]), speeds[stage]) + crossing)
    return slowest, sum(crossing_times[start] for start in starts[1:])


@st.composite
def problems(draw: st.DrawFn, with_speeds: bool) -> tuple[list[int], list[int], list[bool], int, list[int]]:
    size = draw(st.integers(1, 10))
    times = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    if draw(st.booleans()):  # one long operation: many cuts tie for the slowest stage, and the second objective decides
        times[draw(st.integers(0, size - 1))] = 40
    crossing_times = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    allowed = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    num_stages = draw(st.integers(1, sum(allowed[1:]) + 1))
    speeds = draw(st.lists(st.integers(1, 7), min_size=num_stages, max_size=num_stages)) if with_speeds else [1] * num_stages
    return times, crossing_times, allowed, num_stages, speeds


def check_against_brute_force(problem: tuple[list[int], list[int], list[bool], int, list[int]], pass_speeds: bool) -> None:
    times, crossing_times, allowed, num_stages, speeds = problem
    found = cut(np.array(times), np.array(crossing_times), num_stages, np.array(allowed), speeds if pass_speeds else None)
    points = [point for point in range(1, len(times)) if allowed[point]]
    best = min(objective((0, *inner), times, crossing_times, speeds) for inner in combinations(points, num_stages - 1))
    assert objective(found.starts, times, crossing_times, speeds) == best
    assert found.slowest == pytest.approx(float(best[0]), rel=1e-9)
    assert found.total_crossing == best[1]
    assert len(found.starts) == num_stages and set(found.starts[1:]) <= set(points)


@settings(max_examples=300)
@given(problem=problems(with_speeds=False))
def test_equals_brute_force(problem: tuple[list[int], list[int], list[bool], int, list[int]]) -> None:
    check_against_brute_force(problem, pass_speeds=False)


@settings(max_examples=300)
@given(problem=problems(with_speeds=True))
def test_equals_brute_force_with_speeds(problem: tuple[list[int], list[int], list[bool], int, list[int]]) -> None:
    check_against_brute_force(problem, pass_speeds=True)


def test_the_cheaper_of_two_equal_cuts() -> None:
    # the last operation sets the slowest stage to 10; the first cut may be anywhere before it
    found = cut(np.array([1.0, 1.0, 1.0, 10.0]), np.array([0.0, 3.0, 2.0, 0.0]), 3)
    assert found.starts == (0, 2, 3)
    assert (found.slowest, found.total_crossing) == (10.0, 2.0)


def test_equal_layers_are_cut_evenly() -> None:
    # 49 operations: 25 / 24 and 17 / 17 / 15 in EPL's tests are as good as ours in the slowest stage
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
def test_4000_positions_64_stages_in_time(one_long: bool) -> None:
    random = np.random.default_rng(0)
    times, crossing_times = random.random(4000), random.random(4000)
    if one_long:  # nearly every cut is as good for the slowest stage: most work for the second objective
        times[2000] = 3000.0
    start = time.perf_counter()
    found = cut(times, crossing_times, 64)
    assert time.perf_counter() - start < 5
    assert found.slowest >= times.max()


def test_too_many_stages() -> None:
    allowed = np.array([True, False, True, True])
    with pytest.raises(ValueError, match=r"asked for 4 stages, but the model can be cut at 2 points: at most 3 stages"):
        cut(np.ones(4), np.zeros(4), 4, allowed)


def test_the_reason_has_the_numbers() -> None:
    reason = cut(np.array([1.0, 2.0, 4.0]), np.array([9.0, 0.5, 0.25]), 2).reason
    assert "2 stages of 3 operations" in reason and "stage 1 (operations 2 to 2) with 4.25 s" in reason and "0.25 s in all" in reason


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
def test_bad_arguments_are_refused(times: list[float], crossing_times: list[float], speeds: list[float] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(np.array(times), np.array(crossing_times), 2, speeds=speeds)
