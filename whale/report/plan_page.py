"""A plan for a browser: one HTML page with pictures, tables and reasons, which needs nothing from
elsewhere and opens from disk. And the same figures as JSON, for other programs; the plan itself is
`Plan.save`'s file.

Every predicted number of the page stands in an element with `data-key` (its place in `plan_json`)
and `data-value` (what is there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from whale.plans.plan import Plan
from whale.plans.sharding import StageSharding
from whale.report import tables
from whale.report.plan_pictures import (
    cluster_picture,
    memory_picture,
    stages_picture,
    timeline_picture,
)
from whale.report.plan_story import story
from whale.report.plan_table import replicas_of, summary
from whale.report.svg import render
from whale.report.tables import forward_flop, layers_of, num_devices_shown, samples_by_rank
from whale.simulation.memory import CLASSES
from whale.simulation.simulate import figures_in
from whale.simulation.timeline import Timeline
from whale.units import count, human_bytes, human_flop, human_rate, human_seconds, ranges

RENAMED_FIELDS = {"told_bytes": "exchanged_bytes"}
"""fields of the JSON, old -> new: it holds both, and this table once under `renamed`"""


@dataclass(frozen=True)
class Figure:
    """A number that is in the JSON too."""

    key: str
    """its place there: `devices.3.busy_s`"""
    value: float
    text: str


Cell = str | Figure


@dataclass(frozen=True)
class Sheet:
    """A table of a page."""

    words: Sequence[str]
    """headings of the columns on the left"""
    numbers: Sequence[str]
    """headings of the columns on the right"""
    rows: Sequence[Sequence[Cell]]
    num_left_out: int = 0
    best: Sequence[Cell] | None = None
    """the row that stands out"""


def html(plan: Plan, timeline: Timeline) -> str:
    """The page of a plan and its simulated step."""
    shape = count(len(plan.stages), "stage")
    if not plan.is_uniform:
        shape = f"{count(plan.num_replicas, 'model replica')} that are not alike"
    title = f"Whale plan: {count(plan.num_devices, 'device')}, {shape}, batch {plan.batch_size}"
    stages = [("TaskGraphs on devices", stages_picture(plan.by_template[0]))]
    if not plan.is_uniform:
        stages = [
            (f"TaskGraphs on devices: {replicas_of(view)}", stages_picture(view))
            for view in plan.by_template
        ]
    pictures = [
        ("Cluster", cluster_picture(plan, timeline)),
        *stages,
        ("One step over time, and memory below each device", timeline_picture(timeline)),
        ("Memory at its fullest moment", memory_picture(timeline)),
    ]
    return render(
        "plan.html",
        title=title,
        summary=summary(plan),
        story=story(plan, timeline),
        facts=_facts(timeline),
        pictures=pictures,
        work=_work(plan, timeline),
        memory=_memory(timeline),
        elsewhere=_elsewhere(timeline),
        shardings=[
            _sharding_section(view, sharding)
            for view in plan.by_template
            for sharding in view.shardings
        ],
        decisions=Sheet(
            ("what", "choice", "why"), (), [(d.what, d.choice, d.why) for d in plan.decisions]
        ),
        alternatives=_alternatives(plan, timeline),
        notes=plan.notes,
    )


def _facts(timeline: Timeline) -> list[tuple[str, Cell]]:
    """(what it says, number) of the boxes on top of the page."""
    samples_per_s = timeline.samples_per_s
    return [
        ("predicted step", _seconds("step_s", timeline.step_s)),
        ("samples/s", Figure("samples_per_s", samples_per_s, human_rate(samples_per_s))),
        (
            "bubble: devices compute nothing",
            Figure("bubble", timeline.bubble, f"{timeline.bubble:.1%}"),
        ),
        _fullest(timeline),
    ]


def _fullest(timeline: Timeline) -> tuple[str, str]:
    """(what it says, how full the fullest device is)"""
    known = [device for device in timeline.devices if device.memory_bytes]
    if not known:
        device = max(timeline.devices, key=lambda each: each.peak_total_bytes)
        held = human_bytes(device.peak_total_bytes)
        return f"memory of rank {device.rank}, which holds most", held
    device = max(known, key=lambda each: each.peak_total_bytes / each.memory_bytes)
    full = f"{device.peak_total_bytes / device.memory_bytes:.0%}"
    return f"of its memory: rank {device.rank}, the fullest", full


def _work(plan: Plan, timeline: Timeline) -> Sheet:
    """What each device does in the step."""
    counts = samples_by_rank(plan)
    rows: list[list[Cell]] = []
    for device in timeline.devices[: num_devices_shown(timeline)]:
        view = plan.of_rank(device.rank)
        own = [view.stages[stage] for stage in view.stages_of_rank(device.rank)]
        key = f"devices.{device.rank}"
        samples = sum(counts[device.rank])
        flop = forward_flop(plan, device.rank, own, samples)
        rows.append(
            [
                str(device.rank),
                f"{device.kind} on {device.host}",
                (f"stage {ranges([stage.index for stage in own])}" if own else "left out")
                + _replica(plan, device.rank),
                layers_of(own) if len(view.stages) > 1 else "all",
                Figure(f"{key}.samples", samples, str(samples)),
                human_rate(samples / timeline.step_s if timeline.step_s else 0.0),
                Figure(f"{key}.forward_flop", flop, human_flop(flop)),
                _seconds(f"{key}.busy_s", device.busy_s),
                _seconds(f"{key}.wait_s", device.wait_s),
                _seconds(f"{key}.idle_s", timeline.idle_s(device.rank)),
            ]
        )
    words = ("rank", "device", "stages", "layers")
    numbers = ("samples", "samples/s", "forward FLOP", "busy", "wait", "idle")
    return Sheet(words, numbers, rows, len(timeline.devices) - len(rows))


def _replica(plan: Plan, rank: int) -> str:
    """The replica of a rank, where stages are counted in each by itself."""
    if plan.is_uniform:
        return ""
    view = plan.of_rank(rank)
    if rank not in view.ranks:
        return ""
    return f" of replica {view.first_replica + view.place_of_rank(rank)[1]}"


def _memory(timeline: Timeline) -> Sheet:
    """What fills the memory of each device at its fullest moment."""
    rows: list[list[Cell]] = []
    beside = tables.memories_beside(timeline.devices)
    for device in timeline.devices[: num_devices_shown(timeline)]:
        key = f"devices.{device.rank}"
        row: list[Cell] = [str(device.rank), device.kind]
        for name in CLASSES:
            row.append(_bytes(f"{key}.peak_bytes.{name}", device.peak_bytes[name]))
        row.append(_bytes(f"{key}.peak_total_bytes", device.peak_total_bytes))
        capacity = human_bytes(device.memory_bytes) if device.memory_bytes else "not known"
        row.append(Figure(f"{key}.memory_bytes", device.memory_bytes, capacity))
        for memory in beside:
            row.append(_bytes(f"{key}.elsewhere_bytes.{memory}", device.elsewhere_bytes[memory]))
        rows.append(row)
    numbers = (*CLASSES, "in all", "capacity", *(tables.ON_MEMORY[memory] for memory in beside))
    return Sheet(("rank", "device"), numbers, rows, len(timeline.devices) - len(rows))


def _elsewhere(timeline: Timeline) -> Sheet | None:
    """What is at home in the memories of the hosts, and what moves in a step."""
    if not any(device.away for device in timeline.devices):
        return None
    rows: list[list[Cell]] = []
    shown = timeline.devices[: num_devices_shown(timeline)]
    for device in shown:
        for what, memory, held, moved in tables.away_rows(device):
            sizes = [human_bytes(number) for number in (held, *moved)]
            rows.append([str(device.rank), what, memory, *sizes])
        if device.away is not None:
            rows.append([str(device.rank), "", tables.hidden_text(device), "", "", ""])
    words = ("rank", "what", "where")
    return Sheet(words, ("held", "in", "out"), rows, len(timeline.devices) - len(shown))


def _alternatives(plan: Plan, timeline: Timeline) -> Sheet | None:
    """Other plans that the search made, with their predicted steps beside that of this one."""
    if not plan.alternatives:
        return None
    rows: list[list[Cell]] = []
    for number, each in enumerate(plan.alternatives):
        ratio = f"{each.step_s / timeline.step_s:.2f}" if timeline.step_s else ""
        rows.append([each.what, _seconds(f"alternatives.{number}.step_s", each.step_s), ratio])
    return Sheet(("plan",), ("predicted step", "times this plan's step"), rows)


def _sharding_section(plan: Plan, sharding: StageSharding) -> tuple[str, Sheet, list[str]]:
    """Heading, operations and remarks of a stage on a grid."""
    rows = []
    for what, times, pattern, sent, why in tables.sharding_rows(plan, sharding):
        rows.append((what, pattern, why, times, sent))
    sheet = Sheet(("operation", "pattern", "why"), ("times", "sent each"), rows)
    return tables.sharding_title(plan, sharding), sheet, tables.sharding_remarks(sharding)


def _seconds(key: str, value: float) -> Figure:
    return Figure(key, value, human_seconds(value))


def _bytes(key: str, value: float) -> Figure:
    return Figure(key, value, human_bytes(value))


# ---- JSON


def plan_json(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Plain data. Keys of `Timeline.to_json` stay where they are; the plan's own figures stand
    beside them.
    """
    predicted = timeline.to_json()
    devices = [
        {**figures, **work}
        for figures, work in zip(predicted.pop("devices"), _work_of_devices(plan), strict=True)
    ]
    return {
        "summary": summary(plan),
        "batch_size": plan.batch_size,
        "num_micro_batch": plan.num_micro_batch,
        "num_replicas": plan.num_replicas,
        "schedule": " + ".join(view.schedule.name for view in plan.by_template),
        "templates": [
            {
                "replicas": [view.first_replica + number for number in range(view.num_replicas)],
                "batch_size": view.batch_size,
                "num_micro_batch": view.num_micro_batch,
                "schedule": view.schedule.name,
            }
            for view in plan.by_template
        ],
        **predicted,
        "devices": devices,
        "network": asdict(figures_in(plan).network),
        "task_graphs": [asdict(part) for part in plan.task_graphs],
        "stages": [
            {**asdict(stage), "ranks": list(plan.ranks_of_stage(stage.index))}
            for stage in plan.stages
        ],
        "shardings": [_sharding(each) for view in plan.by_template for each in view.shardings],
        "decisions": [asdict(decision) for decision in plan.decisions],
        "alternatives": [asdict(alternative) for alternative in plan.alternatives],
        "notes": list(plan.notes),
        "renamed": RENAMED_FIELDS,
    }


def _with_old_names(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, and those that had another name until 0.1.0 under that name too."""
    old = {name: fields[new] for name, new in RENAMED_FIELDS.items() if new in fields}
    return fields | old


def _sharding(sharding: StageSharding) -> dict[str, Any]:
    """A stage on a grid: every operation with its pattern, bytes and reason."""
    names = ("stage", "num_samples", "seconds", "sent_bytes", "keeps_gathered", "replicated")
    return {
        **{name: getattr(sharding, name) for name in names},
        "operations": [_with_old_names(asdict(operation)) for operation in sharding.operations],
        "parameters": {name: asdict(stored) for name, stored in sharding.stored.items()},
    }


def _work_of_devices(plan: Plan) -> list[dict[str, Any]]:
    """What each rank does: stages and layers, samples, its part of a grid, FLOP."""
    found: list[dict[str, Any]] = []
    counts = samples_by_rank(plan)
    for rank, samples in enumerate(counts):
        view = plan.of_rank(rank)
        if rank not in view.ranks:
            found.append({"virtual_device": None, "replica": None, "stages": [], "samples": 0})
            continue
        index, replica, place = view.place_of_rank(rank)
        device = view.virtual_devices[index]
        own = [view.stages[stage] for stage in view.stages_of_rank(rank)]
        found.append(
            {
                "virtual_device": index,
                "replica": view.first_replica + replica,
                "stages": [stage.index for stage in own],
                "layers": layers_of(own) if len(view.stages) > 1 else "all",
                "samples": sum(samples),
                "samples_of_micro_batches": samples,
                "shard": None
                if device.grid is None
                else {"grid": device.grid.name, "place": place, "of": device.num_devices},
                "forward_flop": forward_flop(plan, rank, own, sum(samples)),
            }
        )
    return found
