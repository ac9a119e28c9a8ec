"""Two plans side by side: what differs in devices, cuts, shares, memory and the predicted step, in
words and numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from whale.names import listed
from whale.plans.plan import Plan
from whale.report.tables import layers_of, samples_by_rank
from whale.simulation.simulate import simulate
from whale.simulation.timeline import Timeline
from whale.units import compared, count, human_bytes, human_rate, human_seconds, ranges

SHOWN = 8
"""devices that are written out"""


def compare(a: Plan, b: Plan) -> list[str]:
    """One line for each thing that differs; none where the plans do the same."""
    lines = [*_devices(a, b), *_batch(a, b), *_cuts(a, b), *_schedule(a, b), *_shares(a, b)]
    if a.figures is None or b.figures is None:
        return [
            *lines,
            "step and memory are not compared: a plan has no figures of its cluster (make it "
            "again)",
        ]
    first = simulate(a)
    second = simulate(b)
    return [*lines, *_memory(first, second), *_step(first, second)]


def _devices(a: Plan, b: Plan) -> Iterator[str]:
    if Counter(a.device_kinds) != Counter(b.device_kinds):
        yield f"devices: {_kinds(a)} -> {_kinds(b)}"
    elif a.device_kinds != b.device_kinds:
        yield "devices: the same kinds in another order of ranks"
    if (len(a.virtual_devices), a.num_replicas) != (len(b.virtual_devices), b.num_replicas):
        yield f"parallelism: {_shape(a)} -> {_shape(b)}"
    elif a.virtual_devices != b.virtual_devices and a.num_devices == b.num_devices:
        moved = [
            rank
            for rank in range(a.num_devices)
            if a.of_rank(rank).stages_of_rank(rank) != b.of_rank(rank).stages_of_rank(rank)
        ]
        more = " ..." if len(moved) > SHOWN else ""
        elsewhere = f"{count(len(moved), 'device')} elsewhere"
        yield f"placement: {elsewhere} (rank {ranges(moved[:SHOWN])}{more})"


def _kinds(plan: Plan) -> str:
    return " + ".join(f"{number} x {kind}" for kind, number in Counter(plan.device_kinds).items())


def _shape(plan: Plan) -> str:
    return (
        f"{count(len(plan.virtual_devices), 'VirtualDevice')} x "
        f"{count(plan.num_replicas, 'model replica')}"
    )


def _batch(a: Plan, b: Plan) -> Iterator[str]:
    if (a.batch_size, a.num_micro_batch) != (b.batch_size, b.num_micro_batch):
        before = f"{a.batch_size} in {count(a.num_micro_batch, 'micro-batch')}"
        yield f"batch: {before} -> {b.batch_size} in {b.num_micro_batch}"


def _cuts(a: Plan, b: Plan) -> Iterator[str]:
    if len(a.stages) != len(b.stages):
        yield f"cuts: {count(len(a.stages), 'stage')} -> {count(len(b.stages), 'stage')}"
        return
    changed = [
        f"stage {x.index}: {layers_of([x])}, {human_bytes(x.parameter_bytes)} -> "
        f"{layers_of([y])}, {human_bytes(y.parameter_bytes)}"
        for x, y in zip(a.stages, b.stages, strict=True)
        if x.parameters != y.parameters
    ]
    if changed:
        yield f"cuts: {listed(changed, SHOWN, '; ')}"


def _schedule(a: Plan, b: Plan) -> Iterator[str]:
    before, after = (" + ".join(view.schedule.name for view in plan.by_template) for plan in (a, b))
    if before != after:
        yield f"schedule: {before} -> {after}"


def _shares(a: Plan, b: Plan) -> Iterator[str]:
    first = [sum(each) for each in samples_by_rank(a)]
    second = [sum(each) for each in samples_by_rank(b)]
    if first != second:
        yield f"samples by rank: {listed(first, SHOWN, '+')} -> {listed(second, SHOWN, '+')}"


def _memory(a: Timeline, b: Timeline) -> Iterator[str]:
    """Only the device with the largest difference; all of them are in the tables of `whale
    show`.
    """
    if len(a.devices) != len(b.devices):
        fullest = [
            max(timeline.devices, key=lambda device: device.peak_total_bytes) for timeline in (a, b)
        ]
        words = (
            f"{human_bytes(each.peak_total_bytes)} on rank {each.rank} ({each.kind})"
            for each in fullest
        )
        yield "memory of the fullest device: " + " -> ".join(words)
        return
    pairs = list(zip(a.devices, b.devices, strict=True))
    x, y = max(pairs, key=lambda pair: abs(pair[0].peak_total_bytes - pair[1].peak_total_bytes))
    if x.peak_total_bytes == y.peak_total_bytes:
        return
    parts = [
        f"{name} {human_bytes(x.peak_bytes[name])} -> {human_bytes(y.peak_bytes[name])}"
        for name in x.peak_bytes
        if x.peak_bytes[name] != y.peak_bytes[name]
    ]
    total = f"{human_bytes(x.peak_total_bytes)} -> {human_bytes(y.peak_total_bytes)}"
    yield f"memory, most on rank {x.rank}: {total} ({', '.join(parts)})"


def _step(a: Timeline, b: Timeline) -> Iterator[str]:
    if a.step_s == b.step_s and a.batch_size == b.batch_size:
        return
    yield f"predicted step: {human_seconds(a.step_s)} -> {human_seconds(b.step_s)}"
    ratio = b.samples_per_s / a.samples_per_s
    which = "the second is" if ratio >= 1 else "the first is"
    faster = f"{which} {compared(max(ratio, 1 / ratio), 'faster', 'slower', 'as fast')}"
    yield f"samples/s: {human_rate(a.samples_per_s)} -> {human_rate(b.samples_per_s)}: {faster}"
    yield f"bubble: {a.bubble:.1%} -> {b.bubble:.1%}"
    if a.limit != b.limit:
        yield f"limited by: {a.limit} -> {b.limit}"
