"""Ranks watch each other, so that one that raises, is killed, hangs or loses its network ends the job everywhere, with one message.

Rank 0 runs a hub. Every rank keeps a connection to it, says each second where it stands in its action list, and hears from the hub each
second. A closed connection is a rank that died; silence beyond the time-out is a rank that hangs, is stopped or is cut off. The hub then
sends its verdict to all, and every process ends after a short grace in which it may still end by itself. A silent hub is a verdict too.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BEAT_S = 1.0
GRACE_S = 3.0  # from a rank's failure to the end of the others: all may fail alike and end by themselves
EXIT_CODE = 13


@dataclass
class _Seen:
    """What the hub knows of one rank."""

    connection: socket.socket
    last_beat: float
    position: str = "starting"
    failure: str | None = None
    failed_at: float = 0.0
    has_left: bool = False


@dataclass
class Watch:
    """This process's side of the watch."""

    rank: int
    num_ranks: int
    timeout_s: float
    position: Any = "starting"
    """where this rank stands: written by the executor at each action, told to the hub with each beat"""
    _socket: socket.socket | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def connect(self, address: tuple[str, int], token: str) -> None:
        self._socket = socket.create_connection(address, timeout=self.timeout_s)
        self._socket.settimeout(None)
        self._say({"token": token, "rank": self.rank})
        threading.Thread(target=self._beat, name="whale-beat", daemon=True).start()
        threading.Thread(target=self._listen, name="whale-watch", daemon=True).start()
        atexit.register(self.leave)
        before = sys.excepthook

        def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self.report_failure(error)
            before(kind, error, trace)

        sys.excepthook = report

    def report_failure(self, error: BaseException) -> None:
        """Says that this rank raised. The others end unless all of them fail alike."""
        text = str(error).strip().splitlines()
        self._say({"failed": f"{type(error).__name__}: {text[0] if text else ''}", "position": str(self.position)})

    def leave(self) -> None:
        """This rank is done; its silence means nothing from now on."""
        self._ended.set()
        self._say({"bye": True})

    def _say(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            with self._lock, contextlib.suppress(OSError):
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._say({"position": str(self.position)})

    def _listen(self) -> None:
        assert self._socket is not None
        self._socket.settimeout(self.timeout_s)
        try:
            for line in self._socket.makefile("r"):
                message = json.loads(line)
                if "verdict" in message:
                    self._end(message["verdict"], prints=self.rank == message["printer"])
        except (OSError, ValueError):
            pass
        if not self._ended.is_set():
            self._end(
                f"rank 0 has been silent for {self.timeout_s:.0f} s or is gone; rank {self.rank} stood at {self.position}. "
                f"Look at the log of rank 0, or at the network between the hosts",
                prints=self.rank == 1,
            )

    def _end(self, verdict: str, prints: bool) -> None:
        if self._ended.wait(GRACE_S):
            return  # the main thread is ending by itself
        if prints:
            print(f"whale: {verdict}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(EXIT_CODE)


class Hub:
    """Rank 0's side: listens to everyone and decides."""

    def __init__(self, num_ranks: int, timeout_s: float, host: str) -> None:
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self.token = secrets.token_hex(16)
        self._server = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._ranks: dict[int, _Seen] = {}
        self._lock = threading.Lock()
        for target in (self._accept, self._decide):
            threading.Thread(target=target, name=f"whale-hub-{target.__name__}", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._hear, args=(connection,), name="whale-hub-rank", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        """One rank's messages, from its greeting to its end."""
        lines = connection.makefile("r")
        seen: _Seen | None = None
        with contextlib.suppress(OSError, ValueError):
            greeting = json.loads(lines.readline() or "{}")
            if greeting.get("token") != self.token:
                connection.close()  # a stranger
                return
            seen = _Seen(connection, time.monotonic())
            with self._lock:
                self._ranks[int(greeting["rank"])] = seen
            for line in lines:
                message = json.loads(line)
                seen.last_beat = time.monotonic()
                position = message.get("position", seen.position)
                if position != seen.position and "failed" not in message:
                    seen.failure = None  # all ranks raised alike, the script caught it and went on
                seen.position = position
                seen.has_left = seen.has_left or "bye" in message
                if "failed" in message and seen.failure is None:
                    seen.failure, seen.failed_at = message["failed"], time.monotonic()
        if seen is not None and not seen.has_left and seen.failure is None:
            seen.failure, seen.failed_at = "its process ended without a word (killed?)", time.monotonic()

    def _decide(self) -> None:
        while True:
            time.sleep(BEAT_S / 2)
            with self._lock:
                ranks = dict(self._ranks)
            verdict = judge(ranks, self.num_ranks, self.timeout_s, time.monotonic())
            message = {"verdict": verdict, "printer": min(r for r, s in ranks.items() if s.failure is None)} if verdict else {"beat": True}
            for seen in ranks.values():
                with contextlib.suppress(OSError):
                    seen.connection.sendall(json.dumps(message).encode() + b"\n")
            if verdict:
                return


def judge(ranks: dict[int, _Seen], num_ranks: int, timeout_s: float, now: float) -> str | None:
    """Why the job must end, or None."""
    alive = [rank for rank, seen in ranks.items() if seen.failure is None]
    others = "; ".join(f"rank {rank} at {ranks[rank].position}" for rank in sorted(alive))
    failed = {rank: seen for rank, seen in ranks.items() if seen.failure is not None}
    if failed and alive and len(alive) + len(failed) == num_ranks:
        first = min(failed, key=lambda rank: failed[rank].failed_at)
        if any(not ranks[rank].has_left for rank in alive) and now - failed[first].failed_at > GRACE_S:
            return f"rank {first} failed at {failed[first].position}: {failed[first].failure}. The others stood: {others}"
    silent = [rank for rank in alive if not ranks[rank].has_left and now - ranks[rank].last_beat > timeout_s]
    if silent:
        rank = silent[0]
        rest = "; ".join(f"rank {other} at {ranks[other].position}" for other in sorted(alive) if other != rank)
        where = f"at {ranks[rank].position} (hung, stopped or cut off)"
        return f"rank {rank} has been silent for {timeout_s:.0f} s {where}. The others stood: {rest}"
    return None


def start_watch(rank: int, num_ranks: int, timeout_s: float, share: Callable[[Any], Any]) -> Watch:
    """Starts the watch on every rank; `share` gives rank 0's value to all (a collective)."""
    hub: Hub | None = None
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if rank == 0:
        is_local = master in ("127.0.0.1", "localhost", "::1")
        hub = Hub(num_ranks, timeout_s, "127.0.0.1" if is_local else "0.0.0.0")
    told = share((hub.address[1], hub.token) if hub is not None else None)
    watch = Watch(rank, num_ranks, timeout_s)
    watch.connect(("127.0.0.1" if rank == 0 or master == "localhost" else master, told[0]), told[1])
    return watch
