"""Whether updates on the host run under the next forward (`runtime/updates_ahead.py`): by rule
where that is not exact, else by the simulated step.
"""

from __future__ import annotations

from dataclasses import replace

from whale.planning.problem import Problem
from whale.plans.plan import Decision, Plan
from whale.simulation.simulate import step_seconds
from whale.units import human_seconds

WHAT = "updates on the host"
AT_THE_END = "before the step is over"


def with_updates_ahead(plan: Plan, problem: Problem) -> Plan:
    """The plan with what is shorter, and why; the same where nothing is updated on a host."""
    if all(block.updated_on != "host" for block in plan.blocks):
        return plan
    why = _why_not(plan, problem)
    if why is not None:
        return _with_decision(plan, AT_THE_END, why)
    assert plan.figures is not None
    ahead = replace(plan, updates_ahead=True)
    before_s = step_seconds(plan).step_s
    after_s = step_seconds(ahead).step_s
    if after_s >= before_s:
        return _with_decision(plan, AT_THE_END, "under the next forward a step would be no shorter")
    longest_s = max(away.ahead_s for away in plan.figures.away)
    why = (
        f"a simulated step takes {human_seconds(after_s)} and not {human_seconds(before_s)}: of "
        f"the {human_seconds(longest_s)} on the slowest rank the forward waits for each block only "
        "until it is there"
    )
    return _with_decision(ahead, "under the next forward", why)


def _why_not(plan: Plan, problem: Problem) -> str | None:
    """Why updates are not to run under the next forward; None: they may."""
    assert plan.figures is not None
    if not plan.figures.overlaps:
        return "CPU ranks run the forward on the host itself, so that nothing would be hidden"
    if not any(block.may_wait for block in plan.blocks):
        return (
            "weights that a grid cuts are on the device, where the forward does not wait for them"
        )
    is_on_grid = any(device.grid is not None for device in plan.virtual_devices)
    if problem.updates_whole and is_on_grid:
        return "the optimizer looks at whole parameters, of which ranks exchange parts in an update"
    if problem.config.compile:
        return '"compile" would be cut at every block that the forward waits for'
    return None


def _with_decision(plan: Plan, choice: str, why: str) -> Plan:
    return replace(plan, decisions=(*plan.decisions, Decision(WHAT, choice, why)))
