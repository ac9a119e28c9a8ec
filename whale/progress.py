"""A line of progress for scripts that print none: step, loss, samples a second, time left.

`whale run` asks for it; rank 0 writes it. As soon as the script writes something itself (a line to
stdout, a progress bar), nothing more is written. No torch here: the launcher uses it, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

PROGRESS_VARIABLE = "WHALE_PROGRESS"
"""environment variable with which `whale run` asks for the line"""
QUIET_STEPS = 3
"""steps in which a script that prints something would have begun to"""
EVERY_S = 10.0
"""seconds between two lines of a file or pipe"""
EVERY_ON_TERMINAL_S = 0.5
SIGNS_OF_PROGRESS = ("\r", "loss", "step", "it/s")
"""what tells a progress bar or log from a warning, on stderr"""


class _Watched:
    """A stream that knows whether the script has written to it."""

    def __init__(self, stream: TextIO, signs: tuple[str, ...]) -> None:
        self._stream = stream
        self._signs = signs
        self.is_used = False

    def write(self, text: str) -> int:
        if text.strip() and (not self._signs or any(sign in text for sign in self._signs)):
            self.is_used = True
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_watched: list[_Watched] = []


def watch_output() -> None:
    """Notices from now on what the script of this process prints. Called before it runs."""
    if _watched:
        return
    _watched.append(_Watched(sys.stdout, ()))
    _watched.append(_Watched(sys.stderr, SIGNS_OF_PROGRESS))
    sys.stdout, sys.stderr = _watched  # type: ignore[assignment]


class ProgressLine:
    """Writes the line for one engine."""

    def __init__(
        self, num_steps: int | None, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_steps = num_steps
        """of the whole run; None: not known, and no time left is said"""
        self._stream = stream
        self._clock = clock
        self._start = self._last = clock()
        self._first_step: int | None = None
        self._num_samples = 0
        for watched in _watched:
            watched.is_used = False  # what was printed before the first step is no progress

    def note(self, step: int, num_samples: int, loss: Callable[[], float]) -> None:
        """A step is done, the `step`-th counted from 1. `loss` is only read when a line is due."""
        if any(watched.is_used for watched in _watched):
            return
        now = self._clock()
        if self._first_step is None:
            self._first_step = step
            self._start = self._last = now  # the first step has captures and compilation in it
            return
        self._num_samples += num_samples
        every_s = EVERY_ON_TERMINAL_S if self._stream.isatty() else EVERY_S
        is_last = step == self._num_steps
        if step - self._first_step < QUIET_STEPS or (now - self._last < every_s and not is_last):
            return
        self._write(step, loss(), self._num_samples / (now - self._last), now)
        self._last = now
        self._num_samples = 0

    def _write(self, step: int, loss: float, samples_per_s: float, now: float) -> None:
        assert self._first_step is not None
        of = f"/{self._num_steps}" if self._num_steps is not None else ""
        parts = [f"step {step}{of}", f"loss {loss:.4f}", f"{samples_per_s:.0f} samples/s"]
        if self._num_steps is not None:
            step_s = (now - self._start) / (step - self._first_step)
            parts.append(f"{(self._num_steps - step) * step_s:.0f} s left")
        text = "  ".join(parts)
        is_terminal = self._stream.isatty()
        self._stream.write(f"\r{text}\x1b[K" if is_terminal else f"{text}\n")
        if is_terminal and step == self._num_steps:
            self._stream.write("\n")
        self._stream.flush()


def open_progress(rank: int, num_steps: int | None) -> ProgressLine | None:
    """The line of this process; None where it is not asked for, or another rank writes it."""
    if rank != 0 or os.environ.get(PROGRESS_VARIABLE) != "1":
        return None
    stream = _watched[0]._stream if _watched else sys.stdout
    return ProgressLine(num_steps, stream)
