"""Messages between CPU ranks of one host, through memory: no thread in between, at most one process is woken up.

gloo wakes a thread of the sender when the receive is posted, one of the receiver when the message comes, and that wakes the one who waits.
Here each directed pair of ranks has a Unix socket and a block of shared memory (the ring):

    small tensor     one packet:  header | bytes
    larger tensor    copied into the ring, and one packet:  header with its place; the receiver copies it out and moves `consumed` on
    no room          by gloo after all, and one packet that says so

    ring:   consumed (8 bytes) | ..... free ..... | taken, not yet consumed | ..... free .....

A sender never blocks: packets that the socket does not take now wait in a list. What was sent belongs to the receiver: the sender's
tensor is free at once.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime.hub import Process
from whale.runtime.ranks import Ranks

HEADER = struct.Struct("qqq")
"""tag, bytes, and where they are: INLINE, BY_GROUP, or a position in the ring"""
INLINE, BY_GROUP = -1, -2
INLINE_BYTES = 1024
"""larger tensors go through the ring: a socket holds some hundred small packets, or few large ones"""
RING_BYTES = 32 * 1024**2
"""of each directed pair; only what is used takes memory"""
RING_START = 64
"""`consumed` has a cache line of its own"""
SOCKET_BYTES = 1024**2
"""asked for; Linux gives what its administrator allows"""
GREETING = struct.Struct("q")
_COUNT = struct.Struct("Q")


class Outgoing:
    """From this rank to another one on its host."""

    def __init__(self, connection: socket.socket, ring: mmap.mmap, group: dist.ProcessGroup, peer: int) -> None:
        self._connection, self._ring, self._group, self._peer = connection, ring, group, peer
        self._bytes = torch.frombuffer(ring, dtype=torch.uint8)
        self._taken = 0  # bytes of the ring, counted from the beginning of the job
        self._unsent: deque[bytes] = deque()
        self._by_group: list[tuple[dist.Work, Tensor]] = []
        self._lock = threading.Lock()  # an emulated link sends from a thread

    def send(self, tensor: Tensor, tag: int) -> None:
        data = tensor.reshape(-1).view(torch.uint8)
        num_bytes = data.numel()
        with self._lock:
            if num_bytes <= INLINE_BYTES:
                self._say(HEADER.pack(tag, num_bytes, INLINE) + data.numpy().tobytes())
            elif (place := self._take(num_bytes)) is not None:
                start = RING_START + place % RING_BYTES
                self._bytes[start : start + num_bytes].copy_(data)
                self._say(HEADER.pack(tag, num_bytes, place))
            else:
                self._by_group.append((self._group.send([tensor], self._peer, tag), tensor))
                self._say(HEADER.pack(tag, num_bytes, BY_GROUP))

    def _take(self, num_bytes: int) -> int | None:
        """Where in the ring there is room for so many bytes in one piece."""
        place = self._taken
        if place % RING_BYTES + num_bytes > RING_BYTES:
            place += RING_BYTES - place % RING_BYTES  # not over the end
        (consumed,) = _COUNT.unpack_from(self._ring, 0)
        if place + num_bytes - consumed > RING_BYTES:
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

    def drain(self) -> None:
        """End of a pass: nothing is left here."""
        self._connection.setblocking(True)
        while self._unsent:
            self._connection.send(self._unsent.popleft())
        for work, _ in self._by_group:
            work.wait()
        self._by_group.clear()


class Incoming:
    """From another rank of this host."""

    def __init__(self, connection: socket.socket, ring: mmap.mmap, group: dist.ProcessGroup, peer: int, own: dict[int, Outgoing]) -> None:
        """`own`: the lines out of this rank, which may still have something to send before it waits."""
        self._connection, self._ring, self._group, self._peer, self._own = connection, ring, group, peer, own
        self._bytes = torch.frombuffer(ring, dtype=torch.uint8)
        self._packet = bytearray(HEADER.size + INLINE_BYTES)
        self._early: dict[int, Tensor | None] = {}
        """by tag: messages that came before the one that was waited for; None: it comes by gloo"""

    def wait(self, buffer: Tensor, tag: int) -> None:
        """Fills the buffer with the message of this tag."""
        while tag not in self._early:
            got, found = self._next(buffer, tag)
            if got == tag and found is not None:
                return
            self._early[got] = found
        known = self._early.pop(tag)
        if known is None:
            self._group.recv([buffer], self._peer, tag).wait()
        else:
            buffer.reshape(-1).view(torch.uint8).copy_(known)

    def forget(self, is_old: Callable[[int], bool]) -> None:
        """Lets go of messages that a failed step left behind, by their tags."""
        self._early = {tag: found for tag, found in self._early.items() if not is_old(tag)}

    def _next(self, buffer: Tensor, tag: int) -> tuple[int, Tensor | None]:
        """(tag of the next message, its bytes): those of the wanted tag are written into the buffer straight away."""
        self._read()
        got, num_bytes, place = HEADER.unpack_from(self._packet)
        if place == BY_GROUP:
            return got, None
        target = buffer.reshape(-1).view(torch.uint8) if got == tag else torch.empty(num_bytes, dtype=torch.uint8)
        if place == INLINE:
            if num_bytes:
                target.copy_(torch.frombuffer(self._packet, dtype=torch.uint8, offset=HEADER.size, count=num_bytes))
        else:
            start = RING_START + place % RING_BYTES
            target.copy_(self._bytes[start : start + num_bytes])
            _COUNT.pack_into(self._ring, 0, place + num_bytes)
        return got, target

    def _read(self) -> None:
        while not all(outgoing.flush() for outgoing in self._own.values()):
            try:  # both sides may have a full socket: read and write in turns
                size = self._connection.recv_into(self._packet, 0, socket.MSG_DONTWAIT)
                break
            except BlockingIOError:
                threading.Event().wait(1e-4)
        else:
            size = self._connection.recv_into(self._packet)  # BlockingIOError after the time of SO_RCVTIMEO
        if size == 0:
            raise RuntimeError("Connection closed by peer")


def connect(ranks: Ranks, pairs: Iterable[tuple[int, int]], is_wanted: bool = True) -> tuple[dict[int, Outgoing], dict[int, Incoming]]:
    """Lines from and to the ranks of this rank's host, by rank. All ranks call it; none where one of them could not be made.

    Every source knocks first; the sockets keep what they say until the destination opens the door. So nobody waits for anybody.
    """
    assert dist.group.WORLD is not None
    group = dist.group.WORLD
    is_linux = hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")
    possible = is_wanted and is_linux and ranks.device == "cpu" and ranks.has_channels_by_tag
    with tempfile.TemporaryDirectory(prefix="whale-") as folder:
        path, host = str(Path(folder) / "door"), _host()
        places: list[tuple[str, str] | None] = ranks.gather((host, path) if possible else None)
        here = {rank for rank, place in enumerate(places) if place is not None and place[0] == host} if possible else set()
        own = [pair for pair in sorted(set(pairs)) if set(pair) <= here]
        sources = [source for source, destination in own if destination == ranks.rank]
        door: socket.socket | None = None
        to: dict[int, Outgoing] = {}
        incoming: dict[int, Incoming] = {}
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
                incoming[source] = Incoming(connection, ring, group, source, to)
        except OSError as error:
            problem = error
        failed = ranks.gather(problem is not None)
        if door is not None:
            door.close()
    return ({}, {}) if any(failed) else (to, incoming)


def _host() -> str:
    """Processes with the same answer can reach each other by a path, and are on one host for every purpose of this job."""
    try:
        return Process.this().host + os.readlink("/proc/self/ns/net") + os.readlink("/proc/self/ns/mnt")
    except OSError:
        return Process.this().host


def _knock(place: tuple[str, str] | None, group: dist.ProcessGroup, source: int, destination: int) -> Outgoing:
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
    return Outgoing(connection, ring, group, destination)


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
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
    return GREETING.unpack(message)[0], connection, ring
