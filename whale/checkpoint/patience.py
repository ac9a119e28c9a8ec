"""Ranks that save meet in a folder only: how long one waits there for the others, and how it sees
that nobody can write any more.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

EXIT_TIMEOUT_S = 60.0
"""longest patience once the script has ended: a job with a dead rank must not hang for long"""
POLL_S = 0.05
PROGRESS_S = 1.0  # how often sizes are looked at for progress
PROBE = "probe"


class Patience:
    """Waiting for other ranks, for as long as files in a folder appear or grow."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder = folder
        self._limit_s = limit_s
        self._last_progress = self._last_look = time.monotonic()
        self._seen: object = None

    @property
    def limit_s(self) -> float:
        return (
            self._limit_s
            if threading.main_thread().is_alive()
            else min(self._limit_s, EXIT_TIMEOUT_S)
        )

    def pause(self) -> None:
        time.sleep(POLL_S)

    def looks_now(self) -> bool:
        """Whether `is_over` will look at the folder: not each time, file systems can be slow."""
        return time.monotonic() - self._last_look >= PROGRESS_S

    def is_over(self) -> bool:
        now = time.monotonic()
        if now - self._last_look >= PROGRESS_S:
            self._last_look = now
            seen = _sizes(self.folder)
            if seen != self._seen:
                self._seen = seen
                self._last_progress = now
        return now - self._last_progress > self.limit_s


def try_to_write(folder: Path) -> None:
    """Raises what the system says on a disk that is full or read-only."""
    probe = folder / PROBE
    try:
        probe.write_bytes(b"x")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def _sizes(folder: Path) -> list[tuple[str, int]]:
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as items:
        for item in items:
            with contextlib.suppress(OSError):
                if item.name != PROBE:
                    found.append((item.name, item.stat().st_size))
    return sorted(found)
