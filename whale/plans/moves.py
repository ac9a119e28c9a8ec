"""The moves of a plan's blocks through their slots, proved with the plan: weights that are at home
elsewhere are here when a forward or backward uses them, in the buffers that the plan counts.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from whale.plans.blocks import slots_of
from whale.scheduling import Kind
from whale.scheduling.residence import ResidenceError, check_moves, moves_of

if TYPE_CHECKING:
    from whale.plans.plan import Plan

MOST_USES = 20_000
"""uses of blocks that are proved one by one: those of the first micro-batches of a long step, which
repeat
"""


def weight_uses(plan: Plan, device: int) -> tuple[list[Hashable], dict[Hashable, int]]:
    """(blocks in the order in which a rank of a VirtualDevice uses them in a step, their slots)"""
    ranks = tuple(sorted(plan.virtual_devices[device].all_ranks))
    own = [number for number, block in enumerate(plan.blocks) if block.ranks == ranks]
    sizes = [plan.blocks[number].num_elements for number in own]
    slot_of: dict[Hashable, int] = dict(zip(own, slots_of(sizes, [0] * len(own)), strict=True))
    of_stage: dict[int, list[int]] = {}
    for number in own:
        stages = {stage for name in plan.blocks[number].parameters for stage in plan.holders[name]}
        for stage in stages:
            of_stage.setdefault(stage, []).append(number)
    uses: list[Hashable] = []
    for action in plan.schedule.orders[device]:
        if action.is_compute and action.kind is not Kind.WEIGHT:
            blocks = of_stage.get(action.stage, [])
            uses += blocks if action.kind is Kind.FORWARD else reversed(blocks)
        if len(uses) > MOST_USES:
            break
    return uses, slot_of


def residence_problem(plan: Plan) -> str | None:
    """What does not hold of the moves of a plan's weights; None: they are proved."""
    if not plan.is_uniform or all(block.weights == "device" for block in plan.blocks):
        return None
    for device in range(len(plan.virtual_devices)):
        uses, slot_of = weight_uses(plan, device)
        try:
            check_moves(uses, moves_of(uses, slot_of), slot_of)
        except ResidenceError as error:
            return f"weights of VirtualDevice {device} are not there in time: {error}"
    return None
