"""Messages take the time of the emulated link: a thread holds each one back until it would have
arrived.

A message of n bytes over a link of rate r and latency l that is free at time t arrives at  t + n /
r + l; the link is free again at t + n / r. Devices of one host have a link of their own for each
direction of each pair; all messages that leave a host share its network card, whose next free time
lies in a file that all processes map.

An all-reduce of gradients takes the time of `simulation/communication.py`. The members of a group
agree on the latest end that any of them comes to by itself; a rank whose ring leaves its host takes
the card of that host.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from whale.cluster.cluster import Cluster
from whale.distributed.message import Message
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.emulation.pace import sleep_until
from whale.simulation.communication import AllReduce

_NUMBER = struct.Struct("d")


class NetworkCards:
    """A table of when the network card of each host is free, shared by the processes of one
    machine.
    """

    def __init__(self, path: Path, num_hosts: int) -> None:
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), num_hosts * _NUMBER.size)

    @staticmethod
    def create(path: Path, num_hosts: int) -> None:
        path.write_bytes(bytes(num_hosts * _NUMBER.size))

    def book(self, host: int, seconds: float, since: float | None = None) -> float:
        """Takes the card for so long, after those before; when it is free again, by `perf_counter`,
        which all processes share.

        `since`: the earliest start; None: now.
        """
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            place = host * _NUMBER.size
            earliest = time.perf_counter() if since is None else since
            end = max(earliest, _NUMBER.unpack_from(self._map, place)[0]) + seconds
            _NUMBER.pack_into(self._map, place, end)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return end


class EmulatedTransport(Transport):
    """Real messages, sent when they would have arrived."""

    def __init__(
        self,
        ranks: Ranks,
        pairs: Iterable[tuple[int, int]],
        cluster: Cluster,
        cards: NetworkCards | None,
        factor: float,
        share_memory: bool = True,
    ) -> None:
        """`cards`: None where all devices are on one host."""
        self.factor = factor
        """all times of the emulation are stretched by it; may change between two steps"""
        self.num_bytes: Callable[[Message], float] = lambda message: message.num_bytes
        """of what a message stands for"""
        super().__init__(ranks, pairs, share_memory)
        self._cluster = cluster
        self._cards = cards
        self._host_number = {host: place for place, host in enumerate(cluster.hosts)}
        self._free: dict[int, float] = {}
        """for each peer on this host"""
        self._waiting: list[tuple[float, int, Tensor, int, int]] = []
        self._count = itertools.count()
        self._change = threading.Condition()
        self._failure: BaseException | None = None
        threading.Thread(target=self._deliver, name="whale-emulated-links", daemon=True).start()

    def send(self, tensor: Tensor, message: Message) -> None:
        arrival = self._book(message.peer, self.num_bytes(message))
        with self._change:
            if self._failure is not None:
                raise self._failure
            heapq.heappush(
                self._waiting,
                (arrival, next(self._count), tensor, message.peer, message.tag + self.epoch),
            )
            self._change.notify()

    def _book(self, peer: int, num_bytes: float) -> float:
        """Time at which a message that is sent now arrives, in seconds of `perf_counter`."""
        own = self._cluster.devices[self.ranks.rank].host
        other = self._cluster.devices[peer].host
        link = self._cluster.link(self.ranks.rank, peer)
        on_the_way = self.factor * link.sending_s(num_bytes)
        latency_s = self.factor * link.latency_s
        if own == other or self._cards is None:
            self._free[peer] = max(time.perf_counter(), self._free.get(peer, 0.0)) + on_the_way
            return self._free[peer] + latency_s
        through = self._cards.book(self._host_number[own], self.factor * link.card_s(num_bytes))
        if link.card_bytes_per_s is not None:  # this device alone does not fill the card
            out = self.ranks.rank
            self._free[out] = max(time.perf_counter(), self._free.get(out, 0.0)) + on_the_way
            through = max(through, self._free[out])
        return through + latency_s

    def _deliver(self) -> None:
        while True:
            with self._change:
                while not self._waiting:
                    self._change.wait()
                arrival = self._waiting[0][0]
                left = arrival - time.perf_counter()
                if left > 1e-3:
                    self._change.wait(left - 5e-4)  # an earlier one may come in meanwhile
                    continue
                _, _, tensor, peer, tag = heapq.heappop(self._waiting)
                self._in_hand = True
            sleep_until(arrival)
            try:
                self._issue(tensor, peer, tag)
            except BaseException as error:
                self._failure = error
                return
            finally:
                with self._change:
                    self._in_hand = False
                    self._change.notify_all()

    _in_hand = False

    def drain(self) -> None:
        with self._change:
            while (self._waiting or self._in_hand) and self._failure is None:
                self._change.wait(1.0)
        super().drain()


class AllReduceClock:
    """The clock that says when the all-reduces of one rank would be over."""

    def __init__(
        self,
        all_reduces: Sequence[AllReduce],
        ranks: Ranks,
        own_stages: Sequence[int],
        cluster: Cluster,
        cards: NetworkCards | None,
    ) -> None:
        """All ranks make it together, from the same all-reduces."""
        for members in sorted({each.ranks for each in all_reduces}):
            # on a grid the parts of a weight have groups that nothing else asks for
            ranks.group(members)
        self._own: dict[AllReduce, set[int]] = {}
        for each in all_reduces:
            if ranks.rank in each.ranks:
                self._own[each] = set(each.stages_of(ranks.rank)) & set(own_stages)
        self._ranks = ranks
        self._cards = cards
        self._host = cluster.devices[ranks.rank].host
        self._host_number = cluster.hosts.index(self._host)
        self._leaves = {each: _leaves_host(each, ranks.rank, cluster) for each in self._own}
        self._open: dict[AllReduce, set[int]] = {}
        self._free: dict[tuple[int, ...], float] = {}
        self.last_backward_s: Mapping[int, float] = {}
        """of each stage of this rank; set with its program"""

    def begin(self) -> None:
        self._open = {each: set(stages) for each, stages in self._own.items()}
        self._free = {}

    def close_stage(self, stage: int, now: float) -> None:
        """Starts the all-reduces that waited for the gradients of this stage only."""
        for each, stages in self._open.items():
            if stage in stages:
                stages.discard(stage)
                if not stages:
                    self._free[each.ranks] = self._end(
                        each, now, self.last_backward_s.get(stage, 0.0)
                    )

    def _end(self, each: AllReduce, closed: float, last_backward_s: float) -> float:
        """End of the all-reduce as far as this rank knows, in seconds of `perf_counter`."""
        free = self._free.get(each.ranks, 0.0)
        end = each.end(closed, last_backward_s, free)
        if self._cards is not None and self._leaves[each]:
            seconds = dict(each.leaving)[self._host]
            end = max(
                end,
                self._cards.book(
                    self._host_number, seconds, max(each.first_ready(closed, last_backward_s), free)
                ),
            )
        return end

    def finish(self) -> None:
        """Returns when all all-reduces would be over; the members of each group agree on the
        latest end.
        """
        for ranks in sorted(self._free):
            end = torch.tensor([self._free[ranks]], dtype=torch.float64)
            dist.all_reduce(end, op=dist.ReduceOp.MAX, group=self._ranks.group(ranks))
            sleep_until(float(end))


def _leaves_host(each: AllReduce, rank: int, cluster: Cluster) -> bool:
    """Whether the next device of the ring is on another host."""
    after = each.ranks[(each.ranks.index(rank) + 1) % len(each.ranks)]
    return cluster.devices[rank].host != cluster.devices[after].host
