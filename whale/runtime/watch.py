"""Ranks watch each other, so that one that raises, is killed, hangs or loses its network ends the job everywhere, with one message.

Rank 0 runs a hub. Every rank keeps a connection to it, says with each beat where it stands in its action list, and hears the hub's beat.

    what the hub sees                          what it makes of it
    a connection ends without a word           the rank died; decided when another rank notices too, or after GRACE_S
    a rank says that it raised                 decided after GRACE_S: all may raise alike, then each ends (or goes on) by itself
    a rank says that communication failed      follows from another rank's end; a cause only when nothing better is known
    a rank says that it got SIGTERM            its launcher ends it, so something happened: decided at once
    silence beyond `timeout_s`                 the rank hangs, is stopped or is cut off

A verdict goes to all. The rank that raised raises on, so that its traceback is seen; the others end with EXIT_CODE. A hub that is silent or
gone is a verdict too. A rank that ends normally says goodbye, and what the others do after the hub's goodbye is left to the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import hmac
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_S = 3.0  # from a rank's failure to the verdict: all may fail alike and end by themselves
LINGER_S = 1.5  # from the verdict to the end of the ranks that did not cause it: the launcher sees the cause end first
CAUSE_S = 5.0  # the same for the rank that raised, which has a traceback to print and perhaps files to close
SETTLE_S = 0.5  # after a SIGTERM, in which the sign of what came before it may still arrive
TERMINATED_S = 1.0  # from SIGTERM to the end of the process
PAUSE_S = 1.0  # a longer gap between two looks means that this process itself stood still: that is nobody's silence
SHORTEST_BEAT_S, LONGEST_BEAT_S = 0.1, 1.0
BEATS_PER_S = 500  # that the hub hears from all ranks together: some 1 % of a core
EXIT_CODE = 13  # of a rank that ends because of another one
LONGEST_LINE = 1 << 20  # bytes; more without a line end is no rank of ours
LONGEST_TEXT = 500

FOLLOWING = ("connection closed", "connection reset", "connection refused", "broken pipe", "gloo", "nccl", "is gone or stuck")
"""words in the messages of failed communication: the other side is the one to look at"""
SILENCE = "it hangs, is stopped or is cut off"
DEATH = "died without a word (killed, or crashed)"


class End(enum.Enum):
    """How a rank ended, or said that it would."""

    RAISED = "raised"
    DIED = "died"
    FOLLOWED = "followed"
    TERMINATED = "terminated"


@dataclass
class Seen:
    """What the hub knows of one rank."""

    heard_at: float
    rank: int | None = None
    """None: a connection that has not yet said who it is"""
    position: str = "the start"
    end: End | None = None
    text: str = ""
    ended_at: float = 0.0
    has_left: bool = False
    connection: socket.socket | None = None
    unread: bytes = b""

    def ended(self, end: End, text: str, now: float) -> None:
        if self.end is None and not self.has_left:
            self.end, self.text, self.ended_at = end, text, now


@dataclass(frozen=True)
class Verdict:
    """Why the job must end."""

    cause: int
    text: str


def beat_s(num_ranks: int) -> float:
    """Seconds between two beats: often in small jobs, so that positions are fresh, and never more than the hub can hear."""
    return min(LONGEST_BEAT_S, max(SHORTEST_BEAT_S, num_ranks / BEATS_PER_S))


def judge(ranks: Mapping[int, Seen], timeout_s: float, now: float) -> Verdict | None:
    """Why the job must end, or None. `ranks` holds every rank of the job."""
    ended = sorted((rank for rank in ranks if ranks[rank].end is not None), key=lambda rank: ranks[rank].ended_at)
    causes = [rank for rank in ended if ranks[rank].end in (End.RAISED, End.DIED)]
    followed = [rank for rank in ended if ranks[rank].end is End.FOLLOWED]
    terminated = [rank for rank in ended if ranks[rank].end is End.TERMINATED]
    touched = [rank for rank in ranks if not ranks[rank].has_left and rank not in causes]  # whom the end of another one concerns
    if causes:
        is_sure = bool(followed or terminated) or now - ranks[causes[0]].ended_at > GRACE_S
        return _verdict(causes[0], ranks, now) if touched and is_sure else None
    if ended and ended[0] in followed:  # the sign of what it follows from may still arrive
        grace_s = SETTLE_S if terminated else GRACE_S
        return _verdict(ended[0], ranks, now) if now - ranks[ended[0]].ended_at > grace_s else None
    if ended and 0 not in terminated:  # SIGTERM for some ranks only: nobody ends the whole job
        return _verdict(ended[0], ranks, now) if now - ranks[ended[0]].ended_at > GRACE_S else None
    silent = [rank for rank, seen in ranks.items() if seen.end is None and not seen.has_left and now - seen.heard_at > timeout_s]
    return _verdict(min(silent), ranks, now) if silent else None


def all_raised(ranks: Iterable[Seen]) -> bool:
    """Every rank that is left has raised by itself: no rank is the cause, and each may end or go on."""
    left = [seen for seen in ranks if not seen.has_left]
    return bool(left) and all(seen.end is End.RAISED for seen in left)


def _verdict(cause: int, ranks: Mapping[int, Seen], now: float) -> Verdict:
    seen = ranks[cause]
    age_s = (seen.ended_at if seen.end is not None else now) - seen.heard_at
    if seen.end is None:
        what = f"rank {cause} has been silent for {age_s:.0f} s: {SILENCE}. It was last heard of at {seen.position}"
    elif seen.end is End.DIED:
        what = f"rank {cause} {DEATH}. It was last heard of {age_s:.1f} s before, at {seen.position}"
    elif seen.end is End.TERMINATED:
        what = f"rank {cause} was ended by SIGTERM at {seen.position}"
    else:
        what = f"rank {cause} failed at {seen.position}: {seen.text}"
    others = positions({rank: other.position for rank, other in ranks.items() if rank != cause and not other.has_left})
    return Verdict(cause, f"{what}. The others stood: {others}")


def positions(where: Mapping[int, str]) -> str:
    """`rank 0 at F0.1; ranks 1, 2 at F1.0`: ranks at the same place together."""
    together: dict[str, list[int]] = {}
    for rank in sorted(where):
        together.setdefault(where[rank], []).append(rank)
    texts = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} at {place}" for place, ranks in together.items()]
    return "; ".join(texts) or "all had ended"


def follows_from_another(error: BaseException) -> bool:
    """Whether communication failed, which is some other rank's fault."""
    import torch.distributed as dist

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError | ConnectionError):
            return True
        if isinstance(seen, RuntimeError) and any(word in str(seen).lower() for word in FOLLOWING):
            return True
        seen = seen.__cause__
    return False


class Hub:
    """Rank 0's side: one thread that listens to everyone and decides."""

    def __init__(self, num_ranks: int, timeout_s: float, is_local: bool) -> None:
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self.token = secrets.token_hex(16)
        self._server = _open_server(is_local)
        self.port: int = self._server.getsockname()[1]
        now = time.monotonic()
        self._ranks = {rank: Seen(now, rank) for rank in range(num_ranks)}
        self._lock = threading.Lock()  # the thread against `close`
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._is_closed = False
        self._has_decided = False
        self._thread = threading.Thread(target=self._run, name="whale-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Rank 0 is done: what is known now is decided now, then everyone hears goodbye."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if any(seen.end is End.RAISED for seen in self._ranks.values()):
                self._decide(time.monotonic() + GRACE_S)
            self._tell({"bye": True})
        self._thread.join(LONGEST_BEAT_S)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Also in forked children: their copies would hide the end of this process."""
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
                    self._tell({"beat": True})
            last = now

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, Seen(time.monotonic()))

    def _hear(self, connection: socket.socket, seen: Seen, now: float) -> None:
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

    def _note(self, connection: socket.socket, seen: Seen, message: dict[str, Any], now: float) -> Seen:
        if "token" in message:
            if not hmac.compare_digest(str(message["token"]), self.token):
                raise ValueError("a stranger")
            known = self._ranks[int(message["rank"])]
            known.connection, known.unread = connection, seen.unread
            self._selector.modify(connection, selectors.EVENT_READ, known)
            seen = known
        elif seen.rank is None:
            raise ValueError("it does not say who it is")
        seen.heard_at = now
        seen.position = str(message.get("position", seen.position))
        if "failed" in message:
            seen.ended(End.FOLLOWED if message["follows"] else End.RAISED, str(message["failed"]), now)
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
            self._tell({"alike": True})
            return
        verdict = judge(self._ranks, self.timeout_s, now)
        if verdict is not None:
            self._has_decided = True
            _print(verdict.text)
            self._tell({"verdict": verdict.text, "cause": verdict.cause})

    def _tell(self, message: dict[str, Any]) -> None:
        """To all. Rank 1 also hears where everyone stands: it has to tell when rank 0 is gone."""
        for rank, seen in self._ranks.items():
            if seen.connection is not None:
                extra = {"positions": [other.position for other in self._ranks.values()]} if rank == 1 else {}
                with contextlib.suppress(OSError):  # also a full buffer: it has not read for long
                    seen.connection.sendall(json.dumps(message | extra).encode() + b"\n")


@dataclass
class Watch:
    """This process's side of the watch: one thread."""

    rank: int
    num_ranks: int
    timeout_s: float
    position: Any = "the start"  # str() of it is told
    """where this rank stands: written by the executor at each action, told to the hub with each beat"""
    step: int | None = None
    """training step of the position"""
    hub: Hub | None = None
    """on rank 0"""
    _connection: socket.socket | None = None
    _signals: socket.socket | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _has_left: bool = False
    _others: list[str] = field(default_factory=list)
    _reported: BaseException | None = None
    _hurry: threading.Event = field(default_factory=threading.Event)
    _may_raise: threading.Event = field(default_factory=threading.Event)
    _ends: threading.Event = field(default_factory=threading.Event)
    _terminated_at: float | None = None
    _pid: int = field(default_factory=os.getpid)

    @property
    def where(self) -> str:
        return str(self.position) if self.step is None else f"step {self.step}, {self.position}"

    def is_for(self, rank: int, num_ranks: int) -> bool:
        """Whether this watch goes on, in this process, for the same job."""
        return (self.rank, self.num_ranks, self._pid) == (rank, num_ranks, os.getpid()) and not self._has_left

    def connect(self, hosts: Iterable[str], port: int, token: str) -> None:
        """Joins the hub, trying its addresses in order, and starts watching."""
        self._connection = _connect(self.rank, list(dict.fromkeys(hosts)), port, self.timeout_s)
        self._say({"token": token, "rank": self.rank, "position": self.where})
        self._hear_sigterm()
        os.register_at_fork(after_in_child=self._forget)
        self._thread = threading.Thread(target=self._run, name="whale-watch", daemon=True)
        self._thread.start()
        atexit.register(self.leave)
        before = sys.excepthook

        def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if isinstance(error, Exception):
                self.report_failure(error)
            before(kind, error, trace)

        sys.excepthook = report

    def report_failure(self, error: BaseException) -> None:
        """Says that this rank raised. Returns when it may raise on; does not return when another rank is the cause and this one ends."""
        if self._has_left or error is self._reported or self._ends.is_set() or os.getpid() != self._pid:
            return
        self._reported = error
        follows = follows_from_another(error)
        self._may_raise.clear()
        self._say({"failed": _first_line(error), "follows": follows, "position": self.where})
        if follows:
            self._hurry.set()
        self._may_raise.wait(GRACE_S + LINGER_S + 2 * LONGEST_BEAT_S)

    def leave(self) -> None:
        """This rank is done; its silence means nothing from now on."""
        if self._has_left or os.getpid() != self._pid:  # a forked child has inherited this
            return
        self._has_left = True
        self._say({"bye": True})
        if self.hub is not None:
            self.hub.close()
        atexit.unregister(self.leave)

    # ---- inside

    def _say(self, message: dict[str, Any]) -> None:
        assert self._connection is not None
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _run(self) -> None:
        """Says where this rank stands, hears what the hub says, and ends the process when it must."""
        assert self._connection is not None
        unread, silent_s, last, next_beat = b"", 0.0, time.monotonic(), 0.0
        with selectors.DefaultSelector() as selector:
            for source in filter(None, (self._connection, self._signals)):
                selector.register(source, selectors.EVENT_READ)
            while not self._has_left:
                ready = {key.fileobj for key, _ in selector.select(SHORTEST_BEAT_S)}
                now = time.monotonic()
                silent_s += min(now - last, PAUSE_S)
                last = now
                self._look_for_sigterm()
                if self._connection in ready:
                    silent_s = 0.0
                    read = _received(self._connection)
                    if not read:
                        return self._lost_hub(DEATH, GRACE_S)
                    *lines, unread = (unread + read).split(b"\n")
                    for line in lines:
                        if not self._obey(json.loads(line)):
                            return None
                if silent_s > self.timeout_s:
                    return self._lost_hub(f"has been silent for {silent_s:.0f} s: {SILENCE}", 0.0)
                if self._terminated_at is not None and now - self._terminated_at > TERMINATED_S:
                    _exit(128 + signal.SIGTERM)
                if now >= next_beat:
                    next_beat = now + beat_s(self.num_ranks)
                    self._say({"position": self.where})
        return None

    def _obey(self, message: dict[str, Any]) -> bool:
        """False when there is nothing more to hear."""
        self._others = message.get("positions", self._others)
        if "verdict" in message:
            self._ends.set()
            self._end(message["verdict"], is_cause=message["cause"] == self.rank)
            return False
        if "alike" in message:
            self._may_raise.set()
        if "bye" in message:
            self._may_raise.set()
            return False
        return True

    def _lost_hub(self, what: str, grace_s: float) -> None:
        """A dead hub may be a job that ended everywhere: it counts when this rank is in trouble too, or still there after a while."""
        self._wait(grace_s, self._hurry)
        if self._has_left:
            return
        self._ends.set()
        where = dict(enumerate(self._others)) | {self.rank: self.where}
        last = f" It was last heard of at {where.pop(0)}." if 0 in where else ""
        text = f"rank 0 {what}.{last} The others stood: {positions(where)}. Look at the log of rank 0, and at the network between the hosts"
        if self.rank == 1 or os.environ.get("LOCAL_RANK") == "0":  # one message for each host
            _print(text)
        self._end(text, is_cause=False)

    def _end(self, verdict: str, is_cause: bool) -> None:
        """Ends this process, unless it ends by itself in time."""
        if is_cause:
            self._may_raise.set()
        else:
            _write_down(verdict)
        self._wait(CAUSE_S if is_cause else LINGER_S, None)
        if not self._has_left:
            _exit(EXIT_CODE if self._terminated_at is None else 128 + signal.SIGTERM)

    def _wait(self, seconds: float, event: threading.Event | None) -> None:
        """Returns early when the event is set, this rank leaves, or SIGTERM comes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._has_left and self._terminated_at is None and not (event and event.is_set()):
            time.sleep(SHORTEST_BEAT_S / 4)
            self._look_for_sigterm()

    def _look_for_sigterm(self) -> None:
        if self._signals is not None and signal.SIGTERM in _received(self._signals):
            self._terminated_at = self._terminated_at or time.monotonic()
            self._hurry.set()
            self._say({"terminated": True, "position": self.where})

    def _hear_sigterm(self) -> None:
        """SIGTERM ends this process a moment later than usual: after it has heard why. A handler of the user's own stays as it is.

        The main thread may stand inside C++, where no Python handler runs; the byte that Python's C handler writes is read by our thread.
        """
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop has it
            signal.set_wakeup_fd(before)
            return
        self._signals, self._wake = ours, theirs

        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != self._pid or self._has_left:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            with contextlib.suppress(OSError):
                theirs.send(bytes([number]))  # where someone has taken the wake-up away since

        self._handler = handle
        signal.signal(signal.SIGTERM, handle)

    def _forget(self) -> None:
        """In a forked child (a worker that loads data): its signals are not ours, and its copies of our sockets hide our end."""
        if self._signals is not None and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
        if self._connection is not None:
            self._connection.close()
        if self.hub is not None:
            self.hub.close_sockets()


_current: Watch | None = None


def start_watch(rank: int, num_ranks: int, timeout_s: float, share: Callable[[Any], Any]) -> Watch:
    """Starts the watch on every rank; `share` gives rank 0's value to all (a collective). A second call gives the first one's watch."""
    global _current
    if _current is not None and _current.is_for(rank, num_ranks):
        _current.timeout_s = timeout_s
        if _current.hub is not None:
            _current.hub.timeout_s = timeout_s
        return _current
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    is_local = master in ("127.0.0.1", "localhost", "::1")
    hub = Hub(num_ranks, timeout_s, is_local) if rank == 0 else None
    port, token, name = share((hub.port, hub.token, socket.getfqdn()) if hub is not None else None)
    _current = Watch(rank, num_ranks, timeout_s, hub=hub)
    _current.connect(["127.0.0.1"] if rank == 0 or is_local else [master, name], port, token)
    return _current


def _open_server(is_local: bool) -> socket.socket:
    if is_local:
        return socket.create_server(("127.0.0.1", 0), backlog=4096)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)


def _connect(rank: int, hosts: list[str], port: int, timeout_s: float) -> socket.socket:
    problem: OSError | None = None
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            problem = error
            continue
        connection.settimeout(timeout_s)  # of a `sendall` into a full buffer
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    raise ConnectionError(
        f"rank {rank} cannot reach rank 0 at {' or '.join(hosts)}, port {port} ({problem}): MASTER_ADDR must be the host of rank 0, and "
        f"hosts must reach each other on all ports"
    )


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(LONGEST_LINE)
    except OSError:
        return b""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "..."


def _print(text: str) -> None:
    """In one write, so that it does not mix with the lines of other ranks."""
    with contextlib.suppress(OSError, ValueError):
        os.write(2, f"whale: {text}\n".encode())


def _write_down(text: str) -> None:
    """Tells torch's launcher, in the form that it reads, why this rank ends."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or Path(path).exists():
        return
    now = time.time_ns()
    record = {"message": {"message": text, "extraInfo": {"timestamp": str(now // 10**9)}}, "time_ns": now}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(record))


def _exit(code: int) -> None:
    """Ends the process at once; what was printed gets out unless the main thread stands in the middle of it."""
    flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flush.start()
    flush.join(SHORTEST_BEAT_S)
    os._exit(code)
