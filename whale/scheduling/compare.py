"""All schedules side by side for equal devices: what `whale schedule` shows.

Times are those of one device for one micro-batch; a device with C chunks does each in 1 / C of
them. The unit of memory is what one micro-batch saves on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from whale.scheduling.action import Orders, Schedule, StageGraph, require_micro_batches
from whale.scheduling.check import check
from whale.scheduling.costs import Costs, even_costs
from whale.scheduling.list_scheduler import list_orders
from whale.scheduling.messages import add_messages
from whale.scheduling.orders import (
    gpipe,
    interleaved_orders,
    one_f_one_b,
    wave_orders,
    zero_bubble_orders,
)
from whale.scheduling.placement import DeviceOfStage, loop, two_pipelines, wave
from whale.scheduling.simulate import ScheduleTimes, simulate

CHIMERA = "chimera"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is compared."""

    num_devices: int
    num_micro_batch: int
    num_waves: int = 2
    forward_s: float = 1.0
    backward_s: float = 2.0
    input_share: float = 0.5
    """part of a backward that is its input gradient"""
    message_s: float = 0.0
    action_s: float = 0.0
    memory: float | None = None
    """cap of the list-scheduled rows, in micro-batches on a device; default as many as there are
    devices, which is what 1F1B needs
    """
    tries: int | None = None
    """size of the list scheduler's search"""

    def __post_init__(self) -> None:
        require_micro_batches(self.num_micro_batch)
        for name, value in (("devices", self.num_devices), ("waves", self.num_waves)):
            if value < 1:
                raise ValueError(f"{value} {name}: at least 1 is needed")
        times = {
            "forward": self.forward_s,
            "backward": self.backward_s,
            "latency": self.message_s,
            "action cost": self.action_s,
        }
        for name, number in times.items():
            if not math.isfinite(number):
                raise ValueError(f"{name} is {number}; a finite number is needed")
        if math.isnan(self.cap):
            raise ValueError("memory is nan; a number is needed")
        if not 0 <= self.input_share <= 1:
            raise ValueError(
                f"input_share is {self.input_share}; the input gradient is between 0 and 1 of a "
                "backward"
            )
        if self.forward_s <= 0 or self.backward_s <= 0:
            raise ValueError(
                f"forward and backward must take time, got {self.forward_s} and {self.backward_s}"
            )

    @property
    def cap(self) -> float:
        return float(self.num_devices if self.memory is None else self.memory)

    def costs(self, graph: StageGraph) -> Costs:
        return even_costs(
            graph,
            self.forward_s,
            self.backward_s,
            input_share=self.input_share,
            message_s=self.message_s,
            action_s=self.action_s,
        )


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule of the comparison."""

    name: str
    num_chunks: int
    timeline: ScheduleTimes
    num_weights: int = 1
    """copies of the weights that it holds"""

    @property
    def peak(self) -> float:
        return max(self.timeline.peak_memory)


def compare(question: Question) -> tuple[ScheduleRow, ...]:
    """Every schedule that there is for this question, checked and simulated."""
    return tuple(_rows(question))


def _rows(question: Question) -> Iterator[ScheduleRow]:
    num_devices = question.num_devices
    count = question.num_micro_batch
    chunks = 2 * question.num_waves
    one = StageGraph.chain(num_devices)
    looped = _chain(loop(num_devices, chunks))
    waved = _chain(wave(num_devices, question.num_waves))
    yield _row(question, "gpipe", one, gpipe(one, count))
    yield _row(question, "1f1b", one, one_f_one_b(one, count))
    yield _row(question, "interleaved", looped, interleaved_orders(looped, count))
    yield _row(question, "zero-bubble (ZB-H1)", one, zero_bubble_orders(one, count))
    yield _row(question, "wave (Hanayo)", waved, wave_orders(waved, count))
    for name, graph in (("auto, loop", looped), ("auto, wave", waved)):
        costs = replace(question.costs(graph), memory_cap=(question.cap,) * num_devices)
        yield _row(
            question,
            name,
            graph,
            list_orders(graph, costs, count, split=True, tries=question.tries),
        )
    if count % 2 == 0:
        yield chimera(question)


def _chain(placement: DeviceOfStage) -> StageGraph:
    return StageGraph.chain(len(placement), placement)


def _row(question: Question, name: str, graph: StageGraph, orders: Orders) -> ScheduleRow:
    schedule = Schedule(name, graph, question.num_micro_batch, add_messages(graph, orders))
    check(schedule, require_channel_order=True)
    return ScheduleRow(name, len(graph.stages_of(0)), simulate(schedule, question.costs(graph)))


def chimera(question: Question) -> ScheduleRow:
    """Chimera: two replicas of the model, one pipeline down and one up, list scheduled, whole
    backwards.

    One micro-batch of its graph is two of the question's. Summing the gradients of the two replicas
    is not counted.
    """
    if question.num_micro_batch % 2:
        raise ValueError(
            f"Chimera needs an even number of micro-batches, got {question.num_micro_batch}"
        )
    graph = two_pipelines(question.num_devices)
    # both stages of a device have the work of a device for one micro-batch; `even_costs` halves
    # what it is given
    costs = question.costs(graph)
    costs = replace(
        costs,
        forward_s=tuple(2 * time for time in costs.forward_s),
        input_backward_s=tuple(2 * time for time in costs.input_backward_s),
        weight_backward_s=tuple(2 * time for time in costs.weight_backward_s),
        saved=(1.0,) * graph.num_stages,
        weight_gradient=(1.0,) * graph.num_stages,
        memory_cap=(max(question.cap, 2.0),) * question.num_devices,
    )
    count = question.num_micro_batch // 2
    orders = list_orders(graph, costs, count, split=False, tries=question.tries)
    schedule = Schedule(CHIMERA, graph, count, add_messages(graph, orders))
    check(schedule, costs=costs, require_channel_order=True)
    return ScheduleRow(CHIMERA, 1, simulate(schedule, costs), num_weights=2)
