"""Drafts of a search with what ranks hold alike in parts (ZeRO), and with homes outside of the
devices (offload): alternatives to recomputation and to more stages, where memory is short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whale.planning.offload_auto import Try, too_many_bytes
from whale.search.candidate import MemoryChoice
from whale.search.point import Estimate, Point

if TYPE_CHECKING:
    from whale.search.search import Search

WORTH_PARTS = 0.99
"""optimizer states in parts are drafted for speed alone where their estimate is at most this part
of the best
"""
OFFLOADED = 2
"""candidates of one choice of homes that are drafted until one fits"""


def draft_zero(search: Search) -> None:
    """What ranks hold alike in parts: all levels where memory is short, or the user asks for it;
    else optimizer states, since each rank then updates a part of the weights only.
    """
    further = [each for each in search.measures[1:] if not each.offload.is_any]
    is_asked = search.is_short or search.settings.zero_for_speed
    most = search.budget.zero or int(search.best is None)
    if not is_asked:
        further = further[:1]
    if not further or not most:
        return
    found: list[tuple[Estimate, MemoryChoice]] = []
    for memory in further:
        found += [(estimate, memory) for estimate in estimates_with(search, memory)[:2]]
    found.sort(key=lambda each: each[0].step_s)
    for number, (estimate, memory) in enumerate(found[:most], start=1):
        best = search.best
        worth = 1.0 if is_asked else WORTH_PARTS
        if best is not None and estimate.step_s > worth * best.score_s:
            break
        search.report("ZeRO", number, most)
        search.draft(search.candidate_of(estimate, memory))


def draft_offload(search: Search) -> None:
    """What need not be on the devices all the time on their hosts, that which moves least first.
    Something that is at home elsewhere in a plan that fits is not tried with more beside it.
    """
    homes = [each for each in search.measures if each.offload.is_any]
    if not homes or not search.is_short:
        return
    fitting: list[Try] = []
    for number, memory in enumerate(homes, start=1):
        own = Try(memory.zero, memory.offload)
        if any(each.is_less_than(own) for each in fitting):
            continue
        if too_many_bytes(search.problem, memory.offload) is not None:
            continue
        search.report("offload", number, len(homes))
        for estimate in estimates_with(search, memory)[:OFFLOADED]:
            best = search.best
            if best is not None and estimate.step_s > best.score_s:
                break
            if search.draft(search.candidate_of(estimate, memory)) is not None:
                fitting.append(own)
                break


def estimates_with(search: Search, memory: MemoryChoice) -> list[Estimate]:
    """Estimates with one measure against a lack of memory, the best first."""
    estimator = search.estimator_of(memory)
    one_stage: list[Point] = []
    pipelines: list[Point] = []
    for point in search.points(estimator=estimator):
        # without offload a device that shares with no other one gains nothing
        if memory.offload.is_any or point.shape.widest > 1:
            (one_stage if point.shape.num_stages == 1 else pipelines).append(point)
    # apart: by the guess, pipelines come first where much is all-reduced, however slow they are
    few = search.budget.estimates // 8
    found = search.estimated(one_stage, estimator, few)
    found += search.estimated(pipelines, estimator, few)
    return sorted(found, key=lambda each: each.step_s)
