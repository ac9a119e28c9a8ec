"""Clusters of many hosts that are alike: one slice is searched, and repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import whale as wh
from tests.unit.test_search import BATCH, KINDS, WIDTH, Net, problem_of
from whale.cluster.cluster import Cluster, Device, Link
from whale.search import search, slices
from whale.search.candidate import Candidate, DeviceGroup, ReplicaChoice
from whale.search.refusals import opened_up
from whale.search.search import Search, new_search
from whale.search.settings import OpenSettings
from whale.search.slices import Slices, slice_numbers


def hosts_of(*kinds: str) -> Cluster:
    """Two devices on every host, all of one kind."""
    devices = []
    for host, kind in enumerate(kinds):
        for place in range(2):
            devices.append(Device(len(devices), f"host{host}", place, KINDS[kind]))
    return Cluster(tuple(devices), Link(1e9, 1e-6), Link(1e8, 1e-5))


def test_slices_have_the_same_devices_and_take_every_one() -> None:
    cluster = hosts_of("fast", "old", "old", "fast", "old", "old")
    found = Slices.of(cluster, 2)
    assert sorted(rank for ranks in found.ranks for rank in ranks) == list(range(12))
    kinds = [[cluster.devices[rank].kind for rank in ranks] for ranks in found.ranks]
    assert kinds[0] == kinds[1] == [device.kind for device in found.cluster.devices]
    for ranks in found.ranks:  # devices that share a host in the slice share one in the cluster
        for rank, device in enumerate(found.cluster.devices):
            other = found.cluster.devices[rank ^ 1]
            here = cluster.devices[ranks[rank]].host == cluster.devices[ranks[rank ^ 1]].host
            assert here == (device.host == other.host)


def test_what_is_repeated_takes_every_device() -> None:
    found = Slices.of(hosts_of("fast", "old", "fast", "old"), 2)
    one = ReplicaChoice((DeviceGroup((0, 1)), DeviceGroup((2, 3))))
    made = found.repeated(Candidate((one,)))
    assert made.ranks == tuple(range(8)) and made.are_alike and len(made.replicas) == 2


def test_numbers_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "MOST_DEVICES", 4)
    cluster = hosts_of(*["fast"] * 4, *["old"] * 4)
    assert slice_numbers(cluster, 32) == [4, 2]
    assert slice_numbers(cluster, 5) == [4, 2]  # some slices get a sample more
    assert slice_numbers(cluster, 3) == [2]  # too few samples for four slices
    assert slice_numbers(cluster, 1) == []
    assert slice_numbers(hosts_of("fast", "old"), 32) == []  # small
    assert slice_numbers(hosts_of("fast", "old", "old"), 32) == []  # not alike


def test_hosts_that_do_not_divide_are_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty hosts and one: the fewest devices are left over, and no more than one in twenty."""
    monkeypatch.setattr(slices, "MOST_DEVICES", 20)
    cluster = hosts_of(*["fast"] * 21)
    # small slices first: 10 x 2 hosts and one left over, 7 x 3, 3 x 7
    assert slice_numbers(cluster, 32) == [10, 7, 3]
    assert Slices.of(cluster, 3).left_over == ()
    assert Slices.of(cluster, 2).left_over == (40, 41)
    assert slice_numbers(hosts_of(*["fast"] * 11), 2) == []  # 2 x 5 leave more than that


def test_the_plan_says_what_was_searched_and_what_is_left_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five hosts that are alike in two slices: one host is in neither. 31 samples do not divide."""
    monkeypatch.setattr(slices, "MOST_DEVICES", 5)
    monkeypatch.setattr(slices, "SLICE_PARTS", (1,))
    monkeypatch.setattr(slices, "LEAST_USED", 0.8)
    monkeypatch.setitem(KINDS, "fast", replace(KINDS["fast"], memory_bytes=400_000))
    cluster = hosts_of(*["fast"] * 5)
    plan = wh.plan(Net(layers=16), torch.zeros(31, WIDTH), cluster=cluster, config={})
    assert plan.batch_size == 31
    said = [each for each in plan.decisions if each.what in ("strategy", "devices left out")]
    assert "one of 2 slices of 4 devices that are alike" in said[0].why
    assert said[-1].choice == "rank 8-9" and "equal slices" in said[-1].why


def test_a_slice_gives_about_the_plan_of_the_whole_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = hosts_of("fast", "old", "fast", "old")

    def plan() -> wh.Plan:
        config = {"strategy": "auto"}
        return wh.plan(Net(), torch.zeros(BATCH, WIDTH), cluster=cluster, config=config)

    whole_s = wh.simulate(plan()).step_s
    found: list[bool] = []

    def noted(made: Search) -> bool:
        found.append(slices.draft_slices(made))
        return found[-1]

    monkeypatch.setattr(search, "draft_slices", noted)
    monkeypatch.setattr(slices, "MOST_DEVICES", 4)
    sliced_s = wh.simulate(plan()).step_s
    assert any(found)
    assert sliced_s <= 1.1 * whole_s


def test_a_plan_of_one_slice_is_bounded_by_the_devices_that_it_takes() -> None:
    """The old device of a slice cannot be as fast as the fast one, whatever others are there."""
    cluster = hosts_of("fast", "old")
    config = {"strategy": "data"}
    problem = opened_up(
        problem_of(
            lambda: wh.plan(Net(), torch.zeros(BATCH, WIDTH), cluster=cluster, config=config)
        )
    )
    made = new_search(problem, OpenSettings.of(problem))

    def on(rank: int) -> Candidate:
        return Candidate((ReplicaChoice((DeviceGroup((rank,)),)),))

    assert not slices._is_too_slow(made, on(2))  # there is no plan yet
    best = made.draft(on(0))
    assert slices._is_too_slow(made, on(2)) and not slices._is_too_slow(made, on(1))
    slow = made.draft(on(2))
    assert best is not None and slow is not None and slow.score_s > best.score_s


def test_where_no_plan_of_a_slice_fits_on_all_slices_all_devices_of_one_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All-reduces between slices take memory that few devices of one, filled by a plan, do not have."""
    monkeypatch.setattr(slices, "MOST_DEVICES", 4)
    cluster = hosts_of("fast", "old", "fast", "old")
    draft_repeated = slices._draft_repeated
    may_leave_out: list[bool] = []

    def first_does_not_fit(whole: Search, found: Slices, inner: Search, tries: int | None) -> bool:
        may_leave_out.append(inner.budget.smaller > 0)
        fits = draft_repeated(whole, found, inner, tries)
        return fits and len(may_leave_out) > 1

    monkeypatch.setattr(slices, "_draft_repeated", first_does_not_fit)
    wh.plan(Net(), torch.zeros(BATCH, WIDTH), cluster=cluster, config={"strategy": "auto"})
    assert may_leave_out[:2] == [True, False]
