"""Schedules: what every device does, in order, as plain data made before anything runs. No torch
here.

Reading order: `action` (the data), `placement` (which device holds what), `orders` (published
orders), `messages` (a pass that adds the rest), `memory` (what actions hold), `event_loop` (when
they run), `check` (the proof), `costs` and `simulate` (how long it takes), `list_pass`, `exchanges`
and `list_scheduler` (orders made for given costs, on the flat lists of `problem`), `build` (a
schedule by its name), `picture` (the schedule as text).
"""

from whale.scheduling.action import Action, Edge, Kind, Orders, Schedule, StageGraph, parse_action
from whale.scheduling.build import ORDERS, build, build_forward_only
from whale.scheduling.check import ScheduleError, check, peaks_in_flight, start_times
from whale.scheduling.costs import Costs, even_costs, lower_bound, stages_without_input_gradient
from whale.scheduling.list_scheduler import list_orders
from whale.scheduling.memory import ActionMemory
from whale.scheduling.messages import add_messages, arrived_by
from whale.scheduling.orders import (
    forward_only,
    gpipe,
    interleaved_orders,
    one_f_one_b,
    wave_orders,
    zero_bubble_orders,
)
from whale.scheduling.picture import draw
from whale.scheduling.simulate import simulate

__all__ = [
    "ORDERS",
    "Action",
    "ActionMemory",
    "Costs",
    "Edge",
    "Kind",
    "Orders",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "add_messages",
    "arrived_by",
    "build",
    "build_forward_only",
    "check",
    "draw",
    "even_costs",
    "forward_only",
    "gpipe",
    "interleaved_orders",
    "list_orders",
    "lower_bound",
    "one_f_one_b",
    "parse_action",
    "peaks_in_flight",
    "simulate",
    "stages_without_input_gradient",
    "start_times",
    "wave_orders",
    "zero_bubble_orders",
]
