"""Ranks and the devices of a cluster file, matched by host name and local rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale.cluster.file import loads
from whale.cluster.matching import HOST_VARIABLE, RankPlace, match, num_local_devices, this_place

TWO_HOSTS = loads(
    "hosts: [{name: big1, kind: V100-32GB, count: 3}, {name: small1.example, devices: [{kind: "
    "P100}, {kind: T4}]}]"
)


def places(*at: tuple[str, int]) -> list[RankPlace]:
    return [RankPlace(host, local_rank) for host, local_rank in at]


def test_hosts_in_another_order_than_the_file() -> None:
    """torchrun counts from the host of node rank 0; unequal devices per host, and one device of
    big1 has no rank.
    """
    cluster = match(
        TWO_HOSTS, places(("small1.example", 0), ("small1.example", 1), ("big1", 0), ("big1", 1))
    )
    assert [(d.rank, d.host, d.local_rank, d.kind.name) for d in cluster.devices] == [
        (0, "small1.example", 0, "P100"),
        (1, "small1.example", 1, "T4"),
        (2, "big1", 0, "V100-32GB"),
        (3, "big1", 1, "V100-32GB"),
    ]
    assert cluster.link(1, 2) == cluster.inter_host and cluster.link(2, 3) == cluster.intra_host


def test_names_are_the_same_up_to_the_first_dot() -> None:
    cluster = match(TWO_HOSTS, places(("big1.cluster.local", 1), ("small1", 0)))
    assert [device.kind.name for device in cluster.devices] == ["V100-32GB", "P100"]


def test_localhost_alone_is_any_one_machine() -> None:
    anywhere = loads("hosts: [{name: localhost, devices: [{kind: T4}, {kind: P100}]}]")
    assert [d.kind.name for d in match(anywhere, places(("node7", 1), ("node7", 0))).devices] == [
        "P100",
        "T4",
    ]
    with pytest.raises(
        ValueError, match="rank 0 runs on host 'node7', which is not in the cluster file"
    ):
        match(anywhere, places(("node7", 0), ("node8", 0)))


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (
            [("big1", 0), ("big2", 0), ("big2", 1)],
            "ranks 1, 2 run on host 'big2', which is not in the cluster file (it has big1, ",
        ),
        ([("big1", 0), ("big2", 0)], "Did you mean 'big1'? Add the host, or set WHALE_HOST there"),
        (
            [("small1", i) for i in range(3)],
            "3 ranks (0, 1, 2) run on host 'small1', which has 2 devices in the cluster file; "
            "start 2",
        ),
        (
            [("big1", i) for i in range(6)],
            "the cluster file has 5 devices, but 6 ranks run; start 5 ranks or add 1 to the file",
        ),
        ([("big1", 0), ("big1", 0)], "ranks 0 and 1 are both local rank 0 of host 'big1'"),
        (
            [("small1", 2)],
            "rank 0 is local rank 2 of host 'small1', whose 2 devices in the cluster file are "
            "local ranks 0 to 1",
        ),
    ],
)
def test_what_does_not_match_is_refused_with_names_and_numbers(
    at: list[tuple[str, int]], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        match(TWO_HOSTS, places(*at))
    assert message in str(error.value)


@given(
    st.permutations(
        [("big1", 0), ("big1", 1), ("big1", 2), ("small1.example", 0), ("small1.example", 1)]
    ),
    st.integers(1, 5),
)
def test_every_rank_gets_the_device_of_its_place(order: list[tuple[str, int]], number: int) -> None:
    cluster = match(TWO_HOSTS, places(*order[:number]))
    assert [(device.host, device.local_rank) for device in cluster.devices] == order[:number]
    known = {(device.host, device.local_rank): device.kind for device in TWO_HOSTS.devices}
    assert all(device.kind == known[device.host, device.local_rank] for device in cluster.devices)


def test_the_environment_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "small1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert this_place() == RankPlace("small1", 1)
    assert num_local_devices(TWO_HOSTS) == 2
