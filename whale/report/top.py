"""`whale top run_folder`: a table of all ranks that follows a run, from the metrics files alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from whale.metric_files import last_metrics, read_finished
from whale.report.fit_table import NARROW_GAP, add_row, make_table
from whale.units import human_age, human_bytes, human_seconds

COLUMNS = (
    "step",
    "samples/s",
    "step time",
    "compute",
    "comm.",
    "bubble",
    "MFU",
    "memory",
    "last seen",
)
STALE_S = 10.0  # a rank that wrote nothing for so long is marked


def metrics_table(
    lines: Mapping[int, dict[str, Any] | None],
    now: float,
    finished: Mapping[str, Any] | None = None,
) -> Table:
    """The last step of every rank. `finished`: what `read_finished` gives."""
    newest = max(filter(None, lines.values()), key=lambda line: line["time"])
    ended = "" if finished is None else "finished, "
    title = (
        f"{ended}step {newest['step']}: loss {newest['loss']:.6g}, gradient norm "
        f"{newest['grad_norm']:.4g}, learning rate {newest['lr']:.4g}"
    )
    table = make_table(title, ("rank",), COLUMNS, gap=NARROW_GAP)
    for rank, line in lines.items():
        if line is None:
            add_row(table, str(rank), *["-"] * len(COLUMNS))
            continue
        total = line["total_s"]
        age = now - line["time"]
        add_row(
            table,
            str(rank),
            str(line["step"]),
            f"{line['samples_per_s']:.1f}",
            human_seconds(total),
            *(
                f"{100 * line[part] / total:.0f} %"
                for part in ("compute_s", "communication_s", "bubble_s")
            ),
            f"{100 * line['model_flop_utilisation']:.1f} %",
            human_bytes(line["memory_bytes"]),
            f"{human_age(age)} ago" + (" (silent)" if age > STALE_S and finished is None else ""),
        )
    return table


def follow(run_folder: Path, console: Console, every_s: float, once: bool) -> None:
    """Prints the table once, or keeps it up to date until the run is finished or Ctrl-C."""
    if every_s <= 0:
        raise ValueError(f"--every {every_s:g}: the time between two updates must be more than 0 s")
    lines = last_metrics(run_folder)
    if not any(lines.values()):
        raise ValueError(
            f"{run_folder} has no metrics yet: give a run folder ('run_folder' of the config, "
            "'runs/<script>' under whale run)"
        )

    def table() -> Table:
        return metrics_table(last_metrics(run_folder), time.time(), read_finished(run_folder))

    if once or not console.is_terminal:
        console.print(table())
        return
    with Live(table(), console=console, auto_refresh=False) as live:
        while read_finished(run_folder) is None:
            time.sleep(every_s)
            live.update(table(), refresh=True)
