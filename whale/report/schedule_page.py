"""Schedules side by side: a table and a picture in the terminal, the same as SVG and as one
self-contained HTML page.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from markupsafe import Markup
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale.report.plan_page import Sheet
from whale.report.svg import Drawing, render, text_width
from whale.report.svg import legend as svg_legend
from whale.scheduling.action import Kind
from whale.scheduling.compare import Question, ScheduleRow
from whale.scheduling.picture import DIGITS, IDLE
from whale.scheduling.simulate import ScheduleTimes

INK = "#1f2933"
COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#54a24b",
    Kind.INPUT: "#72b7b2",
    Kind.WEIGHT: "#eeca3b",
}
MEANING = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
}
LETTERS = {kind: INK if kind is Kind.WEIGHT else "#ffffff" for kind in COLOURS}
SIGNS = {Kind.FORWARD: "=", Kind.BACKWARD: "#", Kind.INPUT: "-", Kind.WEIGHT: "+"}
"""what fills an action in the terminal behind its micro-batch: readable without colours"""
LABEL_WIDTH = 11
LEAST_COLUMNS = 20

# sizes of the SVG in pixels
PAGE_WIDTH = 1180
LEFT = 76
ROW_HEIGHT = 20
ROW_GAP = 3
TITLE_HEIGHT = 24
PANEL_GAP = 18
LEGEND_HEIGHT = 26


def table(question: Question, rows: Sequence[ScheduleRow]) -> Table:
    """Bubble, lower bound of the step, how far the step is over it, and peak activations, for every
    schedule.
    """
    title = (
        f"{question.num_devices} devices, {question.num_micro_batch} micro-batches: "
        f"{_asked(question)}, memory cap of auto {question.cap:g}"
    )
    result = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for name in HEADINGS:
        result.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    for row in rows:
        result.add_row(*_cells(row), style="bold" if row is best(rows) else "")
    return result


HEADINGS = ("schedule", "chunks", "step", "bubble %", "bound", "over %", "peak", "weights")


def _cells(row: ScheduleRow) -> tuple[str, ...]:
    timeline = row.timeline
    over = 100 * (timeline.step_s / timeline.lower_bound_s - 1)
    return (
        row.name,
        str(row.num_chunks),
        f"{timeline.step_s:.4g}",
        f"{100 * timeline.bubble:.1f}",
        f"{timeline.lower_bound_s:.4g}",
        f"{over:.1f}",
        f"{row.peak:.4g}",
        f"{row.num_weights}x",
    )


def best(rows: Sequence[ScheduleRow]) -> ScheduleRow:
    """The shortest step with one copy of the weights."""
    return min((row for row in rows if row.num_weights == 1), key=lambda row: row.timeline.step_s)


def pick(rows: Sequence[ScheduleRow], name: str) -> list[ScheduleRow]:
    """The rows whose name begins so; `best` or `all`."""
    if name == "all":
        return list(rows)
    found = [best(rows)] if name == "best" else [row for row in rows if row.name.startswith(name)]
    if not found:
        names = [row.name for row in rows]
        nearest = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"there is no schedule {name!r} to draw; did you mean {nearest!r}? There are: best, "
            f"all, {', '.join(names)}"
        )
    return found


def picture(row: ScheduleRow, width: int) -> RenderableType:
    """One line for each device; an action begins with its micro-batch and continues with the sign
    of its kind.
    """
    timeline = row.timeline
    columns = max(width - LABEL_WIDTH, LEAST_COLUMNS)
    lines: list[Text] = [Text(f"{row.name}: bubble {100 * timeline.bubble:.1f} %", style="bold")]
    for device in range(len(timeline.starts)):
        line = Text(f"device {device}".ljust(LABEL_WIDTH), no_wrap=True, overflow="ignore")
        for character, kind in _columns(timeline, device, columns):
            line.append(character, style="dim" if kind is None else f"black on {COLOURS[kind]}")
        lines.append(line)
    return Group(*lines)


def _columns(timeline: ScheduleTimes, device: int, columns: int) -> list[tuple[str, Kind | None]]:
    """Character and kind of each column of time."""
    result: list[tuple[str, Kind | None]] = [(IDLE, None)] * columns
    scale = columns / timeline.step_s
    order = timeline.schedule.orders[device]
    for action, start, end in zip(
        order, timeline.starts[device], timeline.ends[device], strict=True
    ):
        if action.is_compute:
            first = round(start * scale)
            last = max(round(end * scale), round(start * scale) + 1)
            for column in range(first, min(last, columns)):
                character = (
                    DIGITS[action.micro_batch % len(DIGITS)]
                    if column == first
                    else SIGNS[action.kind]
                )
                result[column] = (character, action.kind)
    return result


def legend() -> Text:
    text = Text("each action: its micro-batch, then ")
    for kind, sign in SIGNS.items():
        text.append(f" {sign} {MEANING[kind]} ", style=f"black on {COLOURS[kind]}")
    text.append(f"  {IDLE} idle")
    return text


def show(
    question: Question, rows: Sequence[ScheduleRow], drawn: Sequence[ScheduleRow], console: Console
) -> None:
    """Table and pictures in the terminal."""
    console.print(table(question, rows))
    for row in drawn:
        console.print(picture(row, console.width))
    console.print(legend())


# ---- SVG and HTML


def svg(rows: Sequence[ScheduleRow]) -> Markup:
    """All these schedules one below the other on one scale of time."""
    longest = max(row.timeline.step_s for row in rows)
    kinds: set[Kind] = set()
    for row in rows:
        for order in row.timeline.schedule.orders:
            kinds.update(action.kind for action in order)
    drawing = Drawing(PAGE_WIDTH)
    panel_heights = [
        TITLE_HEIGHT + len(row.timeline.starts) * (ROW_HEIGHT + ROW_GAP) + PANEL_GAP for row in rows
    ]
    # a picture on its own has a ground of its own
    drawing.box(0, 0, PAGE_WIDTH, LEGEND_HEIGHT + sum(panel_heights), "white")
    shown = [(COLOURS[kind], MEANING[kind]) for kind in COLOURS if kind in kinds]
    svg_legend(drawing, LEFT, 10, shown)
    top = LEGEND_HEIGHT
    for row, height in zip(rows, panel_heights, strict=True):
        _panel(drawing, row, top, (PAGE_WIDTH - LEFT) / longest)
        top += height
    return drawing.svg("what every device does when")


def _panel(drawing: Drawing, row: ScheduleRow, top: int, scale: float) -> None:
    """One schedule; `scale`: pixels for a unit of time."""
    timeline = row.timeline
    title = (
        f"{row.name}: step {timeline.step_s:.4g}, bubble {100 * timeline.bubble:.1f} %, peak "
        f"activations {row.peak:.4g}"
    )
    drawing.text(0, top + 16, title, bold=True)
    for device, order in enumerate(timeline.schedule.orders):
        y = top + TITLE_HEIGHT + device * (ROW_HEIGHT + ROW_GAP)
        drawing.text(0, y + 14, f"device {device}")
        drawing.box(LEFT, y, timeline.step_s * scale, ROW_HEIGHT, "#eef1f4")
        for action, start, end in zip(
            order, timeline.starts[device], timeline.ends[device], strict=True
        ):
            if not action.is_compute:
                continue
            x = LEFT + start * scale
            wide = (end - start) * scale
            hint = f"{action} from {start:.4g} to {end:.4g}"
            colour = COLOURS[action.kind]
            drawing.box(x, y, wide, ROW_HEIGHT, colour, line="white", title=hint)
            number = str(action.micro_batch)
            if wide >= text_width(number, 10) + 3:
                fill = LETTERS[action.kind]
                drawing.text(x + wide / 2, y + 14, number, 10, anchor="middle", fill=fill)


def html(question: Question, rows: Sequence[ScheduleRow]) -> Markup:
    """One page without anything from elsewhere."""
    title = (
        f"{question.num_devices} devices, {question.num_micro_batch} micro-batches, "
        f"{question.num_waves} waves"
    )
    cells = [_cells(row) for row in rows]
    best_cells = cells[list(rows).index(best(rows))]
    schedules = Sheet(HEADINGS[:1], HEADINGS[1:], cells, best=best_cells)
    return render(
        "schedule.html",
        title=title,
        summary=f"{_asked(question)}, memory cap of auto {question.cap:g}",
        schedules=schedules,
        picture=svg(rows),
    )


def _asked(question: Question) -> str:
    return (
        f"forward {question.forward_s:g}, backward {question.backward_s:g}, "
        f"message {question.message_s:g}"
    )
