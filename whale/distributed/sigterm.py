"""SIGTERM in a process that is watched: it ends the process a moment later than usual, after the
others have heard why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from whale.distributed.hub import LONGEST_LINE


class Sigterm:
    """Notices SIGTERM from a thread. A handler of the user's own stays as it is.

    The main thread may stand inside C++, where no Python handler runs; the byte that Python's C
    handler writes is read by the thread that watches.
    """

    def __init__(self) -> None:
        self.bytes: socket.socket | None = None
        """readable when a signal came; None where signals are not ours to hear"""
        self.at: float | None = None
        """when the first SIGTERM was noticed"""

    def hear(self, is_over: Callable[[], bool]) -> None:
        """Takes SIGTERM from now on. Once `is_over` it ends the process as usual."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop has it
            signal.set_wakeup_fd(before)
            return
        self.bytes = ours
        self._wake = theirs

        def handle(number: int, frame: FrameType | None) -> None:
            if is_over():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            with contextlib.suppress(OSError):
                theirs.send(bytes([number]))  # where someone has taken the wake-up away since

        self._handler = handle
        signal.signal(signal.SIGTERM, handle)

    def has_come(self) -> bool:
        """Whether SIGTERM came since this was asked last."""
        if self.bytes is None or signal.SIGTERM not in received(self.bytes):
            return False
        self.at = self.at or time.monotonic()
        return True

    def give_back(self) -> None:
        """Signals are as they were before `hear`."""
        if self.bytes is not None and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


def received(connection: socket.socket) -> bytes:
    """What has arrived at a socket; nothing where it is closed or broken."""
    try:
        return connection.recv(LONGEST_LINE)
    except OSError:
        return b""
