"""Moves that make an estimate better: one cut at a time."""

from __future__ import annotations

from whale.search.estimate import Estimate, Estimator

DISTANCES = (1, -1, 2, -2, 4, -4)
"""segments by which a cut is moved"""
SAME = 1e-9


def best_cuts(estimator: Estimator, estimate: Estimate, tries: int) -> Estimate:
    """The estimate from which no move of one cut is shorter, or what was found after so many
    tries.
    """
    best = estimate
    is_better = True
    while is_better:
        is_better = False
        for place in range(1, len(best.cuts)):
            for distance in DISTANCES:
                if not tries:
                    return best
                moved = [*best.cuts, estimator.outline.num_segments]
                moved[place] += distance
                if not moved[place - 1] < moved[place] < moved[place + 1]:
                    continue
                tries -= 1
                found = estimator.with_cuts(best.point, tuple(moved[:-1]))
                if found.step_s < best.step_s * (1 - SAME):
                    best = found
                    is_better = True
    return best
