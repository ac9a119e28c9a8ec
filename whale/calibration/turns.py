"""Typical times of many things, on a machine with neighbours.

A neighbour that no process here can see, such as another guest of the same processor, makes a core
up to twice as slow, for a second or for ten. What is timed in that second cannot be compared with
what is timed in the next. So all subjects take turns, in several passes, with looks at the core
between them (`Speed`),

    pass 1:  a a a | b b b | c c c
    pass 2:  a a a | b b b | c c c
    pass 7:  b b b                     only b met too few fast moments until then

and the fastest stretches of each count: those in which the core was its own. Processes that share
the core are another matter, and do count: what they take of most stretches is added (not to what
ranks do together: there nobody knows who waited for whom).

This pays on cores only (docs/log.md): without passes and looks a calibration predicted steps up to
18 % too long in every second run, with them eight calibrations gave 180 to 191 ms for a step of
187; a shared core is found 1.95 to 2.0 times as slow as a free one, where it was 1.8. Accelerators
come through the same two calls, `take_turns` and `Subject`, and end after the fewest passes.
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

from whale.distributed.ranks import Ranks

NEARLY = 1.10
"""a core is fast when it is no slower than this, against its own best"""
BEST = 0.05
"""this part of all looks at a core are its best ones"""
FEWEST_PASSES = 6
MOST_S = 120.0
"""over all subjects; and no pass begins later than that"""
NUM_FASTEST = 3
"""stretches of each subject that count; it takes turns until so many were at fast moments, on every
rank
"""
LOOP_S = 0.02
"""how long a short call is repeated in one turn"""
STRETCH_S = 0.06
"""how long a subject takes turns in a pass; one turn at least"""
TURNS_TOGETHER = 4
"""in a pass, of what ranks do together"""

Turn = Sequence[float]
Key = TypeVar("Key", bound=Hashable)


class Speed:
    """How fast the core of this process is at a moment, against its own best over the whole run:
    fixed work, timed before and after whatever is measured.

    It is CPU time, which does not pass while another process has the core. An accelerator has no
    such neighbours: it always looks fast, and this class does nothing there.
    """

    def __init__(self, is_core: bool = True) -> None:
        self._is_core = is_core
        self._looks: list[float] = []
        self._small = torch.ones(64, 64)
        self._large = torch.ones(192, 192)
        self._out = torch.empty(64, 64)
        self._out_large = torch.empty(192, 192)

    def look(self) -> float:
        """CPU seconds of fixed work now: about a millisecond of products, memory and calls."""
        if not self._is_core:
            self._looks.append(1e-3)
            return self._looks[-1]
        # what was measured before has used the caches: a look after a large copy took 1.1 to 1.15
        # times as long
        self._work()
        start = time.thread_time()
        self._work()
        self._looks.append(time.thread_time() - start)
        return self._looks[-1]

    def _work(self) -> None:
        torch.mm(self._large, self._large, out=self._out_large)
        for _ in range(60):
            torch.mm(self._small, self._small, out=self._out)
            torch.add(self._small, self._out, out=self._out)
            torch.relu_(self._out[:1])

    @property
    def best_s(self) -> float:
        """A look at this core when it is fast, as far as is known up to now."""
        return sorted(self._looks)[int(BEST * len(self._looks))]

    def slowness(self, look_s: float) -> float:
        """How many times slower than its best the core was at this look."""
        return look_s / self.best_s


@dataclass(frozen=True)
class Stretch:
    """Turns of one subject, one right after the other."""

    turns: Sequence[Turn]
    part: float = 1.0
    """fraction of the core's time that other processes left; not known, so 1, where ranks wait for
    each other, or an accelerator computes
    """

    @property
    def seconds(self) -> float:
        """Mean seconds of a turn, by the clock."""
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
        turns: list[Turn] = []
        for stretch in self.fastest:
            turns.extend(stretch.turns)
        medians = [statistics.median(piece) for piece in zip(*turns, strict=True)]
        cpu_s = statistics.fmean(stretch.cpu_s for stretch in self.fastest)
        turn_s = cpu_s / statistics.median(self._parts)
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
    num_reported = 0
    for number in itertools.count(1):
        if number <= FEWEST_PASSES or len(waiting) != num_reported:
            progress(f"pass {number} over {len(waiting)} of {len(subjects)} kinds of work")
            num_reported = len(waiting)
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
            own = [sum(look_s <= fast_s for look_s in record.looks) for record in records.values()]
            # a subject is done when every rank met enough fast moments: all ranks agree on it
            waiting = [
                key
                for key, *by_rank in zip(subjects, *ranks.gather(own))
                if min(by_rank) < NUM_FASTEST
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
    """Subjects in the order of one pass: the short ones come after each of the others."""
    short = [key for key in waiting if subjects[key].is_short]
    order: list[Key] = []
    for key in waiting:
        if key not in short:
            order += [key, *short]
    return order or short


def _stretch(subject: Subject, on_accelerator: bool) -> Stretch:
    if subject.is_together:
        subject.turn()  # ranks come here one after the other, and the first one waits
        return Stretch([subject.turn() for _ in range(TURNS_TOGETHER)])
    begin = time.perf_counter()
    begin_cpu = time.process_time()
    turns = [subject.turn()]
    # a slow rank is not waited for: all continue to compute
    while time.perf_counter() - begin < STRETCH_S:
        turns.append(subject.turn())
    part = (time.process_time() - begin_cpu) / (time.perf_counter() - begin)
    return Stretch(turns) if on_accelerator else Stretch(turns, part)


# ---- subjects that are one call


def loop(run: Callable[[], object], ranks: Ranks) -> Subject:
    """The call, many times in a turn: looking at the clock, and at a device, takes time as well. On
    an accelerator the clock is that of its events: launching is not part of it.
    """
    device = ranks.device

    def turn() -> Turn:
        device.synchronise()
        start = device.event()
        number = 0
        calls = 1
        while True:
            for _ in range(calls):
                run()
            number += calls
            end = device.event()
            device.synchronise()
            passed = device.elapsed_s(start, end)
            if passed > LOOP_S:
                return [passed / number]
            calls = 2 * calls

    return Subject(turn)


def once(
    run: Callable[[], object], ranks: Ranks, is_together: bool = False, is_short: bool = False
) -> Subject:
    """The call, once in a turn."""
    device = ranks.device

    def turn() -> Turn:
        start = device.event()
        run()
        end = device.event()
        device.synchronise()
        return [device.elapsed_s(start, end)]

    return Subject(turn, is_together, is_short)
