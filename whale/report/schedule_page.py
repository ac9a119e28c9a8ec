"""Schedules side by side: a table and a picture in the terminal, the same as SVG and as one
self-contained HTML page.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale.report.page_style import STYLE
from whale.scheduling.action import Kind
from whale.scheduling.compare import Question, Row
from whale.scheduling.simulate import Timeline

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
    Kind.INPUT: "input part",
    Kind.WEIGHT: "weight part",
}
LETTERS = {kind: INK if kind is Kind.WEIGHT else "#ffffff" for kind in COLOURS}
SIGNS = {Kind.FORWARD: "=", Kind.BACKWARD: "#", Kind.INPUT: "-", Kind.WEIGHT: "+"}
"""what fills an action in the terminal behind its micro-batch: readable without colours"""
IDLE = "."
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
LABEL_WIDTH = 11
LEAST_COLUMNS = 20

# sizes of the SVG in pixels
PAGE_WIDTH = 1180
LEFT = 76
ROW_HEIGHT = 20
ROW_GAP = 3
TITLE_HEIGHT = 24
PANEL_GAP = 18
TEXT_WIDTH = 7
LEGEND_HEIGHT = 26


def table(question: Question, rows: Sequence[Row]) -> Table:
    """Bubble, lower bound of the step, how far the step is over it, and peak activations, for every
    schedule.
    """
    title = (
        f"{question.num_devices} devices, {question.num_micro_batch} micro-batches: forward "
        f"{question.forward_s:g}, "
    )
    title += (
        f"backward {question.backward_s:g}, message {question.message_s:g}, memory cap of auto "
        f"{question.cap:g}"
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


def _cells(row: Row) -> tuple[str, ...]:
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


def best(rows: Sequence[Row]) -> Row:
    """The shortest step with one copy of the weights."""
    return min((row for row in rows if row.num_weights == 1), key=lambda row: row.timeline.step_s)


def pick(rows: Sequence[Row], name: str) -> list[Row]:
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


def picture(row: Row, width: int) -> RenderableType:
    """One line for each device; an action begins with its micro-batch and goes on with the sign of
    its kind.
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


def _columns(timeline: Timeline, device: int, columns: int) -> list[tuple[str, Kind | None]]:
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


def show(question: Question, rows: Sequence[Row], drawn: Sequence[Row], console: Console) -> None:
    """Table and pictures in the terminal."""
    console.print(table(question, rows))
    for row in drawn:
        console.print(picture(row, console.width))
    console.print(legend())


# ---- SVG and HTML


def svg(rows: Sequence[Row]) -> str:
    """All these schedules one below the other on one scale of time."""
    longest = max(row.timeline.step_s for row in rows)
    kinds = {
        action.kind for row in rows for order in row.timeline.schedule.orders for action in order
    }
    parts: list[str] = []
    x = LEFT
    for kind, colour in COLOURS.items():
        if kind in kinds:
            parts.append(f'<rect x="{x}" y="0" width="12" height="12" rx="2" fill="{colour}"/>')
            parts.append(f'<text x="{x + 18}" y="10">{MEANING[kind]}</text>')
            x += 110
    top = LEGEND_HEIGHT
    for row in rows:
        parts += _panel(row, top, (PAGE_WIDTH - LEFT) / longest)
        top += TITLE_HEIGHT + len(row.timeline.starts) * (ROW_HEIGHT + ROW_GAP) + PANEL_GAP
    size = f'viewBox="0 0 {PAGE_WIDTH} {top}" width="{PAGE_WIDTH}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, DejaVu Sans, sans-serif" font-size="12" fill="{INK}">'
    return "\n".join(
        [head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""]
    )


def _panel(row: Row, top: int, scale: float) -> list[str]:
    timeline = row.timeline
    title = (
        f"{row.name}: step {timeline.step_s:.4g}, bubble {100 * timeline.bubble:.1f} %, peak "
        f"activations {row.peak:.4g}"
    )
    parts = [f'<text x="0" y="{top + 16}" font-weight="600">{escape(title)}</text>']
    for device, order in enumerate(timeline.schedule.orders):
        y = top + TITLE_HEIGHT + device * (ROW_HEIGHT + ROW_GAP)
        parts.append(f'<text x="0" y="{y + 14}">device {device}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{timeline.step_s * scale:.2f}" height="{ROW_HEIGHT}" fill="#eef1f4"/>'
        )
        for action, start, end in zip(
            order, timeline.starts[device], timeline.ends[device], strict=True
        ):
            if not action.is_compute:
                continue
            x = LEFT + start * scale
            wide = (end - start) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{ROW_HEIGHT}" fill="{COLOURS[action.kind]}" stroke="white" '
                f'stroke-width="0.5"><title>{action} from {start:.4g} to {end:.4g}</title></rect>'
            )
            number = str(action.micro_batch)
            if wide >= TEXT_WIDTH * len(number) + 2:
                middle = x + wide / 2
                fill = LETTERS[action.kind]
                parts.append(
                    f'<text x="{middle:.2f}" y="{y + 14}" text-anchor="middle" font-size="10" fill="{fill}">{number}</text>'
                )
    return parts


EXPLAINED = (
    "Step and bound are in the unit of the forward. Bound: no order of the same chunks is "
    "shorter; over: how far the step is from it. "
    "Peak: the most micro-batches whose activations a device holds. Weights: copies of the model. "
    "The shortest step with one copy is bold."
)


def html(question: Question, rows: Sequence[Row]) -> str:
    """One page without anything from elsewhere."""
    heading = (
        f"{question.num_devices} devices, {question.num_micro_batch} micro-batches, "
        f"{question.num_waves} waves"
    )
    asked = (
        f"forward {question.forward_s:g}, backward {question.backward_s:g}, message "
        f"{question.message_s:g}, "
    )
    asked += f"memory cap of auto {question.cap:g}"
    head = "".join(
        f"<th{' class=word' if name == 'schedule' else ''}>{escape(name)}</th>" for name in HEADINGS
    )
    body = "\n".join(_html_row(row, row is best(rows)) for row in rows)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(heading)}</title><style>{STYLE}</style></head>
<body><main>
<h1>{escape(heading)}</h1>
<p class="weak">{escape(asked)}</p>
<section><h2>Schedules side by side</h2>
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></section>
<section><h2>What every device does when</h2>
{svg(rows)}</section>
<footer>{escape(EXPLAINED)} Hold the mouse over an action for its times.</footer>
</main></body></html>
"""


def _html_row(row: Row, is_best: bool) -> str:
    name, *numbers = map(escape, _cells(row))
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    return f'<tr{" class=best" if is_best else ""}><td class="word">{name}</td>{cells}</tr>'


def save(text: str, file: Path) -> None:
    file.write_text(text, encoding="utf-8")
