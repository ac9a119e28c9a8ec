"""Published orders for several chunks on each device, and for split backwards: Hanayo's wave,
interleaved 1F1B, ZB-H1.

They are made for chains of like stages. Every edge of another stage graph goes to a later stage, as
all of these orders do, so they hold for any graph with the right placement. c is the chunk on
device d, B the number of micro-batches.

Wave (Hanayo). A device has two lanes. One follows the legs that come to it from its far side, the
other those from its near side:

    main   F(1, .) F(3, .) ... F(2W-1, .)   B(2W-2, .) ... B(2, .) B(0, .)
    side   F(0, .) F(2, .) ... F(2W-2, .)   B(2W-1, .) ... B(3, .) B(1, .)       (. stands for micro-batches 0..B-1)

It starts with min(P - d, B) actions of `side`, then takes one from each in turn, `main` first, and
what is left in the end.

Interleaved 1F1B. Micro-batches go in groups of P; a group passes chunk after chunk. Device d does
(C - 1) P + 2 (P - d - 1) forwards ahead, then one forward and one backward in turn. A last group
that is not full is ordered as if it were, and what is not there is left out: an order without
deadlock has none when all actions of some micro-batches are taken away.

ZB-H1. 1F1B with the input part in the place of the backward; weight parts follow d actions behind,
so that all devices keep at most P micro-batches, and then fill the end. With C chunks the same on
the lanes of interleaved 1F1B, (C - 1) P + P - d forwards ahead.
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


def wave_orders(graph: StageGraph, num_micro_batch: int, *, unit: int | None = None) -> Orders:
    """Hanayo's order. `unit`: how many micro-batches go together, unit after unit (the paper draws
    one unit of P); default all.
    """
    require_micro_batches(num_micro_batch)
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


def interleaved_orders(graph: StageGraph, num_micro_batch: int) -> Orders:
    """Interleaved 1F1B for any number of micro-batches; with one chunk on each device it
    is 1F1B.
    """
    require_micro_batches(num_micro_batch)
    num_chunks = num_loops_of(graph.device_of_stage)
    if num_chunks is None:
        raise ValueError(
            _wrong_placement(
                "interleaved", graph, "stage s on device s modulo the number of devices"
            )
        )
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
    num_chunks = num_loops_of(graph.device_of_stage)
    if num_chunks is None:
        raise ValueError(
            _wrong_placement(
                "zero-bubble", graph, "stage s on device s modulo the number of devices"
            )
        )
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
                order.append(_weight_part(next(weights)))
            if not is_over:
                order.append(forwards[num_ahead + index])
        order += map(_weight_part, weights)
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


def _weight_part(action: Action) -> Action:
    return weight_backward(action.stage, action.micro_batch)


def _split(order: Lane, num_micro_batch: int, unsplit: Collection[int]) -> Iterator[Action]:
    """Whole backwards become input parts, or stay and lose their weight part; what only fills up a
    group is left out.
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
        f"{list(graph.device_of_stage)}; "
        "place them so, or take 'auto', which orders any placement"
    )
