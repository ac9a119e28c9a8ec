"""Orders in which each device computes, as published: GPipe, 1F1B, Hanayo's wave, interleaved
1F1B, ZB-H1, and forward only. M micro-batches, P devices.

GPipe, 1F1B and forward only are made the same way, for any stage graph. Each forward and backward
gets a slot, a whole number, and each device does its actions by ascending slot. Let d(s) be the
number of stages on the longest path from stage s to the end of the stage graph (S - s on a chain)
and D = max d. For micro-batch m:

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

The others are made for chains of equal stages with several chunks on each device, or with split
backwards. Every edge of another stage graph goes to a later stage, as all of these orders do, so
they hold for any graph with the right placement. d is the device, c the chunk on it.

Wave (Hanayo). A device has two lanes. One follows the legs that come to it from its far side, the
other those from its near side:

    main   F(1, .) F(3, .) ... F(2W-1, .)   B(2W-2, .) ... B(2, .) B(0, .)
    side   F(0, .) F(2, .) ... F(2W-2, .)   B(2W-1, .) ... B(3, .) B(1, .)

each for micro-batches 0..M-1. It starts with min(P - d, M) actions of `side`, then takes one from
each in turn, `main` first, and what is left in the end.

Interleaved 1F1B. Micro-batches go in groups of P; a group passes chunk after chunk. Device d does
(C - 1) P + 2 (P - d - 1) forwards ahead, then one forward and one backward in turn. A last group
that is not full is ordered as if it were, and what is not there is left out: an order without
deadlock has none when all actions of some micro-batches are taken away.

ZB-H1. 1F1B with the input gradient in the place of the backward; weight gradients follow d actions
behind, so that all devices hold at most P micro-batches, and then fill the end. With C chunks the
same on the lanes of interleaved 1F1B, (C - 1) P + P - d forwards ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain, zip_longest

from whale.scheduling.action import (
    Action,
    Kind,
    Orders,
    StageGraph,
    backward,
    forward,
    input_backward,
    require_micro_batches,
    weight_backward,
)
from whale.scheduling.placement import num_loops_of, num_waves_of

Lane = list[Action]
"""actions of a device that follow one another"""


def forward_only(stage_graph: StageGraph, num_micro_batch: int) -> Orders:
    """Orders for evaluation: every forward, no backward."""
    remaining = stages_to_end(stage_graph)

    def slot(action: Action) -> int:
        return action.micro_batch - remaining[action.stage]

    return _by_slot(stage_graph, num_micro_batch, (Kind.FORWARD,), slot)


def gpipe(stage_graph: StageGraph, num_micro_batch: int) -> Orders:
    """All forwards, then all backwards. Every stage has all micro-batches in flight."""
    remaining = stages_to_end(stage_graph)
    longest = max(remaining)

    def slot(action: Action) -> int:
        if action.kind is Kind.FORWARD:
            return action.micro_batch + longest - remaining[action.stage]
        return num_micro_batch + longest + action.micro_batch + remaining[action.stage]

    return _by_slot(stage_graph, num_micro_batch, (Kind.FORWARD, Kind.BACKWARD), slot)


def one_f_one_b(stage_graph: StageGraph, num_micro_batch: int) -> Orders:
    """One forward, one backward. Stage s has at most min(d(s), M) micro-batches in flight."""
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


# ---- several chunks on each device, or split backwards


def wave_orders(graph: StageGraph, num_micro_batch: int, *, unit: int | None = None) -> Orders:
    """Hanayo's order. `unit`: how many micro-batches go together, unit after unit (the paper draws
    one unit of P); default all.
    """
    require_micro_batches(num_micro_batch)
    if graph.num_stages == 1:  # one device, or data parallelism: nothing goes down and back up
        return one_f_one_b(graph, num_micro_batch)
    num_waves = num_waves_of(graph.device_of_stage)
    if num_waves is None:
        raise ValueError(
            _wrong_placement(
                "wave",
                graph,
                "on each device an even number of chunks that go down and come back up",
            )
        )
    size = num_micro_batch if unit is None else unit
    if size < 1:
        raise ValueError(f"a unit of {size} micro-batches: at least 1 is needed")
    units = [
        range(first, min(first + size, num_micro_batch))
        for first in range(0, num_micro_batch, size)
    ]
    return tuple(
        tuple(chain.from_iterable(_wave_unit(graph, device, num_waves, each) for each in units))
        for device in range(graph.num_devices)
    )


def _wave_unit(
    graph: StageGraph, device: int, num_waves: int, micro_batches: range
) -> Iterator[Action]:
    stages = graph.stages_of(device)
    odd = range(1, 2 * num_waves, 2)
    even = range(0, 2 * num_waves, 2)

    def lane(make: Callable[[int, int], Action], chunks: range) -> Lane:
        return [
            make(stages[chunk], micro_batch) for chunk in chunks for micro_batch in micro_batches
        ]

    main = lane(forward, odd) + lane(backward, even[::-1])
    side = lane(forward, even) + lane(backward, odd[::-1])
    num_ahead = min(graph.num_devices - device, len(micro_batches))
    return chain(side[:num_ahead], _in_turn(main, side[num_ahead:]))


def _num_loops(name: str, graph: StageGraph) -> int:
    """Stages on each device, one after the other in loops; another placement is refused."""
    found = num_loops_of(graph.device_of_stage)
    if found is None:
        wanted = "stage s on device s modulo the number of devices"
        raise ValueError(_wrong_placement(name, graph, wanted))
    return found


def interleaved_orders(graph: StageGraph, num_micro_batch: int) -> Orders:
    """Interleaved 1F1B for any number of micro-batches; with one chunk on each device it
    is 1F1B.
    """
    require_micro_batches(num_micro_batch)
    num_chunks = _num_loops("interleaved", graph)
    num_devices = graph.num_devices
    orders = []
    for device in range(num_devices):
        forwards, backwards = _grouped(graph, device, num_micro_batch)
        per_device = 2 if num_chunks > 1 else 1
        num_ahead = (num_chunks - 1) * num_devices + per_device * (num_devices - device - 1)
        order = chain(forwards[:num_ahead], _in_turn(forwards[num_ahead:], backwards))
        orders.append(tuple(action for action in order if action.micro_batch < num_micro_batch))
    return tuple(orders)


def zero_bubble_orders(
    graph: StageGraph, num_micro_batch: int, unsplit: Collection[int] = ()
) -> Orders:
    """ZB-H1, with several chunks on each device its interleaved form; the backward of stages in
    `unsplit` stays whole.
    """
    require_micro_batches(num_micro_batch)
    num_chunks = _num_loops("zero-bubble", graph)
    num_devices = graph.num_devices
    orders = []
    for device in range(num_devices):
        forwards, backwards = _grouped(graph, device, num_micro_batch)
        num_ahead = (num_chunks - 1) * num_devices + num_devices - device
        order = forwards[:num_ahead]
        weights = iter(backwards)
        for index, action in enumerate(backwards):
            is_over = num_ahead + index >= len(forwards)
            order.append(action)
            if index >= device or is_over:
                order.append(_weight_gradient(next(weights)))
            if not is_over:
                order.append(forwards[num_ahead + index])
        order += map(_weight_gradient, weights)
        orders.append(tuple(_split(order, num_micro_batch, unsplit)))
    return tuple(orders)


def _grouped(graph: StageGraph, device: int, num_micro_batch: int) -> tuple[Lane, Lane]:
    """Forwards and whole backwards of a device, in groups of as many micro-batches as there are
    devices, the last one filled up.
    """
    size = graph.num_devices
    groups = [range(first, first + size) for first in range(0, num_micro_batch, size)]
    stages = graph.stages_of(device)
    forwards = [forward(stage, m) for group in groups for stage in stages for m in group]
    backwards = [backward(stage, m) for group in groups for stage in stages[::-1] for m in group]
    return forwards, backwards


def _weight_gradient(action: Action) -> Action:
    return weight_backward(action.stage, action.micro_batch)


def _split(order: Lane, num_micro_batch: int, unsplit: Collection[int]) -> Iterator[Action]:
    """Whole backwards become input gradients, or stay and lose their weight gradient; what only
    fills up a group is left out.
    """
    for action in order:
        if action.micro_batch >= num_micro_batch or (
            action.kind is Kind.WEIGHT and action.stage in unsplit
        ):
            continue
        is_input = action.kind is Kind.BACKWARD and action.stage not in unsplit
        yield input_backward(action.stage, action.micro_batch) if is_input else action


def _in_turn(first: Lane, second: Lane) -> Iterator[Action]:
    pairs = zip_longest(first, second)
    return (action for pair in pairs for action in pair if action is not None)


def _wrong_placement(name: str, graph: StageGraph, needed: str) -> str:
    return (
        f"schedule {name!r} needs {needed}, but the {graph.num_stages} stages lie on devices "
        f"{list(graph.device_of_stage)}; place them so, or take 'auto', which orders any placement"
    )
