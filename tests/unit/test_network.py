"""Links as curves, between pairs of hosts, and network cards that one device does not fill."""

from __future__ import annotations

import math
import re

import pytest

from whale.cluster.cluster import Cluster
from whale.cluster.file import dumps, loads
from whale.cluster.network import Link, Network, PairLink, slower
from whale.simulation.communication import Links, all_reduce_seconds, ring_s

CURVE = Link(4e9, 1e-5, ((1e5, 1e9), (1e7, 3e9), (1e9, 4e9)))


def test_a_curve_is_straight_in_the_logarithm_and_flat_outside() -> None:
    assert CURVE.rate(1e3) == 1e9
    assert CURVE.rate(1e6) == pytest.approx(2e9)  # half way between 1e5 and 1e7
    assert CURVE.rate(1e8) == pytest.approx(3.5e9)
    assert CURVE.rate(1e12) == 4e9
    assert CURVE.seconds(1e6) == pytest.approx(1e-5 + 1e6 / 2e9)
    assert Link(5.0, 1.0).rate(1e9) == 5.0


def test_the_slower_of_two_links_is_at_no_size_faster_than_either() -> None:
    other = Link(2e9, 5e-5, (), card_bytes_per_s=3e9)
    both = slower(CURVE, other)
    assert both.latency_s == 5e-5
    assert both.card_bytes_per_s == 3e9
    for power in range(4, 11):
        assert both.rate(10.0**power) <= min(CURVE.rate(10.0**power), other.rate(10.0**power)) + 1


def test_pairs_of_hosts_have_their_own_link_in_both_directions() -> None:
    between = Link(1e9, 1e-5)
    network = Network(
        ("a1", "a2", "b1"),
        Link(1e10, 0.0),
        Link(5e9, 0.0),
        pair_links=(PairLink(("a*", "b*"), between),),
    )
    assert network.link(0, 2) == network.link(2, 1) == between
    assert network.link(0, 1) == Link(5e9, 0.0)


def test_devices_of_a_host_share_a_card_that_one_does_not_fill() -> None:
    """1 GB each from two devices at once: each alone takes 1 s (1 GB/s); the card carries 1.6 GB/s
    and is busy for 1.25 s in all.
    """
    link = Link(1e9, 0.0, (), card_bytes_per_s=1.6e9)
    links = Links(Network(("a", "a", "b", "b"), Link(1e11, 0.0), link), 1.0)
    assert links.send("first", 0, 2, 1e9, 0.0) == pytest.approx(1.0)
    assert links.send("second", 1, 3, 1e9, 0.0) == pytest.approx(1.25)
    assert links.send("third", 0, 3, 1e9, 0.0) == pytest.approx(2.0)  # its own device is busy


def test_a_card_without_a_rate_of_its_own_is_as_fast_as_one_device() -> None:
    links = Links(Network(("a", "a", "b"), Link(1e11, 0.0), Link(1e9, 0.0)), 1.0)
    assert links.send("first", 0, 2, 1e9, 0.0) == pytest.approx(1.0)
    assert links.send("second", 1, 2, 1e9, 0.0) == pytest.approx(2.0)


def test_a_ring_goes_at_the_rate_of_its_parts() -> None:
    """4 devices, 40 MB in one bucket: 6 steps of 10 MB at the 3 GB/s of that size."""
    assert ring_s(4e7, [CURVE], 4) == pytest.approx(6 * (1e7 / 3e9 + 1e-5))
    assert ring_s(4e7, [CURVE], 4, 100) > ring_s(4e7, [CURVE], 4)


def test_members_of_a_ring_on_one_host_leave_it_together() -> None:
    """Two devices of each host reach 1.6 GB/s, where one alone has 1 and the card carries 1.6."""
    link = Link(1e9, 0.0, (), card_bytes_per_s=1.6e9)
    network = Network(("a", "a", "b", "b"), Link(1e12, 0.0), link)
    both, leaving = all_reduce_seconds(8e8, 1, (0, 1, 2, 3), network)
    assert both == pytest.approx(2 * 3 / 4 * 8e8 / 1.6e9)
    assert dict(leaving) == {"a": pytest.approx(0.75), "b": pytest.approx(0.75)}
    alone, _ = all_reduce_seconds(8e8, 1, (0, 2), network)
    assert alone == pytest.approx(8e8 / 1e9)
    assert link.together(8).rate(1.0) == 1.6e9
    assert Link(1e9, 0.0).together(8) == Link(1e9, 0.0)


FILE = """
hosts:
  - {name: big1, kind: A100-40GB, count: 2}
  - {name: small1, kind: V100-16GB, count: 2}
links:
  inter_host: {gb_per_s: 2.4, latency_us: 30, card_gb_per_s: 6}
  pairs:
    - {hosts: [big*, small1], latency_us: 40, curve: {0.1: 0.8, 10: 2.1, 1000: 2.4}}
"""


def test_curves_pairs_and_cards_of_a_cluster_file() -> None:
    cluster = loads(FILE)
    assert cluster.inter_host == Link(2.4e9, 3e-5, (), 6e9)
    link = cluster.link(0, 2)
    assert link.bytes_per_s == 2.4e9  # of the largest message
    assert link.rate(1e7) == pytest.approx(2.1e9)
    again = loads(dumps(cluster))
    assert again.network == cluster.network


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[big*, small1]", "[big*, smal1]", "links.pairs[0]: no host is called 'smal1'"),
        ("gb_per_s: 2.4, latency_us: 30", "latency_us: 30", "a link needs `gb_per_s`"),
        ("curve: {0.1: 0.8,", "curve: {0: 0.8,", "must be more than 0"),
        ("latency_us: 40", "latency: 40", "unknown key 'latency'"),
    ],
)
def test_mistakes_in_links_are_named(before: str, after: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        loads(FILE.replace(before, after))


def test_a_plain_link_stays_what_it_was() -> None:
    cluster = Cluster.uniform(2)
    assert cluster.inter_host.curve == ()
    assert math.isclose(cluster.inter_host.seconds(6.25e9), 1.0, rel_tol=1e-4)
