"""What the search would give instead of a hand-made plan, in one line."""

from __future__ import annotations

from whale.planning.problem import Problem
from whale.plans.plan import Plan
from whale.search.budget import Budget
from whale.search.choose import Report, silent, why_fixed
from whale.search.refusals import is_annotated, opened_up
from whale.search.search import search
from whale.search.settings import OpenSettings
from whale.simulation.simulate import step_seconds
from whale.units import human_seconds

HINT = Budget(
    estimates=150,
    cut_moves=60,
    drafts=3,
    heterogeneous=1,
    smaller=1,
    split=1,
    tensor=0,
    zero=1,
    polished=1,
)


def hint(problem: Problem, plan: Plan, progress: Report = silent) -> str | None:
    """None where the plan is the search's own, or there is one device."""
    if why_fixed(problem) is None or problem.cluster.num_devices == 1:
        return None
    if problem.cluster.is_uniform and problem.cluster.devices[0].kind.is_cpu:
        return None  # what is known of them is not enough to promise anything
    opened = opened_up(problem)
    best = search(opened, OpenSettings.of(opened), HINT, progress).best
    if best is None:
        return None
    own_s = step_seconds(plan).step_s
    without = " without annotations" if is_annotated(problem) else ""
    if best.step_s >= own_s:
        return (
            f'"strategy": "auto"{without} finds no faster plan than these {human_seconds(own_s)} '
            "a step"
        )
    return (
        f'"strategy": "auto"{without} would give {human_seconds(best.step_s)} a step instead of '
        f"{human_seconds(own_s)}: {best.candidate.describe()}"
    )
