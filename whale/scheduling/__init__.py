"""Schedules: what every device does, in order, as plain data made before anything runs. No torch here.

Reading order: `action` (the data), `orders` (who computes what when), `messages` (a pass that adds the rest), `check` (the proof),
`picture` (the schedule as text).
"""

from whale.scheduling.action import Action, Edge, Kind, Orders, Schedule, StageGraph, parse_action
from whale.scheduling.check import Proof, ScheduleError, check, start_times
from whale.scheduling.messages import ORDERS, add_messages, build, build_forward_only
from whale.scheduling.orders import forward_only, gpipe, one_f_one_b, stages_to_end
from whale.scheduling.picture import draw

__all__ = [
    "ORDERS",
    "Action",
    "Edge",
    "Kind",
    "Orders",
    "Proof",
    "Schedule",
    "ScheduleError",
    "StageGraph",
    "add_messages",
    "build",
    "build_forward_only",
    "check",
    "draw",
    "forward_only",
    "gpipe",
    "one_f_one_b",
    "parse_action",
    "stages_to_end",
    "start_times",
]
