"""In which order each device computes: GPipe, 1F1B, and forward only.

Every order is made the same way. Each forward and backward gets a slot, a whole number, and each
device does its actions by ascending slot. Let d(s) be the number of stages on the longest path from
stage s to the end of the stage graph (S - s on a chain) and D = max d. For micro-batch m:

                 slot of F(s, m)       slot of B(s, m)
    forward only  m + D - d(s)          -
    GPipe         m + D - d(s)          M + D + m + d(s)
    1F1B         2m + D - d(s)         2m + D + d(s) - 1

No deadlock, whatever the graph and the placement. An edge p -> c has d(p) > d(c). So F(p, m) has a
smaller slot than F(c, m), B(c, m) a smaller one than B(p, m), and F(s, m) a smaller one than B(s,
m). All dependencies, and the order on every device, go from lower slots to higher ones or between
equal slots on one device, where nothing depends on anything: they cannot form a circle.

Ascending micro-batches: in one stage, slots of forwards grow with m, and so do those of backwards.

In flight (forward done, backward not): in 1F1B, F(s, m) comes after B(s, m') exactly when 2m - d(s)
> 2m' + d(s) - 1, that is m' <= m - d(s). So at most min(d(s), M) micro-batches of stage s are in
flight: on a chain the classical warm-up of S - 1 - s forwards, then one forward, one backward. In
GPipe all M are.

Among equal slots on one device the backward comes first, because it frees memory, then the later
stage, because it is nearer to the end.
"""

from __future__ import annotations

from collections.abc import Callable

from whale.scheduling.action import (
    Action,
    Kind,
    Orders,
    StageGraph,
    backward,
    forward,
    require_micro_batches,
)


def forward_only(stage_graph: StageGraph, num_micro_batch: int) -> Orders:
    """Orders for evaluation: every forward, no backward."""
    remaining = stages_to_end(stage_graph)

    def slot(action: Action) -> int:
        return action.micro_batch - remaining[action.stage]

    return _by_slot(stage_graph, num_micro_batch, (Kind.FORWARD,), slot)


def gpipe(stage_graph: StageGraph, num_micro_batch: int) -> Orders:
    """All forwards, then all backwards. Every stage keeps all micro-batches in flight."""
    remaining = stages_to_end(stage_graph)
    longest = max(remaining)

    def slot(action: Action) -> int:
        if action.kind is Kind.FORWARD:
            return action.micro_batch + longest - remaining[action.stage]
        return num_micro_batch + longest + action.micro_batch + remaining[action.stage]

    return _by_slot(stage_graph, num_micro_batch, (Kind.FORWARD, Kind.BACKWARD), slot)


def one_f_one_b(stage_graph: StageGraph, num_micro_batch: int) -> Orders:
    """One forward, one backward. Stage s keeps at most min(d(s), M) micro-batches in flight."""
    remaining = stages_to_end(stage_graph)
    longest = max(remaining)

    def slot(action: Action) -> int:
        if action.kind is Kind.FORWARD:
            return 2 * action.micro_batch + longest - remaining[action.stage]
        return 2 * action.micro_batch + longest + remaining[action.stage] - 1

    return _by_slot(stage_graph, num_micro_batch, (Kind.FORWARD, Kind.BACKWARD), slot)


def stages_to_end(stage_graph: StageGraph) -> tuple[int, ...]:
    """d(s) for each stage: how many stages the longest path from s to the end has, s included."""
    remaining = [1] * stage_graph.num_stages
    for stage in reversed(range(stage_graph.num_stages)):
        remaining[stage] += max(
            (remaining[consumer] for consumer in stage_graph.consumers(stage)), default=0
        )
    return tuple(remaining)


def _by_slot(
    stage_graph: StageGraph,
    num_micro_batch: int,
    kinds: tuple[Kind, ...],
    slot: Callable[[Action], int],
) -> Orders:
    require_micro_batches(num_micro_batch)
    make = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    orders: list[tuple[Action, ...]] = []
    for device in range(stage_graph.num_devices):
        stages = stage_graph.stages_of(device)
        actions = [
            make[kind](stage, micro_batch)
            for kind in kinds
            for stage in stages
            for micro_batch in range(num_micro_batch)
        ]
        orders.append(
            tuple(
                sorted(
                    actions,
                    key=lambda action: (slot(action), action.kind is Kind.FORWARD, -action.stage),
                )
            )
        )
    return tuple(orders)
