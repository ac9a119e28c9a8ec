"""Compute actions take the time of the emulated device: what is left of it after the real work is
slept.

An action takes its time from its real start. One that took longer than its time is an overrun; with
more than 1 % of them a run says nothing about the emulated cluster and is called invalid.

By how much times are stretched is the user's to say (`--stretch`). Where nobody says it, it is
first what the shortest action needs, and then what this machine needed in the first steps: an
action of a tiny model is over on the emulated device before a process here has looked at its
messages.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from whale.scheduling import Action, Kind

SHORTEST_S = 5e-3
"""the shortest action of an emulation; all times are stretched by one factor until it holds"""
MOST_OVERRUNS = 0.01
LATE_S = 1e-3
LATE_PART = 0.1
"""an action that ends so many seconds, and such a part of its time, after its time is an overrun"""
HEADROOM = 2.0
"""a stretch leaves an action so many times what it needed: the next ones have other moments in
which the machine is busy
"""
LONGEST_STEP_S = 5.0
"""no step becomes longer than that unless the user asks for it: a machine that would need more is
too busy, and the run says so at its end
"""
TRIAL_STEPS = 5
"""steps in which times may be stretched further"""
_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of prctl(2)


@dataclass
class Trial:
    """How much more the actions of one rank would need, before it is settled how far times are
    stretched.

    The first action of each kind on each stage is left out: it makes much that the others find.
    """

    wanted: list[float] = field(default_factory=list)
    """by what the time of each action would have to be multiplied; 1 where it was not late"""
    _seen: set[tuple[Kind, int]] = field(default_factory=set)

    def note(self, action: Action, late_s: float, seconds: float) -> None:
        key = (action.kind, action.stage)
        if key in self._seen:
            self.wanted.append(wanted_stretch(late_s, seconds))
        self._seen.add(key)


def is_late(late_s: float, seconds: float) -> bool:
    """Whether an action that takes `seconds` and ended so much later is an overrun."""
    return late_s > max(LATE_S, LATE_PART * seconds)


def wanted_stretch(late_s: float, seconds: float) -> float:
    """The factor on the time of an action with which it would not have been late: the work may have
    taken that long, or the machine may have run something else, which next time takes as long.
    """
    if not is_late(late_s, seconds):
        return 1.0
    return max(HEADROOM * (1 + late_s / seconds), late_s / (LATE_PART * seconds))


def enough_stretch(factor: float, wanted: Sequence[float], step_s: float) -> float:
    """The factor with which actions like these would be in time, all but the `MOST_OVERRUNS` that
    may be late; `factor` itself where they are.

    `wanted`: of the actions of all ranks, under times stretched by `factor`, with which a step
    takes `step_s`.
    """
    num_may_be_late = int(MOST_OVERRUNS * len(wanted))
    needed = sorted(wanted, reverse=True)[num_may_be_late : num_may_be_late + 1]
    if not needed or needed[0] <= 1:
        return factor
    rounded = float(f"{factor * needed[0]:.3g}")
    return max(factor, min(rounded, factor * LONGEST_STEP_S / step_s))


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
    trial: Trial | None = None
    """notes each action, too, until it is settled how far times are stretched"""

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
        if self.trial is not None:
            self.trial.note(action, late_s, seconds)
        if is_late(late_s, seconds):
            self.num_overruns += 1
            self.worst_overrun = max(self.worst_overrun, (late_s, str(action)))
            self.worst_ratio = max(self.worst_ratio, 1 + late_s / seconds)

    def restretch(self, ratio: float) -> None:
        """All times become so many times as long; counts from here on."""
        self.seconds = {action: ratio * seconds for action, seconds in self.seconds.items()}
        self.forget()

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
