"""A step in the terminal: a row for each device over time (also of a measured step), and the tables
of work and memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from whale.plans.plan import Plan
from whale.report.fit_table import wide_console
from whale.report.plan_table import summary
from whale.report.tables import (
    memory_table,
    num_devices_shown,
    prediction,
    work_table,
)
from whale.simulation.timeline import ALL_REDUCE, Timeline

Event = tuple[str, float, float]
"""(action, start, end) in seconds"""
WIDTH = 100
"""columns of time in a picture, at most"""
LEAST_WIDTH = 40
FORWARDS = "0123456789"
BACKWARDS = "abcdefghij"
WEIGHT_GRADIENT = "+"
WAITING = "."
IDLE = " "
LEGEND = (
    "0 to 9: forward of micro-batch 0 to 9 (then from 0 again), a to j: its backward or its input "
    "gradient, +: weight gradient, .: waits for a message or for all-reduces of gradients"
)


def picture(
    rows: Sequence[Sequence[Event]],
    labels: Sequence[str],
    step_s: float,
    columns: int | None = None,
) -> str:
    """One row of text for each rank, time from left to right. `columns`: of the terminal, which no
    row leaves.
    """
    wide = max(map(len, labels)) + 2
    width = WIDTH if columns is None else max(LEAST_WIDTH, min(WIDTH, columns - wide))
    lines = []
    for events, label in zip(rows, labels, strict=True):
        cells = [IDLE] * width
        for name, start, end in events:
            mark = _mark(name)
            if mark:
                first = round(start / step_s * width)
                last = round(end / step_s * width)
                cells[first:last] = mark * (min(last, width) - first)
        lines.append((label.ljust(wide) + "".join(cells)).rstrip())
    return "\n".join(lines)


def _mark(name: str) -> str:
    if name.startswith(("receive", ALL_REDUCE)):
        return WAITING
    if name[0] not in "FBIW" or "." not in name:
        return ""
    micro_batch = int(name.split(".")[1])
    return {"F": FORWARDS[micro_batch % 10], "W": WEIGHT_GRADIENT}.get(
        name[0], BACKWARDS[micro_batch % 10]
    )


def print_timeline(plan: Plan, timeline: Timeline, console: Console | None = None) -> None:
    """Prints the step, as wide as the terminal; without one it has no colours."""
    console = console or wide_console()
    console.print(Text(summary(plan), style="bold"))
    console.print()
    console.print(prediction(timeline))
    console.print()
    shown = timeline.devices[: num_devices_shown(timeline)]
    rows = [device.events for device in shown]
    drawn = picture(
        rows,
        [f"rank {device.rank} {device.kind}" for device in shown],
        timeline.step_s,
        console.width,
    )
    console.print(Text(drawn, no_wrap=True, overflow="ignore"), soft_wrap=True)
    if len(timeline.devices) > len(shown):
        console.print(f"... {len(timeline.devices) - len(shown)} more")
    console.print(Text(LEGEND, style="dim"))
    console.print()
    console.print(work_table(plan, timeline))
    console.print()
    console.print(memory_table(timeline))
