"""What connects the devices: which host each rank is on, and the links inside and between hosts.

Sending n bytes over a link takes  latency + n / rate(n)  seconds. A link is one rate, or a curve:
points of (bytes of a message, rate), straight in the logarithm of the bytes between them and flat
outside, as measured curves are.

All messages that leave a host share its network card. One GPU alone may not fill the card: then
`card_bytes_per_s` says what all of them together reach, and a message of n bytes keeps its GPU for
n / rate(n) and the card for n / card rate.

A message between two hosts takes the link of that pair, else the slower of the two hosts' links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property


@dataclass(frozen=True)
class Link:
    """What connects two devices."""

    bytes_per_s: float
    """rate of large messages"""
    latency_s: float
    curve: tuple[tuple[float, float], ...] = ()
    """(bytes of a message, bytes per second), messages of rising size; empty: one rate for all"""
    card_bytes_per_s: float | None = None
    """what all devices of a host reach together; None: what one of them does"""

    def rate(self, num_bytes: float) -> float:
        """Bytes per second of a message of this size."""
        if not self.curve:
            return self.bytes_per_s
        first_bytes, first_rate = self.curve[0]
        if num_bytes <= first_bytes:
            return first_rate
        for (small, slow), (large, fast) in zip(self.curve, self.curve[1:]):
            if num_bytes <= large:
                share = math.log(num_bytes / small) / math.log(large / small)
                return slow + share * (fast - slow)
        return self.curve[-1][1]

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.latency_s + self.sending_s(num_bytes)

    def sending_s(self, num_bytes: float) -> float:
        """How long a message keeps the link of its sender."""
        return num_bytes / self.rate(num_bytes)

    def card_s(self, num_bytes: float) -> float:
        """How long a message keeps the network card of its host: less than its sender where one
        device does not fill the card.
        """
        if self.card_bytes_per_s is None:
            return self.sending_s(num_bytes)
        # small messages reach as much less of the card as they do of the link
        fraction = self.rate(num_bytes) / self.bytes_per_s
        return num_bytes / (fraction * self.card_bytes_per_s)

    def together(self, num_devices: int) -> Link:
        """The link as so many devices of a host have it who send at the same time, all of them
        together: more than one has, up to what the card carries.
        """
        if self.card_bytes_per_s is None or num_devices < 2:
            return self
        factor = max(1.0, min(float(num_devices), self.card_bytes_per_s / self.bytes_per_s))
        curve = tuple((size, factor * rate) for size, rate in self.curve)
        return Link(factor * self.bytes_per_s, self.latency_s, curve, self.card_bytes_per_s)


def slower(a: Link, b: Link) -> Link:
    """A link that is at no size faster than either of two."""
    if a == b:
        return a
    sizes = sorted({size for link in (a, b) for size, _ in link.curve})
    cards = [link.card_bytes_per_s or link.bytes_per_s for link in (a, b)]
    has_card = a.card_bytes_per_s is not None or b.card_bytes_per_s is not None
    return Link(
        min(a.bytes_per_s, b.bytes_per_s),
        max(a.latency_s, b.latency_s),
        tuple((size, min(a.rate(size), b.rate(size))) for size in sizes),
        min(cards) if has_card else None,
    )


@dataclass(frozen=True)
class PairLink:
    """The link between hosts of two names, in both directions; a name may be a pattern (`gpu*`)."""

    hosts: tuple[str, str]
    link: Link

    def connects(self, a: str, b: str) -> bool:
        """Whether it is the link between these two hosts."""
        first, second = self.hosts
        there = fnmatchcase(a, first) and fnmatchcase(b, second)
        return there or (fnmatchcase(b, first) and fnmatchcase(a, second))


@dataclass(frozen=True)
class HostLinks:
    """Links of one host that differ from the others'; None: as everywhere."""

    host: str
    intra_host: Link | None = None
    inter_host: Link | None = None


@dataclass(frozen=True)
class Network:
    """All links of a cluster, without its devices: small enough to be part of a plan."""

    hosts: tuple[str, ...]
    """by rank"""
    intra_host: Link
    inter_host: Link
    host_links: tuple[HostLinks, ...] = ()
    """hosts with links of their own"""
    all_reduce: Link | None = None
    """measured all-reduce over all devices: latency, and the bytes per second that each device
    sends; None: not measured
    """
    pair_links: tuple[PairLink, ...] = ()
    """links between certain hosts; the first that connects two hosts is theirs"""

    @cached_property
    def _known(self) -> dict[tuple[str, str], Link]:
        return {}  # links between hosts, as they are asked for

    @cached_property
    def _own_links(self) -> dict[str, HostLinks]:
        return {links.host: links for links in self.host_links}

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The link between two ranks."""
        host_a = self.hosts[rank_a]
        host_b = self.hosts[rank_b]
        if (host_a, host_b) not in self._known:
            self._known[host_a, host_b] = self._between(host_a, host_b)
        return self._known[host_a, host_b]

    def _between(self, host_a: str, host_b: str) -> Link:
        own_a, own_b = (self._own_links.get(host, HostLinks(host)) for host in (host_a, host_b))
        if host_a == host_b:
            return own_a.intra_host or self.intra_host
        for pair in self.pair_links:
            if pair.connects(host_a, host_b):
                return pair.link
        return slower(own_a.inter_host or self.inter_host, own_b.inter_host or self.inter_host)
