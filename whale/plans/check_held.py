"""Whether what ranks hold of the weights fits together in a plan file: boxes of tensors, layouts on
grids, blocks of ZeRO and their homes, owners (`check.py` calls these checks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from whale.plans.blocks import GRADIENTS_TOO, STATES, WEIGHTS_TOO

if TYPE_CHECKING:
    from whale.plans.blocks import Block
    from whale.plans.plan import Boxes, Plan, ReplicaTemplate
    from whale.plans.sharding import StageSharding, StoredLayout

MOST_SEGMENTS = 4096
"""of a fused dim: a range is stored for each, on every device"""


def in_range(numbers: Sequence[int], count: int, least: int = 0) -> bool:
    """Whether all these indices are of one of `count` things."""
    return all(least <= number < count for number in numbers)


def tensor_problems(template: ReplicaTemplate) -> Iterator[str]:
    """Problems of who holds which boxes of every tensor."""
    for index, boxes in enumerate(template.boxes):
        if problem := _boxes_problem(boxes):
            yield f"boxes {index} {problem}"
    for name, holding in template.tensors.items():
        if not holding.stages or list(holding.stages) != sorted(set(holding.stages)):
            yield f"{name} is held by stages {list(holding.stages)[:8]}"
        if min(holding.stages, default=0) < 0:
            yield f"{name} is held by a stage that is not there"
        if holding.boxes and len(holding.boxes) != len(holding.stages):
            yield f"{name} has boxes for {len(holding.boxes)} of {len(holding.stages)} stages"
        if not in_range(holding.boxes, len(template.boxes), least=-1):
            yield f"{name} names boxes that are not there"
        on_device: dict[int, int] = {}
        for stage, index in zip(holding.stages, holding.boxes):
            device = template.stages[stage].virtual_device
            if on_device.setdefault(device, index) != index:
                yield f"{name} is cut in two ways on VirtualDevice {device}"


def _boxes_problem(boxes: Boxes) -> str | None:
    for ranges in boxes.places:
        if len(ranges) != len(boxes.shape):
            return f"have {len(ranges)} dims of {len(boxes.shape)}"
        for size, parts in zip(boxes.shape, ranges, strict=True):
            last = 0
            for start, stop in parts:
                if not last <= start <= stop <= size:
                    return f"have a range [{start}, {stop}) of a dim of {size}"
                last = stop
    return None


def sharding_problems(template: ReplicaTemplate) -> Iterator[str]:
    """Problems of the layouts on grids, and of boxes that are not theirs."""
    on_grids = [
        stage.index for stage in template.stages if template.grids[stage.virtual_device] is not None
    ]
    said = sorted(sharding.stage for sharding in template.shardings)
    if said != on_grids:
        yield f"it says how stages {said} are sharded, on grids are {on_grids}"
        return
    known: set[tuple[int, StoredLayout, int]] = set()
    for sharding in template.shardings:
        yield from _sharding(template, sharding, known)
    stored_on = {sharding.stage: sharding.stored for sharding in template.shardings}
    for name, holding in template.tensors.items():
        for stage, index in zip(holding.stages, holding.boxes):
            if index >= 0 and name not in stored_on.get(stage, {}):
                yield f"{name} has boxes on stage {stage}, which does not cut it"


def _sharding(
    template: ReplicaTemplate, sharding: StageSharding, known: set[tuple[int, StoredLayout, int]]
) -> Iterator[str]:
    """`known`: (VirtualDevice, layout, index of boxes) that fit together. Layers are alike, and on
    1,024 devices the ranges of every place take time.
    """
    stage = sharding.stage
    device = template.stages[stage].virtual_device
    grid = template.grids[device]
    assert grid is not None
    if not in_range([number for _, number in sharding.choices], len(sharding.options)):
        yield f"an operation of stage {stage} names a pattern that is not there"
    if len(sharding.work) not in (0, grid.num_devices):
        yield f"stage {stage} has the work of {len(sharding.work)} of {grid.num_devices} devices"
    for name, stored in sharding.stored.items():
        holding = template.tensors.get(name)
        if holding is None or stage not in holding.stages:
            yield f"{name} is cut on stage {stage}, which does not hold it"
            return
        index = holding.boxes[holding.stages.index(stage)] if holding.boxes else -1
        if (device, stored, index) in known:
            continue
        if any(segments > MOST_SEGMENTS for _, _, segments in stored.cuts):
            yield f"{name} is cut in more than {MOST_SEGMENTS} segments"
            return
        try:
            layout = stored.layout()
        except (TypeError, ValueError) as error:
            yield f"{name} is cut in a way that cannot be: {error}"
            return
        if unknown := (layout.sharded | layout.stored) - set("xyz"):
            yield f"{name} is cut over axis {sorted(unknown)[0]!r}, which no grid has"
            return
        boxes = template.boxes[index] if index >= 0 else None
        held = layout.held_ranges(grid)
        if boxes is None or boxes.shape != layout.shape or boxes.places != held:
            yield f"the boxes of {name} on stage {stage} are not those of its layout"
        known.add((device, stored, index))


def block_problems(plan: Plan) -> Iterator[str]:
    """Problems of the parts that ranks hold of parameters under ZeRO."""
    if plan.zero not in (0, STATES, GRADIENTS_TOO, WEIGHTS_TOO):
        yield f"it has level {plan.zero} of ZeRO"
    if any(block.ends for block in plan.blocks) and not plan.zero:
        yield "it has blocks and no ZeRO"
    if any(len(block.ranks) > 1 for block in plan.blocks if block.ends) and (
        plan.zero >= GRADIENTS_TOO and plan.least_samples < 1
    ):
        yield "it leaves ranks without samples that share gradients in every backward"
    yield from _ahead_problems(plan)
    groups = {tuple(sorted(device.all_ranks)) for device in plan.virtual_devices}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for index, block in enumerate(plan.blocks):
        problem = _block_problem(plan, block, groups) or _home_problem(plan, block)
        if problem:
            yield f"block {index} {problem}"
            return
        for name in block.parameters:
            if (name, block.ranks) in seen:
                yield f"{name} is in two blocks of ranks {list(block.ranks)[:8]}"
            seen.add((name, block.ranks))


def _ahead_problems(plan: Plan) -> Iterator[str]:
    """Problems of updates under the next forward."""
    if not plan.updates_ahead:
        return
    if not any(block.may_wait for block in plan.blocks):
        yield "it updates under the next forward, and no block is updated on the host"
    if plan.owners or plan.summed_norms:
        yield "it updates under the next forward, and ranks exchange parts of an update"


def owner_problems(plan: Plan) -> Iterator[str]:
    """Problems of the ranks that update whole parameters for all holders."""
    for name, rank in plan.owners.items():
        stages = plan.holders.get(name, ())
        if rank not in {holder for stage in stages for holder in plan.ranks_of_stage(stage)}:
            yield f"{name} is updated by rank {rank}, which does not hold it"
    for name in plan.summed_norms:
        if name not in plan.holders or name in plan.owners:
            yield f"{name} is updated in parts, and nobody holds it or a rank updates it whole"


def _block_problem(plan: Plan, block: Block, groups: set[tuple[int, ...]]) -> str | None:
    if block.ranks not in groups:
        return f"is held by ranks {list(block.ranks)[:8]}, which run no stage together"
    if not block.parameters or len(block.shapes) != len(block.parameters):
        return f"has shapes for {len(block.shapes)} of {len(block.parameters)} parameters"
    for name, shape in zip(block.parameters, block.shapes, strict=True):
        stages = plan.holders.get(name, ())
        holders = {rank for stage in stages for rank in plan.ranks_of_stage(stage)}
        if not set(block.ranks) <= holders:
            return f"has {name}, which its ranks do not hold"
        if not shape or 0 in shape:
            return f"has {name}, which has no rows"
    on_grid = {
        tuple(sorted(device.all_ranks))
        for device in plan.virtual_devices
        if device.grid is not None
    }
    if not block.ends or block.ranks in on_grid:
        return _grid_block_problem(block, block.ranks in on_grid)
    if len(block.ends) != len(block.ranks):
        return f"has parts for {len(block.ends)} of {len(block.ranks)} ranks"
    if list(block.ends) != sorted(block.ends):
        return "has parts that run backwards"
    if block.ends[-1] != block.num_elements:
        return f"has parts of {block.ends[-1]} of its {block.num_elements} elements"
    if not all(map(block.is_row_end, block.ends)):
        return "has a part that ends in the middle of a row"
    return None


def _grid_block_problem(block: Block, is_on_grid: bool) -> str | None:
    """What is wrong with a block whose parameters a grid cuts."""
    if not is_on_grid:
        return "has no parts, and no grid cuts its parameters"
    return "has parts, though a grid cuts its parameters" if block.ends else None


def _home_problem(plan: Plan, block: Block) -> str | None:
    """What is wrong with where the parts of a block are at home."""
    if not plan.is_uniform and block.is_away:
        return "is at home elsewhere, in a plan of model replicas that are not alike"
    level = plan.zero if block.ends else WEIGHTS_TOO
    if block.weights != "device" and level < WEIGHTS_TOO:
        return f"has weights on {block.weights}, which takes level 3 of ZeRO and not {plan.zero}"
    if block.gradients != "device" and level < GRADIENTS_TOO:
        return (
            f"sums gradients on {block.gradients}, which takes level 2 of ZeRO and not {plan.zero}"
        )
    if block.updated_on == "host" and block.states == "device":
        return "is updated on the host, and its optimizer state is on the device"
    return None
