"""The cluster file: what it means, that what is written is read again, and every message for a
wrong one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import whale as wh
from whale.cluster.cluster import (
    DEVICE_KINDS,
    ETHERNET_50G,
    PCIE_3_X16,
    Cluster,
    Device,
    DeviceKind,
    HostLinks,
    Link,
)
from whale.cluster.file import dumps, loads
from whale.cluster.kinds import MatmulRate

MIXED = """
hosts:
  - {name: big1, kind: v100-32gb, count: 2}
  - name: small1.example
    devices: [{kind: P100}, {kind: my-card, count: 2}]
    intra_host: {gb_per_s: 10, latency_us: 12}
links:
  inter_host: {gb_per_s: 3.5, latency_us: 25}
kinds:
  my-card: {tflop_per_s: 14, fp16_tflop_per_s: 28, memory_gb: 8, gb_per_s: 448, matmul_tflop_per_s: {fp32: {512: 3.5}}}
"""


def test_a_file_means_what_it_says() -> None:
    cluster = loads(MIXED)
    v100 = DEVICE_KINDS["V100-32GB"]
    p100 = DEVICE_KINDS["P100"]
    mine = DeviceKind(
        "my-card", 14e12, 8 * 10**9, 448e9, None, None, 28e12, (MatmulRate("fp32", 512, 3.5e12),)
    )
    expected = [
        ("big1", 0, v100),
        ("big1", 1, v100),
        ("small1.example", 0, p100),
        ("small1.example", 1, mine),
        ("small1.example", 2, mine),
    ]
    assert cluster.devices == tuple(Device(rank, *where) for rank, where in enumerate(expected))
    assert cluster.link(0, 1) == PCIE_3_X16  # not said: assumed
    assert cluster.link(3, 4) == Link(10e9, 12e-6)
    assert cluster.link(1, 2) == Link(3.5e9, 25e-6)


def test_the_shortest_file() -> None:
    cluster = loads("hosts: [{name: a, kind: T4}]")
    assert [device.kind.name for device in cluster.devices] == ["T4"]
    assert (cluster.intra_host, cluster.inter_host) == (PCIE_3_X16, ETHERNET_50G)


def test_load_and_save(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MIXED)
    cluster = wh.Cluster.load(tmp_path / "a.yaml")
    cluster.save(tmp_path / "b.yaml")
    assert wh.Cluster.load(str(tmp_path / "b.yaml")) == cluster


def figures(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


links = st.builds(
    lambda rate, latency: Link(rate * 10**6, latency / 10**6), figures(1, 10**6), figures(0, 10**5)
)
kinds = st.one_of(
    st.sampled_from(sorted(DEVICE_KINDS.values(), key=lambda kind: kind.name)),
    st.builds(
        lambda number, flop, memory, rate: DeviceKind(
            f"own{number}", flop * 1e9, memory * 10**6, rate * 1e6, bf16_flop_per_s=flop * 2e9
        ),
        st.integers(0, 2),
        figures(1, 10**6),
        figures(1, 10**6),
        figures(1, 10**6),
    ),
)


@given(
    hosts=st.lists(st.lists(kinds, min_size=1, max_size=4), min_size=1, max_size=4),
    intra=links,
    inter=links,
    own=st.none() | links,
)
def test_what_is_written_is_read_again(
    hosts: list[list[DeviceKind]], intra: Link, inter: Link, own: Link | None
) -> None:
    by_name: dict[str, DeviceKind] = {}
    devices: list[Device] = []
    for host, host_kinds in enumerate(hosts):
        for local_rank, kind in enumerate(host_kinds):
            same = by_name.setdefault(kind.name, kind)  # one meaning for a name
            devices.append(Device(len(devices), f"h{host}", local_rank, same))
    own_links = (HostLinks("h0", inter_host=own),) if own else ()
    cluster = Cluster(tuple(devices), intra, inter, own_links, all_reduce=own)
    again = loads(dumps(cluster))
    assert [(d.rank, d.host, d.local_rank, d.kind.name) for d in again.devices] == [
        (d.rank, d.host, d.local_rank, d.kind.name) for d in cluster.devices
    ]
    for a, b in zip(again.devices, cluster.devices, strict=True):
        assert a.kind.memory_bytes == b.kind.memory_bytes
        assert (a.kind.flop_per_s, a.kind.bytes_per_s) == pytest.approx(
            (b.kind.flop_per_s, b.kind.bytes_per_s), rel=1e-5
        )
        assert a.kind.rate("bf16") == pytest.approx(b.kind.rate("bf16"), rel=1e-5)
    for a_link, b_link in (
        (again.intra_host, intra),
        (again.inter_host, inter),
        (again.all_reduce, own),
    ):
        assert (a_link is None) == (b_link is None)
        if a_link is not None and b_link is not None:
            assert (a_link.bytes_per_s, a_link.latency_s) == pytest.approx(
                (b_link.bytes_per_s, b_link.latency_s), rel=1e-5
            )
    assert [h.host for h in again.host_links] == [h.host for h in own_links]


HOST = "hosts: [{name: a, kind: T4, count: 2}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "hosts: [{name: a, kind: V100}]",
            "host 'a': unknown device kind 'V100'; did you mean 'V100-16GB' or 'V100-32GB'?",
        ),
        (
            HOST + "kinds: {slow: {tflop_per_s: 1, memory_gb: 0, gb_per_s: 1}}",
            "kinds.slow.memory_gb must be more than 0, not 0",
        ),
        (HOST + "kinds: {slow: {tflop_per_s: 1, gb_per_s: 1}}", "kinds.slow.memory_gb is missing"),
        (
            HOST + "kinds: {t4: {tflop_per_s: 1, memory_gb: 1, gb_per_s: 1}}",
            "kind 't4' is there already",
        ),
        (
            HOST + "links: {inter_host: {gb_per_s: -3}}",
            "links.inter_host.gb_per_s must be more than 0, not -3",
        ),
        (
            HOST + "links: {inter_host: {gb_per_s: .inf}}",
            "links.inter_host.gb_per_s: a finite number is needed, not inf",
        ),
        (
            HOST + "links: {inter_host: {gb_per_s: 1, latency_us: -1}}",
            "links.inter_host.latency_us must be at least 0, not -1",
        ),
        (HOST + "links: {inter_host: {gbps: 3}}", "unknown key 'gbps' in links.inter_host"),
        (
            HOST + "links: {intrahost: {gb_per_s: 3}}",
            "unknown key 'intrahost' in links. Did you mean 'intra_host'?",
        ),
        (HOST + "hosts: []", "in line 2: the key 'hosts' is there twice"),
        (
            "hosts: [{name: a, kind: T4}, {name: a, kind: P100}]",
            "host 'a' is there twice; list all its devices in one place",
        ),
        (
            "hosts: [{name: a, kind: T4, cuont: 2}]",
            "unknown key 'cuont' in hosts[0]. Did you mean 'count'?",
        ),
        ("host: [{name: a, kind: T4}]", "unknown key 'host'. Did you mean 'hosts'?"),
        ("hosts: [{name: a, kind: T4, count: 0}]", "hosts[0].count must be at least 1, not 0"),
        ("hosts: [{name: a, kind: T4, count: 2.5}]", "hosts[0].count is 2.5"),
        (
            "hosts: [{name: a, kind: T4, count: yes}]",
            "hosts[0].count: a number is needed, not true",
        ),
        (
            "hosts: [{name: a, kind: T4, count: 1000000}]",
            "hosts[0].count must be at most 100000, not 1000000",
        ),
        ("hosts: [{name: 7, kind: T4}]", "hosts[0].name must be text, not 7; put it in quotes"),
        ("hosts: [{name: a}]", "host 'a' has no devices; give it a `kind` and a `count`"),
        (
            "hosts: [{name: a, kind: T4, devices: [{kind: P100}]}]",
            "host 'a' has both `devices` and `kind` or `count`",
        ),
        (
            "hosts: [{name: a, devices: [{knid: P100}]}]",
            "unknown key 'knid' in hosts[0].devices[0]. Did you mean 'kind'?",
        ),
        ("hosts: []", "hosts is empty"),
        ("", "it should start with `hosts:`, but holds nothing"),
        ("- a", "it should start with `hosts:`"),
        ("hosts: [", "cannot be read as YAML in line 1"),
        ("hosts: !!python/object/apply:os.getpid []", "cannot be read as YAML"),
    ],
)
def test_a_wrong_file_is_explained(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        Cluster.load(path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"cluster file {path}: ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cluster file .*nowhere.yaml: No such file"):
        Cluster.load(tmp_path / "nowhere.yaml")


def test_other_figures_under_a_built_in_name_are_not_written() -> None:
    with pytest.raises(ValueError, match="kind 'T4' has other figures than the built-in kind"):
        dumps(Cluster.uniform(1, DeviceKind("T4", 1e12, 10**9, 1e9)))
