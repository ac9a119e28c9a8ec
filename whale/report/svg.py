"""A picture as SVG text: boxes, lines and words, each placed by hand. Nothing from elsewhere is
needed to show it. `render` makes pictures and pages from the templates beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

CHARACTER = 0.56
"""width of an average character of a sans-serif font, in units of its size"""


@functools.cache
def _templates() -> Environment:
    """Templates of this package; all values are escaped, and a name that is missing is an error."""
    return Environment(
        loader=PackageLoader("whale.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> Markup:
    """A file of `templates/` with these values in it; other templates do not escape it again."""
    return Markup(_templates().get_template(template).render(values))


def text_width(text: str, size: float) -> float:
    """About how wide a text of this font size is, in pixels."""
    return CHARACTER * size * len(text)


def shortened(text: str, size: float, width: float) -> str:
    """The text, with an ellipsis where it is wider than `width` pixels."""
    most = int(width / (CHARACTER * size))
    return text if len(text) <= most else text[: max(0, most - 1)].rstrip() + "…"


@dataclass(frozen=True)
class SvgShape:
    """One element of an SVG."""

    tag: str
    attributes: dict[str, str]
    title: str = ""
    """what is shown while the mouse is over it"""
    text: str = ""


@dataclass
class Drawing:
    """Shapes of one picture, which grows downwards."""

    width: float
    height: float = 0.0
    shapes: list[SvgShape] = field(default_factory=list)

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
        attributes = _numbers(x=x, y=y, width=max(wide, 0), height=high) | {"fill": fill}
        if radius:
            attributes["rx"] = f"{radius:g}"
        if line != "none":
            attributes["stroke"] = line
        self.shapes.append(SvgShape("rect", attributes, title))
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
        attributes = _numbers(x=x, y=y) | {"font-size": f"{size:g}", "fill": fill}
        if anchor != "start":
            attributes["text-anchor"] = anchor
        if bold:
            attributes["font-weight"] = "600"
        self.shapes.append(SvgShape("text", attributes, text=text))
        self.height = max(self.height, y + 0.3 * size)

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str = "#c3ccd5") -> None:
        look = {"stroke": colour, "stroke-width": "1"}
        self.shapes.append(SvgShape("line", _numbers(x1=x1, y1=y1, x2=x2, y2=y2) | look))
        self.height = max(self.height, y1, y2)

    def area(self, points: Sequence[tuple[float, float]], fill: str, title: str = "") -> None:
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.shapes.append(SvgShape("polygon", {"points": path, "fill": fill}, title))

    def svg(self, name: str) -> Markup:
        """The whole picture; `name` is read out by screen readers."""
        return render(
            "drawing.svg",
            name=name,
            width=f"{self.width:g}",
            height=f"{self.height + 2:.0f}",
            shapes=self.shapes,
        )


def legend(drawing: Drawing, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
    """A row of (colour, meaning)."""
    for colour, meaning in entries:
        drawing.box(x, y - 10, 12, 12, colour, radius=2)
        drawing.text(x + 18, y, meaning)
        x += 18 + text_width(meaning, 12) + 24


def _numbers(**values: float) -> dict[str, str]:
    return {name: f"{value:.2f}" for name, value in values.items()}
