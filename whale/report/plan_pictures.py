"""Pictures of a plan: the cluster, what runs on which device, memory, and the step over time. Each
is one SVG, made for a laptop.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup

from whale.plans.plan import Plan
from whale.plans.samples import SampleMap
from whale.report.svg import Drawing, legend, shortened, text_width
from whale.report.tables import layers_of, num_devices_shown, of_memory
from whale.simulation.memory import CLASSES
from whale.simulation.timeline import ALL_REDUCE, UPDATE, DeviceTimeline, Event, Timeline
from whale.units import count, human_bytes, human_flop, human_seconds, num_shown, ranges

WIDTH = 1180
KIND_COLOURS = ("#dbe9f6", "#fde3c8", "#dff0d8", "#ead9f0", "#fbe6ea", "#e8e4d9")
KIND_LINES = ("#4c78a8", "#d97706", "#54a24b", "#9467bd", "#d6546f", "#8a7f5c")
MEMORY_COLOURS = dict(
    zip(CLASSES, ("#4c78a8", "#f2a65a", "#9467bd", "#54a24b", "#9aa5b1"), strict=True)
)
EVENT_COLOURS = {
    "F": "#4c78a8",
    "B": "#54a24b",
    "I": "#72b7b2",
    "W": "#eeca3b",
    ALL_REDUCE: "#e45756",
    UPDATE: "#9467bd",
    "receive": "#d5dbe1",
}
EVENT_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "receive": "waits for a message",
    ALL_REDUCE: "waits for all-reduces of gradients",
    UPDATE: "update",
}
MEMORY_CURVE = "#b9c6d3"
GREY = "#eef1f4"
SOFT = "#f7f9fb"
INK = "#1f2933"
WEAK = "#616e7c"
LABEL = 170
SHOWN_HOSTS = 12
SHOWN_GROUPS = 8
SHOWN_REPLICAS = 6
TOO_NARROW = 0.25
"""pixels: an event that nobody could see is not drawn"""


def colour_of(kinds: Sequence[str], kind: str) -> tuple[str, str]:
    """(fill, line) of a kind of device, the same in all pictures."""
    place = list(dict.fromkeys(kinds)).index(kind) % len(KIND_COLOURS)
    return KIND_COLOURS[place], KIND_LINES[place]


# ---- the cluster


def cluster_picture(plan: Plan, timeline: Timeline) -> Markup:
    """Hosts with their devices; neighbours of one kind are drawn as one box where a host
    has many.
    """
    network = plan.figures.network if plan.figures is not None else None
    hosts = [
        (host, list(members))
        for host, members in groupby(timeline.devices, key=lambda device: device.host)
    ]
    drawing = Drawing(WIDTH)
    x = 0.0
    y = 0.0
    row_high = 0.0
    shown = num_shown(len(hosts), SHOWN_HOSTS)
    for host, members in hosts[:shown]:
        groups = _device_groups(members)
        per_row = min(len(groups), 4)
        wide = 20 + per_row * 138
        high = 40 + 58 * -(-len(groups) // 4)
        if x and x + wide > WIDTH:
            x = 0.0
            y = y + row_high + 14
            row_high = 0.0
        drawing.box(x, y, wide, high, SOFT, line="#c3ccd5", radius=8)
        drawing.text(x + 12, y + 20, shortened(f"host {host}", 13, wide - 20), 13, bold=True)
        for place, group in enumerate(groups):
            left = x + 12 + 138 * (place % 4)
            top = y + 32 + 58 * (place // 4)
            _device_box(drawing, plan, group, left, top)
        row_high = max(row_high, high)
        x = x + wide + 14
    y += row_high + 22
    if len(hosts) > shown:
        drawing.text(0, y, f"... and {count(len(hosts) - shown, 'host')} more", fill=WEAK)
        y += 18
    if network is not None:
        inside = network.intra_host
        between = network.inter_host
        words = (
            f"inside a host {human_bytes(inside.bytes_per_s)}/s, "
            f"{human_seconds(inside.latency_s)} latency"
        )
        if len(hosts) > 1:
            words += (
                f"   ·   between hosts {human_bytes(between.bytes_per_s)}/s, "
                f"{human_seconds(between.latency_s)} latency"
            )
        drawing.text(0, y, words, fill=WEAK)
    return drawing.svg("the cluster")


def _device_groups(members: Sequence[DeviceTimeline]) -> list[list[DeviceTimeline]]:
    if len(members) <= SHOWN_GROUPS:
        return [[member] for member in members]
    return [list(group) for _, group in groupby(members, key=lambda device: device.kind)][
        :SHOWN_GROUPS
    ]


def _device_box(
    drawing: Drawing, plan: Plan, group: Sequence[DeviceTimeline], x: float, y: float
) -> None:
    fill, line = colour_of(plan.device_kinds, group[0].kind)
    drawing.box(
        x,
        y,
        130,
        50,
        fill,
        line=line,
        radius=5,
        title=f"rank {ranges([d.rank for d in group])}: {group[0].kind}",
    )
    ranks = (
        f"rank {group[0].rank}"
        if len(group) == 1
        else f"{len(group)} x, ranks {ranges([d.rank for d in group])}"
    )
    drawing.text(x + 8, y + 18, shortened(ranks, 12, 116), bold=True)
    memory = human_bytes(group[0].memory_bytes) if group[0].memory_bytes else "memory ?"
    drawing.text(x + 8, y + 35, shortened(f"{group[0].kind}, {memory}", 11, 118), 11, fill=WEAK)


# ---- TaskGraphs on devices


def stages_picture(plan: Plan) -> Markup:
    """One row for each VirtualDevice: its TaskGraphs and layers on the left, its devices in every
    model replica on the right.
    """
    drawing = Drawing(WIDTH)
    left = 372
    high = 64
    gap = 26
    shown = num_shown(plan.num_replicas, SHOWN_REPLICAS)
    wide = (WIDTH - left) / shown
    for replica in range(shown):
        drawing.text(
            left + replica * wide,
            14,
            shortened(f"model replica {plan.first_replica + replica}", 12, wide),
            fill=WEAK,
        )
    samples = SampleMap.planned(plan)
    size = samples.micro_batches[0][1] - samples.micro_batches[0][0]
    y = 26.0
    for device in plan.virtual_devices:
        _stages_box(drawing, plan, device.index, y, left, high)
        for replica, ranks in enumerate(device.ranks[:shown]):
            shares = [stop - start for start, stop in samples.devices(0, replica, device.index)]
            _stage_cell(
                drawing, plan, ranks, shares, size, left + replica * wide, y, wide - 10, high
            )
        y += high + gap
        sent = [
            c
            for c in plan.crossings
            if plan.stages[c.source].virtual_device == device.index != _device(plan, c.destination)
        ]
        if sent and device is not plan.virtual_devices[-1]:
            total = sum(c.sample_bytes * (size if c.batched else 1) for c in sent)
            drawing.text(
                10,
                y - 9,
                f"↓ sends {human_bytes(total)} for a micro-batch of {count(size, 'sample')}",
                11,
                fill=WEAK,
            )
    drawing.height = y - gap
    if plan.num_replicas > shown:
        drawing.text(
            left,
            drawing.height + 20,
            f"... and {count(plan.num_replicas - shown, 'model replica')} more like these",
            fill=WEAK,
        )
    return drawing.svg("TaskGraphs on devices")


def _stages_box(
    drawing: Drawing, plan: Plan, device: int, y: float, left: float, high: float
) -> None:
    """Stages and TaskGraphs of one VirtualDevice, their layers, FLOP and bytes."""
    stages = [stage for stage in plan.stages if stage.virtual_device == device]
    graphs = ", ".join(part.label for part in plan.task_graphs if part.virtual_device == device)
    drawing.box(0, y, left - 24, high, SOFT, line="#c3ccd5", radius=6, title=graphs)
    word = "stages" if len(stages) > 1 else "stage"
    numbers = ranges([stage.index for stage in stages])
    drawing.text(10, y + 18, f"{word} {numbers}", 13, bold=True)
    layers = layers_of(stages) if len(plan.stages) > 1 else "all layers"
    drawing.text(left - 34, y + 18, shortened(layers, 12, 220), anchor="end", fill=WEAK)
    drawing.text(10, y + 36, shortened(_without_model_name(graphs), 12, left - 44))
    work = human_flop(sum(stage.forward_flop for stage in stages))
    held = human_bytes(sum(stage.parameter_bytes for stage in stages))
    text = shortened(f"forward {work}, parameters {held}", 11, left - 44)
    drawing.text(10, y + 54, text, 11, fill=WEAK)


def _without_model_name(labels: str) -> str:
    """`wte .. h.3` for `transformer.wte .. transformer.h.3`: the first part of the names goes where
    most names share it, unless a bare number would be left.
    """
    names = re.findall(r"[\w.]+\w", labels)
    counted = Counter(name.partition(".")[0] for name in names)
    first = max(counted, key=counted.__getitem__, default="")
    start = rf"(?<![\w.]){re.escape(first)}\."
    if 2 * counted[first] <= len(names) or re.search(rf"{start}\d", labels):
        return labels
    return re.sub(start, "", labels)


def _device(plan: Plan, stage: int) -> int:
    return plan.stages[stage].virtual_device


def _stage_cell(
    drawing: Drawing,
    plan: Plan,
    ranks: Sequence[int],
    shares: Sequence[int],
    size: int,
    x: float,
    y: float,
    wide: float,
    high: float,
) -> None:
    kinds = Counter(plan.device_kinds[rank] for rank in ranks)
    fill, line = colour_of(plan.device_kinds, plan.device_kinds[ranks[0]])
    drawing.box(
        x,
        y,
        wide,
        high,
        fill,
        line=line,
        radius=6,
        title=", ".join(f"rank {r}: {s}" for r, s in zip(ranks, shares, strict=True)),
    )
    drawing.text(x + 9, y + 18, shortened(f"rank {ranges(ranks)}", 12, wide - 14), bold=True)
    drawing.text(
        x + 9,
        y + 36,
        shortened(", ".join(f"{n} x {k}" if n > 1 else k for k, n in kinds.items()), 11, wide - 14),
        11,
        fill=WEAK,
    )
    grid = plan.virtual_devices[plan.place_of_rank(ranks[0])[0]].grid
    each = f"{sum(shares) if grid is not None else '+'.join(map(str, shares))} of {size} samples"
    if grid is not None:
        each += f" together, on a grid {grid.name}" if len(grid.axes) > 1 else " together"
    drawing.text(x + 9, y + 54, shortened(each, 12, wide - 14))


# ---- memory


def memory_picture(timeline: Timeline) -> Markup:
    """One bar for each device, on one scale, with its capacity as the frame."""
    drawing = Drawing(WIDTH)
    shown = timeline.devices[: num_devices_shown(timeline)]
    bar_width = WIDTH - LABEL - 190
    largest = max(max(device.memory_bytes, device.peak_total_bytes) for device in shown) or 1.0
    legend(drawing, LABEL, 12, [(MEMORY_COLOURS[name], name) for name in CLASSES])
    for place, device in enumerate(shown):
        y = 30.0 + 26 * place
        drawing.text(0, y + 13, _label(device))
        drawing.box(
            LABEL,
            y,
            bar_width * (device.memory_bytes or largest) / largest,
            18,
            GREY,
            title=f"capacity {human_bytes(device.memory_bytes)}",
        )
        x = float(LABEL)
        for name in CLASSES:
            wide = bar_width * device.peak_bytes[name] / largest
            drawing.box(
                x,
                y,
                wide,
                18,
                MEMORY_COLOURS[name],
                title=f"{name} {human_bytes(device.peak_bytes[name])}",
            )
            x += wide
        drawing.text(WIDTH, y + 13, _held(device), anchor="end")
    _more(drawing, timeline)
    return drawing.svg("memory of the devices")


# ---- time


def timeline_picture(timeline: Timeline) -> Markup:
    """What every device does when, and below each row its memory over time."""
    drawing = Drawing(WIDTH)
    shown = timeline.devices[: num_devices_shown(timeline)]
    top = 26.0
    fullest = max(device.peak_total_bytes for device in shown) or 1.0
    scale = (WIDTH - LABEL - 1) / timeline.step_s if timeline.step_s else 0.0
    used = set()
    for device in shown:
        used |= {_sort(event) for event in device.events if event.seconds > 0}
    entries = [(EVENT_COLOURS[name], words) for name, words in EVENT_NAMES.items() if name in used]
    legend(
        drawing, 0, 12, [*entries, (MEMORY_CURVE, f"memory, full height {human_bytes(fullest)}")]
    )
    for device in shown:
        drawing.text(0, top + 15, _label(device))
        drawing.box(LABEL, top, scale * timeline.step_s, 22, GREY)
        for event in device.events:
            _event(drawing, event, top, scale)
        _curve(drawing, device, top + 24, scale, timeline.step_s, fullest)
        top += 50
    drawing.line(LABEL, top, WIDTH, top)
    for tick in range(9):
        x = LABEL + (WIDTH - LABEL - 1) * tick / 8
        seconds = timeline.step_s * tick / 8
        drawing.line(x, top, x, top + 5)
        drawing.text(
            x,
            top + 18,
            human_seconds(seconds),
            11,
            anchor="start" if not tick else "end" if tick == 8 else "middle",
            fill=WEAK,
        )
    drawing.height = top + 24
    _more(drawing, timeline)
    return drawing.svg("the step over time")


def _event(drawing: Drawing, event: Event, top: float, scale: float) -> None:
    wide = event.seconds * scale
    if wide < TOO_NARROW:
        return
    x = LABEL + event.start_s * scale
    hint = f"{event.name}: {human_seconds(event.start_s)} to {human_seconds(event.end_s)}"
    drawing.box(x, top, wide - min(1.0, wide / 4), 22, EVENT_COLOURS[_sort(event)], title=hint)
    number = event.name.rpartition(".")[2]
    if event.is_compute and wide >= text_width(number, 10) + 3:
        drawing.text(
            x + wide / 2,
            top + 15,
            number,
            10,
            anchor="middle",
            fill=INK if event.name[0] == "W" else "#ffffff",
        )


def _curve(
    drawing: Drawing, device: DeviceTimeline, top: float, scale: float, step_s: float, full: float
) -> None:
    """Memory over time as a filled step line; its full height is the peak of the fullest device."""
    high = 18.0
    points = [(float(LABEL), top + high)]
    before = 0.0
    for point in device.memory:
        x = LABEL + point.time_s * scale
        points += [
            (x, top + high * (1 - min(1.0, before / full))),
            (x, top + high * (1 - min(1.0, point.total_bytes / full))),
        ]
        before = point.total_bytes
    end = LABEL + step_s * scale
    points += [(end, points[-1][1]), (end, top + high)]
    drawing.line(LABEL, top, end, top, "#e3e8ed")
    drawing.area(points, MEMORY_CURVE, f"memory of rank {device.rank}: at most {_held(device)}")


def _sort(event: Event) -> str:
    """Key of EVENT_COLOURS."""
    if event.name in (ALL_REDUCE, UPDATE):
        return event.name
    return "receive" if event.is_wait else event.name[0]


def _held(device: DeviceTimeline) -> str:
    """`3.77 GB of 16.0 GB (24 %)`"""
    held = human_bytes(device.peak_total_bytes)
    return f"{held} of {of_memory(device)}" if device.memory_bytes else held


def _label(device: DeviceTimeline) -> str:
    return shortened(f"rank {device.rank}  {device.kind}", 12, LABEL - 8)


def _more(drawing: Drawing, timeline: Timeline) -> None:
    if left_out := len(timeline.devices) - num_devices_shown(timeline):
        drawing.text(0, drawing.height + 18, f"... and {count(left_out, 'device')} more", fill=WEAK)
