"""Plans and timelines in a notebook: as the last line of a cell they show themselves as the page
and the pictures that `whale plan --html` writes. `wh.Plan`, `wh.Timeline` and `wh.simulate` come
from here, so that whoever uses them has it.
"""

from __future__ import annotations

import html

from whale.plans.file import diff
from whale.plans.plan import Plan
from whale.report.plan_page import html as plan_page
from whale.report.plan_pictures import memory_picture, timeline_picture
from whale.simulation.simulate import simulate
from whale.simulation.timeline import Timeline

__all__ = ["Plan", "Timeline", "diff", "simulate"]
FRAME_PIXELS = 700
"""height of the page of a plan below a cell"""


def plan_html(plan: Plan) -> str:
    """The page of a plan in a frame of its own: its style does not reach the notebook."""
    page = html.escape(plan_page(plan, simulate(plan)))
    size = f"width:100%;height:{FRAME_PIXELS}px;border:0"
    return f'<iframe style="{size}" sandbox="allow-scripts" srcdoc="{page}"></iframe>'


def timeline_html(timeline: Timeline) -> str:
    """The step over time, and the memory of every device at its fullest moment."""
    return f"<div>{timeline_picture(timeline)}{memory_picture(timeline)}</div>"


# the classes stand below the report, which knows how to draw them
Plan._repr_html_ = plan_html  # type: ignore[attr-defined]
Timeline._repr_html_ = timeline_html  # type: ignore[attr-defined]
