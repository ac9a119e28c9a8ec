"""Compute actions take the time of the emulated device: what is left of it after the real work is
slept.

An action takes its time from its real start. One that took longer than its time is an overrun; with
more than 1 % of them a run says nothing about the emulated cluster and is called invalid.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from whale.scheduling import Action

SHORTEST_S = 5e-3
"""the shortest action of an emulation; all times are stretched by one factor until it holds"""
MOST_OVERRUNS = 0.01
LATE_S = 1e-3
LATE_PART = 0.1
"""an action that ends so many seconds, and such a part of its time, after its time is an overrun"""
_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of prctl(2)


@dataclass
class Pace:
    """Times of one rank's actions, and how closely the rank took them."""

    seconds: Mapping[Action, float]
    num_actions: int = 0
    num_overruns: int = 0
    worst_overrun: tuple[float, str] = field(default=(0.0, ""))
    """(seconds, action)"""
    worst_ratio: float = 1.0
    """of what an overrun took to its time, the largest: with times so much longer none would have
    been late
    """
    note: Callable[[Action], None] | None = None
    """called for every action, before it is paced: the accounting of memory"""

    def finish(self, action: Action, start: float) -> None:
        """Sleeps until this compute action, begun at `start`, has taken its time."""
        if self.note is not None:
            self.note(action)
        seconds = self.seconds[action]
        if not seconds:
            # nothing to do on the emulated device: the weight gradient of a stage without weights
            return
        self.num_actions += 1
        late_s = sleep_until(start + seconds)
        if late_s > max(LATE_S, LATE_PART * seconds):
            self.num_overruns += 1
            self.worst_overrun = max(self.worst_overrun, (late_s, str(action)))
            self.worst_ratio = max(self.worst_ratio, 1 + late_s / seconds)

    def forget(self) -> None:
        """Counts from here on."""
        self.num_actions = self.num_overruns = 0
        self.worst_overrun = (0.0, "")
        self.worst_ratio = 1.0

    @property
    def is_valid(self) -> bool:
        return self.num_overruns <= MOST_OVERRUNS * self.num_actions


def sleep_until(deadline: float) -> float:
    """Returns at `deadline` (of `time.perf_counter`), or at once when it is past; how many seconds
    after it that is.
    """
    left = deadline - time.perf_counter()
    if left > 0:
        time.sleep(left)
        left = deadline - time.perf_counter()  # a busy machine wakes up late
    return -left


def wake_up_on_time() -> None:
    """Linux may end every sleep of a process 50 microseconds late, to save power; here each of them
    counts.
    """
    try:
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1000, 0, 0, 0)  # in nanoseconds
    except (OSError, AttributeError):
        pass  # not Linux: sleeps are a little longer


def stretch_factor(shortest_s: float) -> float:
    """Times are stretched, never shrunk, so that the shortest action takes `SHORTEST_S`."""
    return max(1.0, SHORTEST_S / shortest_s) if shortest_s > 0 else 1.0
