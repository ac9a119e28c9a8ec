"""Actions over time as text: one row for each device."""

from __future__ import annotations

from collections.abc import Sequence

Event = tuple[str, float, float]
"""(action, start, end) in seconds"""
WIDTH = 100
"""columns of time in a picture"""
FORWARDS = "0123456789"
BACKWARDS = "abcdefghij"
WEIGHT_PART = "+"
WAITING = "."
IDLE = " "
LEGEND = (
    "0 to 9: forward of micro-batch 0 to 9 (then from 0 again), a to j: its backward or the input "
    "part of it, +: weight part, "
    ".: waits for a message or for sums of gradients"
)


def picture(rows: Sequence[Sequence[Event]], labels: Sequence[str], step_s: float) -> str:
    """One row for each rank, time from left to right."""
    wide = max(map(len, labels)) + 2
    lines = []
    for events, label in zip(rows, labels, strict=True):
        cells = [IDLE] * WIDTH
        for name, start, end in events:
            mark = _mark(name)
            if mark:
                first = round(start / step_s * WIDTH)
                last = round(end / step_s * WIDTH)
                cells[first:last] = mark * (min(last, WIDTH) - first)
        lines.append((label.ljust(wide) + "".join(cells)).rstrip())
    return "\n".join(lines)


def _mark(name: str) -> str:
    if name.startswith(("receive", "sums")):
        return WAITING
    if name[0] not in "FBIW" or "." not in name:
        return ""
    micro_batch = int(name.split(".")[1])
    return {"F": FORWARDS[micro_batch % 10], "W": WEIGHT_PART}.get(
        name[0], BACKWARDS[micro_batch % 10]
    )
