"""The hub of the watch, on rank 0: hears from every rank, and decides when the job must end and
because of which rank.

what the hub sees                      what it makes of it
a connection ends without a word       the rank died; decided when another rank notices too, or
                                       after GRACE_S
a rank says that it raised             decided after GRACE_S: all may raise alike, then each ends
                                       (or continues) by itself
a rank says that communication failed  follows from another rank's end; a cause only when nothing
                                       better is known
a rank says that it got SIGTERM        its launcher ends it, so something happened: decided at once
silence beyond `timeout_s`             the rank hangs, is stopped or is cut off
batches of different shapes            decided at once: the ranks would wait for each other for ever
different calls of the engine          decided at once, for the same reason (`calls.py`)
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import json
import math
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from whale.distributed.calls import NO_CALL, Call, awaited, difference, have_met

GRACE_S = 3.0  # from a rank's failure to the verdict: all may fail alike and end by themselves
SETTLE_S = 0.5  # after a SIGTERM, in which the sign of what came before it may still arrive
# a longer gap between two looks means that this process itself was paused: that is nobody's
# silence
PAUSE_S = 1.0
AWAITED_S = 10.0  # from when ranks wait in a call to a message that says for which rank
SHORTEST_BEAT_S = 0.1
LONGEST_BEAT_S = 1.0
BEATS_PER_S = 500  # that the hub hears from all ranks together: some 1 % of a core
LONGEST_LINE = 1 << 20  # bytes; more without a line end is no rank of ours
BACKLOG = 4096  # ranks that connect at the same moment

SILENCE = "it hangs, is stopped or is cut off"
DEATH = "died without a word (killed, or crashed)"


@dataclass(frozen=True)
class Process:
    """Where a rank runs. Processes with the same `host` see each other's pids: not so in two
    containers of one machine.
    """

    host: str
    pid: int

    @staticmethod
    def this() -> Process:
        try:
            host = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink(
                "/proc/self/ns/pid"
            )
        except OSError:  # not Linux
            host = socket.gethostname()
        return Process(host, os.getpid())

    def kill(self) -> None:
        """Ends it when it is on this host: a process that hangs cannot end itself."""
        if self.host == Process.this().host and self.pid != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class End(enum.Enum):
    """How a rank ended, or said that it would."""

    RAISED = "raised"
    DIED = "died"
    FOLLOWED = "followed"
    TERMINATED = "terminated"


@dataclass
class SeenRank:
    """What the hub knows of one rank."""

    heard_at: float
    rank: int | None = None
    """None: a connection that has not yet said who it is"""
    position: str = "the start"
    end: End | None = None
    text: str = ""
    ended_at: float = 0.0
    has_left: bool = False
    has_raised: bool = False
    """at some time, as all others did"""
    process: Process | None = None
    batch: tuple[int, str] | None = None
    """how many batches this rank was given so far, and the shapes of the last one"""
    call: Call = NO_CALL
    """the latest method of the engine that this rank called, of those that all must call"""
    connection: socket.socket | None = None
    unread: bytes = b""

    def ended(self, end: End, text: str, now: float) -> None:
        if self.end is None and not self.has_left:
            self.end = end
            self.text = text
            self.ended_at = now


@dataclass(frozen=True)
class Verdict:
    """Why the job must end."""

    cause: int | None
    """None: no rank is more to blame than others"""
    text: str
    standing: Process | None = None
    """the process of a silent rank, which must be ended by the others of its host"""
    is_refused_call: bool = False
    """the cause waits in a call, and raises the text there: it knows the line of its script"""


def beat_s(num_ranks: int) -> float:
    """Seconds between two beats: often in small jobs, so that positions are fresh, and never more
    than the hub can hear.
    """
    return min(LONGEST_BEAT_S, max(SHORTEST_BEAT_S, num_ranks / BEATS_PER_S))


def judge(ranks: Mapping[int, SeenRank], timeout_s: float, now: float) -> Verdict | None:
    """Why the job must end, or None. `ranks` holds every rank of the job."""
    ended = sorted(
        (rank for rank in ranks if ranks[rank].end is not None),
        key=lambda rank: ranks[rank].ended_at,
    )
    causes = [rank for rank in ended if ranks[rank].end in (End.RAISED, End.DIED)]
    followed = [rank for rank in ended if ranks[rank].end is End.FOLLOWED]
    terminated = [rank for rank in ended if ranks[rank].end is End.TERMINATED]
    if causes:
        is_sure = bool(followed or terminated) or now - ranks[causes[0]].ended_at > GRACE_S
        concerns_any = any(not seen.has_left for rank, seen in ranks.items() if rank != causes[0])
        if not is_sure or not concerns_any or not _are_positions_fresh(ranks, causes[0], now):
            return None
        return _verdict(causes[0], ranks, now)
    calls = _other_call(ranks)
    if calls is not None:
        return Verdict(*calls, is_refused_call=calls[0] is not None)
    other = _other_batch(ranks)
    if other is not None:
        return _verdict(other[0], ranks, now)
    if ended and ended[0] in followed:  # the sign of what it follows from may still arrive
        grace_s = SETTLE_S if terminated else GRACE_S
        return _verdict(ended[0], ranks, now) if now - ranks[ended[0]].ended_at > grace_s else None
    if ended and 0 not in terminated:  # SIGTERM for some ranks only: nobody ends the whole job
        return _verdict(ended[0], ranks, now) if now - ranks[ended[0]].ended_at > GRACE_S else None
    silent = []
    for rank, seen in ranks.items():
        is_expected = seen.end is None and not seen.has_left
        if is_expected and now - seen.heard_at > timeout_s:
            silent.append(rank)
    return _verdict(min(silent), ranks, now) if silent else None


def _are_positions_fresh(ranks: Mapping[int, SeenRank], cause: int, now: float) -> bool:
    """Whether the others were heard of since `cause` ended, so that the verdict can say where they
    stand: a whole step of a small model may pass between two beats. They have two beats' time.
    """
    ended_at = ranks[cause].ended_at
    if now - ended_at > 2 * beat_s(len(ranks)):
        return True
    return all(
        seen.end is not None or seen.has_left or seen.heard_at >= ended_at
        for seen in ranks.values()
    )


def all_raised(ranks: Iterable[SeenRank]) -> bool:
    """Every rank that is left has raised by itself: no rank is the cause, and each may end or go
    on.
    """
    left = [seen for seen in ranks if not seen.has_left]
    return bool(left) and all(seen.end is End.RAISED for seen in left)


def _other_call(ranks: Mapping[int, SeenRank]) -> tuple[int | None, str] | None:
    """What ranks called instead of what all must call, and the rank to say so."""
    calls = {rank: seen.call for rank, seen in ranks.items()}
    somebody_waits = any(call.waits for call in calls.values())
    left = set()
    for rank, seen in ranks.items():
        # all raised the same error, perhaps one call apart: on one rank reading the loss raised it
        if seen.has_left and (somebody_waits or not seen.has_raised):
            left.add(rank)
    return difference(calls, left)


def _other_batch(ranks: Mapping[int, SeenRank]) -> tuple[int, str] | None:
    """The first rank whose batch has other shapes than that of a lower rank at the same place in
    the script, and what to say of it.
    """
    first: dict[int, tuple[int, str]] = {}
    for rank in sorted(ranks):
        batch = ranks[rank].batch
        if batch is None:
            continue
        lower, shapes = first.setdefault(batch[0], (rank, batch[1]))
        if shapes != batch[1]:
            what = (
                f"rank {rank} was given another batch than rank {lower}: {batch[1]}, rank {lower} "
                f"has {shapes}"
            )
            return rank, f"{what}. Every rank must be given the same whole mini-batch"
    return None


def _verdict(cause: int, ranks: Mapping[int, SeenRank], now: float) -> Verdict:
    seen = ranks[cause]
    other = _other_batch(ranks)
    age_s = (seen.ended_at if seen.end is not None else now) - seen.heard_at
    is_silent = False
    if other is not None and seen.end in (None, End.FOLLOWED):
        what = f"{other[1]}. It stood at {seen.position}"
    elif seen.end is None:
        is_silent = True
        what = (
            f"rank {cause} has been silent for {age_s:.0f} s: {SILENCE}. It was last heard of at "
            f"{seen.position}"
        )
    elif seen.end is End.DIED:
        what = (
            f"rank {cause} {DEATH}. It was last heard of {age_s:.1f} s before, at {seen.position}"
        )
    elif seen.end is End.TERMINATED:
        what = f"rank {cause} was ended by SIGTERM at {seen.position}"
    else:
        calls = _other_call(ranks)
        what = f"rank {cause} failed at {seen.position}: {seen.text}"
        what += f". And {other[1]}" if other is not None else ""
        what += f". And {calls[1]}" if calls is not None else ""
    waiting: dict[int, str] = {}
    for rank, each in ranks.items():
        if rank != cause and not each.has_left:
            waiting[rank] = each.position
    others = positions(waiting)
    return Verdict(
        cause, f"{what}. The others stood: {others}", seen.process if is_silent else None
    )


def positions(where: Mapping[int, str]) -> str:
    """`rank 0 at F0.1; ranks 1, 2 at F1.0`: ranks at the same place together."""
    together: dict[str, list[int]] = {}
    for rank in sorted(where):
        together.setdefault(where[rank], []).append(rank)
    texts = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} at {place}"
        for place, ranks in together.items()
    ]
    return "; ".join(texts) or "all had ended"


class Hub:
    """Rank 0's side: one thread that listens to everyone and decides."""

    def __init__(self, num_ranks: int, timeout_s: float, is_local: bool) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self.token = secrets.token_hex(16)
        self._server = _open_server(is_local)
        self.port: int = self._server.getsockname()[1]
        now = time.monotonic()
        self._ranks = {rank: SeenRank(now, rank) for rank in range(num_ranks)}
        self._lock = threading.Lock()  # the thread against `close`
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._is_closed = False
        self._has_decided = False
        self._waiting_since: float | None = None
        """when a rank began to wait in a call that others have not come to"""
        self._thread = threading.Thread(target=self._run, name="whale-hub", daemon=True)
        self._thread.start()

    def close(self, num_calls: int = 0) -> None:
        """Rank 0 is done: what is known now is decided now, then everyone hears goodbye, and how
        many calls of the engine rank 0 has made.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if any(seen.end is End.RAISED for seen in self._ranks.values()):
                self._decide(time.monotonic() + GRACE_S)
            self._send_to_all({"bye": True, "calls": num_calls})
        self._thread.join(LONGEST_BEAT_S)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Closes all sockets; called in forked children, too, whose copies would hide the end of
        this process.
        """
        self._server.close()
        for seen in self._ranks.values():
            if seen.connection is not None:
                seen.connection.close()
        self._selector.close()

    def _run(self) -> None:
        last = next_beat = time.monotonic()
        while not self._is_closed:
            ready = self._selector.select(SHORTEST_BEAT_S / 2)
            now = time.monotonic()
            with self._lock:
                if self._is_closed:
                    return
                if now - last > PAUSE_S:
                    for seen in self._ranks.values():
                        seen.heard_at += now - last
                for key, _ in ready:
                    if key.data is None:
                        self._accept()
                    else:
                        self._hear(key.fileobj, key.data, now)  # type: ignore[arg-type]
                self._decide(now)
                if now >= next_beat:
                    next_beat = now + beat_s(self.num_ranks)
                    self._send_to_all({"beat": True})
            last = now

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, SeenRank(time.monotonic()))

    def _hear(self, connection: socket.socket, seen: SeenRank, now: float) -> None:
        """What one rank, or one that has not yet said who it is, has to say."""
        try:
            read = connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            read = b""
        *lines, seen.unread = (seen.unread + read).split(b"\n")
        try:
            for line in lines:
                seen = self._note(connection, seen, json.loads(line), now)
        except (ValueError, KeyError, TypeError, AttributeError):  # no rank of ours
            read = b""
        if not read or len(seen.unread) > LONGEST_LINE:
            self._selector.unregister(connection)
            connection.close()
            seen.connection = None
            seen.ended(End.DIED, "", now)

    def _note(
        self, connection: socket.socket, seen: SeenRank, message: dict[str, Any], now: float
    ) -> SeenRank:
        if "token" in message:
            if not hmac.compare_digest(str(message["token"]), self.token):
                raise ValueError("a stranger")
            known = self._ranks[int(message["rank"])]
            known.connection = connection
            known.unread = seen.unread
            known.process = Process(str(message["host"]), int(message["pid"]))
            self._selector.modify(connection, selectors.EVENT_READ, known)
            seen = known
        elif seen.rank is None:
            raise ValueError("it does not say who it is")
        seen.heard_at = now
        seen.position = str(message.get("position", seen.position))
        if "batch" in message:
            number, shapes = message["batch"]
            seen.batch = int(number), str(shapes)
        if "call" in message:
            number, name, waits = message["call"]
            if int(number) > seen.call.number:  # a beat repeats what was said at once
                seen.call = Call(int(number), str(name), bool(waits))
        if "failed" in message:
            seen.ended(
                End.FOLLOWED if message["follows"] else End.RAISED, str(message["failed"]), now
            )
        if "terminated" in message:
            seen.ended(End.TERMINATED, "SIGTERM", now)
        seen.has_left = seen.has_left or ("bye" in message and seen.end is None)
        return seen

    def _decide(self, now: float) -> None:
        if self._has_decided:
            return
        if all_raised(self._ranks.values()):
            for seen in self._ranks.values():
                seen.end = None
                seen.has_raised = True
            self._send_to_all({"alike": True})
            return
        verdict = judge(self._ranks, self.timeout_s, now)
        if verdict is not None:
            self._has_decided = True
            if not verdict.is_refused_call:
                print_message(verdict.text)
            self._send_to_all({"verdict": asdict(verdict)}, last=verdict.cause)
            return
        self._bring_together(now)

    def _bring_together(self, now: float) -> None:
        """Lets ranks continue that wait in a call to which all have come; says for whom they wait
        when that takes long.
        """
        calls = {rank: seen.call for rank, seen in self._ranks.items()}
        if have_met(calls):
            for seen in self._ranks.values():
                seen.call = replace(seen.call, waits=False)
            self._waiting_since = None
            self._send_to_all({"met": calls[0].number})
            return
        found = awaited(calls)
        if found is None:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > AWAITED_S:
            self._waiting_since = math.inf  # said once
            self._send_to_all({"awaited": found})

    def _send_to_all(self, message: dict[str, Any], last: int | None = 0) -> None:
        """Sends a message to all ranks. Rank 1 also gets the position of every rank, for the
        message that it prints if rank 0 dies. `last`: the rank that is sent to last, since this
        process may end when it has the message.
        """
        for rank, seen in sorted(self._ranks.items(), key=lambda item: item[0] == last):
            if seen.connection is not None:
                extra = (
                    {"positions": [other.position for other in self._ranks.values()]}
                    if rank == 1
                    else {}
                )
                with contextlib.suppress(OSError):  # also a full buffer: it has not read for long
                    seen.connection.sendall(json.dumps(message | extra).encode() + b"\n")


def _open_server(is_local: bool) -> socket.socket:
    if is_local:
        return socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
        )
    return socket.create_server(("", 0), backlog=BACKLOG)


def print_message(text: str) -> None:
    """Prints a line in one write, so that it does not mix with the lines of other ranks."""
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"whale: {text}\n".encode())
