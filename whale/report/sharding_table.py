"""How the operations of each stage on a grid are sharded: pattern, bytes, why, and what runs whole on every device.

Layers that are alike are one row: `h.*.mlp.up: linear`, with their number.
"""

from __future__ import annotations

import re

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale.planning.plan import Plan
from whale.report.units import human_bytes
from whale.sharding.record import StageSharding
from whale.sharding.sharding import ShardedOperation

SHOWN_ROWS = 24
SHOWN_NAMES = 8
Key = tuple[str, str, float]


def sharding_tables(plan: Plan) -> RenderableType | None:
    """One table for each stage on a grid; None where there is none."""
    if not plan.shardings:
        return None
    return Group(*(part for sharding in plan.shardings for part in _stage(plan, sharding)))


def _stage(plan: Plan, sharding: StageSharding) -> list[RenderableType]:
    grid = plan.virtual_devices[plan.stages[sharding.stage].virtual_device].grid
    assert grid is not None
    title = (
        f"Stage {sharding.stage} on a grid {grid.name} (sent: by one device for {sharding.num_samples} samples, forward and backward; "
        f"{human_bytes(sharding.sent_bytes)} in all)"
    )
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    for name in ("operation", "times", "pattern", "sent each", "why"):
        is_number = name in ("times", "sent each")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    rows = _rows(sharding)
    for (what, pattern, sent), times in list(rows.items())[:SHOWN_ROWS]:
        table.add_row(*map(Text, (what, str(times), pattern, human_bytes(sent) if sent else "-", _why(sent, sharding.sent_bytes))))
    if len(rows) > SHOWN_ROWS:
        table.add_row(f"... {len(rows) - SHOWN_ROWS} more")
    return [table, *_stored(sharding), *_whole(sharding)]


def _rows(sharding: StageSharding) -> dict[Key, int]:
    """Operations in order, those of like layers together."""
    found: dict[Key, int] = {}
    for operation in sharding.operations:
        key = (_layer_free(operation), operation.pattern, operation.sent_bytes)
        found[key] = found.get(key, 0) + 1
    return found


def _layer_free(operation: ShardedOperation) -> str:
    """`transformer.h.3.mlp: addmm` -> `transformer.h.*.mlp: addmm`."""
    return re.sub(r"(?<=\.)\d+(?=[.:])", "*", operation.what)


def _why(sent: float, total: float) -> str:
    """The choice is made for the whole stage at once; what it costs here says what was traded."""
    if not sent:
        return "its inputs already lie so: nothing is sent"
    return f"least time of the whole stage; {sent / total:.0%} of its bytes go to bring the inputs here" if total else ""


def _stored(sharding: StageSharding) -> list[RenderableType]:
    cut = [name for name, stored in sharding.stored.items() if stored.is_cut]
    gathered = [name for name in cut if sharding.stored[name].stored]
    text = f"  {len(cut)} of {len(sharding.stored)} parameters are cut"
    return [Text(text + (f", {len(gathered)} of them gathered before use" if gathered else ""))]


def _whole(sharding: StageSharding) -> list[RenderableType]:
    if not sharding.replicated:
        return []
    names = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=[.:])", "*", name) for name in sharding.replicated))
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return [Text(f"  on every device whole, for want of a rule: {', '.join(names[:SHOWN_NAMES])}{more}")]
