"""Drafts of a search whose devices split operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whale.search.candidate import Candidate
from whale.search.drafting import problem_on
from whale.search.estimate import Estimator
from whale.search.other_clusters import on_ranks
from whale.search.point import Estimate, Point, Shape
from whale.search.shapes import subsets
from whale.search.splits import split_candidates
from whale.search.tensor_groups import GroupOutline, TensorGroups, tensor_groups

if TYPE_CHECKING:
    from whale.search.search import Search

PARTS = 4
"""sets of devices, the fastest, on which operations are split while others take no part"""
WORTH_A_GRID = 0.98
"""a candidate with a grid is drafted where its estimate is at most this part of the best: such a
draft takes longer than others
"""


def draft_split(search: Search) -> None:
    """Heavy parameters split over groups of devices, everything else by samples."""
    settings = search.settings
    if not settings.may_split or search.measures[0].zero or not search.budget.split:
        return
    found = split_candidates(search.outline, settings, search.most_wide > 1)
    for number, each in enumerate(found[: search.budget.split], start=1):
        best = search.best
        if best is not None and each.step_s > WORTH_A_GRID * best.score_s:
            break
        search.report("split operations", number, search.budget.split)
        search.draft(each.candidate)


def draft_split_of_parts(search: Search) -> None:
    """The same on some of the devices: one that is slow, or far from the others, would have to hold
    and to gather as much as they.
    """
    settings = search.settings
    if not settings.may_split or search.measures[0].zero or not search.budget.split:
        return
    parts: list[tuple[float, tuple[int, ...]]] = []
    for ranks in subsets(search.problem.cluster):
        bound_s = search.estimator.bound(Point(Shape(((ranks,),)), 1))
        best = search.best
        if len(ranks) > 1 and (best is None or bound_s < WORTH_A_GRID * best.score_s):
            parts.append((bound_s, ranks))
    parts.sort(key=lambda each: each[0])
    found: list[tuple[float, Candidate]] = []
    for _, ranks in parts[:PARTS]:
        outline = search.outline.on(problem_on(search.problem, ranks))
        for each in split_candidates(outline, settings, search.most_wide > 1)[:1]:
            found.append((each.step_s, on_ranks(each.candidate, ranks)))
    found.sort(key=lambda each: each[0])
    for number, (step_s, candidate) in enumerate(found[: search.budget.split], start=1):
        best = search.best
        if best is not None and step_s > WORTH_A_GRID * best.score_s:
            break
        search.report("split operations on fewer devices", number, search.budget.split)
        search.draft(candidate)


def draft_tensor_groups(search: Search) -> None:
    """Stages on groups of devices that split all their operations."""
    settings = search.settings
    if not settings.may_split or search.measures[0].zero or not search.budget.tensor:
        return
    if not _may_cut_all(search):
        return
    found: list[tuple[Estimate, TensorGroups]] = []
    for groups in tensor_groups(search.problem.cluster):
        outline = GroupOutline.of(search.outline, groups)
        estimator = Estimator(outline, settings.recompute)
        points = search.points(estimator=estimator)
        estimates = search.estimated(points, estimator, search.budget.estimates // 8)
        found += [(estimate, groups) for estimate in estimates[:1]]
    found.sort(key=lambda each: each[0].step_s)
    for number, (estimate, groups) in enumerate(found[: search.budget.tensor], start=1):
        best = search.best
        if best is not None and estimate.step_s > WORTH_A_GRID * best.score_s:
            break
        search.report("tensor parallelism", number, search.budget.tensor)
        starts = search.outline.starts(estimate.cuts)
        search.draft(groups.candidate(estimate, starts, settings, search.measures[0]))


def _may_cut_all(search: Search) -> bool:
    """Whether the optimizer gives the same on parts of parameters."""
    return search.problem.updates_alone and not search.problem.updates_whole
