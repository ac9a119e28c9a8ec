"""A simulated step in the terminal: a row for each device over time, and the tables of work and
memory.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from whale.plans.plan import Plan
from whale.report.device_table import memory_table, num_devices_shown, prediction, work_table
from whale.report.plan_table import summary
from whale.report.time_rows import LEGEND, picture
from whale.simulation.timeline import Timeline


def print_timeline(plan: Plan, timeline: Timeline, console: Console | None = None) -> None:
    """Without a terminal it is 120 columns wide and has no colours."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=120)
    console.print(Text(summary(plan), style="bold"))
    console.print()
    console.print(prediction(timeline))
    console.print()
    shown = timeline.devices[: num_devices_shown(timeline)]
    rows = [device.events for device in shown]
    drawn = picture(
        rows, [f"rank {device.rank} {device.kind}" for device in shown], timeline.step_s
    )
    console.print(Text(drawn, no_wrap=True, overflow="ignore"), soft_wrap=True)
    if len(timeline.devices) > len(shown):
        console.print(f"... {len(timeline.devices) - len(shown)} more")
    console.print(Text(LEGEND, style="dim"))
    console.print()
    console.print(work_table(plan, timeline))
    console.print()
    console.print(memory_table(timeline))
