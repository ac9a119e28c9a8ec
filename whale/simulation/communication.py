"""When messages arrive and all-reduces end, in simulated time. The emulation does the same on a
clock (`emulation/links.py`).

A message of n bytes over a link of rate r and latency l that is free at time t arrives at
t + n / r + l; the link is free again at t + n / r. The rate may depend on n (`cluster/network.py`).
Devices of one host have a link of their own for each direction of each pair; all messages that
leave a host share its network card, and so do all-reduces of gradients. Where one device does not
fill the card, a message occupies the device's outgoing link and the card each for its own time, and
arrives when it has left both.

An all-reduce takes the time of a ring over the slowest link of its group. A ring of k devices that
reduces n bytes in b buckets sends 2 (k - 1) / k n bytes over each of its links, in 2 (k - 1) steps
a bucket:

    T = 2 (k - 1) (n / k / rate + b latency)                                                     (1)

The gradients of a stage go out in b buckets while its last backward, from t - d to t, still runs.
Bucket i is ready at t - d + d i / b and takes T / b, so that the last one is there at

    max(t - d + d / b + T,  t + T / b)                                                           (2)

Members on one host leave it together where one of them does not fill the network card.

A group does one all-reduce after the other, and begins when the last of its members is ready: the
latest end that any member comes to by itself is the end for all. Where a ring leaves a host it
takes the network card of that host, after what was there before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from whale.cluster.network import Link, Network
from whale.plans.blocks import GRADIENTS_TOO, WEIGHTS_TOO
from whale.plans.buckets import bucket_size
from whale.plans.figures import Figures, ZeroFigures
from whale.plans.plan import Plan
from whale.plans.templates import stage_offsets
from whale.scheduling import Kind
from whale.scheduling.action import ENDS_BACKWARD


@dataclass(frozen=True)
class TimedMessage:
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

    def __init__(self, network: Network, factor: float, is_recorded: bool = True) -> None:
        """`is_recorded`: messages are noted."""
        self.is_recorded = is_recorded
        self.network = network
        self._factor = factor
        self._free: dict[tuple[int, int] | str, float] = {}
        self.messages: list[TimedMessage] = []

    def send(self, name: str, source: int, destination: int, num_bytes: float, now: float) -> float:
        """Returns when a message that is sent now arrives, and takes its link until it has left."""
        link = self.network.link(source, destination)
        host = self.network.hosts[source]
        seconds = self._factor * link.sending_s(num_bytes)
        if host == self.network.hosts[destination]:
            free = self._book((source, destination), seconds, now)
        else:
            free = self._book(host, self._factor * link.card_s(num_bytes), now)
            if link.card_bytes_per_s is not None:
                free = max(free, self._book((source, source), seconds, now))
        arrival = free + self._factor * link.latency_s
        if self.is_recorded:
            self.messages.append(
                TimedMessage(name, source, destination, num_bytes, now, free - seconds, arrival)
            )
        return arrival

    def book_card(self, host: str, seconds: float, since: float) -> float:
        """Takes the network card of a host for so long, not before `since`; returns when it is free
        again.
        """
        return self._book(host, seconds, since)

    def _book(self, key: tuple[int, int] | str, seconds: float, since: float) -> float:
        end = max(since, self._free.get(key, 0.0)) + seconds
        self._free[key] = end
        return end


@dataclass(frozen=True)
class AllReduce:
    """Gradients of the parameters that the same stages hold, reduced over all their ranks."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    seconds: float
    num_buckets: int
    leaving: tuple[tuple[str, float], ...] = ()
    """hosts that its ring leaves, and for how long it takes their network cards"""
    stages_by_rank: tuple[tuple[int, ...], ...] = ()
    """of each rank, its own stages of these, as its replica counts them; empty: all ranks count
    them alike
    """

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of which this rank may run some, whose gradients are reduced."""
        return self.stages_by_rank[self.ranks.index(rank)] if self.stages_by_rank else self.stages

    def first_ready(self, closed: float, last_backward_s: float) -> float:
        """When the first bucket can go, where the last backward of these stages on a rank ends at
        `closed`.
        """
        return closed - last_backward_s + last_backward_s / self.num_buckets

    def end(self, closed: float, last_backward_s: float, free: float) -> float:
        """End by line (2), where the group is free at `free`."""
        start = max(self.first_ready(closed, last_backward_s), free)
        return max(start + self.seconds, closed + self.seconds / self.num_buckets)


def ring_s(
    num_bytes: float, links: Sequence[Link], num_devices: int, num_buckets: int = 1
) -> float:
    """Seconds by line (1), over the slowest of these links."""
    if num_devices < 2:
        return 0.0
    # each step sends one of k parts of a bucket
    part_bytes = num_bytes / num_devices
    step_bytes = part_bytes / num_buckets
    rate = min(link.rate(step_bytes) for link in links)
    latency = max(link.latency_s for link in links)
    return 2 * (num_devices - 1) * (part_bytes / rate + num_buckets * latency)


def all_reduces_of(
    plan: Plan, figures: Figures, bucket_bytes: int, factor: float
) -> list[AllReduce]:
    """All all-reduces of gradients in a step, their times stretched by `factor`."""
    found = []
    for state in figures.states:
        for number, ranks in enumerate(state.groups(plan.ranks_of_stage)):
            trained_bytes = state.trained_bytes
            if not plan.is_uniform and state.part_bytes:
                trained_bytes = state.part_bytes[number][1]  # pieces between cuts differ in size
            group = figures.zero_of(ranks)
            if group is not None and group.level >= WEIGHTS_TOO:
                continue  # all its messages are inside forward and backward
            if len(ranks) > 1 and trained_bytes:
                size = bucket_size(trained_bytes, bucket_bytes)
                num_buckets = math.ceil(trained_bytes / size) if figures.overlaps else 1
                seconds, leaving = all_reduce_seconds(
                    trained_bytes, num_buckets, ranks, figures.network
                )
                if group is not None:
                    # an uneven ring waits for its largest part; from level 2 on only the gather
                    # of updated weights is left, as long as a half
                    seconds *= group.most * len(ranks) / (group.level)
                cards = tuple((host, factor * time) for host, time in leaving)
                own = () if plan.is_uniform else _own_stages(plan, state.stages, ranks)
                found.append(
                    AllReduce(state.stages, ranks, factor * seconds, num_buckets, cards, own)
                )
    return found


def _own_stages(
    plan: Plan, stages: Sequence[int], ranks: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Those of these stages of the whole plan that each rank runs, as its replica counts them."""
    first_stages = stage_offsets(plan)
    found = []
    for rank in ranks:
        first = first_stages[plan.template_of_rank(rank)]
        own = plan.of_rank(rank).stages_of_rank(rank)
        found.append(tuple(stage for stage in own if first + stage in stages))
    return tuple(found)


def messages_of_blocks(
    group: ZeroFigures, stage: int, kind: Kind, figures: Figures
) -> tuple[float, int] | None:
    """Seconds of gathers and reduce-scatters in an action of a stage under ZeRO, and in how many
    blocks they go; None where there are none. Each is half of an all-reduce by line (1), with parts
    as long as the largest.
    """
    place = group.stages.index(stage)
    num_bytes = 0
    if group.level >= WEIGHTS_TOO and kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
        num_bytes += group.stage_bytes[place]
    if group.level >= GRADIENTS_TOO and kind in ENDS_BACKWARD:
        num_bytes += group.stage_trained_bytes[place]
    if not num_bytes:
        return None
    num_blocks = max(1, group.num_blocks // len(group.stages))
    as_even = num_bytes * group.most * len(group.ranks)
    seconds, _ = all_reduce_seconds(as_even, num_blocks, group.ranks, figures.network)
    return seconds / 2, num_blocks


def all_reduce_seconds(
    num_bytes: float, num_buckets: int, ranks: Sequence[int], network: Network
) -> tuple[float, list[tuple[str, float]]]:
    """Seconds by line (1) for these ranks, or as measured where an all-reduce was; and (host,
    seconds on its card) where the ring leaves a host.
    """
    pairs = list(zip(ranks, (*ranks[1:], ranks[0])))
    members = Counter(network.hosts[rank] for rank in ranks)
    links = []
    for a, b in pairs:
        host_a = network.hosts[a]
        host_b = network.hosts[b]
        link = network.link(a, b)
        if host_a != host_b:
            # libraries make several rings, which leave a host by different devices
            link = link.together(min(members[host_a], members[host_b]))
        links.append(link)
    if network.all_reduce is not None:
        # the measured latency is that of all steps of a ring over all ranks
        latency_s = network.all_reduce.latency_s / (2 * (len(network.hosts) - 1))
        links = [Link(network.all_reduce.bytes_per_s, latency_s)]
    one_link_bytes = 2 * (len(ranks) - 1) / len(ranks) * num_bytes
    leaving = [
        (network.hosts[a], network.link(a, b).card_s(one_link_bytes))
        for a, b in pairs
        if network.hosts[a] != network.hosts[b]
    ]
    return ring_s(num_bytes, links, len(ranks), num_buckets), leaving
