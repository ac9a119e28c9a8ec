"""A plan as one HTML page: pictures, tables and reasons. It needs nothing from elsewhere and opens
from disk.

Every predicted number stands in an element with `data-key` (its place in `plan_json`) and
`data-value` (what is there).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from whale.plans.plan import Plan
from whale.plans.sharding import StageSharding
from whale.report import sharding_table
from whale.report.device_table import forward_flop, layers_of, num_devices_shown, samples_by_rank
from whale.report.page_style import STYLE
from whale.report.plan_pictures import (
    cluster_picture,
    memory_picture,
    stages_picture,
    timeline_picture,
)
from whale.report.plan_table import summary
from whale.simulation.memory import CLASSES
from whale.simulation.timeline import Timeline
from whale.units import count, human_bytes, human_flop, human_rate, human_seconds, ranges


def html(plan: Plan, timeline: Timeline) -> str:
    """The page."""
    title = (
        f"Whale plan: {count(plan.num_devices, 'device')}, {count(len(plan.stages), 'stage')}, "
        f"batch {plan.batch_size}"
    )
    sections = [
        _section("Cluster", cluster_picture(plan, timeline)),
        _section("TaskGraphs on devices", stages_picture(plan)),
        _section("One step over time, and memory below each device", timeline_picture(timeline)),
        _section("Memory at its fullest moment", memory_picture(timeline)),
        _section("Devices", _work(plan, timeline)),
        _section("Memory in numbers", _memory(timeline)),
        *(
            _section(sharding_table.title(plan, sharding), _sharding(sharding))
            for sharding in plan.shardings
        ),
        _section("Why", _decisions(plan)),
    ]
    if plan.notes:
        sections.append(_section("Notes", "".join(f"<p>{escape(note)}</p>" for note in plan.notes)))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>
<body><main>
<h1>{escape(title)}</h1>
<p class="weak">{escape(summary(plan))}</p>
{_facts(timeline)}
{"".join(sections)}
<footer>All times and bytes are predicted by Whale's cost model; nothing was run. Hold the mouse over a picture for its numbers.</footer>
</main></body></html>
"""


def _facts(timeline: Timeline) -> str:
    facts = (
        ("predicted step", number("step_s", timeline.step_s, human_seconds(timeline.step_s))),
        (
            "samples/s",
            number("samples_per_s", timeline.samples_per_s, human_rate(timeline.samples_per_s)),
        ),
        (
            "bubble: devices compute nothing",
            number("bubble", timeline.bubble, f"{timeline.bubble:.1%}"),
        ),
        _fullest(timeline),
    )
    boxes = "".join(
        f'<div class="fact"><b>{value}</b>{escape(name)}</div>' for name, value in facts
    )
    return f'<div class="facts">{boxes}</div>\n<section><h2>What limits it</h2><p>{escape(timeline.limit)}</p></section>'


def _fullest(timeline: Timeline) -> tuple[str, str]:
    """(what it says, how full the fullest device is)"""
    known = [device for device in timeline.devices if device.memory_bytes]
    if not known:
        device = max(timeline.devices, key=lambda each: each.peak_total_bytes)
        return f"memory of rank {device.rank}, which holds most", human_bytes(
            device.peak_total_bytes
        )
    device = max(known, key=lambda each: each.peak_total_bytes / each.memory_bytes)
    return (
        f"of its memory: rank {device.rank}, the fullest",
        f"{device.peak_total_bytes / device.memory_bytes:.0%}",
    )


def _work(plan: Plan, timeline: Timeline) -> str:
    counts = samples_by_rank(plan)
    rows = []
    for device in timeline.devices[: num_devices_shown(timeline)]:
        own = [plan.stages[stage] for stage in plan.stages_of_rank(device.rank)]
        key = f"devices.{device.rank}"
        samples = sum(counts[device.rank])
        flop = forward_flop(plan, device.rank, own, samples)
        times = (
            ("busy_s", device.busy_s),
            ("wait_s", device.wait_s),
            ("idle_s", timeline.idle_s(device.rank)),
        )
        rows.append(
            [
                str(device.rank),
                escape(f"{device.kind} on {device.host}"),
                escape(f"stage {ranges([stage.index for stage in own])}"),
                escape(layers_of(own) if len(plan.stages) > 1 else "all"),
                number(f"{key}.samples", samples, str(samples)),
                number(f"{key}.forward_flop", flop, human_flop(flop)),
                *(number(f"{key}.{name}", value, human_seconds(value)) for name, value in times),
            ]
        )
    numbers = ("samples", "forward FLOP", "busy", "wait", "idle")
    return _table(
        ("rank", "device", "stages", "layers"), numbers, rows, len(timeline.devices) - len(rows)
    )


def _memory(timeline: Timeline) -> str:
    rows = []
    for device in timeline.devices[: num_devices_shown(timeline)]:
        key = f"devices.{device.rank}"
        parts = (
            number(
                f"{key}.peak_bytes.{name}",
                device.peak_bytes[name],
                human_bytes(device.peak_bytes[name]),
            )
            for name in CLASSES
        )
        total = number(
            f"{key}.peak_total_bytes", device.peak_total_bytes, human_bytes(device.peak_total_bytes)
        )
        capacity = human_bytes(device.memory_bytes) if device.memory_bytes else "not known"
        rows.append(
            [
                str(device.rank),
                escape(device.kind),
                *parts,
                total,
                number(f"{key}.memory_bytes", device.memory_bytes, capacity),
            ]
        )
    return _table(
        ("rank", "device"),
        (*CLASSES, "in all", "capacity"),
        rows,
        len(timeline.devices) - len(rows),
    )


def _sharding(sharding: StageSharding) -> str:
    """The operations of a stage on a grid, and what is stored how."""
    shown = sharding_table.rows(sharding)
    rows = [
        [escape(cell) for cell in (what, pattern, why, times, sent)]
        for what, times, pattern, sent, why in shown
    ]
    table = _table(("operation", "pattern", "why"), ("times", "sent each"), rows)
    return table + "".join(
        f'<p class="weak">{escape(remark)}</p>' for remark in sharding_table.remarks(sharding)
    )


def _decisions(plan: Plan) -> str:
    rows = [[escape(each.what), escape(each.choice), escape(each.why)] for each in plan.decisions]
    return _table(("what", "choice", "why"), (), rows)


def number(key: str, value: float, shown: str) -> str:
    """A number that is in the JSON too."""
    return f'<span data-key="{escape(key)}" data-value="{value!r}">{escape(shown)}</span>'


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>\n{content}\n</section>\n"


def _table(
    words: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[str]],
    num_left_out: int = 0,
) -> str:
    """Cells are HTML already."""
    head = "".join(f'<th class="word">{escape(name)}</th>' for name in words) + "".join(
        f"<th>{escape(name)}</th>" for name in numbers
    )
    body = []
    for row in rows:
        cells = (
            f'<td class="word">{cell}</td>' if place < len(words) else f"<td>{cell}</td>"
            for place, cell in enumerate(row)
        )
        body.append(f"<tr>{''.join(cells)}</tr>")
    if num_left_out:
        body.append(
            f'<tr><td class="word" colspan="{len(words) + len(numbers)}">... {num_left_out} more</td></tr>'
        )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
