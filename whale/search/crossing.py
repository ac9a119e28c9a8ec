"""What one micro-batch sends from the devices of a stage to those of the next, as far as estimates
go: both groups cut its samples evenly, and each pair of devices sends what lies in both their
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale.cluster.network import Link, Network

ROUNDING = 1e-12


@dataclass(frozen=True)
class GroupMessages:
    """The messages between two groups of devices, by the links that they take."""

    links: tuple[tuple[float, Link], ...]
    """(largest part of the micro-batch that a pair of devices sends, their link)"""
    cards: tuple[tuple[str, float, Link], ...]
    """(host, part of the micro-batch that leaves or enters it, link): activations leave one host
    and their gradients the other, so both are counted
    """


@dataclass(frozen=True)
class Boundary:
    """Messages between two stages of all model replicas, each with its samples."""

    messages: tuple[tuple[float, Link], ...]
    """(samples, link) of messages that differ"""
    card_seconds: dict[str, float]
    """by host: seconds on its network card for a byte of each sample"""

    def seconds(self, sample_bytes: float) -> float:
        """Seconds of the slowest message: its own, or those of all that leave the same host, which
        are half of what its card sends: the others are gradients on their way back.
        """
        slowest = 0.5 * sample_bytes * max(self.card_seconds.values(), default=0.0)
        for samples, link in self.messages:
            slowest = max(slowest, link.seconds(samples * sample_bytes))
        return slowest

    def link_seconds(self, sample_bytes: float) -> float:
        """Seconds that the slowest message takes its link, on which the next one waits."""
        return max(
            (link.sending_s(samples * sample_bytes) for samples, link in self.messages), default=0.0
        )


def boundary_of(crossings: Sequence[tuple[GroupMessages, int]]) -> Boundary:
    """What several replicas send: (messages of one of them, its samples of a micro-batch) each."""
    messages: dict[tuple[float, Link], None] = {}
    cards: dict[str, float] = {}
    for crossing, samples in crossings:
        for part, link in crossing.links:
            messages[part * samples, link] = None
        for host, part, link in crossing.cards:
            rate = link.card_bytes_per_s or link.bytes_per_s
            cards[host] = cards.get(host, 0.0) + part * samples / rate
    return Boundary(tuple(messages), cards)


def group_messages(here: Sequence[int], there: Sequence[int], network: Network) -> GroupMessages:
    """What goes from one group of ranks to another one."""
    largest: dict[Link, float] = {}
    leaving: dict[tuple[str, str], float] = {}
    links: dict[tuple[str, str], Link] = {}
    for place, source in enumerate(here):
        start = place / len(here)
        end = (place + 1) / len(here)
        first = int(start * len(there))
        for other in range(first, len(there)):
            begin = max(start, other / len(there))
            stop = min(end, (other + 1) / len(there))
            if begin >= end - ROUNDING:
                break
            if stop - begin <= ROUNDING:
                continue
            target = there[other]
            link = network.link(source, target)
            largest[link] = max(largest.get(link, 0.0), stop - begin)
            hosts = (network.hosts[source], network.hosts[target])
            if hosts[0] != hosts[1]:
                leaving[hosts] = leaving.get(hosts, 0.0) + stop - begin
                links[hosts] = link
    cards = []
    for hosts, part in leaving.items():
        cards += [(host, part, links[hosts]) for host in hosts]
    return GroupMessages(tuple((part, link) for link, part in largest.items()), tuple(cards))
