"""Published orders for several chunks on each device, and for split backwards: Hanayo's wave, interleaved 1F1B, ZB-H1.

They are made for chains of like stages. Every edge of another stage graph goes to a later stage, as all of these orders do, so they hold
for any graph with the right placement. c is the chunk on device d, B the number of micro-batches.

Wave (Hanayo). A device has two lanes. One follows the legs that come to it from its far side, the other those from its near side:

    main   F(1, .) F(3, .) ... F(2W-1, .)   B(2W-2, .) ... B(2, .) B(0, .)
    side   F(0, .) F(2, .) ... F(2W-2, .)   B(2W-1, .) ... B(3, .) B(1, .)       (. stands for micro-batches 0..B-1)

It starts with min(P - d, B) actions of `side`, then takes one from each in turn, `main` first, and what is left in the end.

Interleaved 1F1B. Micro-batches go in groups of P; a group passes chunk after chunk. Device d does (C - 1) P + 2 (P - d - 1) forwards ahead,
then one forward and one backward in turn. A last group that is not full is ordered as if it were, and what is not there is left out: an
order without deadlock has none when all actions of some micro-batches are taken away.

ZB-H1. 1F1B with the input part in the place of the backward; weight parts follow d micro-batches behind, so that all devices keep at most P
micro-batches, and then fill the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import chain, zip_longest

from whale.scheduling.action import Action, Orders, StageGraph, backward, forward, input_backward, require_micro_batches, weight_backward
from whale.scheduling.placement import num_loops_of, num_waves_of

Lane = list[Action]


def wave_orders(graph: StageGraph, num_micro_batch: int, *, unit: int | None = None) -> Orders:
    """Hanayo's order. `unit`: how many micro-batches go together, unit after unit (the paper draws one unit of P); default all."""
    require_micro_batches(num_micro_batch)
    num_waves = num_waves_of(graph.device_of_stage)
    if num_waves is None:
        raise ValueError(_wrong_placement("wave", graph, "on each device an even number of chunks that go down and come back up"))
    size = num_micro_batch if unit is None else unit
    if size < 1:
        raise ValueError(f"a unit of {size} micro-batches: at least 1 is needed")
    units = [range(first, min(first + size, num_micro_batch)) for first in range(0, num_micro_batch, size)]
    return tuple(
        tuple(chain.from_iterable(_wave_unit(graph, device, num_waves, each) for each in units)) for device in range(graph.num_devices)
    )


def _wave_unit(graph: StageGraph, device: int, num_waves: int, micro_batches: range) -> Iterator[Action]:
    stages = graph.stages_of(device)
    odd, even = range(1, 2 * num_waves, 2), range(0, 2 * num_waves, 2)

    def lane(make: Callable[[int, int], Action], chunks: range) -> Lane:
        return [make(stages[chunk], micro_batch) for chunk in chunks for micro_batch in micro_batches]

    main = lane(forward, odd) + lane(backward, even[::-1])
    side = lane(forward, even) + lane(backward, odd[::-1])
    num_ahead = min(graph.num_devices - device, len(micro_batches))
    return chain(side[:num_ahead], _in_turn(main, side[num_ahead:]))


def interleaved_orders(graph: StageGraph, num_micro_batch: int) -> Orders:
    """Interleaved 1F1B for any number of micro-batches; with one chunk on each device it is 1F1B."""
    require_micro_batches(num_micro_batch)
    num_chunks = num_loops_of(graph.device_of_stage)
    if num_chunks is None:
        raise ValueError(_wrong_placement("interleaved", graph, "stage s on device s modulo the number of devices"))
    num_devices = graph.num_devices
    groups = [range(first, first + num_devices) for first in range(0, num_micro_batch, num_devices)]
    orders = []
    for device in range(num_devices):
        stages = graph.stages_of(device)
        forwards = [forward(stage, m) for group in groups for stage in stages for m in group]
        backwards = [backward(stage, m) for group in groups for stage in stages[::-1] for m in group]
        per_device = 2 if num_chunks > 1 else 1
        num_ahead = (num_chunks - 1) * num_devices + per_device * (num_devices - device - 1)
        order = chain(forwards[:num_ahead], _in_turn(forwards[num_ahead:], backwards))
        orders.append(tuple(action for action in order if action.micro_batch < num_micro_batch))
    return tuple(orders)


def zb_h1_orders(graph: StageGraph, num_micro_batch: int, unsplit: Collection[int] = ()) -> Orders:
    """ZB-H1 for one stage on each device; the backward of stages in `unsplit` stays whole."""
    require_micro_batches(num_micro_batch)
    if graph.device_of_stage != tuple(range(graph.num_devices)):
        raise ValueError(_wrong_placement("ZB-H1", graph, "one stage on each device, in the order of the devices"))
    orders = []
    for stage in range(graph.num_stages):
        num_ahead = min(graph.num_devices - stage, num_micro_batch)
        order = [forward(stage, m) for m in range(num_ahead)]
        split = stage not in unsplit
        num_weights = 0
        for m in range(num_micro_batch):
            order.append(input_backward(stage, m) if split else backward(stage, m))
            is_over = num_ahead + m >= num_micro_batch
            if split and (m >= stage or is_over):
                order.append(weight_backward(stage, num_weights))
                num_weights += 1
            if not is_over:
                order.append(forward(stage, num_ahead + m))
        if split:
            order += [weight_backward(stage, m) for m in range(num_weights, num_micro_batch)]
        orders.append(tuple(order))
    return tuple(orders)


def _in_turn(first: Lane, second: Lane) -> Iterator[Action]:
    pairs = zip_longest(first, second)
    return (action for pair in pairs for action in pair if action is not None)


def _wrong_placement(name: str, graph: StageGraph, needed: str) -> str:
    return (
        f"schedule {name!r} needs {needed}, but the {graph.num_stages} stages lie on devices {list(graph.device_of_stage)}; "
        "place them so, or take 'auto', which orders any placement"
    )
