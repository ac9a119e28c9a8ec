"""A schedule as text: one row for each device, time from left to right.

    1f1b: 2 stages on 2 devices, 2 micro-batches
    device 0 (stage 0)  0 1 . . 0'0'. 1'1'
    device 1 (stage 1)  . 0 0'0'1 1'1'. .
    0 forward of micro-batch 0, 0' its backward, . idle
    bubble 33.3 %

Chunks of one device share its row. A split backward is drawn as `0-` (input gradient) and `0+`
(weight gradient), each half as long.
"""

from __future__ import annotations

import textwrap
from fractions import Fraction

from whale.names import count
from whale.scheduling.action import Kind, Schedule
from whale.scheduling.check import start_times

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
CELL_WIDTH = 2
"""characters in one column of time: the micro-batch and its mark"""
IDLE = "."
CLIPPED = ">"
MARKS = {Kind.FORWARD: " ", Kind.BACKWARD: "'", Kind.INPUT: "-", Kind.WEIGHT: "+"}
MAX_COLUMNS_OF_SHORTER = 4
"""a forward or backward, whichever is shorter, is drawn at most so wide; other ratios are rounded
in the drawing, not in the bubble
"""


def draw(schedule: Schedule, forward: float = 1.0, backward: float = 2.0, width: int = 120) -> str:
    """Text picture of a checked schedule when every forward and backward takes these times and
    messages take none.

    Rows longer than `width` characters end with `>`; the legend is wrapped. The last line is the
    bubble: the part of the devices' time that is idle.
    """
    if forward <= 0 or backward <= 0:
        raise ValueError(f"forward and backward must take time, got {forward} and {backward}")
    graph = schedule.stage_graph
    labels = [_label(device, graph.stages_of(device)) for device in range(graph.num_devices)]
    label_width = max(map(len, labels)) + 2
    visible = (width - label_width - len(CLIPPED)) // CELL_WIDTH
    if visible < 1:
        raise ValueError(
            f"width {width} leaves no column beside the row names, which take {label_width}; give "
            f"at least {label_width + 3}"
        )
    rows = _rows(schedule, *_columns(forward, backward))
    num_columns = len(rows[0])
    sizes = (
        f"{count(graph.num_stages, 'stage')} on {count(graph.num_devices, 'device')}, "
        f"{count(schedule.num_micro_batch, 'micro-batch')}"
    )
    lines = [f"{schedule.name}: {sizes}"]
    for label, row in zip(labels, rows, strict=True):
        shown = (
            "".join(row[:visible]) + CLIPPED
            if _is_clipped(row, width - label_width)
            else "".join(row)
        )
        lines.append((label.ljust(label_width) + shown).rstrip())
    lines += textwrap.wrap(_legend(schedule), width)
    if _is_clipped(rows[0], width - label_width):
        lines.append(f"{CLIPPED} clipped: {visible} of {num_columns} columns are shown")
    lines.append(f"bubble {100 * bubble(schedule, forward, backward):.1f} %")
    return "\n".join(lines)


def bubble(schedule: Schedule, forward: float = 1.0, backward: float = 2.0) -> float:
    """Idle part of the devices' time, 0 to 1, from the start of the first action to the end of the
    last.
    """
    duration = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward,
        Kind.INPUT: backward / 2,
        Kind.WEIGHT: backward / 2,
    }
    busy = end = 0.0
    for order, starts in zip(schedule.orders, start_times(schedule, duration), strict=True):
        busy += sum(duration.get(action.kind, 0.0) for action in order)
        end = max(
            end,
            *(
                start + duration.get(action.kind, 0.0)
                for action, start in zip(order, starts, strict=True)
            ),
        )
    return 1 - busy / (end * len(schedule.orders))


def _columns(forward: float, backward: float) -> tuple[int, int]:
    """How many columns a forward and a backward take, in about the ratio of their times."""
    ratio = Fraction(max(forward, backward) / min(forward, backward)).limit_denominator(
        MAX_COLUMNS_OF_SHORTER
    )
    shorter = ratio.denominator
    longer = ratio.numerator
    return (shorter, longer) if forward <= backward else (longer, shorter)


def _rows(schedule: Schedule, forward_columns: int, backward_columns: int) -> list[list[str]]:
    """Cells of each device, all rows equally long."""
    if _is_split(schedule) and backward_columns % 2:
        forward_columns = 2 * forward_columns
        backward_columns = 2 * backward_columns
    half = backward_columns // 2
    columns = {
        Kind.FORWARD: forward_columns,
        Kind.BACKWARD: backward_columns,
        Kind.INPUT: half,
        Kind.WEIGHT: half,
    }
    starts = start_times(schedule, columns)
    rows: list[list[str]] = []
    for order, row_starts in zip(schedule.orders, starts, strict=True):
        row: list[str] = []
        for action, start in zip(order, row_starts, strict=True):
            if action.kind in columns:
                row += [IDLE.ljust(CELL_WIDTH)] * (int(start) - len(row))
                row += [DIGITS[action.micro_batch % len(DIGITS)] + MARKS[action.kind]] * columns[
                    action.kind
                ]
        rows.append(row)
    end = max(map(len, rows))
    return [row + [IDLE.ljust(CELL_WIDTH)] * (end - len(row)) for row in rows]


def _is_clipped(row: list[str], width: int) -> bool:
    return len("".join(row).rstrip()) > width


def _label(device: int, stages: tuple[int, ...]) -> str:
    return f"device {device} (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})"


def _is_split(schedule: Schedule) -> bool:
    return any(action.kind is Kind.WEIGHT for order in schedule.orders for action in order)


def _legend(schedule: Schedule) -> str:
    num_micro_batch = schedule.num_micro_batch
    parts = (
        f", 0{MARKS[Kind.INPUT]} and 0{MARKS[Kind.WEIGHT]} its input and weight gradient"
        if _is_split(schedule)
        else ""
    )
    legend = f"0 forward of micro-batch 0, 0{MARKS[Kind.BACKWARD]} its backward{parts}, {IDLE} idle"
    if num_micro_batch > 10:
        legend += (
            f"; a is micro-batch 10, b is 11, up to {DIGITS[min(num_micro_batch, len(DIGITS)) - 1]}"
        )
    if num_micro_batch > len(DIGITS):
        legend += f", then from 0 again ({num_micro_batch} in all)"
    return legend
