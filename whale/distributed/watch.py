"""Ranks watch each other, so that one that raises, is killed, hangs or loses its network ends the
job everywhere, with one message.

Rank 0 runs a hub (`hub.py`). Every rank keeps a connection to it, says with each beat where it
stands in its action list, and hears the hub's beat. The hub's verdict goes to all: the rank that
raised raises on, so that its traceback is seen; the others end with EXIT_CODE. A hub that is silent
or gone is a verdict too. A rank that ends normally says goodbye; what the others do after the hub's
goodbye is left to the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import multiprocessing.util
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from whale.distributed.calls import NO_CALL, Call, CallsDifferError, Meets, difference, script_line
from whale.distributed.causes import LONGEST_TEXT, first_line, follows_from_another
from whale.distributed.hub import (
    DEATH,
    GRACE_S,
    LONGEST_BEAT_S,
    PAUSE_S,
    SHORTEST_BEAT_S,
    SILENCE,
    Hub,
    Process,
    beat_s,
    positions,
    print_message,
)
from whale.distributed.sigterm import Sigterm, received
from whale.error_file import error_file, write_error

# from the verdict to the end of the ranks that did not cause it: the launcher sees the cause end
# first
LINGER_S = 1.5
# the same for the rank that raised, which has a traceback to print and perhaps files to close
CAUSE_S = 5.0
TERMINATED_S = 1.0  # from SIGTERM to the end of the process
STEP_END = "its end"
EXIT_CODE = 13  # of a rank that ends because of another one


@dataclass
class Watch:
    """This process's side of the watch: one thread."""

    rank: int
    num_ranks: int
    timeout_s: float
    position: Any = "the start"  # str() of it is sent
    """where this rank stands: written by the executor at each action, sent to the hub with each
    beat
    """
    stall_timeout_s: float = math.inf
    """how long the device of this rank may stand at one place of a step. Ranks without one find out
    by the messages that they wait for
    """
    during: str | None = None
    """the step or evaluation of the position"""
    batch: tuple[int, Any] = (0, "")
    """how many batches this rank was given so far, and the last one's shapes (str() of it is sent):
    the hub compares them
    """
    call: Call = NO_CALL
    """the latest method of the engine that was called here, of those that all ranks must call: sent
    to the hub, which compares them
    """
    hub: Hub | None = None
    """on rank 0"""
    hub_process: Process | None = None
    """rank 0's"""
    _connection: socket.socket | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _has_left: bool = False
    _others: list[str] = field(default_factory=list)
    _reported: BaseException | None = None
    _hurry: threading.Event = field(default_factory=threading.Event)
    _may_raise: threading.Event = field(default_factory=threading.Event)
    _ends: threading.Event = field(default_factory=threading.Event)
    _met: threading.Event = field(default_factory=threading.Event)
    _refusal: str | None = None
    """why the call in which this rank waits is not made"""
    _calls_of_first: int | None = None
    """how many calls rank 0 had made when it ended"""
    _sigterm: Sigterm = field(default_factory=Sigterm)
    _pid: int = field(default_factory=os.getpid)

    @property
    def where(self) -> str:
        """`step 3, action 2 of 12, F 0.1`: where the device stands, or the host when the device has
        done all that it was given.
        """
        pending = getattr(self.position, "pending", None)
        if pending is not None:
            return str(pending.where)
        return str(self.position) if self.during is None else f"{self.during}, {self.position}"

    def stand_at(self, place: str) -> None:
        """The host has come to this place between two runs of an action list."""
        if hasattr(self.position, "pending"):  # the device may still be at the actions before
            self.position.position = place
        else:
            self.position = place

    def note_batch(self, shapes: Any) -> None:
        """A batch that the other ranks must have too. It is sent with the next beat, so a step
        costs nothing.
        """
        self.batch = self.batch[0] + 1, shapes

    def note_call(self, name: str, meets: Meets) -> None:
        """This rank calls a method that all ranks must call in the same order. Where they meet it
        returns when all have come to it, otherwise the call is sent with the next beat.
        """
        if self._has_left or os.getpid() != self._pid:
            return
        self._met.clear()
        waits = meets is Meets.ALWAYS or (meets is Meets.AFTER_ANOTHER and name != self.call.name)
        self.call = Call(self.call.number + 1, name, waits)
        self._refuse_after_rank_0()
        if waits:
            self._meet()

    def _meet(self) -> None:
        has_device = hasattr(self.position, "pending")
        before = self.position.position if has_device else self.position
        self.stand_at(f"{self.call.name}, waiting for the other ranks")
        self._say(self._position_and_call())
        longest_s = None if math.isinf(self.stall_timeout_s) else self.stall_timeout_s
        has_met = self._met.wait(longest_s)
        self.stand_at(before)
        if self._refusal is not None:
            raise CallsDifferError(self._refusal)
        if not has_met:
            raise CallsDifferError(
                f"{self.call.name} must be called by all ranks: rank {self.rank} has waited "
                f"{self.stall_timeout_s:.0f} s there for others (`stall_timeout_s`)"
            )

    def _refuse_after_rank_0(self, error: Exception | None = None) -> None:
        """Raises in a call that rank 0 has not made: it ended its script. `error`: how that was
        noticed.
        """
        text = self._beyond_rank_0()
        if text is not None:
            raise CallsDifferError(text) from error

    def _beyond_rank_0(self) -> str | None:
        """What is wrong where this rank has made more calls than rank 0, which has ended."""
        num_calls = self._calls_of_first
        if num_calls is None or self.call.number <= num_calls:
            return None
        found = difference({0: Call(num_calls), self.rank: self.call}, {0})
        return found[1] if found is not None else None

    def is_for(self, rank: int, num_ranks: int) -> bool:
        """Whether this watch still runs, in this process, for the same job."""
        return (self.rank, self.num_ranks, self._pid) == (
            rank,
            num_ranks,
            os.getpid(),
        ) and not self._has_left

    def connect(self, hosts: Iterable[str], port: int, token: str) -> None:
        """Joins the hub, trying its addresses in order, and starts watching."""
        self._connection = _connect(self.rank, list(dict.fromkeys(hosts)), port, self.timeout_s)
        process = Process.this()
        self._say(
            {
                "token": token,
                "rank": self.rank,
                "position": self.where,
                "host": process.host,
                "pid": process.pid,
            }
        )
        self._sigterm.hear(lambda: self._has_left or os.getpid() != self._pid)
        os.register_at_fork(after_in_child=self._forget)
        self._thread = threading.Thread(target=self._run, name="whale-watch", daemon=True)
        self._thread.start()
        atexit.register(self.leave)
        # children of multiprocessing end without atexit
        multiprocessing.util.Finalize(None, self._leave_after_threads, exitpriority=0)
        before = sys.excepthook

        def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            if isinstance(error, Exception):
                self.report_failure(error)
            before(kind, error, trace)

        sys.excepthook = report

    def report_failure(self, error: BaseException) -> None:
        """Says that this rank raised. Returns when it may raise on; does not return when another
        rank is the cause and this one ends.
        """
        if self._has_left or error is self._reported or os.getpid() != self._pid:
            return
        self._reported = error
        # decided already; a rank that is not the cause has nothing to say, and ends in a moment
        if self._ends.is_set():
            self._may_raise.wait(LINGER_S + LONGEST_BEAT_S)
            return
        follows = follows_from_another(error)
        self._may_raise.clear()
        self._say({"failed": first_line(error), "follows": follows, "position": self.where})
        if follows:
            self._hurry.set()
        self._may_raise.wait(GRACE_S + LINGER_S + 2 * LONGEST_BEAT_S)

    def explain(self, error: Exception) -> None:
        """Raises what is behind a failed message: the call was not made by rank 0, which ended."""
        if follows_from_another(error):
            self._refuse_after_rank_0(error)

    def leave(self) -> None:
        """This rank is done; its silence means nothing from now on."""
        if self._has_left or os.getpid() != self._pid:  # a forked child has inherited this
            return
        self._has_left = True
        self._say({"bye": True} | self._position_and_call())
        if self.hub is not None:
            self.hub.close(self.call.number)
        atexit.unregister(self.leave)
        if self._thread is not threading.current_thread():
            # it wakes up within a beat; Python may not be torn down beneath a running thread
            self._thread.join(LONGEST_BEAT_S)
        if threading.current_thread() is threading.main_thread():
            self._sigterm.give_back()

    # ---- inside

    def _leave_after_threads(self) -> None:
        """Leaves when all other threads have ended, as the interpreter waits for them before
        `atexit`: a checkpoint that is being written may need the watch to end. In a thread of its
        own: those of a `ThreadPoolExecutor` end only once the interpreter has begun to wait.
        """
        others = []
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                others.append(thread)

        def leave() -> None:
            for thread in others:
                thread.join()
            self.leave()

        threading.Thread(target=leave, name="whale-leave").start()

    def _say(self, message: dict[str, Any]) -> None:
        assert self._connection is not None
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _run(self) -> None:
        """Says where this rank stands, hears what the hub says, and ends the process when
        it must.
        """
        assert self._connection is not None
        unread = b""
        silent_s = 0.0
        last = time.monotonic()
        next_beat = 0.0
        num_sent = 0
        num_calls = 0
        stall = _Stall()
        with selectors.DefaultSelector() as selector:
            for source in filter(None, (self._connection, self._sigterm.bytes)):
                selector.register(source, selectors.EVENT_READ)
            while not self._has_left:
                ready = {key.fileobj for key, _ in selector.select(SHORTEST_BEAT_S)}
                now = time.monotonic()
                silent_s += min(now - last, PAUSE_S)
                last = now
                self._look_for_sigterm()
                if self._connection in ready:
                    silent_s = 0.0
                    read = received(self._connection)
                    if not read:
                        return self._lost_hub(DEATH, GRACE_S, None)
                    *lines, unread = (unread + read).split(b"\n")
                    for line in lines:
                        if not self._obey(json.loads(line)):
                            return None
                if silent_s > self.timeout_s:
                    return self._lost_hub(
                        f"has been silent for {silent_s:.0f} s: {SILENCE}", 0.0, self.hub_process
                    )
                if self._sigterm.at is not None and now - self._sigterm.at > TERMINATED_S:
                    _exit(128 + signal.SIGTERM)
                if now >= next_beat:
                    next_beat = now + beat_s(self.num_ranks)
                    number, shapes = self.batch
                    news = (
                        {"batch": (number, str(shapes)[:LONGEST_TEXT])}
                        if number != num_sent
                        else {}
                    )
                    num_sent = number
                    if self.call.number != num_calls:
                        num_calls = self.call.number
                        news |= self._position_and_call()
                    self._say({"position": self.where} | news)
                    self._look_for_stall(stall, now)
        return None

    def _look_for_stall(self, stall: _Stall, now: float) -> None:
        """Reports a device that has been at one place of a step for too long. The host may wait for
        it for ever, inside of the driver.
        """
        if not hasattr(self.position, "pending") or stall.is_reported:
            return
        pending = self.position.pending
        where = self.where
        is_busy = pending is not None or self.position.position != STEP_END
        if stall.stood_s(where, is_busy, now) <= self.stall_timeout_s:
            return
        stall.is_reported = True
        follows = pending is None or pending.waits_for_others
        text = f"its device has been there for {stall.seconds:.0f} s"
        self._say({"failed": text, "follows": follows, "position": where})

    def _obey(self, message: dict[str, Any]) -> bool:
        """False when there is nothing more to hear."""
        self._others = message.get("positions", self._others)
        if message.get("met") == self.call.number:
            self._met.set()
        if "awaited" in message and message["awaited"][0] == self.rank:
            print_message(f"{message['awaited'][1]}. Rank {self.rank} is at {self._place()}")
        if "verdict" in message:
            self._ends.set()
            verdict = message["verdict"]
            is_cause = verdict["cause"] == self.rank
            has_raised = is_cause and self._reported is not None
            if is_cause and verdict["is_refused_call"]:
                self._refusal = verdict["text"]
                self._met.set()
                has_raised = True
            self._end(
                verdict["text"],
                has_raised,
                Process(**verdict["standing"]) if verdict["standing"] else None,
            )
            return False
        if "alike" in message:
            self._may_raise.set()
        if "bye" in message:
            self._hear_goodbye(int(message["calls"]))
            self._may_raise.set()
            return False
        return True

    def _hear_goodbye(self, num_calls: int) -> None:
        """Rank 0 has ended, after so many calls."""
        self._calls_of_first = num_calls
        if self.call.waits and not self._met.is_set():
            self._refusal = self._beyond_rank_0()
            self._met.set()

    def _position_and_call(self) -> dict[str, Any]:
        call = self.call
        return {"position": self.where, "call": (call.number, call.name, call.waits)}

    def _place(self) -> str:
        return script_line() or self.where

    def _lost_hub(self, what: str, grace_s: float, standing: Process | None) -> None:
        """A dead hub may be a job that ended everywhere: it counts when this rank is in trouble
        too, or still there after a while.
        """
        self._wait(grace_s, self._hurry)
        if self._has_left:
            return
        self._ends.set()
        where = dict(enumerate(self._others)) | {self.rank: self.where}
        last = f" It was last heard of at {where.pop(0)}." if 0 in where else ""
        text = (
            f"rank 0 {what}.{last} The others stood: {positions(where)}. Look at the log of rank "
            "0, and at the network between the hosts"
        )
        if self.rank == 1 or os.environ.get("LOCAL_RANK") == "0":  # one message for each host
            print_message(text)
        self._end(text, False, standing)

    def _end(self, verdict: str, is_cause: bool, standing: Process | None) -> None:
        """Ends this process, unless it ends by itself in time."""
        if is_cause:
            self._may_raise.set()
        else:
            _say_to_launcher(verdict)
        self._wait(CAUSE_S if is_cause else LINGER_S, None)
        if standing is not None:
            standing.kill()
        if not self._has_left:
            if self._refusal is not None:  # the script caught what this rank raised
                print_message(verdict)
            _exit(EXIT_CODE if self._sigterm.at is None else 128 + signal.SIGTERM)

    def _wait(self, seconds: float, event: threading.Event | None) -> None:
        """Returns early when the event is set, this rank leaves, or SIGTERM comes."""
        deadline = time.monotonic() + seconds
        while (
            time.monotonic() < deadline
            and not self._has_left
            and self._sigterm.at is None
            and not (event and event.is_set())
        ):
            time.sleep(SHORTEST_BEAT_S / 4)
            self._look_for_sigterm()

    def _look_for_sigterm(self) -> None:
        if self._sigterm.has_come():
            self._hurry.set()
            self._say({"terminated": True, "position": self.where})

    def _forget(self) -> None:
        """Lets go of signals and sockets in a forked child (a worker that loads data): its signals
        are not ours, and its copies of our sockets hide our end.
        """
        self._sigterm.give_back()
        if self._connection is not None:
            self._connection.close()
        if self.hub is not None:
            self.hub.close_sockets()


@dataclass
class _Stall:
    """How long a device has been at one place."""

    where: str = ""
    seconds: float = 0.0
    looked_at: float = 0.0
    is_reported: bool = False

    def stood_s(self, where: str, is_busy: bool, now: float) -> float:
        """Seconds at this place, as far as this process was not paused itself."""
        since = min(now - self.looked_at, PAUSE_S)
        self.seconds = self.seconds + since if is_busy and where == self.where else 0.0
        self.where = where
        self.looked_at = now
        return self.seconds


_current: Watch | None = None


def start_watch(
    rank: int,
    num_ranks: int,
    timeout_s: float,
    share: Callable[[Any], Any],
    stall_timeout_s: float = math.inf,
) -> Watch:
    """Starts the watch on every rank; `share` gives rank 0's value to all (a collective). A second
    call gives the first one's watch.
    """
    global _current
    if _current is not None and _current.is_for(rank, num_ranks):
        _current.timeout_s = timeout_s
        if _current.hub is not None:
            _current.hub.timeout_s = timeout_s
        return _current
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    is_local = master in ("127.0.0.1", "localhost", "::1")
    hub = Hub(num_ranks, timeout_s, is_local) if rank == 0 else None
    port, token, name, process = share(
        (hub.port, hub.token, socket.getfqdn(), Process.this()) if hub is not None else None
    )
    _current = Watch(rank, num_ranks, timeout_s, hub=hub, hub_process=process)
    _current.stall_timeout_s = stall_timeout_s
    _current.connect(["127.0.0.1"] if rank == 0 or is_local else [master, name], port, token)
    return _current


def report_failure(error: BaseException) -> None:
    """Reports to the other ranks what a script raised and its launcher caught. Returns when this
    rank may end.
    """
    if _current is not None:
        _current.report_failure(error)


@contextlib.contextmanager
def reporting(watch: Watch | None, what: str) -> Iterator[None]:
    """Reports at once to the others what this rank raises inside: for what all ranks do together, a
    step or an evaluation.
    """
    if watch is None:
        yield
        return
    watch.during = what
    watch.stand_at("its start")
    try:
        yield
    except Exception as error:
        watch.report_failure(error)
        watch.explain(error)
        raise
    watch.stand_at(STEP_END)


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
        f"rank {rank} cannot reach rank 0 at {' or '.join(hosts)}, port {port} ({problem}): "
        "MASTER_ADDR must be the host of rank 0, and hosts must reach each other on all ports"
    )


def _say_to_launcher(text: str) -> None:
    """Writes down for torch's launcher why this rank ends, unless something was written before."""
    file = error_file()
    if file is not None and not file.exists():
        with contextlib.suppress(OSError):
            write_error(file, text)


def _exit(code: int) -> None:
    """Ends the process at once; what was printed gets out unless the main thread stands in the
    middle of it.
    """
    flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flush.start()
    flush.join(SHORTEST_BEAT_S)
    os._exit(code)
