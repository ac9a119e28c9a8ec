"""The pictures of the page of concepts: python docs/concept_pictures.py writes them to docs/images."""

from __future__ import annotations

from pathlib import Path

from whale.report import schedule_page
from whale.report.svg import Drawing
from whale.scheduling.compare import Question, compare

IMAGES = Path(__file__).parent / "images"
WIDTH = 1000
WEAK = "#616e7c"
LINE = "#8894a0"
GREY = "#f7f9fb"
BLUE = ("#dbe9f6", "#4c78a8")
"""fill and line of the first TaskGraph"""
GREEN = ("#dff0d8", "#54a24b")
"""and of the second"""
SHOWN_SCHEDULES = ("gpipe", "1f1b", "zero-bubble (ZB-H1)")


def pictures() -> dict[str, str]:
    """Name of the file -> its text."""
    return {
        "flow.svg": flow(),
        "virtual_devices.svg": virtual_devices(),
        "bridge.svg": bridge(),
        "schedules.svg": schedules(),
    }


def _drawing(height: float) -> Drawing:
    drawing = Drawing(WIDTH)
    drawing.box(0, 0, WIDTH, height, "#ffffff")  # readable on a dark page, too
    return drawing


def _arrow(drawing: Drawing, x1: float, y1: float, x2: float, y2: float) -> None:
    """A line with a head at its second end, for arrows that go right or down."""
    drawing.line(x1, y1, x2, y2, LINE)
    is_flat = x2 - x1 > y2 - y1
    ends = ((-8, -4), (-8, 4)) if is_flat else ((-4, -8), (4, -8))
    head = [(x2, y2), *((x2 + right, y2 + down) for right, down in ends)]
    drawing.area(head, LINE)


def flow() -> str:
    """From the model to what every rank runs."""
    drawing = _drawing(170)
    boxes = (
        ("your model", "plain PyTorch"),
        ("graph", "one DAG with its loss"),
        ("TaskGraphs", "parts with a strategy"),
        ("plan", "where, when and why"),
        ("programs", "one for each rank"),
    )
    steps = ("capture", "annotate", "plan", "lower")
    wide = 152.0
    step = (WIDTH - 2 - wide) / (len(boxes) - 1)
    for place, (name, what) in enumerate(boxes):
        x = 1 + place * step
        fill, line = BLUE if name == "plan" else (GREY, "#c3ccd5")
        drawing.box(x, 20, wide, 56, fill, line=line, radius=6)
        drawing.text(x + wide / 2, 44, name, 14, anchor="middle", bold=True)
        drawing.text(x + wide / 2, 63, what, 11, anchor="middle", fill=WEAK)
        if place < len(steps):
            _arrow(drawing, x + wide + 2, 48, x + step - 2, 48)
            drawing.text(x + (wide + step) / 2, 38, steps[place], 10, anchor="middle", fill=WEAK)
    middle = 1 + 2 * step + (wide + step) / 2
    drawing.box(middle - 110, 112, 220, 46, GREY, line="#c3ccd5", radius=6)
    drawing.text(middle, 131, "cluster", 14, anchor="middle", bold=True)
    drawing.text(middle, 149, "devices, memories, links", 11, anchor="middle", fill=WEAK)
    drawing.line(middle, 112, middle, 50, LINE)
    return str(drawing.svg("from the model to the program of every rank"))


def virtual_devices() -> str:
    """Two TaskGraphs of `replicate(2)` on eight devices."""
    drawing = _drawing(236)
    left = 130.0
    wide = 400.0
    for place, (fill, line) in enumerate((BLUE, GREEN)):
        x = left + place * (wide + 30)
        title = f"TaskGraph {place}: replicate(2)"
        drawing.text(x + wide / 2, 22, title, 13, anchor="middle", bold=True)
        for replica in range(2):
            y = 36.0 + 100 * replica
            drawing.box(x, y, wide, 84, GREY, line="#c3ccd5", radius=8)
            drawing.text(x + 12, y + 20, "VirtualDevice", 11, fill=WEAK)
            for number in range(2):
                device = 4 * replica + 2 * place + number
                box_x = x + 12 + 192 * number
                drawing.box(box_x, y + 30, 184, 42, fill, line=line, radius=6)
                drawing.text(box_x + 12, y + 56, f"device {device}", 13, bold=True)
                drawing.text(box_x + 172, y + 56, "half the samples", 11, anchor="end", fill=WEAK)
    for replica in range(2):
        y = 36.0 + 100 * replica
        drawing.text(0, y + 46, f"model replica {replica}", 13, bold=True)
        _arrow(drawing, left + wide + 2, y + 42, left + wide + 28, y + 42)
    return str(drawing.svg("two TaskGraphs on eight devices"))


def bridge() -> str:
    """Six samples of two devices go to three devices."""
    drawing = _drawing(216)
    left_x = 10.0
    right_x = WIDTH - 310.0
    wide = 300.0
    places: dict[int, tuple[float, float]] = {}
    for device in range(2):
        y = 40.0 + 88 * device
        drawing.box(left_x, y, wide, 64, BLUE[0], line=BLUE[1], radius=6)
        drawing.text(left_x + 12, y + 22, f"device {device}", 13, bold=True)
        for number in range(3):
            sample = 3 * device + number
            x = left_x + 12 + 94 * number
            drawing.box(x, y + 32, 86, 22, "#ffffff", line=BLUE[1], radius=3)
            drawing.text(x + 43, y + 47, f"sample {sample}", 11, anchor="middle")
            places[sample] = (left_x + wide, y + 43)
    for device in range(3):
        y = 34.0 + 60 * device
        drawing.box(right_x, y, wide, 52, GREEN[0], line=GREEN[1], radius=6)
        drawing.text(right_x + 12, y + 31, f"device {2 + device}", 13, bold=True)
        for number in range(2):
            sample = 2 * device + number
            x = right_x + 104 + 96 * number
            drawing.box(x, y + 15, 88, 22, "#ffffff", line=GREEN[1], radius=3)
            drawing.text(x + 44, y + 30, f"sample {sample}", 11, anchor="middle")
            drawing.line(*places[sample], right_x, y + 18 + 16 * number, LINE)
    drawing.text(left_x, 22, "TaskGraph 0: replicate(2)", 13, bold=True)
    drawing.text(right_x, 22, "TaskGraph 1: replicate(3)", 13, bold=True)
    middle = (left_x + wide + right_x) / 2
    drawing.text(
        middle, 22, "bridge: who sends which samples to whom", 12, anchor="middle", fill=WEAK
    )
    return str(drawing.svg("a bridge from two devices to three"))


def schedules() -> str:
    """Three schedules of two devices and four micro-batches, made and simulated by Whale."""
    rows = compare(Question(num_devices=2, num_micro_batch=4))
    return str(schedule_page.svg([row for row in rows if row.name in SHOWN_SCHEDULES]))


if __name__ == "__main__":
    for name, text in pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
