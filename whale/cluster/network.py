"""What connects the devices: which host each rank is on, and the links inside and between hosts.

Sending n bytes over a link takes  latency + n / rate  seconds. A message between two hosts takes
the slower of their two links.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Link:
    """What connects two devices."""

    bytes_per_s: float
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


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
    """measured sum over all devices: latency, and the bytes per second that each device sends;
    None: not measured
    """

    @cached_property
    def _own_links(self) -> dict[str, HostLinks]:
        return {links.host: links for links in self.host_links}

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The link between two ranks."""
        host_a = self.hosts[rank_a]
        host_b = self.hosts[rank_b]
        own_a, own_b = (self._own_links.get(host, HostLinks(host)) for host in (host_a, host_b))
        if host_a == host_b:
            return own_a.intra_host or self.intra_host
        a = own_a.inter_host or self.inter_host
        b = own_b.inter_host or self.inter_host
        return (
            a if a == b else Link(min(a.bytes_per_s, b.bytes_per_s), max(a.latency_s, b.latency_s))
        )
