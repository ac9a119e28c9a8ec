"""One SVG of a saved plan: cluster, stages, the step over time, memory. The picture of the README:

whale plan --cluster examples/mixed_gpus.yaml --save plan.json examples/mixed_gpus.py --large
python docs/plan_picture.py plan.json docs/images/mixed_gpus.svg
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import whale as wh
from whale.report.plan_pictures import (
    cluster_picture,
    memory_picture,
    stages_picture,
    timeline_picture,
)
from whale.report.plan_table import summary

MARGIN = 24
HEADING = 34
SIZE = re.compile(r'width="([\d.]+)" height="([\d.]+)"')


def picture(plan: wh.Plan) -> str:
    """The four pictures of a plan below each other, on white."""
    timeline = wh.simulate(plan)
    parts = {
        "Cluster": cluster_picture(plan, timeline),
        "Stages on devices": stages_picture(plan.by_template[0]),
        f"One step, {timeline.step_s:.2f} s predicted": timeline_picture(timeline),
        "Memory at its fullest moment": memory_picture(timeline),
    }
    top = MARGIN + HEADING
    wide = 0.0
    shapes = [_text(MARGIN, top - 12, summary(plan), 15)]
    for heading, part in parts.items():
        size = SIZE.search(str(part))
        assert size is not None
        shapes.append(_text(MARGIN, top + 16, heading, 14))
        place = f'<svg x="{MARGIN}" y="{top + HEADING}" '
        shapes.append(str(part).replace("<svg ", place, 1))
        top += HEADING + float(size[2]) + MARGIN
        wide = max(wide, float(size[1]))
    wide += 2 * MARGIN
    frame = f'viewBox="0 0 {wide:g} {top:g}" width="{wide:g}" height="{top:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {frame} font-family="sans-serif">'
    return "\n".join(
        [head, '<rect width="100%" height="100%" fill="#ffffff"/>', *shapes, "</svg>\n"]
    )


def _text(x: float, y: float, text: str, size: int) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="600" fill="#1f2933">{escaped}</text>'


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(wh.Plan.load(sys.argv[1])), encoding="utf-8")
