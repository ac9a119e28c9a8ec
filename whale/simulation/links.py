"""When messages arrive, in simulated time.

A message of n bytes over a link of rate r and latency l that is free at time t arrives at  t + n /
r + l; the link is free again at t + n / r. Devices of one host have a link of their own for each
direction of each pair; all messages that leave a host share its network card, and so do gradient
sums. The emulation does the same on a clock (`emulation/links.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.cluster.network import Network


@dataclass(frozen=True)
class Message:
    """One message, from the moment at which it is sent until it has arrived."""

    name: str
    source: int
    destination: int
    num_bytes: float
    sent_s: float
    start_s: float
    """its link was free"""
    arrival_s: float


class Links:
    """The links of a cluster and when each is free."""

    def __init__(self, network: Network, factor: float) -> None:
        self.network = network
        self._factor = factor
        self._free: dict[tuple[int, int] | str, float] = {}
        self.messages: list[Message] = []

    def send(self, name: str, source: int, destination: int, num_bytes: float, now: float) -> float:
        """When a message that is sent now arrives."""
        link = self.network.link(source, destination)
        host = self.network.hosts[source]
        key = (source, destination) if host == self.network.hosts[destination] else host
        seconds = self._factor * num_bytes / link.bytes_per_s
        free = self._book(key, seconds, now)
        arrival = free + self._factor * link.latency_s
        self.messages.append(
            Message(name, source, destination, num_bytes, now, free - seconds, arrival)
        )
        return arrival

    def book_card(self, host: str, seconds: float, since: float) -> float:
        """Takes the network card of a host for so long, not before `since`; when it is
        free again.
        """
        return self._book(host, seconds, since)

    def _book(self, key: tuple[int, int] | str, seconds: float, since: float) -> float:
        end = max(since, self._free.get(key, 0.0)) + seconds
        self._free[key] = end
        return end
