"""How the operations of each stage on a grid are sharded: pattern, bytes, why, and what runs whole
on every device.

Layers that are alike are one row: `h.*.mlp.up: linear`, with their number. The page of a plan shows
the same rows.
"""

from __future__ import annotations

import re
from collections import Counter

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whale.names import listed, num_shown
from whale.plans.plan import Plan
from whale.plans.sharding import StageSharding
from whale.units import human_bytes

SHOWN_ROWS = 24
SHOWN_NAMES = 8
COLUMNS = ("operation", "times", "pattern", "sent each", "why")
Row = tuple[str, str, str, str, str]
"""a text for each of COLUMNS"""


def sharding_tables(plan: Plan) -> RenderableType | None:
    """One table for each stage on a grid; None where there is none."""
    if not plan.shardings:
        return None
    return Group(*(part for sharding in plan.shardings for part in _stage(plan, sharding)))


def _stage(plan: Plan, sharding: StageSharding) -> list[RenderableType]:
    table = Table(
        title=title(plan, sharding),
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=box.SIMPLE_HEAD,
    )
    table.show_edge = table.pad_edge = False
    for name in COLUMNS:
        is_number = name in ("times", "sent each")
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    found = rows(sharding)
    shown = num_shown(len(found), SHOWN_ROWS)
    for row in found[:shown]:
        table.add_row(*map(Text, row))
    if len(found) > shown:
        table.add_row(f"... {len(found) - shown} more")
    return [table, *(Text(f"  {remark}") for remark in remarks(sharding))]


def title(plan: Plan, sharding: StageSharding) -> str:
    grid = plan.virtual_devices[plan.stages[sharding.stage].virtual_device].grid
    assert grid is not None
    total = sharding.sent_bytes + sum(operation.told_bytes for operation in sharding.operations)
    return (
        f"Stage {sharding.stage} on a grid {grid.name} (sent: by one device for "
        f"{sharding.num_samples} samples, forward and backward; "
        f"{human_bytes(total)} in all)"
    )


def rows(sharding: StageSharding) -> list[Row]:
    """Operations in order, those of like layers together."""
    found: Counter[tuple[str, str, float, str]] = Counter()
    for each in sharding.operations:
        found[
            _layer_free(each.what), each.pattern, each.sent_bytes + each.told_bytes, each.why
        ] += 1
    return [
        (what, str(times), pattern, human_bytes(sent) if sent else "-", why)
        for (what, pattern, sent, why), times in found.items()
    ]


def remarks(sharding: StageSharding) -> list[str]:
    """What is stored how, and what runs whole."""
    cut = [name for name, stored in sharding.stored.items() if stored.is_cut]
    gathered = [name for name in cut if sharding.stored[name].stored]
    before_use = f", {len(gathered)} of them gathered before use" if gathered else ""
    found = [f"{len(cut)} of {len(sharding.stored)} parameters are cut{before_use}"]
    names = list(dict.fromkeys(map(_layer_free, sharding.replicated)))
    if names:
        found.append(f"on every device whole, for want of a rule: {listed(names, SHOWN_NAMES)}")
    return found


def _layer_free(what: str) -> str:
    """`transformer.h.3.mlp: addmm` -> `transformer.h.*.mlp: addmm`."""
    return re.sub(r"(?<=\.)\d+(?=[.:])", "*", what)
