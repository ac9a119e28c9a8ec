"""Typical times of many things, on a machine with neighbours.

A neighbour that no process here can see, such as another guest of the same processor, makes a core up to twice as slow, for a second or
for ten. What is timed in that second cannot be compared with what is timed in the next. So all subjects take turns, in several passes,
with looks at the core between them (`speed.py`),

    pass 1:  a a a | b b b | c c c        pass 2:  a a a | b b b | c c c        pass 7, where only b met too few fast moments:  b b b

and the fastest stretches of each count: those in which the core was its own. A stretch is long against the milliseconds for which the
system gives a core to one of several processes. So whatever runs on the core all the time is in every stretch, and does count.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from whale.profiling.speed import NEARLY, Speed
from whale.runtime.ranks import Ranks

FEWEST_PASSES, MOST_S = 6, 90.0
"""over all subjects; and no pass begins later than that"""
NUM_FASTEST = 3
"""stretches of each subject that count, and that must have been at fast moments"""
STRETCH_S = 0.06
"""how long a subject takes turns in a pass; one turn at least"""
TURNS_TOGETHER = 4
"""in a pass, of what ranks do together"""

Turn = Sequence[float]
Stretch = Sequence[Turn]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Subject:
    """Something that is timed."""

    turn: Callable[[], Turn]
    """does it once, and gives the seconds of each of its pieces"""
    is_together: bool = False
    """ranks wait for each other in it: all must take as many turns"""


def take_turns(subjects: Mapping[Key, Subject], ranks: Ranks, progress: Callable[[str], None]) -> dict[Key, list[float]]:
    """Typical seconds of each piece of each subject. All ranks call it with the same subjects, and do each of them at the same time."""
    for subject in subjects.values():
        subject.turn()  # warm
    fastest: dict[Key, list[Stretch]] = {key: [] for key in subjects}
    looks: dict[Key, list[float]] = {key: [] for key in subjects}
    """at the core, one for each stretch: the slower one of before and after it"""
    speed, begin, waiting, num_told = Speed(ranks.device), time.perf_counter(), list(subjects), 0
    for number in itertools.count(1):
        if number <= FEWEST_PASSES or len(waiting) != num_told:
            progress(f"pass {number} over {len(waiting)} of {len(subjects)} kinds of work")
            num_told = len(waiting)
        before_s = speed.look()
        for key in waiting:
            fastest[key] = _fastest([*fastest[key], _stretch(subjects[key])])
            if ranks.is_distributed:
                dist.barrier()  # a look must not see what another rank still does, and the next stretch begins on all at the same time
            after_s = speed.look()
            looks[key].append(max(before_s, after_s))
            before_s = after_s
        if number >= FEWEST_PASSES:
            fast_s = NEARLY * speed.best_s
            num_fast = ranks.gather([sum(look_s <= fast_s for look_s in looks[key]) for key in subjects])
            waiting = [key for key, *by_rank in zip(subjects, *num_fast) if min(by_rank) < NUM_FASTEST]
        if not waiting or ranks.from_first(time.perf_counter() - begin > MOST_S):
            break
    if waiting:
        progress(
            f"{len(waiting)} of {len(subjects)} kinds of work met too few moments with fast cores in {MOST_S:.0f} s, and their times may "
            "be too long. Measure again when the machine does less"
        )
    return {key: typical(found) for key, found in fastest.items()}


def _stretch(subject: Subject) -> Stretch:
    begin, turns = time.perf_counter(), [subject.turn()]
    # a slow rank is not waited for: all go on computing
    while len(turns) < TURNS_TOGETHER if subject.is_together else time.perf_counter() - begin < STRETCH_S:
        turns.append(subject.turn())
    return turns


def _fastest(stretches: Sequence[Stretch]) -> list[Stretch]:
    return sorted(stretches, key=lambda stretch: statistics.fmean(sum(turn) for turn in stretch))[:NUM_FASTEST]


def typical(stretches: Sequence[Stretch]) -> list[float]:
    """Seconds of each piece: medians over the fastest stretches, made as long as their turns are on average.

    A process that shares the core takes it for a few milliseconds now and then, which a median of short pieces does not show.
    """
    turns = [turn for stretch in _fastest(stretches) for turn in stretch]
    medians = [statistics.median(piece) for piece in zip(*turns, strict=True)]
    factor = statistics.fmean(sum(turn) for turn in turns) / sum(medians)
    return [factor * seconds for seconds in medians]


# ---- subjects that are one call


def loop(run: Callable[[], object], ranks: Ranks, round_s: float = 0.02) -> Subject:
    """The call, many times in a turn: looking at the clock, and at a device, takes time as well."""

    def turn() -> Turn:
        finish(ranks.device)
        start, number, calls = time.perf_counter(), 0, 1
        while True:
            for _ in range(calls):
                run()
            number += calls
            finish(ranks.device)
            passed = time.perf_counter() - start
            if passed > round_s:
                return [passed / number]
            calls = 2 * calls

    return Subject(turn)


def once(run: Callable[[], object], ranks: Ranks, is_together: bool = False) -> Subject:
    """The call, once in a turn."""

    def turn() -> Turn:
        start = time.perf_counter()
        run()
        finish(ranks.device)
        return [time.perf_counter() - start]

    return Subject(turn, is_together)


def finish(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize()
