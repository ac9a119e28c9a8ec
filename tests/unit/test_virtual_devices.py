"""DevicePlacement of TaskGraphs: the vectors of the Whale paper, and what must hold for any counts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.plans.virtual_devices import DevicePlacement, place

counts = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def ranks(placement: DevicePlacement) -> list[tuple[tuple[int, ...], ...]]:
    return [virtual_device.ranks for virtual_device in placement.virtual_devices]


def test_figure_5_of_the_paper() -> None:
    placement = place([2, 2], 8)
    assert ranks(placement) == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    assert placement.of_task_graph == (0, 1)
    assert placement.num_replicas == 2


def test_devices_of_a_replica_are_consecutive() -> None:
    # two hosts of two GPUs, rank = 2 * host + GPU: a replica stays inside its host
    assert ranks(place([1, 1], 4)) == [((0,), (2,)), ((1,), (3,))]


@pytest.mark.parametrize(("num_devices", "num_replicas"), [(8, 4), (2, 1)])
def test_nested_data_parallelism(num_devices: int, num_replicas: int) -> None:
    assert place([1, 1], num_devices).num_replicas == num_replicas


def test_different_counts() -> None:
    placement = place([1, 3], 8)
    assert ranks(placement) == [((0,), (4,)), ((1, 2, 3), (5, 6, 7))]
    assert [virtual_device.num_devices for virtual_device in placement.virtual_devices] == [1, 3]


def test_everything_on_all_devices_shares() -> None:
    placement = place([4, 4, 4], 4)
    assert ranks(placement) == [((0, 1, 2, 3),)]
    assert placement.of_task_graph == (0, 0, 0)


def test_colocated_replicas() -> None:
    placement = place([2, 2], 6, colocate=True)
    assert ranks(placement) == [((0, 1), (2, 3), (4, 5))]
    assert placement.of_task_graph == (0, 0)
    assert placement.num_replicas == 3


def test_one_task_graph_is_repeated() -> None:
    assert ranks(place([2], 6)) == [((0, 1), (2, 3), (4, 5))]


@pytest.mark.parametrize("colocate", [False, True])
@given(wanted=counts)
def test_one_device_runs_everything(colocate: bool, wanted: list[int]) -> None:
    placement = place(wanted, 1, colocate=colocate)
    assert ranks(placement) == [((0,),)]
    assert placement.of_task_graph == (0,) * len(wanted)


@given(wanted=counts, num_devices=st.integers(1, 40), colocate=st.booleans())
def test_every_rank_has_one_place(wanted: list[int], num_devices: int, colocate: bool) -> None:
    try:
        placement = place(wanted, num_devices, colocate=colocate)
    except ValueError:
        return
    seen = [
        rank
        for virtual_device in placement.virtual_devices
        for replica in virtual_device.ranks
        for rank in replica
    ]
    assert sorted(seen) == list(range(num_devices))
    for index, virtual_device in enumerate(placement.virtual_devices):
        assert virtual_device.index == index
        assert len(virtual_device.ranks) == placement.num_replicas
    if num_devices > 1:
        assert [
            placement.virtual_devices[index].num_devices for index in placement.of_task_graph
        ] == wanted
    assert str(num_devices) in placement.reason or num_devices == 1


@given(wanted=counts, num_devices=st.integers(2, 40), colocate=st.booleans())
def test_the_offered_counts_work_and_are_the_nearest(
    wanted: list[int], num_devices: int, colocate: bool
) -> None:
    def works(count: int, share: bool = colocate) -> bool:
        try:
            place(wanted, count, colocate=share)
        except ValueError:
            return False
        return True

    if works(num_devices):
        return
    with pytest.raises(ValueError) as error:
        place(wanted, num_devices, colocate=colocate)
    message = str(error.value)
    if colocate and len(set(wanted)) > 1:
        assert "give all the same count" in message
        return
    offered = {
        int(count)
        for count in re.search(r"use ([0-9 or]+) devices", message).group(1).split(" or ")
    }  # type: ignore[union-attr]
    below = max(count for count in range(1, num_devices) if works(count))
    above = next(count for count in range(num_devices + 1, 1000) if works(count))
    assert offered == {below, above}
    assert ("colocate" in message) == (colocate or works(num_devices, True))


def test_the_error_has_all_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"1 \+ 1 = 2 devices, which does not divide 3 devices; use 2 or 4 devices"
    ):
        place([1, 1], 3)


@pytest.mark.parametrize(
    ("wanted", "num_devices", "message"),
    [
        ([1, 0], 4, "TaskGraph 1 asks for 0"),
        ([-2], 1, "asks for -2"),
        ([], 4, "no TaskGraph"),
        ([1], 0, "got 0"),
    ],
)
def test_bad_counts_are_refused(wanted: list[int], num_devices: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(wanted, num_devices)
