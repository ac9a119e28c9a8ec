"""Streams, events and the vector clocks that find races.

A stream is a thread that runs what is launched on it in order. Its clock says, for every stream, how
many of that stream's operations are certainly over when the next operation of this one starts:

    launch on s       clock_s[s] += 1; the operation has number clock_s[s] on stream s
    s records event   event.clock = copy of clock_s
    s waits for it    clock_s = elementwise maximum of clock_s and event.clock
    host waits        every stream's clock takes the maximum: all later launches come after

An operation on stream s that touches bytes which operation n of stream t writes (or writes bytes
that it reads) is ordered after it if and only if clock_s[t] >= n. Otherwise it is a race, whether or
not the threads happened to run in the right order this time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.device.settings import settings

Clock = dict[int, int]
"""stream -> number of its operations that are over"""


class DeviceError(RuntimeError):
    """Something that would be undefined on a GPU: a race, memory that was given away too early."""


@dataclass
class Counters:
    """What a test may look at."""

    host_waits: Counter[str] = field(default_factory=Counter)
    """what the host waited for and the line that asked -> how often"""
    launches: Counter[str] = field(default_factory=Counter)
    """operation -> how often"""
    pageable_copies: int = 0
    """copies from host memory that is not pinned: these block the host on a GPU"""
    incoming_bytes: int = 0
    """copied from the host"""

    def clear(self) -> None:
        self.host_waits.clear()
        self.launches.clear()
        self.pageable_copies = 0
        self.incoming_bytes = 0


OWN_MODULES = {
    *(
        f"tests.device.{name}"
        for name in ("streams", "memory", "kernels", "draws", "backend", "collectives")
    ),
    "tests.exactness",  # its float64 mode stands between the program and torch
    "whale.devices.interface",
    "whale.devices.copies",
}
BACKGROUND_THREADS = {"whale-checkpoint"}
"""whose waiting holds nobody up"""
counters = Counters()
lock = threading.RLock()
"""held while the state of streams and memory changes"""
known_over: Clock = {}
"""what the host has waited for"""
errors: list[BaseException] = []
"""raised on streams; sticky: each later synchronisation raises the first, as CUDA does"""
_loaded: set[str] = set()
"""operations whose kernels are loaded"""


_called_before_waits: list[Callable[[], None]] = []


def call_before_waits(function: Callable[[], None]) -> None:
    """Has `function` called before a stream or the host waits, which changes clocks."""
    _called_before_waits.append(function)


def _before_waits() -> None:
    for function in _called_before_waits:
        function()


def raise_stream_error() -> None:
    """Raises what failed on a stream, at the place where the host notices."""
    if errors:
        raise errors[0]


class Event:
    """A point in a stream that others can wait for."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self._done = threading.Event()
        self._done.set()  # an event that was never recorded is over
        self._time_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with lock:
            self._done = threading.Event()
            self.clock = dict(stream.clock)
            stream.put("record", self._pass)

    def _pass(self) -> None:
        self._time_s = time.perf_counter()
        self._done.set()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        raise_stream_error()
        return self._done.is_set()

    def synchronize(self) -> None:
        note_host_wait("event")
        self._done.wait()
        _everything_after(self.clock)
        raise_stream_error()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events that are over."""
        if not (self._done.is_set() and end._done.is_set()):
            raise RuntimeError("both events must be completed before calculating elapsed time")
        return (end._time_s - self._time_s) * 1e3


class Stream:
    """A queue of operations with a thread that runs them in order."""

    _num_streams = 0

    def __init__(self, device: object = None, priority: int = 0, what: str = "") -> None:
        with lock:
            self.id = Stream._num_streams
            Stream._num_streams += 1
            self.what = what or f"stream {self.id}"
            self.now = "idle"
            self.clock: Clock = {}
            all_streams.append(self)
        self.start()

    def start(self) -> None:
        """Starts the thread; also after a fork, which loses threads."""
        self.previous = threading.Event()
        self.previous.set()
        self.work: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"testgpu {self.what}", daemon=True).start()

    def _run(self) -> None:
        while True:
            name, function = self.work.get()
            self.now = name
            if errors and name != "record" and not settings.num_queues:
                continue  # the device is dead: nothing runs any more
            try:
                _delay(name)
                function()
            except BaseException as error:  # later operations of the stream are undefined, too
                errors.append(error)
            self.now = "idle"

    def put(self, name: str, function: Callable[[], object]) -> None:
        """Queues something without looking at memory."""
        if settings.num_queues:
            _hardware_queue(self.id % settings.num_queues).put((self, name, function))
        else:
            self.work.put((name, function))

    def tick(self, name: str) -> int:
        """Counts one operation and returns its number on this stream."""
        counters.launches[name] += 1
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.clock[self.id]

    def is_after(self, stream: int, number: int) -> bool:
        """Whether what is launched now runs after operation `number` of `stream`."""
        return self.clock.get(stream, 0) >= number

    def wait_event(self, event: Event) -> None:
        """Later operations of this stream run after the event; the host does not wait."""
        with lock:
            _before_waits()
            _merge(self.clock, event.clock)
            self.put("wait", event._done.wait)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        """The host waits for everything that was launched on this stream."""
        event = self.record_event()
        event._done.wait()
        _everything_after(event.clock)
        raise_stream_error()


all_streams: list[Stream] = []
_current = threading.local()


def current_stream() -> Stream:
    """The stream that operations of this thread go to; the first one unless chosen otherwise."""
    with lock:
        if not all_streams:
            Stream(what="the compute stream")
    chosen: Stream = getattr(_current, "stream", all_streams[0])
    return chosen


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Operations inside go to `stream`."""
    before = current_stream()
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


def host_waits(what: str) -> None:
    """The host waits for the current stream; counted by the line of the program that asked."""
    note_host_wait(what)
    current_stream().synchronize()


def synchronize() -> None:
    """The host waits for all streams."""
    note_host_wait("synchronize")
    for stream in list(all_streams):
        stream.synchronize()


_loaded_by_host: set[str] = set()


def load(name: str) -> None:
    """The first call of an operation may wait for the device (`settings.loading_waits`). It is the
    driver that waits and may not do so next time, so the clocks do not know of it.
    """
    if settings.loading_waits and name.startswith("aten.") and name not in _loaded_by_host:
        _loaded_by_host.add(name)
        for stream in list(all_streams):
            stream.record_event()._done.wait()


def note_host_wait(what: str) -> None:
    if threading.current_thread().name in BACKGROUND_THREADS:
        return
    counters.host_waits[f"{what} at {_asking_line()}"] += 1


def _asking_line() -> str:
    """`engine.py:120`: the innermost line outside of torch and of this package."""
    frame = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith("torch.") and module not in OWN_MODULES:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"


def _everything_after(clock: Clock) -> None:
    """The host has waited: whatever it launches from now on comes after `clock`."""
    with lock:
        _before_waits()
        _merge(known_over, clock)
        for stream in all_streams:
            _merge(stream.clock, clock)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _delay(name: str) -> None:
    if settings.jitter_s:
        time.sleep(random.random() * settings.jitter_s)
    if settings.kernel_s and name.startswith("aten."):
        time.sleep(settings.kernel_s)
    if settings.cold_s and name not in _loaded:
        _loaded.add(name)
        time.sleep(settings.cold_s)


# ---- hardware queues

_Queued = tuple[Stream, str, Callable[[], object]]
_hardware_queues: dict[int, queue.SimpleQueue[_Queued]] = {}


def _hardware_queue(number: int) -> queue.SimpleQueue[_Queued]:
    """A queue of the hardware that several streams share.

    What runs blocks nobody. What has to wait, for an event or for the operation before it in its
    stream, blocks all that was launched behind it, on whatever stream.
    """
    if number not in _hardware_queues:
        _hardware_queues[number] = queue.SimpleQueue()
        run = _serve_hardware_queue
        name = f"testgpu queue {number}"
        threading.Thread(
            target=run, args=(_hardware_queues[number],), name=name, daemon=True
        ).start()
    return _hardware_queues[number]


def _serve_hardware_queue(items: queue.SimpleQueue[_Queued]) -> None:
    while True:
        stream, name, function = items.get()
        if name == "record":  # takes no time and waits for nothing at the head of the queue
            stream.work.put((name, function))
            continue
        stream.previous.wait()
        if name == "wait":
            function()
            continue
        stream.previous = threading.Event()
        stream.work.put((name, _followed_by(function, stream.previous.set)))


def _followed_by(function: Callable[[], object], after: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            if not errors:  # otherwise the device is dead
                function()
        finally:
            after()

    return run


def restart_after_fork() -> None:
    """Threads do not survive a fork: those of streams start anew, queued work is lost."""
    _hardware_queues.clear()
    for stream in all_streams:
        stream.start()


def describe_streams() -> str:
    """What every stream is doing, for a test that hangs."""
    return "; ".join(f"{stream.what}: {stream.now}" for stream in all_streams)
