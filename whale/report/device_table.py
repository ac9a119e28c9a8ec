"""Two rows for each device: what it does in a step, and what fills its memory. Everything as
predicted by the simulation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from whale.plans.plan import Plan, Stage
from whale.plans.samples import SampleMap
from whale.simulation.memory import CLASSES
from whale.simulation.timeline import DeviceTimeline, Timeline
from whale.units import human_bytes, human_flop, human_rate, human_seconds, num_shown, ranges

SHOWN_DEVICES = 16


def num_devices_shown(timeline: Timeline) -> int:
    """Rows of the tables and pictures of devices."""
    return num_shown(len(timeline.devices), SHOWN_DEVICES)


def prediction(timeline: Timeline) -> Text:
    """The step in two lines."""
    text = Text("Predicted step ", style="bold")
    text.append(
        f"{human_seconds(timeline.step_s)}, {human_rate(timeline.samples_per_s)} samples/s, "
        f"bubble {timeline.bubble:.1%}\n"
    )
    text.append("limited by ", style="bold")
    return text.append(timeline.limit, style="not bold")


def work_table(plan: Plan, timeline: Timeline) -> Table:
    """Layers, samples, FLOP and time of every device."""
    title = (
        "Devices in one step (FLOP: forward of its samples; wait: for messages and sums of "
        "gradients)"
    )
    table = _table(
        title, ("rank", "device", "stages", "layers"), ("samples", "FLOP", "busy", "wait", "idle")
    )
    counts = samples_by_rank(plan)
    for device in timeline.devices[: num_devices_shown(timeline)]:
        own = [plan.stages[stage] for stage in plan.stages_of_rank(device.rank)]
        shares = (device.busy_s, device.wait_s, timeline.idle_s(device.rank))
        _add_row(
            table,
            str(device.rank),
            f"{device.kind} on {device.host}",
            ranges([stage.index for stage in own]),
            layers_of(own),
            str(sum(counts[device.rank])),
            human_flop(forward_flop(plan, device.rank, own, sum(counts[device.rank]))),
            *(
                f"{human_seconds(seconds)} ({_percent(seconds, timeline.step_s)})"
                for seconds in shares
            ),
        )
    return _more(table, timeline)


def memory_table(timeline: Timeline) -> Table:
    """What fills the memory of every device at its fullest moment."""
    table = _table(
        "Memory at its fullest moment in a step", ("rank", "device"), (*CLASSES, "in all", "of")
    )
    for device in timeline.devices[: num_devices_shown(timeline)]:
        parts = (human_bytes(device.peak_bytes[name]) for name in CLASSES)
        _add_row(
            table,
            str(device.rank),
            device.kind,
            *parts,
            human_bytes(device.peak_total_bytes),
            of_memory(device),
        )
    return _more(table, timeline)


def of_memory(device: DeviceTimeline) -> str:
    if not device.memory_bytes:
        return "not known"
    return (
        f"{human_bytes(device.memory_bytes)} "
        f"({_percent(device.peak_total_bytes, device.memory_bytes)})"
    )


def samples_by_rank(plan: Plan) -> list[list[int]]:
    """[rank][micro-batch]"""
    return SampleMap(plan, plan.batch_size, plan.num_micro_batch).num_by_rank()


def forward_flop(plan: Plan, rank: int, stages: Sequence[Stage], num_samples: int) -> float:
    """Of so many samples on these stages of a rank. Devices of a grid do the work for a sample
    together, each its part.
    """
    work = {sharding.stage: sharding.work for sharding in plan.shardings}
    place = plan.place_of_rank(rank)[2]
    flop = 0.0
    for stage in stages:
        device = plan.virtual_devices[stage.virtual_device]
        even = 1 / device.num_devices if device.grid is not None else 1.0
        flop += stage.forward_flop * (work[stage.index][place] if work.get(stage.index) else even)
    return flop * num_samples / plan.batch_size


def layers_of(stages: Sequence[Stage]) -> str:
    """Layers as the model numbers them: parameters `h.0.attn.weight` .. `h.5.mlp.bias` are `h.0-5`;
    of several lists each.
    """
    found: dict[str, set[int]] = {}
    for name in (name for stage in stages for name in stage.parameters):
        match = re.match(r"(?:(.*?)\.)??(\d+)\.", name)
        if match:
            found.setdefault((match[1] or "").rsplit(".", 1)[-1], set()).add(int(match[2]))
    return (
        "; ".join(
            f"{name}.{ranges(sorted(numbers))}".removeprefix(".") for name, numbers in found.items()
        )
        or "-"
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
    )
    table.show_edge = table.pad_edge = False
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))


def _more(table: Table, timeline: Timeline) -> Table:
    if left_out := len(timeline.devices) - num_devices_shown(timeline):
        table.add_row(f"... {left_out} more")
    return table
