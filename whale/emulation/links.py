"""Messages take the time of the emulated link: a thread holds each one back until it would have
arrived.

A message of n bytes over a link of rate r and latency l that is free at time t arrives at  t + n /
r + l; the link is free again at t + n / r. Devices of one host have a link of their own for each
direction of each pair; all messages that leave a host share its network card, whose next free time
lies in a file that all processes map.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor

from whale.cluster.cluster import Cluster
from whale.distributed.message import Message
from whale.distributed.ranks import Ranks
from whale.distributed.transport import Transport
from whale.emulation.pace import sleep_until

_NUMBER = struct.Struct("d")


class NetworkCards:
    """When the network card of each host is free, shared by the processes of one machine."""

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
        """`factor`: all times of the emulation are stretched by it. `cards`: None where all devices
        are on one host.
        """
        self.num_bytes: Callable[[Message], float] = lambda message: message.num_bytes
        """of what a message stands for"""
        super().__init__(ranks, pairs, share_memory)
        self._cluster = cluster
        self._cards = cards
        self._factor = factor
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
        """When a message that is sent now arrives."""
        own = self._cluster.devices[self.ranks.rank].host
        other = self._cluster.devices[peer].host
        link = self._cluster.link(self.ranks.rank, peer)
        on_the_way = self._factor * num_bytes / link.bytes_per_s
        if own == other or self._cards is None:
            self._free[peer] = max(time.perf_counter(), self._free.get(peer, 0.0)) + on_the_way
            return self._free[peer] + self._factor * link.latency_s
        return self._cards.book(self._host_number[own], on_the_way) + self._factor * link.latency_s

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
