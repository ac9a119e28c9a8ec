"""Whether a plan file fits together: everything that readers index by or divide by is looked at
once, when the file is loaded.

A file may have been edited, cut off or made by another program. After this check lowering, runtime,
simulation and report take a plan as it is. Each check gives one sentence for the user, or None; the
order matters, since later checks rely on what earlier ones have seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from whale.plans.blocks import GRADIENTS_TOO, STATES, WEIGHTS_TOO
from whale.plans.moves import residence_problem
from whale.plans.shares import check_batch, micro_batch_sizes
from whale.scheduling import check as prove_schedule

if TYPE_CHECKING:
    from whale.cluster.network import Link
    from whale.plans.blocks import Block
    from whale.plans.figures import Figures
    from whale.plans.plan import Boxes, Plan, ReplicaShare, ReplicaTemplate
    from whale.plans.sharding import StageSharding, StoredLayout

LARGEST_INTEGER = 2**62
LARGEST_NUMBER = 1e60
"""far more than any count, byte, FLOP or second; products of a few such numbers stay finite"""
ROUNDING = 1e-3
"""sums of bytes that go up and down again, and times in the figures, which are differences of what
was measured, may end this far below 0. Other times may not: schedules and shares are made of them
"""
MOST_SEGMENTS = 4096
"""of a fused dim: a range is stored for each, on every device"""
MAY_BE_NEGATIVE = frozenset(("stage_of_operation", "boxes", "workspace"))
"""fields with -1 for "none", and differences of bytes"""


def number_problem(data: Any) -> str | None:
    """What is wrong with a number somewhere in the JSON data of a plan, if anything: not finite,
    negative, or so large that nobody could compute with it.
    """
    waiting: list[tuple[str, Any, float]] = [("", data, 0.0)]
    while waiting:
        path, value, least = waiting.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                name = f"{path}.{key}" if path else str(key)
                waiting.append((name, item, min(least, _least(key))))
        elif isinstance(value, list):
            for place, item in enumerate(value):
                waiting.append((f"{path}[{place}]", item, least))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            largest = LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER
            if not -largest <= value <= largest:
                return f"{path} is {str(value)[:20]}, which is no sensible number"
            if value < least:
                return f"{path} is {value}, which is negative"
    return None


def _least(key: str) -> float:
    """Least number that may stand in a field of this name, or below it."""
    if key in MAY_BE_NEGATIVE:
        return -math.inf
    return -ROUNDING if key == "figures" or key.endswith("_bytes") else 0.0


def contradiction(plan: Plan) -> str | None:
    """What does not fit together in this plan, if anything."""
    return next(_problems(plan), None)


def _problems(plan: Plan) -> Iterator[str]:
    """The first of these is shown; what comes after it may rely on what it speaks of."""
    if not plan.templates or not plan.replicas:
        yield "it has no model replica"
        return
    if not _in_range([replica.template for replica in plan.replicas], len(plan.templates)):
        yield f"a model replica is like one beyond the {len(plan.templates)} that it describes"
    elif {replica.template for replica in plan.replicas} != set(range(len(plan.templates))):
        yield "no model replica is like one of those that it describes"
    if plan.settings.bucket_bytes < 1:
        yield "its gradients are all-reduced in buckets of 0 bytes"
    if not plan.batch_size >= plan.num_micro_batch >= 1:
        yield f"it cuts {plan.batch_size} samples into {plan.num_micro_batch} micro-batches"
    yield from _devices(plan)
    yield from _task_graphs(plan)
    yield from _shares(plan)
    yield from _blocks(plan)
    yield from _owners(plan)
    if plan.figures is not None:
        yield from _figures(plan, plan.figures)
    for view in plan.by_template:
        yield from _stages(view, view.template)
        yield from _crossings(view.template)
        yield from _schedule(view, view.template)
        yield from _samples(view)
        yield from _tensors(view.template)
        yield from _shardings(view.template)
    if not plan.is_uniform:
        yield from _templates(plan)
    problem = residence_problem(plan)
    if problem is not None:
        yield problem


def _templates(plan: Plan) -> Iterator[str]:
    """Templates are different ways to run the same model on the same mini-batch."""
    found = sum(view.batch_size for view in plan.by_template)
    if found != plan.batch_size:
        yield f"its model replicas get {found} of {plan.batch_size} samples"
    if plan.num_micro_batch != max(view.num_micro_batch for view in plan.by_template):
        yield f"no model replica has the {plan.num_micro_batch} micro-batches of the plan"
    first = plan.templates[0]
    for number, template in enumerate(plan.templates):
        if template.tensors.keys() != first.tensors.keys():
            yield f"template {number} has other weights than template 0"
        if len(template.stage_of_operation) != len(first.stage_of_operation):
            yield f"template {number} has another number of operations than template 0"
        if len(template.loss_terms) != len(first.loss_terms):
            yield f"template {number} has another number of loss terms than template 0"


def _in_range(numbers: Sequence[int], count: int, least: int = 0) -> bool:
    return all(least <= number < count for number in numbers)


def _devices(plan: Plan) -> Iterator[str]:
    if not _in_range(plan.device_of_rank, len(plan.devices)):
        yield f"a rank names a device beyond the {len(plan.devices)} that it describes"
    ranks = sorted(
        rank for replica in plan.replicas for members in replica.ranks for rank in members
    )
    if len(set(ranks)) < len(ranks) or not _in_range(ranks, plan.num_devices):
        yield f"its VirtualDevices hold ranks {ranks[:8]}, but it is for {plan.num_devices} devices"
    for number, replica in enumerate(plan.replicas):
        template = plan.templates[replica.template]
        counts = [len(members) for members in replica.ranks]
        alike = next(each for each in plan.replicas if each.template == replica.template)
        if counts != [len(members) for members in alike.ranks] or 0 in counts:
            yield f"replica {number} has other VirtualDevices than the replicas that it is like"
        if len(counts) != len(template.grids):
            yield f"replica {number} has {len(counts)} VirtualDevices of {len(template.grids)}"
        for index, grid in enumerate(template.grids):
            if grid is None:
                continue
            if min(grid.gx, grid.gy, grid.gz) < 1 or grid.num_devices != counts[index]:
                yield (
                    f"VirtualDevice {index} has a grid of {grid.name} devices and "
                    f"{counts[index]} ranks"
                )


def _task_graphs(plan: Plan) -> Iterator[str]:
    """What stages and TaskGraphs say of each other, before there is a view of each template."""
    first_device = 0
    for template in plan.templates:
        for index, stage in enumerate(template.stages):
            if not _in_range([stage.virtual_device], len(template.grids)):
                yield "a stage names a VirtualDevice that is not there"
            if not _in_range(stage.task_graphs, max(1, len(plan.task_graphs))):
                yield f"stage {index} names a TaskGraph that is not there"
                continue
            if plan.is_uniform:
                continue
            devices = [plan.task_graphs[number].virtual_device for number in stage.task_graphs]
            if not _in_range(devices, first_device + len(template.grids), least=first_device):
                yield f"stage {index} names a TaskGraph of replicas that are not alike"
        first_device += len(template.grids)
    if not _in_range([part.virtual_device for part in plan.task_graphs], first_device):
        yield "a TaskGraph names a VirtualDevice that is not there"


def _shares(plan: Plan) -> Iterator[str]:
    for number, replica in enumerate(plan.replicas):
        if not _in_range([index for index, _ in replica.shares], len(plan.shares)):
            yield f"replica {number} names samples that are not there"


def _stages(plan: Plan, template: ReplicaTemplate) -> Iterator[str]:
    num_stages = len(template.stages)
    num_devices = len(template.grids)
    used = {stage.virtual_device for stage in template.stages}
    if used != set(range(num_devices)):
        yield "a VirtualDevice runs no stage"
    for index, stage in enumerate(template.stages):
        if stage.index != index:
            yield f"stage {index} says that it is stage {stage.index}"
        if stage.num_recomputed > stage.num_regions:
            yield (
                f"stage {index} recomputes {stage.num_recomputed} regions of {stage.num_regions}"
            )
        for region in stage.recomputed:
            if not _in_range(region, len(template.stage_of_operation)):
                yield f"stage {index} recomputes an operation that is not there"
            elif any(template.stage_of_operation[place] != index for place in region):
                yield f"stage {index} recomputes an operation of another stage"
    places = [
        *template.stage_of_operation,
        *(stage for holding in template.tensors.values() for stage in holding.stages),
        *(term.stage for term in template.loss_terms),
    ]
    if not _in_range(places, num_stages, least=-1):
        yield f"an operation, weight or loss names a stage beyond its {num_stages}"
    if any(term.stage < 0 for term in template.loss_terms):
        yield "a loss term has no stage"


def _crossings(template: ReplicaTemplate) -> Iterator[str]:
    graph = template.schedule.stage_graph
    edges = {(crossing.source, crossing.destination) for crossing in template.crossings}
    returned = {
        (crossing.source, crossing.destination)
        for crossing in template.crossings
        if crossing.gradient
    }
    if edges != set(graph.edges) or returned != set(graph.gradient_edges):
        yield "its schedule sends other values between stages than those that cross"
    if graph.device_of_stage != tuple(stage.virtual_device for stage in template.stages):
        yield "its schedule has stages on other VirtualDevices than the plan"


def _schedule(plan: Plan, template: ReplicaTemplate) -> Iterator[str]:
    schedule = template.schedule
    if not schedule.num_micro_batch == plan.num_micro_batch >= 1:
        yield (
            f"its schedule is for {schedule.num_micro_batch} micro-batches, the plan for "
            f"{plan.num_micro_batch}"
        )
    # The proof lists all actions that should be there. A file with a huge number of micro-batches
    # and few actions would fill the memory first.
    num_actions = sum(len(order) for order in schedule.orders)
    if num_actions < schedule.num_micro_batch:
        yield (
            f"its schedule does not hold: {num_actions} actions are missing some of "
            f"{schedule.num_micro_batch} micro-batches"
        )
        return
    try:
        prove_schedule(schedule)
    except (IndexError, KeyError, ValueError) as error:
        yield f"its schedule does not hold: {error}"


def _samples(plan: Plan) -> Iterator[str]:
    for device in plan.virtual_devices:
        try:
            check_batch(
                plan.batch_size,
                plan.num_micro_batch,
                plan.num_replicas * device.num_sample_parts,
            )
        except ValueError as error:
            yield str(error)
    if plan.least_samples not in (0, 1):
        yield f"least_samples is {plan.least_samples}, not 0 or 1"
    own_shares = {index for replica in plan.replicas for index, _ in replica.shares}
    for index in sorted(own_shares):
        share = plan.shares[index]
        if problem := _share_problem(plan, share):
            yield f"share {index} of its samples {problem}"
    for number, replica in enumerate(plan.replicas):
        times = [times for _, times in replica.shares]
        if sum(times) != plan.num_micro_batch or 0 in times:
            yield (
                f"replica {number} has samples for {sum(times)} micro-batches of "
                f"{plan.num_micro_batch}"
            )
    yield from _micro_batches(plan)


def _share_problem(plan: Plan, share: ReplicaShare) -> str | None:
    counts = [device.num_devices for device in plan.virtual_devices]
    for name, numbers in (("runs", share.runs), ("edges", share.edges)):
        if [len(each) for each in numbers] != counts:
            return f"has {name} for other devices than a replica has"
    for device, runs, edges in zip(plan.virtual_devices, share.runs, share.edges, strict=True):
        if sum(edges) != share.num_samples:
            return f"gives {sum(edges)} of {share.num_samples} samples to its devices"
        if device.grid is None and runs != edges:
            return "has devices without a grid that run on other samples than they get"
        if device.grid is not None and set(runs) != {share.num_samples}:
            return "has devices of a grid that do not run on all samples of their replica"
        if min(runs) < plan.least_samples:
            return f"leaves a device without {plan.least_samples} sample"
    return None


def _micro_batches(plan: Plan) -> Iterator[str]:
    """Micro-batches have the sizes that follow from the batch, and those of one size are alike."""
    runs = [
        [index for index, times in replica.shares for _ in range(times)]
        for replica in plan.replicas
    ]
    shares_of: dict[int, tuple[int, ...]] = {}
    sizes = micro_batch_sizes(plan.batch_size, plan.num_micro_batch)
    for number, (size, indices) in enumerate(zip(sizes, zip(*runs, strict=True), strict=True)):
        found = sum(plan.shares[index].num_samples for index in indices)
        if found != size:
            yield f"micro-batch {number} has {size} samples, its replicas get {found}"
        if shares_of.setdefault(size, indices) != indices:
            yield f"micro-batch {number} is divided otherwise than others of {size} samples"


def _tensors(template: ReplicaTemplate) -> Iterator[str]:
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
        if not _in_range(holding.boxes, len(template.boxes), least=-1):
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


def _blocks(plan: Plan) -> Iterator[str]:
    """Parts that ranks hold of parameters under ZeRO."""
    if plan.zero not in (0, STATES, GRADIENTS_TOO, WEIGHTS_TOO):
        yield f"it has level {plan.zero} of ZeRO"
    if any(block.ends for block in plan.blocks) and not plan.zero:
        yield "it has blocks and no ZeRO"
    if any(len(block.ranks) > 1 for block in plan.blocks if block.ends) and (
        plan.zero >= GRADIENTS_TOO and plan.least_samples < 1
    ):
        yield "it leaves ranks without samples that share gradients in every backward"
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


def _owners(plan: Plan) -> Iterator[str]:
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


def _shardings(template: ReplicaTemplate) -> Iterator[str]:
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
    if not _in_range([number for _, number in sharding.choices], len(sharding.options)):
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


def _figures(plan: Plan, figures: Figures) -> Iterator[str]:
    number = plan.num_devices
    by_rank = (figures.network.hosts, figures.update_s, figures.memory_bytes)
    if any(len(values) != number for values in by_rank):
        yield f"its figures describe {len(figures.network.hosts)} devices of {number}"
        return
    if len(figures.stages) != len(plan.stages):
        yield f"its figures describe {len(figures.stages)} stages of {len(plan.stages)}"
        return
    for stage, known in enumerate(figures.stages):
        missing = {plan.device_kinds[rank] for rank in plan.ranks_of_stage(stage)} - set(
            known.times
        )
        if missing:
            yield f"its figures have no times of stage {stage} on a {sorted(missing)[0]}"
    links: list[Link | None] = [
        figures.network.intra_host,
        figures.network.inter_host,
        figures.network.all_reduce,
    ]
    for own in figures.network.host_links:
        links += [own.intra_host, own.inter_host]
    links += [pair.link for pair in figures.network.pair_links]
    rates = [(link.bytes_per_s, link.card_bytes_per_s) for link in links if link is not None]
    if any(not rate > 0 or (card is not None and not card > 0) for rate, card in rates):
        yield "a link of its network carries 0 bytes per second"
    for state in figures.states:
        if not state.stages or not _in_range(state.stages, len(plan.stages)):
            yield "its figures have weights of stages that are not there"
            return
        holders = {rank for stage in state.stages for rank in plan.ranks_of_stage(stage)}
        ranks = [rank for part in state.parts for rank in part]
        is_twice = any(len(set(part)) < len(part) for part in state.parts)
        if plan.is_uniform:  # else a rank may hold several pieces of what others cut
            is_twice = len(set(ranks)) < len(ranks)
        if not set(ranks) <= holders or is_twice:
            yield "its figures have parts of weights on ranks that do not hold them"
        if len(state.part_bytes) != len(state.parts):
            yield "its figures have parts of weights without their bytes"
    for away in figures.away:
        counts = {len(away.stages), len(away.forward), len(away.backward)}
        if not _in_range(away.ranks, number) or len(counts) > 1:
            yield "its figures of what is at home elsewhere do not fit together"
        if min((each.num_pieces for each in (*away.forward, *away.backward)), default=1) < 1:
            yield "its figures move something in 0 pieces"
    if not math.isfinite(figures.optimizer_ratio):
        yield "the optimizer's state has no size"
