"""Whether a plan file fits together: everything that readers index by or divide by is looked at
once, when the file is loaded.

A file may have been edited, cut off or made by another program. After this check lowering, runtime,
simulation and report take a plan as it is. Each check gives one sentence for the user, or None; the
order matters, since later checks rely on what earlier ones have seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from whale.plans.blocks import GRADIENTS_TOO, STATES, WEIGHTS_TOO
from whale.plans.check_held import (
    block_problems,
    in_range,
    owner_problems,
    sharding_problems,
    tensor_problems,
)
from whale.plans.moves import residence_problem
from whale.plans.shares import check_batch, micro_batch_sizes
from whale.scheduling import check as prove_schedule

if TYPE_CHECKING:
    from whale.cluster.network import Link
    from whale.plans.figures import Figures
    from whale.plans.plan import Plan, ReplicaShare, ReplicaTemplate

LARGEST_INTEGER = 2**62
LARGEST_NUMBER = 1e60
"""far more than any count, byte, FLOP or second; products of a few such numbers stay finite"""
ROUNDING = 1e-3
"""sums of bytes that go up and down again, and times in the figures, which are differences of what
was measured, may end this far below 0. Other times may not: schedules and shares are made of them
"""
MAY_BE_NEGATIVE = frozenset(("stage_of_operation", "boxes", "workspace", "moments"))
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
    if not in_range([replica.template for replica in plan.replicas], len(plan.templates)):
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
    if plan.figures is not None:
        yield from _figures(plan, plan.figures)
    for view in plan.by_template:
        yield from _stages(view.template)
        yield from _crossings(view.template)
        yield from _schedule(view, view.template)
        yield from _samples(view)
        yield from tensor_problems(view.template)
        yield from sharding_problems(view.template)
    yield from block_problems(plan)
    yield from owner_problems(plan)
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


def _devices(plan: Plan) -> Iterator[str]:
    if not in_range(plan.device_of_rank, len(plan.devices)):
        yield f"a rank names a device beyond the {len(plan.devices)} that it describes"
    ranks = sorted(
        rank for replica in plan.replicas for members in replica.ranks for rank in members
    )
    if len(set(ranks)) < len(ranks) or not in_range(ranks, plan.num_devices):
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
            if not in_range([stage.virtual_device], len(template.grids)):
                yield "a stage names a VirtualDevice that is not there"
            if not in_range(stage.task_graphs, max(1, len(plan.task_graphs))):
                yield f"stage {index} names a TaskGraph that is not there"
                continue
            if plan.is_uniform:
                continue
            devices = [plan.task_graphs[number].virtual_device for number in stage.task_graphs]
            if not in_range(devices, first_device + len(template.grids), least=first_device):
                yield f"stage {index} names a TaskGraph of replicas that are not alike"
        first_device += len(template.grids)
    if not in_range([part.virtual_device for part in plan.task_graphs], first_device):
        yield "a TaskGraph names a VirtualDevice that is not there"


def _shares(plan: Plan) -> Iterator[str]:
    for number, replica in enumerate(plan.replicas):
        if not in_range([index for index, _ in replica.shares], len(plan.shares)):
            yield f"replica {number} names samples that are not there"


def _stages(template: ReplicaTemplate) -> Iterator[str]:
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
            if not in_range(region, len(template.stage_of_operation)):
                yield f"stage {index} recomputes an operation that is not there"
            elif any(template.stage_of_operation[place] != index for place in region):
                yield f"stage {index} recomputes an operation of another stage"
    places = [
        *template.stage_of_operation,
        *(stage for holding in template.tensors.values() for stage in holding.stages),
        *(term.stage for term in template.loss_terms),
    ]
    if not in_range(places, num_stages, least=-1):
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
        if not state.stages or not in_range(state.stages, len(plan.stages)):
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
    yield from _zero_figures(plan, figures)
    if _has_twice(each.ranks for each in figures.away):
        yield "its figures have a rank twice in what is at home elsewhere"
    for away in figures.away:
        counts = {len(away.stages), len(away.forward), len(away.backward)}
        counts |= {len(away.ahead)} if away.ahead else set()
        if not in_range(away.ranks, number) or len(counts) > 1:
            yield "its figures of what is at home elsewhere do not fit together"
        numbers = [each.num_pieces for each in (*away.forward, *away.backward)]
        if min(*numbers, away.update.num_blocks, 1) < 1:
            yield "its figures move something in 0 pieces"
    if not math.isfinite(figures.optimizer_ratio):
        yield "the optimizer's state has no size"


def _zero_figures(plan: Plan, figures: Figures) -> Iterator[str]:
    """Problems of the figures of ranks that share parameters."""
    if _has_twice(group.ranks for group in figures.zero):
        yield "its figures have a rank twice in what ranks share under ZeRO"
    for group in figures.zero:
        by_stage = {len(group.stages), len(group.stage_bytes), len(group.stage_trained_bytes)}
        is_by_rank = len(group.ranks) == len(group.fractions) > 0
        if not is_by_rank or len(by_stage) > 1 or not in_range(group.ranks, plan.num_devices):
            yield "its figures of what ranks share under ZeRO do not fit together"
        if group.level not in (STATES, GRADIENTS_TOO, WEIGHTS_TOO):
            yield f"its figures are those of level {group.level} of ZeRO"


def _has_twice(groups: Iterable[Sequence[int]]) -> bool:
    """Whether a rank is in these groups more than once."""
    ranks = [rank for group in groups for rank in group]
    return len(set(ranks)) < len(ranks)
