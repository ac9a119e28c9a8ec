"""A plan by hand whose number of micro-batches nobody set: `num_task_graph` says how many stages
there are, and with one micro-batch all of them but one would wait.

    plan_by_hand        the planner's own plan; with the best number, where that is open
    _best_counts        from the number that is estimated to be best upwards, then downwards, while
                        steps get shorter

All else is as in a plan by hand. The number stays 1 where results depend on it by definition, and
where times are not known (`why_unknown`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from whale.cluster.cluster import Cluster
from whale.planning.planner import make_plan
from whale.planning.problem import Problem
from whale.planning.stages import Assignment
from whale.plans.plan import Decision, Plan
from whale.plans.shares import DoesNotFit
from whale.search.drafting import DRAFT_TRIES, actions_seconds
from whale.search.equal_stages import equal_points
from whale.search.refusals import is_annotated
from whale.search.search import new_search
from whale.search.settings import OpenSettings, settled, why_one
from whale.simulation.simulate import step_seconds
from whale.units import human_seconds

MICRO_BATCHES = "micro-batches"
"""what the decision is called in a plan"""
COMPARED = 3
"""so many numbers of micro-batches are named with their steps"""


def plan_by_hand(problem: Problem) -> tuple[Plan, Assignment]:
    """The plan that settings and annotations ask for."""
    fixed = replace(problem, config=settled(problem.config))
    if not has_open_count(problem):
        return make_plan(fixed)
    why = why_one(problem, is_asked=False)
    if why is not None:
        plan, assignment = make_plan(fixed)
        return _with_decision(plan, Decision(MICRO_BATCHES, "1", why)), assignment
    steps_s = _best_counts(fixed)
    for number in sorted(steps_s, key=lambda each: steps_s[each]):
        try:
            plan, assignment = make_plan(_with_count(fixed, number))
        except DoesNotFit:  # its orders were not proved before
            continue
        return _with_decision(plan, Decision(MICRO_BATCHES, str(number), _why(steps_s))), assignment
    return make_plan(fixed)  # refused, and says what would fit


def has_open_count(problem: Problem) -> bool:
    """Whether stages are given and a number of micro-batches is not, where it can be chosen."""
    config = problem.config
    if not isinstance(config.num_task_graph, int) or config.is_given("num_micro_batch"):
        return False
    if problem.cluster.num_devices == 1 or is_annotated(problem) or config.replicas is not None:
        return False
    return why_unknown(problem.cluster) is None


def why_unknown(cluster: Cluster) -> str | None:
    """Why too little is known of the devices to choose by times; None: enough is."""
    if cluster.is_uniform and cluster.devices[0].kind.is_cpu:
        return "equal CPUs: what their links and threads do to each other is not known"
    guessed = [device.kind.name for device in cluster.devices if device.kind.is_guess]
    if guessed:
        return f"{guessed[0]} is in no table of devices (whale profile measures it)"
    return None


def _with_decision(plan: Plan, decision: Decision) -> Plan:
    return replace(plan, decisions=(decision, *plan.decisions))


def _with_count(problem: Problem, number: int) -> Problem:
    return replace(problem, config=problem.config.replace(num_micro_batch=number))


def _best_counts(problem: Problem) -> dict[int, float]:
    """Seconds of a step with each number of micro-batches that was drafted and fits."""
    counts, start = _estimated(problem)
    steps_s: dict[int, float] = {}
    for numbers in (counts[start:], counts[:start][::-1]):
        for number in numbers:
            step_s = _step_s(_with_count(problem, number))
            if step_s is None and not steps_s:
                continue  # more micro-batches take less memory
            is_shorter = step_s is not None and step_s < min(steps_s.values(), default=math.inf)
            if step_s is not None:
                steps_s[number] = step_s
            if not is_shorter:
                break
        if not steps_s:
            break  # fewer do not fit where more do not
    return steps_s


def _step_s(problem: Problem) -> float | None:
    """Seconds of a step by a draft, with what the runtime adds to actions; None: there is none."""
    try:
        plan, _ = make_plan(
            replace(problem, schedule_tries=DRAFT_TRIES, is_proved=False, is_advised=False)
        )
    except ValueError:  # memory, or a buffer that each micro-batch would update again
        return None
    return step_seconds(plan).step_s + actions_seconds(plan)


def _estimated(problem: Problem) -> tuple[list[int], int]:
    """Numbers of micro-batches that there may be, and the place of the best by estimates."""
    stages = problem.config.num_task_graph
    assert stages is not None
    search = new_search(problem, OpenSettings.of(problem))
    best_s: dict[int, float] = {}
    for point in equal_points(search, [stages]):
        number = point.num_micro_batch
        step_s = search.estimator.estimate(point).step_s
        best_s[number] = min(step_s, best_s.get(number, math.inf))
    if not best_s:  # more stages than there are segments, or than a micro-batch has samples
        return [1], 0
    counts = sorted(best_s)
    return counts, counts.index(min(counts, key=lambda each: best_s[each]))


def _why(steps_s: dict[int, float]) -> str:
    best, *others = sorted(steps_s, key=lambda each: steps_s[each])
    compared = [f"{each} takes {human_seconds(steps_s[each])}" for each in others[:COMPARED]]
    text = f'"num_micro_batch" is not set: {best} takes {human_seconds(steps_s[best])} a step'
    return "; ".join([text, *compared])
