"""A plan in plain sentences, for those who do not read tables first."""

from __future__ import annotations

from collections import Counter

from whale.plans.plan import Plan
from whale.report.tables import samples_by_rank
from whale.simulation.timeline import Timeline
from whale.units import count, human_bytes, human_rate, human_seconds, ranges


def story(plan: Plan, timeline: Timeline) -> list[str]:
    """What happens in one step, who does how much of it, how full devices get."""
    return [
        _shape(plan),
        _speed(timeline),
        _shares(plan, timeline),
        _fullness(timeline),
        *_left_out(plan),
    ]


def _shape(plan: Plan) -> str:
    kinds = [f"{number} x {kind}" for kind, number in Counter(plan.device_kinds).items()]
    on = f"on {' and '.join(filter(None, [', '.join(kinds[:-1]), kinds[-1]]))}"
    if not plan.is_uniform:
        return (
            f"{plan.num_replicas} copies of the model that are cut differently run side by side "
            f"{on}; they share every mini-batch of {count(plan.batch_size, 'sample')}."
        )
    num_stages = len(plan.stages)
    cut = "kept whole" if num_stages == 1 else f"cut into {num_stages} stages"
    copies = ""
    if plan.num_replicas > 1:
        copies = f", and {plan.num_replicas} copies of it share every mini-batch"
    pieces = ""
    if plan.num_micro_batch > 1:
        pieces = f" in {plan.num_micro_batch} micro-batches, schedule {plan.schedule.name}"
    samples = count(plan.batch_size, "sample")
    return f"The model is {cut} {on}{copies}; a step trains on {samples}{pieces}."


def _speed(timeline: Timeline) -> str:
    return (
        f"A step should take {human_seconds(timeline.step_s)}, which is "
        f"{human_rate(timeline.samples_per_s)} samples a second; devices compute for "
        f"{1 - timeline.bubble:.0%} of that time. The step is limited by {timeline.limit}"
    ).rstrip(".") + "."


def _shares(plan: Plan, timeline: Timeline) -> str:
    """Samples by kind of device, where kinds differ."""
    counts = samples_by_rank(plan)
    by_kind: dict[str, list[int]] = {}
    for device in timeline.devices:
        by_kind.setdefault(device.kind, []).append(sum(counts[device.rank]))
    texts = [f"each {kind} {_range(samples)}" for kind, samples in by_kind.items()]
    return f"Of the samples of a step, {'; '.join(texts)}."


def _range(samples: list[int]) -> str:
    least = min(samples)
    most = max(samples)
    return f"works on {least}" if least == most else f"works on {least} to {most}"


def _fullness(timeline: Timeline) -> str:
    known = [device for device in timeline.devices if device.memory_bytes]
    if not known:
        most = max(device.peak_total_bytes for device in timeline.devices)
        return f"The fullest device holds {human_bytes(most)}."
    fullest = max(known, key=lambda device: device.peak_total_bytes / device.memory_bytes)
    return (
        f"The fullest device is rank {fullest.rank} ({fullest.kind}): "
        f"{human_bytes(fullest.peak_total_bytes)} of {human_bytes(fullest.memory_bytes)}."
    )


def _left_out(plan: Plan) -> list[str]:
    used = {rank for view in plan.by_template for rank in view.ranks}
    idle = [rank for rank in range(plan.num_devices) if rank not in used]
    if not idle:
        return []
    word = "Device" if len(idle) == 1 else "Devices"
    return [f"{word} {ranges(idle)} take no part: the step is shorter without."]
