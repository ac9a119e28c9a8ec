"""Devices that get no samples: would the step be shorter without them?

A device may be so slow, or its memory so small, that it gets no samples (`balance.py`). It holds
its weights all the same, so it still takes part in every all-reduce of gradients and in the update.
Without it the step is that of the same plan with smaller all-reduces and fewer updates. The plan is
left as it is: who takes part in a job is up to its user. But it says so, with both times.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from whale.names import count
from whale.plans.figures import Figures, StateFigures
from whale.plans.plan import Decision, Plan
from whale.plans.samples import SampleMap
from whale.simulation.simulate import figures_in, run
from whale.units import human_seconds, ranges

LEAST_GAIN = 0.005
"""part of the step: a smaller gain is not reported, and would not be seen in three digits"""


def idle_ranks(plan: Plan) -> tuple[int, ...]:
    """Ranks without samples that could be left out. The model replicas that stay must be alike: so
    whole ones, and single devices where one replica stays."""
    has_samples = [any(numbers) for numbers in SampleMap.planned(plan).num_by_rank()]
    replicas = [
        [rank for device in plan.virtual_devices for rank in device.ranks[index]]
        for index in range(plan.num_replicas)
    ]
    staying = [members for members in replicas if any(has_samples[rank] for rank in members)]
    found = [rank for members in replicas if members not in staying for rank in members]
    if len(staying) == 1:
        found += [rank for rank in staying[0] if not has_samples[rank]]
    return tuple(sorted(found))


def without(plan: Plan, figures: Figures, ranks: Container[int]) -> Figures:
    """The figures of the plan if these ranks, which have no samples, took no part in all-reduces of
    gradients and updates.
    """

    def left(state: StateFigures) -> StateFigures:
        groups = state.groups(plan.ranks_of_stage)
        parts = tuple(tuple(rank for rank in group if rank not in ranks) for group in groups)
        return replace(
            state,
            parts=parts,
            part_bytes=state.part_bytes or ((state.weight_bytes, state.trained_bytes),),
        )

    update_s = tuple(
        0.0 if rank in ranks else seconds for rank, seconds in enumerate(figures.update_s)
    )
    return replace(figures, states=tuple(map(left, figures.states)), update_s=update_s)


def idle_decision(plan: Plan) -> Decision | None:
    """What the plan says of devices that it would be faster without; None where there are none."""
    idle = idle_ranks(plan)
    if not idle:
        return None
    figures = figures_in(plan)
    with_s = run(plan, figures).step_s
    without_s = run(plan, without(plan, figures, idle)).step_s
    if without_s > with_s * (1 - LEAST_GAIN):
        return None
    they, them, compute, take = (
        ("it", "it", "computes", "takes") if len(idle) == 1 else ("they", "them", "compute", "take")
    )
    return Decision(
        "devices without samples",
        f"rank {ranges(idle)}",
        f"without {them}, on {count(plan.num_devices - len(idle), 'device')}, a predicted step "
        f"takes {human_seconds(without_s)}, with {them} {human_seconds(with_s)}: {they} {compute} "
        f"nothing, but {take} part in all-reduces of gradients and updates. Leave {them} out of "
        "the cluster",
    )
