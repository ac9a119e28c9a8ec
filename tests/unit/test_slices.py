"""Bridges: worked by hand, and sample by sample for any intervals."""

from __future__ import annotations

from dataclasses import astuple
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.plans.shares import intervals
from whale.plans.slices import Interval, Slice, bridge, whole


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Two ways to cut the same samples, empty intervals included; the samples need not
    start at 0.
    """
    first = draw(st.integers(0, 5))
    total = draw(st.integers(0, 12))

    def one() -> tuple[Interval, ...]:
        inner = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
        points = [first + point for point in (0, *inner, total)]
        return tuple(pairwise(points))

    return one(), one()


def local(slice_: Slice, held: Interval) -> slice:
    """Where the samples of a slice lie on a device that holds `held`."""
    return slice(slice_.start - held[0], slice_.stop - held[0])


def test_one_to_three() -> None:
    assert bridge([(0, 7)], [(0, 3), (3, 5), (5, 7)]) == (
        Slice(0, 0, 0, 3),
        Slice(0, 1, 3, 5),
        Slice(0, 2, 5, 7),
    )


def test_two_to_one() -> None:
    assert bridge([(0, 4), (4, 7)], [(0, 7)]) == (Slice(0, 0, 0, 4), Slice(1, 0, 4, 7))


def test_three_to_two() -> None:
    source = [(0, 2), (2, 4), (4, 6)]
    destination = [(0, 3), (3, 6)]
    slices = bridge(source, destination)
    assert slices == (Slice(0, 0, 0, 2), Slice(1, 0, 2, 3), Slice(1, 1, 3, 4), Slice(2, 1, 4, 6))
    # the third slice is the second row of source 1 and the first row of destination 1
    assert local(slices[2], source[1]) == slice(1, 2)
    assert local(slices[2], destination[1]) == slice(0, 1)


def test_an_empty_device_gets_nothing() -> None:
    assert bridge([(0, 4)], intervals((2, 0, 2))) == (Slice(0, 0, 0, 2), Slice(0, 2, 2, 4))


@given(cuts=two_cuts())
def test_every_sample_arrives_once_from_its_holder(
    cuts: tuple[tuple[Interval, ...], tuple[Interval, ...]],
) -> None:
    source, destination = cuts
    arrived = [
        (slice_.destination, slice_.source, sample)
        for slice_ in bridge(source, destination)
        for sample in range(slice_.start, slice_.stop)
    ]
    expected = [
        (j, i, sample)
        for j, (start, stop) in enumerate(destination)
        for sample in range(start, stop)
        for i, held in enumerate(source)
        if held[0] <= sample < held[1]
    ]
    assert sorted(arrived) == sorted(expected)


@given(cuts=two_cuts())
def test_rows_moved_by_local_offsets(
    cuts: tuple[tuple[Interval, ...], tuple[Interval, ...]],
) -> None:
    source, destination = cuts
    held = [list(range(*interval)) for interval in source]
    received: list[list[int | None]] = [[None] * (stop - start) for start, stop in destination]
    for slice_ in bridge(source, destination):
        take = local(slice_, source[slice_.source])
        put = local(slice_, destination[slice_.destination])
        received[slice_.destination][put] = held[slice_.source][take]
    assert received == [list(range(*interval)) for interval in destination]


@given(cuts=two_cuts())
def test_backward_is_the_transpose(cuts: tuple[tuple[Interval, ...], tuple[Interval, ...]]) -> None:
    source, destination = cuts
    assert bridge(destination, source) == tuple(
        Slice(there, here, start, stop)
        for here, there, start, stop in map(astuple, bridge(source, destination))
    )


@given(cuts=two_cuts())
def test_few_slices(cuts: tuple[tuple[Interval, ...], tuple[Interval, ...]]) -> None:
    source, destination = cuts
    slices = bridge(source, destination)
    assert len(slices) <= len(source) + len(destination) - 1
    assert all(slice_.num_samples > 0 for slice_ in slices)


def test_whole_values() -> None:
    assert whole(2, 5) == ((0, 0), (1, 1), (0, 2), (1, 3), (0, 4))
    assert whole(3, 1) == ((0, 0),)


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ([(0, 4)], [(0, 5)], r"source holds samples \(0, 4\), the destination \(0, 5\)"),
        ([(0, 2), (3, 4)], [(0, 4)], "must start at 2"),
        ([(0, 4)], [(0, 5), (5, 4)], "destination interval 1"),
        ([], [(0, 4)], "no device"),
    ],
)
def test_bad_intervals_are_refused(
    source: list[Interval], destination: list[Interval], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bridge(source, destination)
