"""How time passes while devices do their actions.

For fixed orders where nothing is shared but the devices: each device starts its next job as soon as
it is free and everything that the job needs has arrived. The search, the proof that a schedule has
no deadlock, its times and its picture all come from this one loop.

The result does not depend on the sequence in which devices are looked at, so none is kept sorted by
time: the search simulates hundreds of thousands of jobs this way. Where messages queue for links in
the order in which they are sent, that sequence does matter: the simulation of a whole cluster
(`simulation/simulate.py`) goes event by event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Jobs = list[list[int]]
"""for each device, its jobs in the order in which it does them"""
Needs = Sequence[tuple[tuple[int, float], ...]]
"""for every job: (job that must be over, seconds on the way from there), without what follows from
the order of a device
"""
UNKNOWN = -1.0
"""an end that is not known yet"""


class StuckError(Exception):
    """The devices wait for each other."""

    def __init__(self, positions: Sequence[int] = ()) -> None:
        """`positions`: for each device, how many of its jobs it has done."""
        super().__init__("the devices wait for each other")
        self.positions = tuple(positions)


def run_in_order(
    jobs: Sequence[Sequence[int]],
    durations: Sequence[float],
    needs: Needs,
    before: tuple[list[float], list[int]] | None = None,
) -> tuple[list[float], list[int]]:
    """End of every job when each device does its jobs in this order as soon as it can, and the
    jobs in a sequence that respects both orders and needs.

    Jobs are numbers: places in `durations` and `needs`. Raises `StuckError` when the devices wait
    for each other. `before`: the same two lists from the beginning of a run, to continue from.
    """
    ends, sequence = before or ([UNKNOWN] * len(durations), [])
    position = [0] * len(jobs)
    clocks = [0.0] * len(jobs)
    if sequence:
        for device, row in enumerate(jobs):
            position[device] = done = bisect_left(row, True, key=lambda job: ends[job] < 0.0)
            clocks[device] = ends[row[done - 1]] if done else 0.0
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(jobs)))
    while ready:
        device = ready.pop()
        row = jobs[device]
        clock = clocks[device]
        at = position[device]
        last = len(row)
        while at < last:
            job = row[at]
            start = clock
            for need, time in needs[job]:
                end = ends[need]
                if end < 0.0:
                    break
                if end + time > start:
                    start = end + time
            else:
                clock = start + durations[job]
                ends[job] = clock
                sequence.append(job)
                at += 1
                if job in waiting:
                    ready += waiting.pop(job)
                continue
            # a need is not over yet: the device is woken when it is
            waiting.setdefault(need, []).append(device)
            break
        position[device] = at
        clocks[device] = clock
    if len(sequence) < sum(map(len, jobs)):
        raise StuckError(position)
    return ends, sequence
