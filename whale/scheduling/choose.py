"""Placement, number of chunks, and split or whole backwards, picked by predicted time.

Chunks cost: every cut adds messages and actions. So of several that take about the same time the
simplest one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from whale.scheduling.action import Schedule, StageGraph, require_micro_batches
from whale.scheduling.check import check
from whale.scheduling.costs import Costs
from whale.scheduling.list_scheduler import list_orders
from whale.scheduling.messages import add_messages
from whale.scheduling.placement import Placement, loop, zigzag
from whale.scheduling.simulate import Timeline, simulate

CHUNKS = (1, 2, 4, 8)
"""chunks on each device that are tried; 2, 4 and 8 as loop and as 1, 2 and 4 waves"""
AS_GOOD = 1.005
"""a simpler candidate within this of the best time is taken instead"""
SCREEN_TRIES = 40
NUM_FINALISTS = 3
"""every candidate is searched with so few tries at first, and only so many of the best with all of
them
"""

StagesFor = Callable[[Placement], tuple[StageGraph, Costs] | None]
"""the stages of the model and their costs when they are cut for this placement; None when the model
cannot be cut so
"""


@dataclass(frozen=True)
class Candidate:
    """One of the choices, list scheduled."""

    placement: str
    """`loop` or `wave`"""
    num_chunks: int
    is_split: bool
    timeline: Timeline
    costs: Costs

    @property
    def name(self) -> str:
        chunks = "1 chunk" if self.num_chunks == 1 else f"{self.num_chunks} chunks"
        return f"{self.placement}, {chunks}, backward {'split' if self.is_split else 'whole'}"


@dataclass(frozen=True)
class Choice:
    """The schedule that was chosen, and why."""

    schedule: Schedule
    costs: Costs
    best: Candidate
    candidates: tuple[Candidate, ...]
    reason: str


def choose(
    num_devices: int,
    num_micro_batch: int,
    stages_for: StagesFor,
    *,
    chunks: Sequence[int] = CHUNKS,
    tries: int | None = None,
) -> Choice:
    """The best schedule among loops and waves of these chunk counts, with split and with whole
    backwards.
    """
    require_micro_batches(num_micro_batch)
    candidates = list(_candidates(num_devices, num_micro_batch, stages_for, chunks, tries))
    if not candidates:
        raise ValueError(
            f"the model can be cut into stages for none of {list(chunks)} chunks on each of "
            f"{num_devices} devices"
        )
    for finalist in sorted(candidates, key=lambda candidate: candidate.timeline.step_s)[
        :NUM_FINALISTS
    ]:
        plain = finalist.timeline.schedule
        searched = _candidate(
            finalist.placement,
            plain.stage_graph,
            finalist.costs,
            num_micro_batch,
            finalist.is_split,
            tries,
        )
        candidates[candidates.index(finalist)] = searched
    least = min(candidate.timeline.step_s for candidate in candidates)
    good = [candidate for candidate in candidates if candidate.timeline.step_s <= least * AS_GOOD]
    best = min(
        good,
        key=lambda candidate: (candidate.num_chunks, candidate.is_split, candidate.timeline.step_s),
    )
    plain = best.timeline.schedule
    orders = add_messages(plain.stage_graph, num_micro_batch, plain.orders)
    schedule = Schedule("auto", plain.stage_graph, num_micro_batch, orders)
    check(schedule, costs=best.costs, require_channel_order=True)
    return Choice(schedule, best.costs, best, tuple(candidates), _reason(best, candidates))


def _candidates(
    num_devices: int,
    num_micro_batch: int,
    stages_for: StagesFor,
    chunks: Sequence[int],
    tries: int | None,
) -> Iterator[Candidate]:
    for count in chunks:
        placements = {"loop": loop(num_devices, count)}
        if count % 2 == 0 and num_devices > 1:
            placements["wave"] = zigzag(num_devices, count)
        for name, placement in placements.items():
            cut = stages_for(placement)
            if cut is None:
                continue
            graph, costs = cut
            for is_split in (False, True):
                screen = SCREEN_TRIES if tries is None else min(SCREEN_TRIES, tries)
                yield _candidate(name, graph, costs, num_micro_batch, is_split, screen)


def _candidate(
    name: str,
    graph: StageGraph,
    costs: Costs,
    num_micro_batch: int,
    is_split: bool,
    tries: int | None,
) -> Candidate:
    orders = list_orders(graph, costs, num_micro_batch, split=is_split, tries=tries)
    timeline = simulate(Schedule(name, graph, num_micro_batch, orders), costs)
    return Candidate(name, len(graph.stages_of(0)), is_split, timeline, costs)


def _reason(best: Candidate, candidates: Sequence[Candidate]) -> str:
    from whale.units import human_seconds  # its package shows plans, which hold schedules

    others = sorted(
        (each for each in candidates if each is not best), key=lambda each: each.timeline.step_s
    )
    reason = (
        f"{best.name}: predicted {human_seconds(best.timeline.step_s)}, bubble "
        f"{100 * best.timeline.bubble:.1f} %"
    )
    if others:
        reason += (
            f"; the best of {len(others)} others, {others[0].name}, would take "
            f"{human_seconds(others[0].timeline.step_s)}"
        )
    return reason
