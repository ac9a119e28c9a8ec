"""Typical times of many things, on a machine with neighbours.

A neighbour that no process here can see, such as another guest of the same processor, makes a core up to twice as slow, for a second or
for ten. What is timed in that second cannot be compared with what is timed in the next. So all subjects take turns, in several passes,

    pass 1:  a a a  b b b  c c c        pass 2:  a a a  b b b  c c c        ...

until nothing gets faster any more, and the fastest stretches of each count: those in which the core was its own. A stretch is long
against the milliseconds for which the system gives a core to one of several processes. So whatever runs on the core all the time is in
every stretch, and does count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from whale.runtime.ranks import Ranks

FEWEST_PASSES, MOST_S = 6, 45.0
"""no pass begins later than that"""
NUM_FASTEST = 3
"""stretches of each subject that count"""
FASTER, NUM_IN_VAIN = 0.01, 4
"""so many passes in a row that make nothing faster by more than this part are the last ones"""
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
    taken: dict[Key, list[Stretch]] = {key: [] for key in subjects}
    totals: list[float] = []
    begin, goes_on = time.perf_counter(), True
    while goes_on:
        progress(f"pass {len(totals) + 1} over {len(subjects)} kinds of work")
        for key, subject in subjects.items():
            if ranks.is_distributed:
                dist.barrier()
            taken[key].append(_stretch(subject))
        totals.append(sum(sum(typical(found)) for found in taken.values()))
        goes_on = ranks.from_first(time.perf_counter() - begin < MOST_S) and any(ranks.gather(_may_be_faster(totals)))
    return {key: typical(found) for key, found in taken.items()}


def _stretch(subject: Subject) -> Stretch:
    begin, turns = time.perf_counter(), [subject.turn()]
    # a slow rank is not waited for: all go on computing
    while len(turns) < TURNS_TOGETHER if subject.is_together else time.perf_counter() - begin < STRETCH_S:
        turns.append(subject.turn())
    return turns


def _may_be_faster(totals: Sequence[float]) -> bool:
    """Typical seconds of all subjects after each pass: whether another pass may help."""
    last = max(FEWEST_PASSES, 1 + NUM_IN_VAIN)
    return len(totals) < last or totals[-1] < (1 - FASTER) * totals[-1 - NUM_IN_VAIN]


def typical(stretches: Sequence[Stretch]) -> list[float]:
    """Seconds of each piece: medians over the fastest stretches, made as long as their turns are on average.

    A process that shares the core takes it for a few milliseconds now and then, which a median of short pieces does not show.
    """
    fastest = sorted(stretches, key=lambda stretch: statistics.fmean(sum(turn) for turn in stretch))[:NUM_FASTEST]
    turns = [turn for stretch in fastest for turn in stretch]
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
