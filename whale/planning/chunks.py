"""More chunks than devices: the model is cut again, finer, and its chunks lie over the VirtualDevices in waves or loops.

A pipeline of P VirtualDevices with C chunks on each fills in 1/C of the time. The annotations still say how many devices there are and
how many of them share each part; where the cuts are is decided here. What the chunks and the messages between them cost goes to the
schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch.fx import Node

from whale import scheduling
from whale.annotation import Strategy
from whale.capture.kinds import Kind
from whale.config import Config
from whale.planning.cuts import Floats
from whale.planning.plan import Crossing, Stage
from whale.planning.task_graphs import TaskGraphs, from_cuts
from whale.planning.virtual_devices import Placement
from whale.scheduling.placement import loop, zigzag

AUTO_COUNTS = (1, 2, 4)
"""chunks on each device that "auto" compares: more of them fill the pipeline faster and cost more messages"""
ACTION_S = 1e-4
"""what the runtime adds to a forward or backward"""


def chunk_counts(config: Config, num_virtual_devices: int) -> tuple[int, ...]:
    """Numbers of chunks on each VirtualDevice that the config allows."""
    if num_virtual_devices == 1:
        return (1,)
    if config.schedule in ("wave", "interleaved"):
        return (2 * (config.num_waves or 1),)
    if config.schedule in ("zero-bubble", "auto") and config.num_waves is not None:
        return (2 * config.num_waves,)
    return AUTO_COUNTS if config.schedule == "auto" else (1,)


def cut_into_chunks(
    operations: Sequence[Node],
    kinds: Mapping[Node, Kind],
    placement: Placement,
    count: int,
    config: Config,
    times: Callable[[Sequence[Node], Sequence[int]], Floats],
    crossing_seconds: Callable[[Node], float],
) -> tuple[TaskGraphs, Placement]:
    """`count` chunks on each VirtualDevice, each chunk a TaskGraph of its own; raises ValueError where the model has too few points.

    `times(operations, virtual_devices)`: seconds, (VirtualDevices, operations).
    """
    num_devices = len(placement.virtual_devices)
    is_loop = config.schedule == "interleaved"
    devices = loop(num_devices, count) if is_loop else zigzag(num_devices, count)
    try:
        cut = from_cuts(operations, kinds, num_devices * count, lambda nodes: times(nodes, devices), crossing_seconds)
    except ValueError as error:
        said = f'"schedule": "{config.schedule}"' + (f' with "num_waves": {config.num_waves}' if config.num_waves else "")
        needed = f"{count} chunks on each of {num_devices} VirtualDevices, {num_devices * count} in all"
        raise ValueError(f"{said} needs {needed}: {error}") from None
    on = [placement.virtual_devices[device] for device in devices]
    strategies = tuple(Strategy("replicate" if device.grid is None else "split", device.num_devices) for device in on)
    shape = "a loop" if is_loop else f"{count // 2} wave{'s' * (count > 2)}"
    task_graphs = TaskGraphs(cut.of_operation, strategies, cut.labels, f"{count} chunks on each VirtualDevice; {cut.reason}")
    return task_graphs, Placement(
        placement.virtual_devices, devices, placement.num_replicas, f"{placement.reason}; their chunks lie in {shape} over them"
    )


def schedule_costs(
    graph: scheduling.StageGraph, stages: Sequence[Stage], crossings: Sequence[Crossing], num_micro_batch: int
) -> scheduling.Costs:
    """What the schedule is made for: one micro-batch on the devices of each stage."""
    messages: dict[scheduling.Edge, float] = {}
    gradients: dict[scheduling.Edge, float] = {}
    for crossing in crossings:
        edge = (crossing.source, crossing.destination)
        messages[edge] = messages.get(edge, 0.0) + crossing.message_s
        if crossing.gradient:
            gradients[edge] = gradients.get(edge, 0.0) + crossing.message_s
    return scheduling.Costs(
        forward_s=tuple(stage.forward_s / num_micro_batch for stage in stages),
        input_backward_s=tuple(stage.input_backward_s / num_micro_batch for stage in stages),
        weight_backward_s=tuple(stage.weight_backward_s / num_micro_batch for stage in stages),
        message_s=messages,
        gradient_message_s=gradients,
        action_s=ACTION_S,
        unsplit=scheduling.stages_without_input_part(graph),
    )
