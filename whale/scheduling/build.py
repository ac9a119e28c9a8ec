"""A schedule from its name: the order, then messages, then the proof."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import get_args

from whale.config_values import ScheduleName
from whale.scheduling.action import Orders, Schedule, StageGraph
from whale.scheduling.check import check
from whale.scheduling.costs import Costs, even_costs, stages_without_input_gradient
from whale.scheduling.list_scheduler import list_orders
from whale.scheduling.messages import add_messages
from whale.scheduling.orders import (
    forward_only,
    gpipe,
    interleaved_orders,
    one_f_one_b,
    wave_orders,
    zero_bubble_orders,
)
from whale.scheduling.placement import num_loops_of

ORDERS: dict[str, Callable[[StageGraph, int], Orders]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""the orders that take any stage graph and need no costs"""

NAMES: tuple[str, ...] = get_args(ScheduleName)
"""the training schedules by the name that a user gives"""

FORWARD_ONLY = "forward only"
"""name of the schedule of an evaluation"""


def build(
    name: str,
    stage_graph: StageGraph,
    num_micro_batch: int,
    costs: Costs | None = None,
    *,
    tries: int | None = None,
    is_proved: bool = True,
) -> Schedule:
    """The training schedule of this name, with messages, checked; also against the memory cap, if
    the costs have one.

    - `gpipe`, `1f1b`: any stage graph.
    - `interleaved`: stages placed in a loop. `wave`: stages placed in waves, in Hanayo's order.
    - `zero-bubble`: backwards split. ZB-H1 (in a loop of several chunks its interleaved form) when
      there are no costs, else list scheduled.
    - `auto`: list scheduled, backwards split where it helps.

    Without costs, `zero-bubble` and `auto` take equal devices, a backward twice as long as its
    forward, and 1F1B's memory. `tries` bounds the search of the list scheduler. `is_proved`: False
    where the caller checks those that it takes.
    """
    require_name(name)
    orders = _orders(name, stage_graph, num_micro_batch, costs, tries)
    schedule = Schedule(name, stage_graph, num_micro_batch, add_messages(stage_graph, orders))
    if is_proved:
        check(schedule, costs=costs, require_channel_order=True)
    return schedule


def build_forward_only(stage_graph: StageGraph, num_micro_batch: int) -> Schedule:
    """The schedule of an evaluation, with messages, checked."""
    orders = add_messages(stage_graph, forward_only(stage_graph, num_micro_batch))
    schedule = Schedule(FORWARD_ONLY, stage_graph, num_micro_batch, orders)
    check(schedule, forward_only=True, require_channel_order=True)
    return schedule


def require_name(name: str) -> None:
    """Refuse a name that is no schedule, with the nearest one that is."""
    if name not in NAMES:
        nearest = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"there is no schedule {name!r}; did you mean {nearest!r}? There are: "
            f"{', '.join(NAMES)}"
        )


def _orders(
    name: str, graph: StageGraph, num_micro_batch: int, costs: Costs | None, tries: int | None
) -> Orders:
    if name in ORDERS:
        return ORDERS[name](graph, num_micro_batch)
    if name == "interleaved":
        return interleaved_orders(graph, num_micro_batch)
    if name == "wave":
        return wave_orders(graph, num_micro_batch)
    unsplit = stages_without_input_gradient(graph)
    if name == "zero-bubble" and costs is None and num_loops_of(graph.device_of_stage):
        return zero_bubble_orders(graph, num_micro_batch, unsplit)
    if costs is None:
        costs = even_costs(graph, memory_cap=graph.num_devices, unsplit=unsplit)
    return list_orders(
        graph, costs, num_micro_batch, split=True if name == "zero-bubble" else None, tries=tries
    )
