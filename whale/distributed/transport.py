"""Point-to-point messages: posted ahead, never blocking compute, let go when a later message shows
that they have arrived.

gloo matches messages by tag. Those of accelerators match by order inside a communicator, so there
each directed pair of ranks has its own, and both sides use it in the order of the sender's program
(`scheduling` proves that the receiver's order is the same). CPU ranks on one host hand messages
over through memory (`distributed/same_host.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from whale.distributed.message import NUM_EPOCHS, Message
from whale.distributed.ranks import Ranks
from whale.distributed.same_host import OutgoingRing, connect
from whale.distributed.same_host_collectives import SameHostCollectives
from whale.dtypes import as_moved

MOST_EXCHANGING = 16
"""ranks that exchange numbers through memory, each with each"""
FIRST_EXCHANGE = 2**40
"""tags of these, beyond those of all messages"""
FULL_RING_S = 1e-4
"""how long to wait before looking again whether a full ring has free bytes"""
GLOO_THREAD = "gloo_tcp_loop"
"""what gloo calls the thread that reads from its sockets"""


class Arrival:
    """A message on its way in."""

    __slots__ = ("buffer", "description", "peer", "tag", "work")

    def __init__(
        self, work: dist.Work | None, buffer: Tensor, peer: int, tag: int, description: str
    ) -> None:
        """`work`: None for a message through memory, which is read when it is waited for."""
        self.work = work
        self.buffer = buffer
        self.peer = peer
        self.tag = tag
        self.description = description


class Transport:
    """Sends and receives of one rank, with the time spent waiting."""

    def __init__(
        self, ranks: Ranks, pairs: Iterable[tuple[int, int]], share_memory: bool = True
    ) -> None:
        """`pairs`: (source, destination) ranks that may talk, the same list on every rank; more of
        them can be connected later. `share_memory`: where it is possible.
        """
        self.ranks = ranks
        pairs = sorted(set(pairs))
        self.epoch = 0
        """part of every tag, another one in each pass over an action list: a message that a failed
        step left behind is never taken for one of a later step"""
        self.waited_s = 0.0
        self._outgoing: dict[tuple[int, int], tuple[dist.Work, Tensor]] = {}
        """by peer and tag: messages that are not known to have arrived"""
        self._to: dict[int, tuple[dist.ProcessGroup, int]] = {}
        """for each peer: the group that carries messages to it, and its rank in there"""
        self._from: dict[int, tuple[dist.ProcessGroup, int]] = {}
        self._num_passes = 0
        self._exchange: Callable[[], Tensor] | None = None
        everyone = (
            itertools.permutations(range(ranks.num_ranks), 2)
            if ranks.num_ranks <= MOST_EXCHANGING
            else ()
        )
        self._rings_to, self._rings_from = connect(ranks, [*pairs, *everyone], share_memory)
        self.collectives = SameHostCollectives(self)
        self._connected: set[tuple[int, int]] = set()
        self.connect(pairs)
        if ranks.backend.has_tags:
            _let_compute_go_first()

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Makes the channels of these (source, destination) ranks that are not there yet. All ranks
        call it with the same pairs, and make them in one order.
        """
        for source, destination in sorted(set(pairs) - self._connected):
            self._connected.add((source, destination))
            group = self._channel(source, destination)
            if self.ranks.rank == source:
                self._to[destination] = (group, dist.get_group_rank(group, destination))
            elif self.ranks.rank == destination:
                self._from[source] = (group, dist.get_group_rank(group, source))

    def _channel(self, source: int, destination: int) -> dist.ProcessGroup:
        """The group of one direction of a pair: where messages are matched by order, one of its
        own, so that a late receive never blocks a send.
        """
        assert self.ranks.world is not None
        if self.ranks.backend_among((source, destination)).has_tags:
            return self.ranks.world
        group = self.ranks.new_group((source, destination))
        assert group is not None
        # such a backend connects two ranks at their first message and blocks both: done here in one
        # order, never inside a step
        greeting = torch.zeros(1, device=self.ranks.device.name)
        if self.ranks.rank == source:
            dist.send(greeting, destination, group=group)
        elif self.ranks.rank == destination:
            dist.recv(greeting, source, group=group)
        return group

    def begin(self) -> None:
        """Start of a pass over an action list; every rank makes the same passes."""
        self._num_passes += 1
        self.epoch = self._num_passes % NUM_EPOCHS
        self.collectives.begin(self._num_passes)
        for ring in self._rings_from.values():
            ring.forget(
                lambda tag: (
                    self.collectives.is_old(tag)
                    or (tag < FIRST_EXCHANGE and tag % NUM_EPOCHS != self.epoch)
                )
            )

    def send(self, tensor: Tensor, message: Message) -> None:
        """Issues the message and returns; the tensor is held until it has left."""
        self._issue(tensor, message.peer, message.tag + self.epoch)

    def _issue(self, tensor: Tensor, peer: int, tag: int) -> None:
        ring = self._rings_to.get(peer)
        if ring is not None:
            ring.send(tensor, tag)
            return
        group, place = self._to[peer]
        self._outgoing[peer, tag] = (group.send([as_moved(tensor)], place, tag), tensor)

    def post(self, buffer: Tensor, message: Message, description: str) -> Arrival:
        tag = message.tag + self.epoch
        work = None
        if message.peer not in self._rings_from:
            group, place = self._from[message.peer]
            work = group.recv([as_moved(buffer)], place, tag)
        return Arrival(work, buffer, message.peer, tag, description)

    def is_through_memory(self, peer: int) -> bool:
        """Whether messages of that rank are read when they are waited for, so that nothing is
        gained by posting them.
        """
        return peer in self._rings_from

    def wait(self, arrival: Arrival, spin_s: float = 0.0) -> None:
        start = time.perf_counter()
        try:
            if arrival.work is None:
                self._rings_from[arrival.peer].wait(arrival.buffer, arrival.tag, spin_s)
            else:
                arrival.work.wait()
        except (RuntimeError, OSError) as error:
            if self.ranks.device.has_failed():
                raise  # an error of this rank's own device, which happens to be noticed here
            raise RuntimeError(
                f"rank {self.ranks.rank} waited {time.perf_counter() - start:.0f} s for "
                f"{arrival.description} from rank {arrival.peer}: "
                f"that rank is gone or stuck ({str(error).splitlines()[0]})"
            ) from error
        self.waited_s += time.perf_counter() - start

    def exchange(self, numbers: Tensor) -> Callable[[], Tensor] | None:
        """Sends every rank these numbers, once in a pass; what is given back waits for theirs:
        (ranks, numbers), the same everywhere.

        None where some rank cannot be reached through memory. The last exchange is over before the
        next begins, so that nothing piles up.
        """
        if len(self._rings_from) < self.ranks.num_ranks - 1:
            return None
        if self._exchange is not None:
            self._exchange()
        everyone = numbers.repeat(self.ranks.num_ranks, 1)
        tag = FIRST_EXCHANGE + self._num_passes
        for ring in self._rings_to.values():
            ring.send(numbers, tag)
        self.push_rings(self._rings_to)
        left = [
            Arrival(None, everyone[peer], peer, tag, "loss and gradient norm")
            for peer in self._rings_from
        ]

        def finish() -> Tensor:
            while left:
                self.wait(left[-1])
                left.pop()
            return everyone

        self._exchange = finish
        return finish

    def reaches_through_memory(self, ranks: Iterable[int]) -> bool:
        """Whether all of these, of which this rank is one, can exchange numbers through
        memory; all of them find the same.
        """
        others = set(ranks) - {self.ranks.rank}
        return (
            self.ranks.num_ranks <= MOST_EXCHANGING
            and others <= self._rings_to.keys()
            and others <= self._rings_from.keys()
        )

    def ring_to(self, peer: int) -> OutgoingRing:
        """The ring to a rank that is reached through memory."""
        return self._rings_to[peer]

    def send_through_memory(self, tensor: Tensor, peer: int, tag: int, enough_bytes: int) -> None:
        """Sends with a tag that no message has. Where the ring is full it waits, and takes in what
        others send: their rings may be full, too.
        """
        start = time.perf_counter()
        while not self._rings_to[peer].send_if_free(tensor, tag, enough_bytes):
            gone = [other for other, ring in self._rings_from.items() if not ring.take_in()]
            waited_s = time.perf_counter() - start
            if peer in gone or waited_s > self.ranks.timeout.total_seconds():
                raise RuntimeError(
                    f"rank {self.ranks.rank} waited {waited_s:.0f} s for free bytes in the memory "
                    f"that it shares with rank {peer}: that rank is gone or stuck"
                )
            for ring in self._rings_to.values():
                ring.flush()
            time.sleep(FULL_RING_S)

    def take_through_memory(
        self, buffer: Tensor, peer: int, tag: int, description: str, spin_s: float = 0.0
    ) -> None:
        """Waits for the message of this tag, `spin_s` seconds of it awake, and fills the buffer."""
        self.wait(Arrival(None, buffer, peer, tag, description), spin_s)

    def push_rings(self, peers: Iterable[int]) -> None:
        """Returns when all packets to these have left: this rank may not come back for long."""
        for peer in peers:
            self._rings_to[peer].push()

    def retire(self, message: Message) -> None:
        """Lets go of a message of this pass that has arrived. Nothing is waited for: gloo cannot be
        asked whether a message has left.
        """
        outgoing = self._outgoing.pop((message.peer, message.tag + self.epoch), None)
        if outgoing is not None:
            outgoing[0].wait()

    def drain(self) -> None:
        """End of a pass: everything must have left."""
        for ring in self._rings_to.values():
            ring.drain()
        for work, _ in self._outgoing.values():
            work.wait()
        self._outgoing.clear()


def _let_compute_go_first() -> None:
    """gloo's thread may run beside the rank's own, never in place of it.

    It only tries the lock of a connection, and asks again and again while the rank holds it to
    send. On a core that both share it took the core away from the rank right there, and asked for
    the rest of its time slice: 0.3 ms for each action of a pipeline of small chunks, and a third of
    a step of a small ResNet, whose batch norms sum over devices.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return  # not Linux
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (thread / "comm").read_text().strip() == GLOO_THREAD and os.sched_getscheduler(
                int(thread.name)
            ) == os.SCHED_OTHER:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
