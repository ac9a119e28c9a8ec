"""Messages between CPU ranks of one host, through memory: no thread in between, at most one process
is woken up. An action of a pipeline takes 0.21 instead of 0.42 to 0.47 ms of a rank's CPU time
(docs/log.md).

gloo wakes a thread of the sender when the receive is posted, one of the receiver when the message
comes, and that wakes the one who waits. Here each directed pair of ranks has a Unix socket and a
block of shared memory (the ring):

    small tensor     one packet:  header | bytes
    larger tensor    copied into the ring, and one packet:  header with its place; the receiver
                     copies it out and moves `consumed` on
    full ring        by gloo after all, and one packet that says so; parts of all-reduces wait for
                     free bytes, and take in what came meanwhile

    ring:   consumed (8 bytes) | ..... free ..... | taken, not yet consumed | ..... free .....

A sender of messages never blocks: packets that the socket does not take now wait in a list. What
was sent belongs to the receiver: the sender's tensor is free at once. A ring that is empty is used
from its beginning, and by all-reduces as soon as its beginning is free for a few parts, so that few
of its bytes are ever touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from whale.distributed.hub import Process
from whale.distributed.ranks import Ranks
from whale.dtypes import as_moved

HEADER = struct.Struct("qqq")
"""tag, bytes, and where they are: INLINE, BY_GROUP, or a position in the ring"""
INLINE = -1
BY_GROUP = -2
INLINE_BYTES = 1024
"""larger tensors go through the ring: a socket holds some hundred small packets, or few large ones
"""
RING_BYTES = 32 * 1024**2
"""of each directed pair; only what is used takes memory"""
RING_START = 64
"""`consumed` has a cache line of its own"""
SOCKET_BYTES = 1024**2
"""asked for; Linux gives what its administrator allows"""
GREETING = struct.Struct("q")
_COUNT = struct.Struct("Q")


class OutgoingRing:
    """The ring from this rank to another one on its host."""

    def __init__(
        self, connection: socket.socket, ring: mmap.mmap, group: dist.ProcessGroup, peer: int
    ) -> None:
        self._connection = connection
        self._ring = ring
        self._group = group
        self._peer = peer
        self._memory = _address(ring) + RING_START
        self._taken = 0  # bytes of the ring, counted from the beginning of the job
        self._begin = 0  # all before was consumed
        self._unsent: deque[bytes] = deque()
        self._by_group: list[tuple[dist.Work, Tensor]] = []
        self._lock = threading.Lock()  # an emulated link sends from a thread

    def send(self, tensor: Tensor, tag: int) -> None:
        """The tensor must be contiguous."""
        with self._lock:
            if not self._send_through_memory(tensor, tag, RING_BYTES):
                self._by_group.append(
                    (self._group.send([as_moved(tensor)], self._peer, tag), tensor)
                )
                self._say(HEADER.pack(tag, tensor.nbytes, BY_GROUP))

    def send_if_free(self, tensor: Tensor, tag: int, enough_bytes: int) -> bool:
        """Whether enough bytes were free. The ring is used from its beginning again as soon as
        `enough_bytes` are free there.
        """
        with self._lock:
            return self._send_through_memory(tensor, tag, enough_bytes)

    def _send_through_memory(self, tensor: Tensor, tag: int, enough_bytes: int) -> bool:
        num_bytes = tensor.nbytes
        assert tensor.is_contiguous(), "its memory would be sent with what lies between its values"
        if num_bytes <= INLINE_BYTES:
            self._say(
                HEADER.pack(tag, num_bytes, INLINE) + ctypes.string_at(tensor.data_ptr(), num_bytes)
            )
            return True
        place = self._take(num_bytes, max(enough_bytes, num_bytes))
        if place is None:
            return False
        ctypes.memmove(self._memory + place % RING_BYTES, tensor.data_ptr(), num_bytes)
        self._say(HEADER.pack(tag, num_bytes, place))
        return True

    def _take(self, num_bytes: int, enough_bytes: int) -> int | None:
        """Where in the ring so many bytes are free in one piece; None where they are not."""
        (consumed,) = _COUNT.unpack_from(self._ring, 0)
        if consumed == self._taken:
            # empty: from its beginning, where bytes are in the caches
            self._taken = self._begin = self._taken + -self._taken % RING_BYTES
        place = self._taken
        free_from = max(consumed, self._begin)
        beginning = place + -place % RING_BYTES
        if (
            place % RING_BYTES + num_bytes > RING_BYTES
            or beginning + enough_bytes - free_from <= RING_BYTES
        ):
            place = beginning  # not over the end, and no further than needed
        if place + num_bytes - free_from > RING_BYTES:
            return None
        self._taken = place + num_bytes
        return place

    def _say(self, packet: bytes) -> None:
        self._unsent.append(packet)
        self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._connection.send(self._unsent[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._unsent.popleft()

    def flush(self) -> bool:
        """Gives the socket what it takes now; whether that was all."""
        if self._unsent:
            with self._lock:
                self._flush()
        return not self._unsent

    def push(self) -> None:
        """Returns when all packets have left. What goes by gloo may still be on its way: the peer
        may ask for it only later.
        """
        while not self.flush():
            threading.Event().wait(1e-4)

    def drain(self) -> None:
        """End of a pass: nothing is left here."""
        self.push()
        for work, _ in self._by_group:
            work.wait()
        self._by_group.clear()


class IncomingRing:
    """The ring from another rank of this host to this one."""

    def __init__(
        self,
        connection: socket.socket,
        ring: mmap.mmap,
        group: dist.ProcessGroup,
        peer: int,
        own: dict[int, OutgoingRing],
    ) -> None:
        """`own`: the rings out of this rank, which may still have something to send before it
        waits.
        """
        self._connection = connection
        self._ring = ring
        self._group = group
        self._peer = peer
        self._own = own
        self._packet = bytearray(HEADER.size + INLINE_BYTES)
        self._inline = _address(self._packet) + HEADER.size
        self._memory = _address(ring) + RING_START
        self._early: dict[int, bytearray | None] = {}
        """by tag: messages that came before the one that was waited for; None: it comes by gloo"""
        self._lock = threading.Lock()  # a loss may be read by another thread

    def wait(self, buffer: Tensor, tag: int, spin_s: float = 0.0) -> None:
        """Fills the buffer, which is contiguous, with the message of this tag. It looks again and
        again for `spin_s` seconds before it sleeps.
        """
        with self._lock:
            self._wait(buffer, tag, spin_s)

    def _wait(self, buffer: Tensor, tag: int, spin_s: float) -> None:
        while tag not in self._early:
            self._read(spin_s)
            if self._sort(buffer, tag):
                return
        known = self._early.pop(tag)
        if known is None:
            self._group.recv([as_moved(buffer)], self._peer, tag).wait()
        else:
            _fill(buffer, _address(known) if known else 0, len(known))

    def _sort(self, buffer: Tensor | None, tag: int | None) -> bool:
        """Fills the buffer with the packet that was read, if it has this tag, and keeps it
        otherwise.
        """
        got, num_bytes, place = HEADER.unpack_from(self._packet)
        if place == BY_GROUP:
            self._early[got] = None
            return False
        start = self._inline if place == INLINE else self._memory + place % RING_BYTES
        if buffer is not None and got == tag:
            _fill(buffer, start, num_bytes)
        else:
            self._early[got] = bytearray(ctypes.string_at(start, num_bytes))
        if place != INLINE:
            _COUNT.pack_into(self._ring, 0, place + num_bytes)
        return got == tag

    def take_in(self) -> bool:
        """Keeps what has come so far, without waiting; False: the other rank is gone."""
        if not self._lock.acquire(blocking=False):
            return True  # another thread reads
        try:
            while self._connection.recv_into(self._packet, 0, socket.MSG_DONTWAIT) > 0:
                self._sort(None, None)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        finally:
            self._lock.release()
        return False

    def forget(self, is_old: Callable[[int], bool]) -> None:
        """Lets go of messages that a failed step left behind, by their tags."""
        self._early = {tag: found for tag, found in self._early.items() if not is_old(tag)}

    def _read(self, spin_s: float) -> None:
        if spin_s and self._read_soon(spin_s):
            return
        while not all(outgoing.flush() for outgoing in self._own.values()):
            try:  # both sides may have a full socket: read and write in turns
                size = self._connection.recv_into(self._packet, 0, socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                threading.Event().wait(1e-4)
        else:
            # BlockingIOError after the time of SO_RCVTIMEO
            size = self._connection.recv_into(self._packet)
        if size == 0:
            raise RuntimeError("Connection closed by peer")

    def _read_soon(self, spin_s: float) -> bool:
        """Whether a packet came within so many seconds, of which others may use the core."""
        end = time.perf_counter() + spin_s
        while time.perf_counter() < end:
            try:
                # nothing in it: the other rank is gone, and the wait that follows says so
                return self._connection.recv_into(self._packet, 0, socket.MSG_DONTWAIT) > 0
            except BlockingIOError:
                os.sched_yield()
        return False


def _address(memory: mmap.mmap | bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _fill(buffer: Tensor, start: int, num_bytes: int) -> None:
    if num_bytes != buffer.nbytes:
        raise RuntimeError(
            f"a message has {num_bytes} bytes where {buffer.nbytes} were expected: the ranks do "
            "not run the same program"
        )
    assert buffer.is_contiguous(), "what arrives would overwrite what lies between its values"
    ctypes.memmove(buffer.data_ptr(), start, num_bytes)


def connect(
    ranks: Ranks, pairs: Iterable[tuple[int, int]], is_wanted: bool = True
) -> tuple[dict[int, OutgoingRing], dict[int, IncomingRing]]:
    """Rings from and to the ranks of this rank's host, by rank. All ranks call it; none where one
    of them could not be made.

    Every source knocks first; the sockets keep what they say until the destination opens the door.
    So nobody waits for anybody.
    """
    assert dist.group.WORLD is not None
    group = dist.group.WORLD
    is_linux = hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")
    is_in_host_memory = not ranks.device.is_accelerator
    possible = is_wanted and is_linux and is_in_host_memory and ranks.backend.has_tags
    with tempfile.TemporaryDirectory(prefix="whale-") as folder:
        path = str(Path(folder) / "door")
        host = _host()
        places: list[tuple[str, str] | None] = ranks.gather((host, path) if possible else None)
        here: set[int] = set()
        for rank, place in enumerate(places if possible else ()):
            if place is not None and place[0] == host:
                here.add(rank)
        own = [pair for pair in sorted(set(pairs)) if set(pair) <= here]
        sources = [source for source, destination in own if destination == ranks.rank]
        door: socket.socket | None = None
        to: dict[int, OutgoingRing] = {}
        incoming: dict[int, IncomingRing] = {}
        problem: OSError | None = None
        try:
            if sources:
                door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                door.bind(path)
                door.listen(len(sources))
        except OSError as error:
            problem = error
        if any(ranks.gather(problem is not None)):
            return {}, {}
        try:
            for source, destination in own:
                if source == ranks.rank:
                    to[destination] = _knock(places[destination], group, source, destination)
            for _ in sources:
                assert door is not None
                source, connection, ring = _open(door, ranks)
                incoming[source] = IncomingRing(connection, ring, group, source, to)
        except OSError as error:
            problem = error
        failed = ranks.gather(problem is not None)
        if door is not None:
            door.close()
    return ({}, {}) if any(failed) else (to, incoming)


def _host() -> str:
    """Processes with the same answer can reach each other by a path, and are on one host for every
    purpose of this job.
    """
    try:
        return (
            Process.this().host
            + os.readlink("/proc/self/ns/net")
            + os.readlink("/proc/self/ns/mnt")
        )
    except OSError:
        return Process.this().host


def _knock(
    place: tuple[str, str] | None, group: dist.ProcessGroup, source: int, destination: int
) -> OutgoingRing:
    assert place is not None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    connection.settimeout(10.0)
    connection.connect(place[1])
    memory = os.memfd_create("whale-ring")
    try:
        os.ftruncate(memory, RING_START + RING_BYTES)
        ring = mmap.mmap(memory, RING_START + RING_BYTES)
        socket.send_fds(connection, [GREETING.pack(source)], [memory])
    finally:
        os.close(memory)
    connection.setblocking(True)
    return OutgoingRing(connection, ring, group, destination)


def _open(door: socket.socket, ranks: Ranks) -> tuple[int, socket.socket, mmap.mmap]:
    door.settimeout(30.0)
    connection, _ = door.accept()
    message, (memory, *_), _, _ = socket.recv_fds(connection, GREETING.size, 1)
    try:
        ring = mmap.mmap(memory, RING_START + RING_BYTES)
    finally:
        os.close(memory)
    seconds = ranks.timeout.total_seconds()
    connection.setblocking(True)
    connection.setsockopt(
        socket.SOL_SOCKET,
        socket.SO_RCVTIMEO,
        struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)),
    )
    return GREETING.unpack(message)[0], connection, ring
