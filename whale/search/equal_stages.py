"""Drafts of what a user gets who sets `num_task_graph` by hand: equal stages of one device each, in
as many model replicas as there are devices for, several on a device cut by the planner itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from whale.planning.balance import device_orders
from whale.search.point import Estimate, Point, Shape

if TYPE_CHECKING:
    from whale.search.search import Search

MOST_STAGES = 16
"""so many equal stages are looked at"""
SLOWER = 1.05
"""where even a rough guess is so many times the best step, nothing is estimated"""
COUNTS_EACH = 2
"""numbers of micro-batches that are drafted, of every number of stages on a device"""


def draft_equal(search: Search) -> None:
    """Plans of equal `num_task_graph`, the best by their estimates."""
    if not search.budget.equal:
        return
    families: dict[tuple[int, int], list[Estimate]] = {}
    below_s = math.inf if search.best is None else SLOWER * search.best.score_s
    for point in equal_points(search, range(2, MOST_STAGES + 1)):
        if search.estimator.guess(point) > below_s:
            continue
        estimate = search.estimator.estimate(point)
        search.num_estimates += 1
        if estimate.fits:
            key = (point.shape.num_stages, point.num_chunks)
            families.setdefault(key, []).append(estimate)
    found: list[Estimate] = []
    for estimates in families.values():
        by_count: dict[int, Estimate] = {}
        for estimate in sorted(estimates, key=lambda each: each.step_s):
            by_count.setdefault(estimate.point.num_micro_batch, estimate)
        found += list(by_count.values())[:COUNTS_EACH]
    found.sort(key=lambda each: each.step_s)
    for number, estimate in enumerate(found[: search.budget.equal], start=1):
        best = search.best
        if best is not None and estimate.step_s > search.budget.slower * best.score_s:
            break
        search.report("equal stages", number, search.budget.equal)
        candidate = search.candidate_of(estimate)
        if estimate.point.num_chunks > 1:  # waves are cut by what their order holds in memory
            candidate = candidate.with_all(starts=None)
            search.point_of[candidate] = estimate.point
        search.draft(candidate)


def equal_points(search: Search, numbers: Iterable[int]) -> Iterator[Point]:
    """So many equal stages, in the orders of devices that the planner compares; without numbers
    that do not divide that of the devices.
    """
    cluster = search.problem.cluster
    settings = search.settings
    number = cluster.num_devices
    for num_stages in numbers:
        if number % num_stages or number // num_stages > search.most_wide:
            continue
        for order in device_orders(cluster, num_stages, search.problem.dtype):
            replicas = []
            for start in range(0, number, num_stages):
                ranks = order.ranks[start : start + num_stages]
                replicas.append(tuple((rank,) for rank in ranks))
            shape = Shape(tuple(replicas))
            for chunks in settings.chunk_counts(num_stages):
                if num_stages * chunks > search.outline.num_segments:
                    continue
                for count in settings.micro_batches(search.problem.batch_size // shape.widest):
                    yield Point(shape, count, chunks)
