"""The plan's tables: TaskGraphs, stages, crossings, holders, ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from whale.capture.graph import CapturedGraph, user_line
from whale.capture.sample_states import batch_dim
from whale.cluster.cluster import Cluster
from whale.config import Config
from whale.costs.costs import NodeCost, value_bytes
from whale.planning.stages import Assignment
from whale.planning.task_graphs import TaskGraphs
from whale.plans.plan import Crossing, Decision, Stage, TaskGraph
from whale.plans.virtual_devices import DevicePlacement
from whale.units import human_bytes


def crossings(
    captured: CapturedGraph,
    assignment: Assignment,
    placement: DevicePlacement,
    device_of_stage: Sequence[int],
    cluster: Cluster,
    micro_batch_size: float,
) -> tuple[Crossing, ...]:
    """Everything that crosses, with the time of its messages for one micro-batch."""
    samples = micro_batch_size / placement.num_replicas
    found = []
    for node, source, destination in assignment.crossings:
        batched = batch_dim(node, captured.batch_symbol) is not None
        sample_bytes = value_bytes(node, captured.batch_symbol, 1)
        ends = [
            placement.virtual_devices[device_of_stage[stage]] for stage in (source, destination)
        ]
        # its devices send or receive the largest part each
        narrowest = min(device.num_devices for device in ends)
        link = cluster.link(ends[0].ranks[0][0], ends[1].ranks[0][0])
        found.append(
            Crossing(
                value=node.name,
                source=source,
                destination=destination,
                sample_bytes=sample_bytes,
                batched=batched,
                gradient=node in assignment.gradients,
                message_s=link.seconds(
                    sample_bytes * samples / narrowest if batched else sample_bytes
                ),
                line=user_line(node),
            )
        )
    return tuple(found)


def holders(captured: CapturedGraph, assignment: Assignment) -> dict[str, tuple[int, ...]]:
    """Stages that hold each parameter and buffer. What nothing uses stays on stage 0, so that
    checkpoints are complete.
    """
    holders: dict[str, list[int]] = {
        name: [] for name, tensor in captured.state.items() if tensor.kind != "constant"
    }
    for stage, part in enumerate(assignment.slices):
        for node in part.state:
            if str(node.target) in holders:
                holders[str(node.target)].append(stage)
    for name, value in captured.buffer_updates.items():
        stage = assignment.result_stage[value]
        if stage not in holders[name]:
            holders[name].append(stage)
    return {name: tuple(sorted(stages)) or (0,) for name, stages in holders.items()}


def describe_task_graphs(
    captured: CapturedGraph,
    task_graphs: TaskGraphs,
    placement: DevicePlacement,
    costs: Mapping[Node, NodeCost],
) -> tuple[TaskGraph, ...]:
    described = []
    for index, (strategy, label) in enumerate(
        zip(task_graphs.strategies, task_graphs.labels, strict=True)
    ):
        own = [node for node, tg in task_graphs.of_operation.items() if tg == index]
        weights = {
            str(a.target) for node in own for a in node.all_input_nodes if a.op == "get_attr"
        }
        described.append(
            TaskGraph(
                index=index,
                label=label,
                strategy=str(strategy),
                num_devices=placement.virtual_devices[placement.of_task_graph[index]].num_devices,
                virtual_device=placement.of_task_graph[index],
                num_operations=len(own),
                forward_flop=float(sum(costs[node].flop for node in own)),
                parameter_bytes=parameter_bytes(captured, weights),
            )
        )
    return tuple(described)


def describe_stages(
    captured: CapturedGraph,
    task_graphs: TaskGraphs,
    assignment: Assignment,
    virtual_devices: Sequence[int],
    costs: Mapping[Node, NodeCost],
    seconds: Sequence[tuple[float, float, float]],
) -> tuple[Stage, ...]:
    """The stages as the plan holds them. `virtual_devices[i]` and `seconds[i]` (forward, input
    gradient, weight gradient) are those of stage i.
    """
    described = []
    for index, part in enumerate(assignment.slices):
        names = sorted(
            str(node.target)
            for node in part.state
            if captured.state[str(node.target)].kind == "parameter"
        )
        own = {
            task_graphs.of_operation[node]
            for node in part.operations
            if node in task_graphs.of_operation
        }
        described.append(
            Stage(
                index=index,
                virtual_device=virtual_devices[index],
                task_graphs=tuple(sorted(own)),
                num_operations=len(part.operations),
                forward_flop=float(sum(costs[node].flop for node in part.operations)),
                forward_s=seconds[index][0],
                parameters=tuple(names),
                parameter_bytes=parameter_bytes(captured, names),
                input_backward_s=seconds[index][1],
                weight_backward_s=seconds[index][2],
            )
        )
    return tuple(described)


def parameter_bytes(captured: CapturedGraph, names: set[str] | list[str]) -> int:
    return sum(
        captured.state[name].num_bytes for name in names if captured.state[name].kind == "parameter"
    )


def tie_decisions(captured: CapturedGraph, assignment: Assignment) -> list[Decision]:
    tied = {
        name: stages for name, stages in holders(captured, assignment).items() if len(stages) > 1
    }
    return [
        Decision(
            f"tied {name}",
            f"held by stages {', '.join(map(str, stages))}",
            "these stages use it; its gradient is all-reduced over them "
            f"({human_bytes(captured.state[name].num_bytes)})",
        )
        for name, stages in tied.items()
        if captured.state[name].kind == "parameter"
    ]


def update_decisions(config: Config, num_stages: int) -> list[Decision]:
    """When the weights of a stage change (`runtime/stage_updates.py`); nothing to say where there
    is one stage.
    """
    if num_stages == 1:
        return []
    reason = config.needs_all_gradients
    if reason is not None:
        return [Decision("optimizer steps", "all stages at the end of the step", reason)]
    why = (
        "nothing needs all gradients first; optimizers that torch does not have, hooks on step() "
        "and shared parameters wait for the end"
    )
    return [Decision("optimizer steps", "per stage, as soon as its gradients are there", why)]
