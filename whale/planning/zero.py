"""ZeRO in a plan: the level, the blocks, and what they change in its memory and times."""

from __future__ import annotations

from dataclasses import replace

from whale.planning.problem import Problem
from whale.planning.zero_blocks import blocks_of
from whale.plans.plan import Plan


def with_zero(problem: Problem, plan: Plan) -> Plan:
    """The plan with the blocks of the level that the config asks for."""
    level = problem.config.zero
    if not isinstance(level, int) or level == 0:
        return plan
    blocks = blocks_of(plan, problem.captured, {})
    return replace(plan, zero=level if blocks else 0, blocks=blocks)
