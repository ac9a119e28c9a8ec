"""A picture as SVG text: boxes, lines and words, each placed by hand. Nothing from elsewhere is
needed to show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

CHARACTER = 0.56
"""width of an average character of a sans-serif font, in units of its size"""


def text_width(text: str, size: float) -> float:
    """About how wide a text is."""
    return CHARACTER * size * len(text)


def shortened(text: str, size: float, room: float) -> str:
    """The text, with an ellipsis where it is too long."""
    most = int(room / (CHARACTER * size))
    return text if len(text) <= most else text[: max(0, most - 1)].rstrip() + "…"


@dataclass
class Drawing:
    """Parts of one picture, which grows downwards."""

    width: float
    height: float = 0.0
    parts: list[str] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        fill: str,
        *,
        line: str = "none",
        radius: float = 0,
        title: str = "",
    ) -> None:
        hint = f"<title>{escape(title)}</title>" if title else ""
        round_ = f' rx="{radius:g}"' if radius else ""
        stroke = f' stroke="{line}"' if line != "none" else ""
        self.parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(wide, 0):.2f}" height="{high:.2f}"{round_} fill="{fill}"{stroke}>{hint}</rect>'
        )
        self.height = max(self.height, y + high)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        *,
        anchor: str = "start",
        fill: str = "#1f2933",
        bold: bool = False,
    ) -> None:
        """`y`: the line on which the letters stand."""
        weight = ' font-weight="600"' if bold else ""
        where = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.parts.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" fill="{fill}"{where}{weight}>{escape(text)}</text>'
        )
        self.height = max(self.height, y + 0.3 * size)

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = "#c3ccd5", width: float = 1
    ) -> None:
        self.parts.append(
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{colour}" stroke-width="{width:g}"/>'
        )
        self.height = max(self.height, y1, y2)

    def area(self, points: Sequence[tuple[float, float]], fill: str, title: str = "") -> None:
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.parts.append(
            f'<polygon points="{path}" fill="{fill}"><title>{escape(title)}</title></polygon>'
        )

    def svg(self, name: str) -> str:
        """The whole picture; `name` is read out by screen readers."""
        size = f'viewBox="0 0 {self.width:g} {self.height + 2:.0f}" width="{self.width:g}" height="{self.height + 2:.0f}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(name)}">\n'
            + "\n".join(self.parts)
            + "\n</svg>"
        )


def legend(drawing: Drawing, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
    """A row of (colour, meaning)."""
    for colour, meaning in entries:
        drawing.box(x, y - 10, 12, 12, colour, radius=2)
        drawing.text(x + 18, y, meaning)
        x += 18 + text_width(meaning, 12) + 24
