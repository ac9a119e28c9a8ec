"""Local search: exchange neighbours on a device, along the critical path.

A step is as long as its longest chain of jobs, each of which waits for the one before: for its
result, or only for the device. Orders get shorter only where such a chain is broken, and only links
of the second kind can be. A try exchanges the two jobs of one such link, chosen at random with a
fixed seed, and simulates. A result that is not longer is kept; sometimes also one that is a little
longer, ever more seldom.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from whale.scheduling.event_loop import UNKNOWN, Jobs, Needs, StuckError, run_in_order
from whale.scheduling.memory import peak_of
from whale.scheduling.problem import OrderProblem

START_HEAT = 0.04
"""at first, orders longer by this part of the step are kept one time in e"""
SEED = 2308
NEAR = 1e-9


def latest_starts(jobs: Jobs, durations: Sequence[float], needs: Needs) -> list[float]:
    """The latest start of every job that does not make the step longer when all orders stay as they
    are.
    """
    ends, sequence = run_in_order(jobs, durations, needs)
    latest_ends = [max(ends)] * len(ends)
    before: list[int] = [-1] * len(ends)
    for row in jobs:
        for one, other in zip(row, row[1:]):
            before[other] = one
    starts = [0.0] * len(ends)
    for job in reversed(sequence):
        start = starts[job] = latest_ends[job] - durations[job]
        for need, time in needs[job]:
            if start - time < latest_ends[need]:
                latest_ends[need] = start - time
        earlier = before[job]
        if earlier >= 0 and start < latest_ends[earlier]:
            latest_ends[earlier] = start
    return starts


def improve(
    problem: OrderProblem, jobs: Jobs, whole: bytearray, needs: Needs, tries: int, bound: float
) -> Jobs:
    """The best orders found, at most as long as `jobs`."""
    durations = problem.durations(whole)
    change_of_job = problem.memory_changes(whole)
    draw = random.Random(SEED)
    rows = [list(row) for row in jobs]
    ends, sequence = run_in_order(rows, durations, needs)
    time = best_time = max(ends)
    best = [list(row) for row in rows]
    places = [0] * len(ends)
    for row in rows:
        for place, job in enumerate(row):
            places[job] = place
    links = critical_links(problem, rows, places, ends, durations, needs)
    for index in range(tries):
        if best_time <= bound * (1 + NEAR) or not links:
            break
        device, place = draw.choice(links)
        row = rows[device]
        row[place], row[place + 1] = row[place + 1], row[place]
        heat = START_HEAT * best_time * (1 - index / tries)
        try:
            if peak_of(map(change_of_job.__getitem__, row)) > problem.caps[device]:
                raise StuckError
            new_ends, new_sequence = _run_again(
                rows, durations, needs, ends, sequence, row[place + 1]
            )
            new_time = max(new_ends)
            accepted = new_time <= time or (
                heat > 0 and draw.random() < math.exp((time - new_time) / heat)
            )
        except StuckError:
            accepted = False
        if not accepted:
            row[place], row[place + 1] = row[place + 1], row[place]
            continue
        ends = new_ends
        sequence = new_sequence
        time = new_time
        places[row[place]] = place
        places[row[place + 1]] = place + 1
        links = critical_links(problem, rows, places, ends, durations, needs)
        if time < best_time * (1 - NEAR):
            best_time = time
            best = [list(row) for row in rows]
    return best


def _run_again(
    rows: Jobs,
    durations: Sequence[float],
    needs: Needs,
    ends: list[float],
    sequence: list[int],
    first: int,
) -> tuple[list[float], list[int]]:
    """Result of `run_in_order` when two neighbours were exchanged: what was done before the `first`
    of them stays as it was.
    """
    done = sequence.index(first)
    new_ends = list(ends)
    for job in sequence[done:]:
        new_ends[job] = UNKNOWN
    return run_in_order(rows, durations, needs, (new_ends, sequence[:done]))


def critical_links(
    problem: OrderProblem,
    rows: Jobs,
    places: Sequence[int],
    ends: Sequence[float],
    durations: Sequence[float],
    needs: Needs,
) -> list[tuple[int, int]]:
    """(device, place of the first) of neighbours on one critical path whose second only waits for
    the device.

    `places`: of every job, in the row of its device.
    """
    last_end = max(ends)
    last_row = next(row for row in filter(None, rows) if ends[row[-1]] == last_end)
    job = next(job for job in last_row if ends[job] == last_end)
    links: list[tuple[int, int]] = []
    size = problem.size
    count = problem.num_micro_batch
    device_of_place = problem.device_of_place
    while True:
        start = ends[job] - durations[job]
        slip = NEAR * (1 + abs(start))
        if start <= slip:
            return links
        device = device_of_place[job % size]
        place = places[job]
        earlier = rows[device][place - 1] if place > 0 else -1
        needed = -1
        depends = False
        for need, time in needs[job]:
            depends = depends or need == earlier
            if needed < 0 and ends[need] + time >= start - slip:
                needed = need
        if place > 0:
            # forwards of a stage stay ascending
            in_order = job < size and earlier == job - 1 and job % count != 0
            if ends[earlier] >= start - slip and not depends and not in_order:
                links.append((device, place - 1))
                if needed < 0:
                    job = earlier
                    continue
            elif needed < 0:
                job = earlier
                continue
        job = needed
