"""When every action of a schedule starts and ends, from costs alone.

Each device does its compute actions in order, each as soon as the device is free and what it needs
has arrived. Messages take their time beside the compute: a send is issued at once, a receive delays
nothing but the action that needs it. Synchronise and update take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.scheduling.action import Action, Kind, Schedule
from whale.scheduling.check import ScheduleError, device_peaks
from whale.scheduling.costs import Costs, lower_bound
from whale.scheduling.event_loop import StuckError, run_in_order
from whale.scheduling.problem import OrderProblem


@dataclass(frozen=True)
class ScheduleTimes:
    """A schedule with times, in the unit of its costs."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    """for each device, for each of its actions"""
    ends: tuple[tuple[float, ...], ...]
    """a message ends when it has arrived"""
    busy_s: tuple[float, ...]
    """for each device, how long it computes"""
    peak_memory: tuple[float, ...]
    """for each device, most activation memory"""
    lower_bound_s: float
    """no order of these stages takes less, with these costs and with backwards split where this
    schedule splits any
    """

    @property
    def step_s(self) -> float:
        return max(max(row, default=0.0) for row in self.ends)

    @property
    def bubble(self) -> float:
        """Idle part of the devices' time, 0 to 1."""
        step = self.step_s
        return 1 - sum(self.busy_s) / (step * len(self.busy_s)) if step else 0.0


def simulate(schedule: Schedule, costs: Costs) -> ScheduleTimes:
    """Times of every action. Takes schedules with messages and plain compute orders; raises
    `ScheduleError` on a deadlock.
    """
    problem = OrderProblem(schedule.stage_graph, costs, schedule.num_micro_batch)
    jobs, whole = problem.jobs(schedule.orders)
    durations = problem.durations(whole)
    try:
        ends, _ = run_in_order(jobs, durations, problem.needs())
    except StuckError:
        raise ScheduleError(
            "deadlock: the devices wait for each other, or for an action that is missing. Try: "
            "`check` of this schedule, which says where"
        ) from None
    rows = [
        _times(problem, order, row, durations, ends)
        for order, row in zip(schedule.orders, jobs, strict=True)
    ]
    split = any(not is_whole for is_whole in whole)
    return ScheduleTimes(
        schedule=schedule,
        starts=tuple(tuple(start for start, _ in row) for row in rows),
        ends=tuple(tuple(end for _, end in row) for row in rows),
        busy_s=tuple(sum(durations[job] for job in row) for row in jobs),
        peak_memory=device_peaks(schedule, costs),
        lower_bound_s=lower_bound(
            schedule.stage_graph, costs, schedule.num_micro_batch, split=split
        ),
    )


def _times(
    problem: OrderProblem,
    order: tuple[Action, ...],
    row: list[int],
    durations: list[float],
    ends: list[float],
) -> list[tuple[float, float]]:
    """(start, end) of every action of one device."""
    result: list[tuple[float, float]] = []
    clock = 0.0
    jobs = iter(row)
    for action in order:
        if action.is_compute:
            job = next(jobs)
            clock = ends[job]
            result.append((clock - durations[job], clock))
        elif action.is_message:
            producer = (
                (problem.size if action.gradient else 0)
                + action.source * problem.num_micro_batch
                + action.micro_batch
            )
            sent = ends[producer]
            arrived = sent + problem.costs.transfer_s(problem.graph, action.edge, action.gradient)
            result.append((sent, sent if action.kind is Kind.SEND else arrived))
        else:
            result.append((clock, clock))
    return result
