"""The dynamic programme that cuts a chain of operations into stages.

Operation i takes t_i seconds; cutting before operation p sends c_p seconds of data. Stage k runs on
a device of speed v_k (or has times of its own, t_ki, in place of t_i / v_k), and the link in front
of it takes c_k[p] = w_k c_p seconds (w_k = 1 where nothing is said). Operation i takes m_ki bytes
on stage k, which has M_k. With boundaries 0 = b_0 < b_1 < ... < b_K = n, inner ones from the
allowed points, S the prefix sums of t, and c = 0 at both ends:

    time_k = (S[b_{k+1}] - S[b_k]) / v_k + c_k[b_k] + c_{k+1}[b_{k+1}]

    minimise    T = max over k of time_k, then, among all cuts with that T, sum of c_k[b_k]     (1)
    subject to  the bytes of stage k are at most M_k                                            (3)

A stage [p, q) on device k keeps within T exactly when

    need_k[q] = S[q] / v_k + c_{k+1}[q] - T  <=  slack_k[p] = S[p] / v_k - c_k[p].              (2)

Smallest T (`_smallest_time`). For a given T, point q can end stage k exactly when (2) holds for the
largest slack of all points p < q that can end stage k - 1: one running maximum a stage, O(K n) for
a T (`_ends`), and the smallest T by bisection.

Least sum for that T (`_least_crossing`). A second programme: G_k[q] = c_{k+1}[q] + min G_{k-1}[p]
over the p < q with (2). A point with less slack and no lower sum than another is never needed, so
the useful points form a staircase, slack and sum both rising, and the best is the first with enough
slack: O(K n log n).

Memory. Bytes are never negative, so for each q line (3) allows all p from some first one on, which
rises with q (`_firsts`). A cut without limits that keeps to them is the best with them as well, so
they are looked at only if it does not. Then the running maximum becomes that of a window
(`_in_window`), and the second programme tries every p of the window: O(K n^2), next to O(K n) where
little crosses (`_least_crossing_in_windows`).

All are exact. Times closer than SAME_TIME (relative) count as equal, so that rounding never decides
which cuts tie for T.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from whale.plans.shares import NotEnoughMemory
from whale.units import human_bytes, human_seconds

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

SHOWN = 8
"""stages whose memory is written out in a message"""
SAME_TIME = 1e-9
"""relative; prefix sums of 4,000 doubles are good to about 1e-13"""
BISECTION_WIDTH = 1e-11
"""relative; well inside SAME_TIME"""


@dataclass(frozen=True)
class Cuts:
    """Where the stages start, what that costs, and why."""

    starts: tuple[int, ...]
    """first operation of each stage; `starts[0]` is 0"""
    slowest: float
    """seconds of the slowest stage, its two crossings included"""
    total_crossing: float
    """seconds of all crossings, each counted once"""
    reason: str


@dataclass(frozen=True)
class StageMemory:
    """Bytes of operations and of stages, for line (3)."""

    operation_bytes: Floats
    """(stages, operations): what each operation takes on each stage, micro-batches in flight
    included
    """
    capacity_bytes: Floats
    """(stages,)"""


@dataclass(frozen=True)
class _Chain:
    """The points where a stage may start or end (operation 0 and the end included), and what counts
    there.
    """

    points: Indices
    elapsed: Floats
    """(stages, points): S / v"""
    crossing: Floats
    """(stages + 1, points): c_k, in front of each stage and behind the last; 0 at both ends"""
    firsts: Indices | None
    """(stages, points): the first point where a stage that ends here may start, by memory; None:
    anywhere
    """

    @property
    def num_stages(self) -> int:
        return len(self.elapsed)

    @cached_property
    def slack(self) -> Floats:
        """(stages, points), line (2)"""
        slack: Floats = self.elapsed - self.crossing[:-1]
        return slack

    def need(self, time: float) -> Floats:
        """(stages, points), line (2)"""
        need: Floats = self.elapsed + self.crossing[1:] - time
        return need


def cut(
    times: Floats,
    crossing_times: Floats,
    num_stages: int,
    allowed: npt.NDArray[np.bool_] | None = None,
    speeds: Sequence[float] | None = None,
    memory: StageMemory | None = None,
    boundary_weights: Sequence[float] | None = None,
) -> Cuts:
    """The best cuts by (1) and (3). `times[i]` (or `times[k, i]`), `crossing_times[p]` in seconds;
    `allowed[p]`: a stage may start at p.

    `boundary_weights`: w_k in front of every stage but the first.
    """
    chain = _chain(times, crossing_times, num_stages, allowed, speeds)
    if boundary_weights is not None:
        chain = replace(
            chain, crossing=chain.crossing * np.array([0.0, *boundary_weights, 0.0])[:, np.newaxis]
        )
    why = ""
    if memory is None:
        chosen = _best(chain)
    else:
        used = _prefix_sums(memory.operation_bytes)[:, chain.points]
        limit = np.asarray(memory.capacity_bytes, dtype=np.float64)
        within = replace(chain, firsts=_firsts(used, limit))
        _check_memory(within, used, limit)
        chosen = _best(chain)
        if (_between(used, chosen) > limit).any():
            free = float(_stage_times(chain, chosen).max())
            chain = within
            chosen = _best(within)
            why = f"; memory moved the cuts (slowest without limits: {human_seconds(free)})"
    stage_times = _stage_times(chain, chosen)
    starts = tuple(int(start) for start in chain.points[chosen[:-1]])
    slowest = float(stage_times.max())
    total_crossing = float(chain.crossing[np.arange(num_stages + 1), chosen].sum())
    worst = int(stage_times.argmax())
    last = int(chain.points[chosen[worst + 1]]) - 1
    num_operations = int(chain.points[-1])
    reason = (
        f"{num_stages} stages of {num_operations} operations, cut at {num_stages - 1} of "
        f"{len(chain.points) - 2} points: slowest is stage {worst} (operations {starts[worst]} to "
        f"{last}) with {human_seconds(slowest)}, mean {human_seconds(stage_times.mean())}; the "
        f"cuts send {human_seconds(total_crossing)} in all{why}"
    )
    return Cuts(starts, slowest, total_crossing, reason)


def _best(chain: _Chain) -> list[int]:
    time = _smallest_time(chain) * (1 + SAME_TIME)
    return (
        _least_crossing(chain, time)
        if chain.firsts is None
        else _least_crossing_in_windows(chain, time)
    )


def _stage_times(chain: _Chain, chosen: list[int]) -> Floats:
    crossed = chain.crossing[np.arange(chain.num_stages + 1), chosen]
    times: Floats = _between(chain.elapsed, chosen) + crossed[:-1] + crossed[1:]
    return times


def _between(sums: Floats, chosen: list[int]) -> Floats:
    """What each stage has between its boundaries. `sums`: (stages, points)"""
    stages = np.arange(len(sums))
    difference: Floats = sums[stages, chosen[1:]] - sums[stages, chosen[:-1]]
    return difference


def _prefix_sums(values: Floats) -> Floats:
    sums: Floats = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
    return sums


def _firsts(used: Floats, limit: Floats) -> Indices:
    """Line (3): for each stage and end, the first start that fits."""
    return np.stack(
        [
            np.searchsorted(row, row - most, side="left")
            for row, most in zip(used, limit, strict=True)
        ]
    ).astype(np.int64)


def _check_memory(chain: _Chain, used: Floats, limit: Floats) -> None:
    """Raises `NotEnoughMemory`, with numbers, when no cut keeps within memory: found by taking as
    much as fits on each stage in turn.
    """
    if _fits(chain, np.inf):
        return
    reached = np.zeros(len(chain.points), dtype=bool)  # points at which a stage can end
    reached[0] = True
    done = 0
    for stage in range(chain.num_stages):
        assert chain.firsts is not None
        before = np.concatenate([[0], np.cumsum(reached)])
        ends = np.arange(len(chain.points))
        # some start lies between the first that fits and the end
        reached = before[ends] > before[np.minimum(chain.firsts[stage], ends)]
        if not reached.any():
            break
        done = int(np.flatnonzero(reached)[-1])
    rest = float(used[-1, -1] - used[-1, done])
    sizes = [human_bytes(max(0.0, float(most))) for most in limit]
    capacities = f"{', '.join(sizes[:SHOWN])}{', ...' * (len(sizes) > SHOWN)}"
    if len(set(sizes)) == 1:
        capacities = f"{sizes[0]} each"
    raise NotEnoughMemory(
        f"no cut into {chain.num_stages} stages fits into memory: stages of {capacities} leave "
        f"operations {int(chain.points[done])} to {int(chain.points[-1]) - 1} without a place, "
        f"which need {human_bytes(rest)} more"
    )


def _smallest_time(chain: _Chain) -> float:
    """Smallest T of (1), by bisection, to BISECTION_WIDTH."""
    # no cut is faster than the mean of stages in which every operation is on the stage that is
    # fastest for it
    lower = float(np.diff(chain.elapsed).min(axis=0).sum()) / chain.num_stages * (1 - SAME_TIME)
    most = float(chain.elapsed[:, -1].max() + 2 * chain.crossing.max()) * (1 + SAME_TIME)
    # operations that take no time (only messages do) give a lower bound of 0, which never doubles
    upper = min(max(2 * lower, BISECTION_WIDTH * most), most)
    while upper < most and not _fits(chain, upper):
        lower = upper
        upper = min(2 * upper, most)
    while upper - lower > BISECTION_WIDTH * upper:
        middle = (lower + upper) / 2
        if not lower < middle < upper:
            break
        if _fits(chain, middle):
            upper = middle
        else:
            lower = middle
    return upper


def _fits(chain: _Chain, time: float) -> bool:
    """Some cut keeps every stage within `time`."""
    return _ends(chain, time) is not None


def _ends(chain: _Chain, time: float) -> list[Indices] | None:
    """The points at which each stage can end, all stages up to it within `time`; None where no cut
    is.
    """
    needs = chain.need(time)
    last = len(chain.points) - 1
    ends = np.zeros(1, dtype=np.int64)
    found = []
    for stage in range(chain.num_stages):
        slack = chain.slack[stage][ends]
        # of points from the first end on: the largest slack before it, and what the last of these
        # ends is
        points = np.arange(ends[0] + 1, last + 1)
        before = np.searchsorted(ends, points) - 1
        best = np.maximum.accumulate(slack)
        reaches = best[before] >= needs[stage, points]
        if chain.firsts is not None:
            reaches &= _in_window(
                slack,
                best,
                ends,
                before,
                needs[stage, points],
                chain.firsts[stage, points],
                reaches,
            )
        ends = points[reaches]
        if not len(ends):
            return None
        found.append(ends)
    return found if ends[-1] == last else None


def _in_window(
    slack: Floats,
    best: Floats,
    ends: Indices,
    before: Indices,
    need: Floats,
    firsts: Indices,
    asked: npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Which of the `asked` points have enough slack at an end that memory allows, from
    `firsts` on.
    """
    places = np.arange(len(ends))
    # mostly the last end with the largest slack of all before is such an end: slacks rise but where
    # much crosses
    latest = np.maximum.accumulate(np.where(slack == best, places, 0))[before]
    starts = np.searchsorted(ends, firsts)
    inside: npt.NDArray[np.bool_] = latest >= starts
    for point in np.flatnonzero(asked & ~inside & (starts <= before)):
        inside[point] = slack[starts[point] : before[point] + 1].max() >= need[point]
    return inside


def _least_crossing(chain: _Chain, time: float) -> list[int]:
    """Boundaries (as indices into `chain.points`) of the cut within `time` that sends least."""
    needs = chain.need(time)
    found = _ends(chain, time)
    assert found is not None, f"no cut within {time} s, though one was found before"
    sums: dict[int, float] = {0: 0.0}  # G_{k-1}, of points that can end a stage
    chosen_before: list[dict[int, int]] = []
    for stage, ends in enumerate(found):
        slacks = chain.slack[stage].tolist()
        need = needs[stage].tolist()
        crossing = chain.crossing[stage + 1].tolist()
        stairs = _Staircase()
        starts = iter(sums.items())
        start = next(starts, None)
        next_sums = {}
        before = {}
        for point in ends.tolist():
            while start is not None and start[0] < point:
                stairs.add(slacks[start[0]], start[1], start[0])
                start = next(starts, None)
            cheapest = stairs.cheapest(need[point])
            assert cheapest is not None
            next_sums[point] = cheapest[0] + crossing[point]
            before[point] = cheapest[1]
        sums = next_sums
        chosen_before.append(before)
    return _backwards(chosen_before, len(chain.points) - 1)


def _least_crossing_in_windows(chain: _Chain, time: float) -> list[int]:
    """The cuts of `_least_crossing`, with the starts that memory allows. A point that another beats
    may outlive it here: so no staircase.
    """
    needs = chain.need(time)
    found = _ends(chain, time)
    assert chain.firsts is not None
    assert found is not None, f"no cut within {time} s, though one was found before"
    starts = np.zeros(1, dtype=np.int64)
    sums = np.zeros(1)
    chosen_before: list[dict[int, int]] = []
    for stage, ends in enumerate(found):
        slack = chain.slack[stage][starts]
        need = needs[stage][ends]
        firsts = np.searchsorted(starts, chain.firsts[stage][ends])
        lasts = np.searchsorted(starts, ends)
        next_sums = np.empty(len(ends))
        before = {}
        for place, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True)):
            candidates = np.where(slack[first:last] >= need[place], sums[first:last], np.inf)
            best = int(candidates.argmin())
            next_sums[place] = candidates[best] + chain.crossing[stage + 1, ends[place]]
            before[int(ends[place])] = int(starts[first + best])
        starts = ends
        sums = next_sums
        chosen_before.append(before)
    return _backwards(chosen_before, len(chain.points) - 1)


def _backwards(chosen_before: list[dict[int, int]], last: int) -> list[int]:
    """Boundaries, from the best start of every stage for each end."""
    chosen = [last]
    for before in reversed(chosen_before):
        chosen.append(before[chosen[-1]])
    return chosen[::-1]


class _Staircase:
    """Points with (slack, sum), kept so that both rise: the cheapest with enough slack is the first
    with enough slack.
    """

    def __init__(self) -> None:
        self.slacks: list[float] = []
        self.sums: list[float] = []
        self.points: list[int] = []

    def add(self, slack: float, total: float, point: int) -> None:
        place = bisect_left(self.slacks, slack)
        if place < len(self.slacks) and self.sums[place] <= total:
            return  # another has as much slack for no more
        # from here to `place`: less slack, and no cheaper
        first = bisect_left(self.sums, total, 0, place)
        self.slacks[first:place] = [slack]
        self.sums[first:place] = [total]
        self.points[first:place] = [point]

    def cheapest(self, need: float) -> tuple[float, int] | None:
        place = bisect_left(self.slacks, need)
        return (self.sums[place], self.points[place]) if place < len(self.slacks) else None


def _chain(
    times: Floats,
    crossing_times: Floats,
    num_stages: int,
    allowed: npt.NDArray[np.bool_] | None,
    speeds: Sequence[float] | None,
) -> _Chain:
    """Check the arguments of `cut` and keep only the points that matter."""
    times = np.asarray(times, dtype=np.float64)
    crossing_times = np.asarray(crossing_times, dtype=np.float64)
    num_operations = times.shape[-1]
    if num_operations < 1 or num_stages < 1:
        raise ValueError(
            f"need at least 1 operation and 1 stage, got {num_operations} operations and "
            f"{num_stages} stages"
        )
    inner = (
        np.ones(num_operations, dtype=bool) if allowed is None else np.array(allowed, dtype=bool)
    )
    if not len(crossing_times) == len(inner) == num_operations:
        raise ValueError(
            f"{num_operations} operation times need as many crossing times and allowed marks, got "
            f"{len(crossing_times)} and {len(inner)}"
        )
    inner[0] = False  # the first stage starts there anyway
    num_points = int(inner.sum())
    if num_stages > num_points + 1:
        raise ValueError(
            f"asked for {num_stages} stages, but the model can be cut at {num_points} points: at "
            f"most {num_points + 1} stages"
        )
    stage_speeds = np.ones(num_stages) if speeds is None else np.asarray(speeds, dtype=np.float64)
    if (
        len(stage_speeds) != num_stages
        or not (np.isfinite(stage_speeds) & (stage_speeds > 0)).all()
    ):
        raise ValueError(
            f"speeds {list(stage_speeds)} must be {num_stages} positive numbers, one for each stage"
        )
    if times.ndim == 2 and len(times) != num_stages:
        raise ValueError(f"times of {len(times)} stages were given for {num_stages} stages")
    points = np.concatenate(([0], np.flatnonzero(inner), [num_operations]))
    crossing = np.concatenate(([0.0], crossing_times[inner], [0.0]))
    for name, values in (("operation", times), ("crossing", crossing)):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(
                f"a {name} time is negative or not finite: "
                f"{values[~(np.isfinite(values) & (values >= 0))][0]}"
            )
    elapsed = _prefix_sums(np.atleast_2d(times))[:, points] / stage_speeds[:, np.newaxis]
    return _Chain(points, elapsed, np.tile(crossing, (num_stages + 1, 1)), None)
