"""Typical times of many things, on a machine with neighbours.

A neighbour that no process here can see, such as another guest of the same processor, makes a core
up to twice as slow, for a second or for ten. What is timed in that second cannot be compared with
what is timed in the next. So all subjects take turns, in several passes, with looks at the core
between them (`speed.py`),

    pass 1:  a a a | b b b | c c c        pass 2:  a a a | b b b | c c c        pass 7, where only b met too few fast moments:  b b b

and the fastest stretches of each count: those in which the core was its own. Processes that share
the core are another matter, and do count: what they take of most stretches is added (not to what
ranks do together: there nobody knows who waited for whom).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from whale.calibration.speed import NEARLY, Speed
from whale.distributed.ranks import Ranks

FEWEST_PASSES = 6
MOST_S = 120.0
"""over all subjects; and no pass begins later than that"""
NUM_FASTEST = 3
"""stretches of each subject that count; it takes turns until so many were at fast moments, on every
rank
"""
STRETCH_S = 0.06
"""how long a subject takes turns in a pass; one turn at least"""
TURNS_TOGETHER = 4
"""in a pass, of what ranks do together"""

Turn = Sequence[float]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Stretch:
    """Turns one after the other."""

    turns: Sequence[Turn]
    part: float = 1.0
    """of the core's time, that other processes left; not known where ranks wait for each other, or
    a GPU computes
    """

    @property
    def seconds(self) -> float:
        """Of a turn, on the clock."""
        return statistics.fmean(sum(turn) for turn in self.turns)

    @property
    def cpu_s(self) -> float:
        return self.part * self.seconds


class Record:
    """All stretches of one subject. How fast the core is comes from the fastest of them; how much
    of it other processes take, from the median of all: of many stretches a few have a shared core
    nearly for themselves, and a few share one that is free else."""

    def __init__(self) -> None:
        self.fastest: list[Stretch] = []
        self.looks: list[float] = []
        """at the core, one for each stretch: the slower one of before and after it"""
        self._parts: list[float] = []

    def add(self, stretch: Stretch, look_s: float) -> None:
        self.fastest = sorted([*self.fastest, stretch], key=lambda each: each.cpu_s)[:NUM_FASTEST]
        self.looks.append(look_s)
        self._parts.append(stretch.part)

    def typical(self) -> list[float]:
        """Seconds of each piece: medians over the fastest stretches, made as long as turns are
        beside the other processes.

        These take the core for a few milliseconds now and then, which a median of short pieces does
        not show.
        """
        medians = [
            statistics.median(piece)
            for piece in zip(
                *(turn for stretch in self.fastest for turn in stretch.turns), strict=True
            )
        ]
        turn_s = statistics.fmean(stretch.cpu_s for stretch in self.fastest) / statistics.median(
            self._parts
        )
        return [seconds * turn_s / sum(medians) for seconds in medians]


@dataclass(frozen=True)
class Subject:
    """Something that is timed."""

    turn: Callable[[], Turn]
    """does it once, and gives the seconds of each of its pieces"""
    is_together: bool = False
    """ranks wait for each other in it: all must take as many turns"""
    is_short: bool = False
    """it comes after each of the others: of what ranks do together little is ever done while all
    cores are fast, which is seldom
    """


def take_turns(
    subjects: Mapping[Key, Subject], ranks: Ranks, progress: Callable[[str], None]
) -> dict[Key, list[float]]:
    """Typical seconds of each piece of each subject. All ranks call it with the same subjects, and
    do each of them at the same time.
    """
    for subject in subjects.values():
        subject.turn()  # warm
    records = {key: Record() for key in subjects}
    speed = Speed(not ranks.device.is_accelerator)
    begin = time.perf_counter()
    waiting = list(subjects)
    num_told = 0
    for number in itertools.count(1):
        if number <= FEWEST_PASSES or len(waiting) != num_told:
            progress(f"pass {number} over {len(waiting)} of {len(subjects)} kinds of work")
            num_told = len(waiting)
        before_s = speed.look()
        for key in _order(subjects, waiting):
            stretch = _stretch(subjects[key], ranks.device.is_accelerator)
            if ranks.is_distributed:
                # a look must not see what another rank still does, and the next stretch begins on
                # all at the same time
                dist.barrier()
            after_s = speed.look()
            records[key].add(stretch, max(before_s, after_s))
            before_s = after_s
        is_over = ranks.from_first(time.perf_counter() - begin > MOST_S)
        if number >= FEWEST_PASSES or is_over:
            fast_s = NEARLY * speed.best_s
            num_fast = ranks.gather(
                [sum(look_s <= fast_s for look_s in record.looks) for record in records.values()]
            )
            waiting = [
                key for key, *by_rank in zip(subjects, *num_fast) if min(by_rank) < NUM_FASTEST
            ]
        if is_over or not waiting:
            break
    if waiting:
        progress(
            f"{len(waiting)} of {len(subjects)} kinds of work met too few moments with fast cores "
            f"in {MOST_S:.0f} s, and their times may "
            "be too long. Measure again when the machine does less"
        )
    return {key: record.typical() for key, record in records.items()}


def _order(subjects: Mapping[Key, Subject], waiting: Sequence[Key]) -> list[Key]:
    """Of a pass."""
    short = [key for key in waiting if subjects[key].is_short]
    return [each for key in waiting if key not in short for each in (key, *short)] or short


def _stretch(subject: Subject, on_accelerator: bool) -> Stretch:
    if subject.is_together:
        subject.turn()  # ranks come here one after the other, and the first one waits
        return Stretch([subject.turn() for _ in range(TURNS_TOGETHER)])
    begin = time.perf_counter()
    begin_cpu = time.process_time()
    turns = [subject.turn()]
    while (
        time.perf_counter() - begin < STRETCH_S
    ):  # a slow rank is not waited for: all go on computing
        turns.append(subject.turn())
    part = (time.process_time() - begin_cpu) / (time.perf_counter() - begin)
    return Stretch(turns) if on_accelerator else Stretch(turns, part)


# ---- subjects that are one call


def loop(run: Callable[[], object], ranks: Ranks, round_s: float = 0.02) -> Subject:
    """The call, many times in a turn: looking at the clock, and at a device, takes time as well."""

    def turn() -> Turn:
        ranks.device.synchronise()
        start = time.perf_counter()
        number = 0
        calls = 1
        while True:
            for _ in range(calls):
                run()
            number += calls
            ranks.device.synchronise()
            passed = time.perf_counter() - start
            if passed > round_s:
                return [passed / number]
            calls = 2 * calls

    return Subject(turn)


def once(
    run: Callable[[], object], ranks: Ranks, is_together: bool = False, is_short: bool = False
) -> Subject:
    """The call, once in a turn."""

    def turn() -> Turn:
        start = time.perf_counter()
        run()
        ranks.device.synchronise()
        return [time.perf_counter() - start]

    return Subject(turn, is_together, is_short)
