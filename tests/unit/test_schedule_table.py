"""Every row of the table of twelve schedules (research note on Hanayo, section 1.9): published
orders give its figures, list-scheduled ones reach or beat them at the same memory and with the same
number of chunks.

Tf = 1, Tb = 2, Ti = Tw = 1 for a device; a cell is (bubble in %, peak activations). The figures
come from another simulator and, where they are torch's schedules, from torch's own generators.
"""

from __future__ import annotations

import pytest

from whale.scheduling import (
    Costs,
    Orders,
    Schedule,
    StageGraph,
    build,
    even_costs,
    list_orders,
    simulate,
    wave_orders,
    zero_bubble_orders,
)
from whale.scheduling.compare import Question, chimera
from whale.scheduling.placement import DeviceOfStage, loop, wave

CASES = ((4, 4), (4, 8), (8, 8), (8, 16))
"""devices and micro-batches: the columns of the table"""
ROUNDING = 0.05 + 1e-6
"""the table has one digit behind the point"""


def chain(placement: DeviceOfStage) -> StageGraph:
    return StageGraph.chain(len(placement), placement)


def measure(
    graph: StageGraph, costs: Costs, num_micro_batch: int, orders: Orders
) -> tuple[float, float]:
    timeline = simulate(Schedule("measured", graph, num_micro_batch, orders), costs)
    return 100 * timeline.bubble, max(timeline.peak_memory)


PUBLISHED = [
    # name, chunks, message, bubbles, peaks (None: the table does not say)
    ("gpipe", 1, 0.0, (42.9, 27.3, 46.7, 30.4), (4, 8, 8, 16)),
    ("1f1b", 1, 0.0, (42.9, 27.3, 46.7, 30.4), (4, 4, 8, 8)),
    ("interleaved", 2, 0.0, (27.3, 15.8, 30.4, 17.9), (4, 5.5, 8, 11.5)),
    ("interleaved", 4, 0.0, (15.8, 8.6, 17.9, 9.9), (4, 4.75, 8, 9.75)),
    ("zb-h1", 1, 0.0, (20.0, 11.1, 22.6, 12.7), (4, 4, 8, 8)),
    ("zb-h1", 2, 0.0, (11.1, 5.9, 12.7, 6.8), (4, 4, 8, 8)),
    ("zb-h1", 4, 0.0, (5.9, 3.0, 6.8, 3.5), (4, 4, 8, 8)),
    ("zb-h1", 8, 0.0, (3.0, 1.5, 3.5, 1.8), (4, 4, 8, 8)),
    ("wave", 2, 0.0, (33.3, 20.0, 36.8, 22.6), (4, 8, 8, 16)),
    ("wave", 4, 0.0, (20.0, 11.1, 22.6, 12.7), (4, 8, 8, 16)),
    ("wave", 8, 0.0, (11.1, 5.9, 12.7, 6.8), (4, 8, 8, 16)),
    ("units", 2, 0.0, (33.3, 33.3, 36.8, 36.8), (4, 4, 8, 8)),
    ("units", 4, 0.0, (20.0, 20.0, 22.6, 22.6), (4, 4, 8, 8)),
    ("units", 8, 0.0, (11.1, 11.1, 12.7, 12.7), (4, 4, 8, 8)),
    ("gpipe", 1, 0.1, (44.4, 28.6, 48.3, 31.8), None),
    ("1f1b", 1, 0.1, (45.5, 30.6, 49.6, 34.2), None),
    ("interleaved", 2, 0.1, (33.0, 19.7, 36.0, 22.0), None),
    ("interleaved", 4, 0.1, (30.4, 17.9, 32.3, 19.3), None),
    ("zb-h1", 1, 0.1, (25.0, 14.9, 28.6, 17.0), None),
    ("zb-h1", 2, 0.1, (19.5, 11.4, 22.3, 12.9), None),
    ("zb-h1", 4, 0.1, (19.7, 11.6, 22.0, 12.6), None),
    ("zb-h1", 8, 0.1, (25.8, 20.3, 27.4, 21.8), None),
    ("wave", 2, 0.1, (38.8, 26.8, 42.9, 30.2), None),
    ("wave", 4, 0.1, (32.6, 25.5, 36.5, 28.8), None),
    ("wave", 8, 0.1, (35.8, 32.4, 39.8, 36.1), None),
]


@pytest.mark.parametrize(("name", "num_chunks", "message_s", "bubbles", "peaks"), PUBLISHED)
def test_published_orders_give_the_figures_of_the_table(
    name: str,
    num_chunks: int,
    message_s: float,
    bubbles: tuple[float, ...],
    peaks: tuple[float, ...] | None,
) -> None:
    for column, (num_devices, num_micro_batch) in enumerate(CASES):
        zigzag = name in ("wave", "units")
        graph = chain(
            wave(num_devices, num_chunks // 2) if zigzag else loop(num_devices, num_chunks)
        )
        if name == "zb-h1":
            orders = zero_bubble_orders(graph, num_micro_batch)
        elif name == "units":
            orders = wave_orders(graph, num_micro_batch, unit=num_devices)
        else:
            orders = build(name, graph, num_micro_batch).orders
        bubble, peak = measure(
            graph, even_costs(graph, message_s=message_s), num_micro_batch, orders
        )
        assert bubble == pytest.approx(bubbles[column], abs=ROUNDING), (
            num_devices,
            num_micro_batch,
        )
        if peaks is not None:
            assert peak == pytest.approx(peaks[column])


LISTED = [
    # row of the table, chunks, split, message, bubbles; all with peak activations at most P
    ("wave greedy", "wave", 2, False, 0.0, (33.3, 20.0, 36.8, 23.2)),
    ("wave greedy", "wave", 4, False, 0.0, (21.3, 16.5, 23.8, 18.6)),
    ("wave greedy", "wave", 8, False, 0.0, (11.9, 9.0, 13.5, 11.3)),
    (
        "ZBV, DualPipeV, Interleaved ZB v=2, wave greedy+ZB",
        "wave",
        2,
        True,
        0.0,
        (11.1, 5.9, 12.7, 6.8),
    ),
    ("Interleaved ZB v=4, wave greedy+ZB", "wave", 4, True, 0.0, (5.9, 3.0, 6.8, 3.5)),
    ("Interleaved ZB v=8, wave greedy+ZB", "wave", 8, True, 0.0, (3.0, 1.5, 3.5, 1.8)),
    ("Interleaved ZB v=2 on its own placement", "loop", 2, True, 0.0, (11.1, 5.9, 12.7, 6.8)),
    ("Interleaved ZB v=4 on its own placement", "loop", 4, True, 0.0, (5.9, 3.0, 6.8, 3.5)),
    ("ZBV, DualPipeV, wave greedy+ZB", "wave", 2, True, 0.1, (20.0, 10.4, 22.1, 12.4)),
    ("Interleaved ZB v=4, wave greedy+ZB", "wave", 4, True, 0.1, (16.4, 10.4, 18.8, 10.7)),
    ("Interleaved ZB v=8, wave greedy+ZB", "wave", 8, True, 0.1, (21.4, 17.2, 24.5, 21.4)),
    (
        "Interleaved ZB v=2 on its own placement, list scheduler on loop",
        "loop",
        2,
        True,
        0.1,
        (18.9, 11.4, 20.8, 12.9),
    ),
    (
        "Interleaved ZB v=4 on its own placement, list scheduler on loop",
        "loop",
        4,
        True,
        0.1,
        (17.8, 11.6, 19.1, 12.6),
    ),
]


@pytest.mark.parametrize(
    ("row", "placement", "num_chunks", "split", "message_s", "bubbles"), LISTED
)
def test_list_scheduled_orders_reach_or_beat_the_table_at_the_same_memory(
    row: str,
    placement: str,
    num_chunks: int,
    split: bool,
    message_s: float,
    bubbles: tuple[float, ...],
) -> None:
    for column, (num_devices, num_micro_batch) in enumerate(CASES):
        graph = chain(
            wave(num_devices, num_chunks // 2)
            if placement == "wave"
            else loop(num_devices, num_chunks)
        )
        costs = even_costs(graph, message_s=message_s, memory_cap=num_devices)
        orders = list_orders(graph, costs, num_micro_batch, split=split)
        bubble, peak = measure(graph, costs, num_micro_batch, orders)
        assert bubble <= bubbles[column] + ROUNDING, (row, num_devices, num_micro_batch)
        assert peak <= num_devices * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_devices", "num_micro_batch", "cap", "bubble_of_table"), [(4, 8, 7, 7.0), (8, 16, 14, 8.0)]
)
def test_more_memory_buys_back_the_latency(
    num_devices: int, num_micro_batch: int, cap: float, bubble_of_table: float
) -> None:
    graph = chain(wave(num_devices, 1))
    costs = even_costs(graph, message_s=0.1, memory_cap=cap)
    bubble, peak = measure(
        graph, costs, num_micro_batch, list_orders(graph, costs, num_micro_batch, split=True)
    )
    assert bubble <= bubble_of_table + ROUNDING
    assert peak <= cap * (1 + 1e-9)


@pytest.mark.parametrize(
    ("message_s", "bubbles"), [(0.0, (25.0, 25.0, 33.3, 30.4)), (0.1, (31.8, 25.0, 38.8, 31.8))]
)
def test_chimera_is_at_least_as_good_as_the_table_gives_it(
    message_s: float, bubbles: tuple[float, ...]
) -> None:
    """So that what is said against Chimera is said against a good one. At N = D without latency its
    bubble is (D - 2) / (1.5 N + D - 2).
    """
    for column, (num_devices, num_micro_batch) in enumerate(CASES):
        row = chimera(
            Question(num_devices=num_devices, num_micro_batch=num_micro_batch, message_s=message_s)
        )
        assert 100 * row.timeline.bubble <= bubbles[column] + ROUNDING, (
            num_devices,
            num_micro_batch,
        )
        assert row.peak <= num_devices
        if num_devices == num_micro_batch and not message_s:
            assert row.timeline.bubble == pytest.approx(
                (num_devices - 2) / (1.5 * num_micro_batch + num_devices - 2)
            )


@pytest.mark.parametrize("num_devices", [4, 6, 8])
@pytest.mark.parametrize("num_waves", [1, 2, 4])
def test_within_three_percent_of_the_lower_bound_at_twice_as_many_micro_batches(
    num_devices: int, num_waves: int
) -> None:
    graph = chain(wave(num_devices, num_waves))
    costs = even_costs(graph, memory_cap=num_devices)
    timeline = simulate(
        Schedule("auto", graph, 2 * num_devices, list_orders(graph, costs, 2 * num_devices)), costs
    )
    bound = 2 * num_devices * 3.0 + (num_devices - 1) / (2 * num_waves)
    assert timeline.lower_bound_s == pytest.approx(bound)
    assert bound * (1 - 1e-9) <= timeline.step_s <= 1.03 * bound
