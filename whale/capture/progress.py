"""One line that says how far a capture is, from its third second on: `capturing GPT ... 1,234
operations`. Most captures are over before.
"""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

FIRST_S = 3.0
EVERY_S = 0.5
"""on a terminal, where the line is written over"""
EVERY_IN_FILE_S = 10.0
LOOK_EVERY = 16
"""operations between two looks at the clock"""


class CaptureProgress:
    """Counts the operations of one capture."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name = name
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._next = time.monotonic() + FIRST_S
        self._is_shown = False
        self.num_operations = 0

    def note(self) -> None:
        """One more operation."""
        self.num_operations += 1
        if self.num_operations % LOOK_EVERY == 0 and time.monotonic() >= self._next:
            self._show()

    def _show(self) -> None:
        text = f"capturing {self._name} ... {self.num_operations:,} operations"
        self._stream.write(f"\r{text}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
        self._is_shown = True
        self._next = time.monotonic() + (EVERY_S if self._is_terminal else EVERY_IN_FILE_S)

    def finish(self) -> None:
        """Takes the line away on a terminal."""
        if self._is_shown and self._is_terminal:
            self._stream.write("\r\033[K")
            self._stream.flush()


@contextmanager
def progress(name: str) -> Iterator[CaptureProgress]:
    """Shows the progress of what stands inside, on the first rank of a job."""
    stream = sys.stderr if os.environ.get("RANK", "0") == "0" else io.StringIO()
    shown = CaptureProgress(name, stream)
    try:
        yield shown
    finally:
        shown.finish()
