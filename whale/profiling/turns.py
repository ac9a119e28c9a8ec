"""Typical times of many things, on a machine with neighbours.

A neighbour that no process here can see, such as another guest of the same processor, makes a core up to twice as slow, for a second or
for ten. What is timed in that second cannot be compared with what is timed in the next. So all subjects take turns, in several passes,

    pass 0:  a a a  b b b  c c c        pass 1:  a a a  b b b  c c c        ...

and only the fastest stretches of each count: those in which the core was its own. A stretch is long against the milliseconds for which
the system gives a core to one of several processes. So whatever runs on the core all the time is in every stretch, and does count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from whale.runtime.ranks import Ranks

NUM_PASSES = 6
PASS_S = 0.1
"""how long each subject takes turns in a pass; one turn at least"""
TURNS_TOGETHER = 4
"""in a pass, of what ranks do together"""
STRETCH_S = 0.05
FASTEST = 0.25
"""this part of the stretches counts"""

Turn = Sequence[float]
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
    passes: dict[Key, list[list[Turn]]] = {key: [] for key in subjects}
    for number in range(NUM_PASSES):
        progress(f"pass {number + 1} of {NUM_PASSES} over {len(subjects)} kinds of work")
        for key, subject in subjects.items():
            if ranks.is_distributed:
                dist.barrier()
            passes[key].append(_one_pass(subject))
    return {key: typical(found) for key, found in passes.items()}


def _one_pass(subject: Subject) -> list[Turn]:
    if subject.is_together:
        return [subject.turn() for _ in range(TURNS_TOGETHER)]
    turns: list[Turn] = []
    begin = time.perf_counter()
    while not turns or time.perf_counter() - begin < PASS_S:  # a slow rank is not waited for: all go on computing
        turns.append(subject.turn())
    return turns


def typical(passes: Sequence[Sequence[Turn]]) -> list[float]:
    """Seconds of each piece: medians over the fastest stretches, stretched to what a turn takes there on average.

    A process that shares the core takes it for a few milliseconds now and then, which a median of short pieces does not show.
    """
    stretches = sorted((stretch for turns in passes for stretch in _stretches(turns)), key=_mean_s)
    chosen = [turn for stretch in stretches[: math.ceil(FASTEST * len(stretches))] for turn in stretch]
    medians = [statistics.median(piece) for piece in zip(*chosen, strict=True)]
    factor = _mean_s(chosen) / sum(medians)
    return [factor * seconds for seconds in medians]


def _stretches(turns: Sequence[Turn]) -> Iterator[Sequence[Turn]]:
    """The turns of one pass in pieces of STRETCH_S at least; what is left at the end belongs to the last of them."""
    begin, passed, found = 0, 0.0, []
    for place, turn in enumerate(turns):
        passed += sum(turn)
        if passed >= STRETCH_S:
            found.append(turns[begin : place + 1])
            begin, passed = place + 1, 0.0
    if not found:
        yield turns
        return
    yield from found[:-1]
    yield [*found[-1], *turns[begin:]]


def _mean_s(turns: Sequence[Turn]) -> float:
    return statistics.fmean(sum(turn) for turn in turns)


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
