"""Points that fit are found behind thousands that are faster and do not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_search import mixed, plan_of, problem_of
from whale.search import outline
from whale.search.budget import Budget
from whale.search.first_fit import first_fit
from whale.search.outline import Outline
from whale.search.point import Estimate, Point, Shape
from whale.search.search import Search
from whale.search.settings import OpenSettings


@given(st.integers(0, 2000), st.integers(1, 400), st.integers(1, 50))
def test_what_is_found_fits_and_the_place_before_does_not(
    first: int, length: int, tries: int
) -> None:
    """Of 2,000 places, those of one stretch fit; one that is longer than the stride is found."""
    asked = []

    def fits(place: int) -> bool:
        asked.append(place)
        return first <= place < first + length

    place = first_fit(fits, 0, 2000, tries)
    stride = -(-2000 // tries)
    assert place == first or (place == 2000 and (length < stride or first > 2000 - stride))
    assert len(asked) <= tries + math.ceil(math.log2(stride)) + 1


@dataclass
class Queued:
    """An estimator of points that take as long as they have micro-batches."""

    first: int
    """the first number of micro-batches that fits"""

    def guess(self, point: Point) -> float:
        return float(point.num_micro_batch)

    bound = guess

    def estimate(self, point: Point) -> Estimate:
        is_right = point.num_micro_batch >= self.first
        return Estimate(point, float(point.num_micro_batch) if is_right else math.inf)


@pytest.mark.parametrize("first", [1, 100, 130, 4000])
def test_the_fastest_point_that_fits_is_found_wherever_it_is(first: int) -> None:
    """Of 5,000 points, 240 are tried at most where none fits."""
    problem = problem_of(plan_of)
    search = Search(problem, OpenSettings.of(problem), Budget(estimates=60))
    points = [Point(Shape((((0,),),)), number) for number in range(1, 5001)]
    found = search.estimated(points, Queued(first))  # type: ignore[arg-type]
    assert found[0].point.num_micro_batch == first
    assert search.num_estimates <= 2 * 240 + 20


def test_a_model_that_is_large_for_its_devices_has_more_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many that the smallest device holds three segments."""
    monkeypatch.setattr(outline, "MOST_POINTS", 2)
    problem = problem_of(plan_of)
    coarse = Outline(problem)
    held_bytes = float(coarse.static_bytes(False).sum())
    small = mixed(memory_bytes=int(3 * held_bytes / 8))
    fine = Outline(replace(problem, cluster=small))
    assert coarse.num_segments <= 3 and 6 <= fine.num_segments <= 9
