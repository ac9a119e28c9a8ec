"""Placements and published orders: Hanayo's figure cell by cell, closed forms, any number of
micro-batches.
"""

from __future__ import annotations

import pytest

from whale.scheduling import (
    Kind,
    Schedule,
    StageGraph,
    add_messages,
    build,
    check,
    even_costs,
    interleaved_orders,
    one_f_one_b,
    simulate,
    wave_orders,
    zero_bubble_orders,
)
from whale.scheduling.placement import loop, num_loops_of, num_waves_of, two_pipelines, wave, zigzag

FIGURE = (
    # the paper's figure for 4 devices, 2 waves, 4 micro-batches, read cell by cell
    "F0.0 F0.1 F0.2 F0.3 F7.0 F8.0 F7.1 F8.1 F7.2 F8.2 F7.3 F8.3 F15.0 B15.0 F15.1 B15.1 F15.2 "
    "B15.2 F15.3 B15.3 "
    "B8.0 B7.0 B8.1 B7.1 B8.2 B7.2 B8.3 B7.3 B0.0 B0.1 B0.2 B0.3",
    "F1.0 F1.1 F1.2 F6.0 F1.3 F6.1 F9.0 F6.2 F9.1 F6.3 F9.2 F14.0 F9.3 F14.1 B14.0 F14.2 B14.1 "
    "F14.3 B14.2 B9.0 B14.3 "
    "B9.1 B6.0 B9.2 B6.1 B9.3 B6.2 B1.0 B6.3 B1.1 B1.2 B1.3",
    "F2.0 F2.1 F5.0 F2.2 F5.1 F2.3 F5.2 F10.0 F5.3 F10.1 F13.0 F10.2 F13.1 F10.3 F13.2 B13.0 "
    "F13.3 B13.1 B10.0 B13.2 "
    "B10.1 B13.3 B10.2 B5.0 B10.3 B5.1 B2.0 B5.2 B2.1 B5.3 B2.2 B2.3",
    "F3.0 F4.0 F3.1 F4.1 F3.2 F4.2 F3.3 F4.3 F11.0 F12.0 F11.1 F12.1 F11.2 F12.2 F11.3 F12.3 "
    "B12.0 B11.0 B12.1 B11.1 "
    "B12.2 B11.2 B12.3 B11.3 B4.0 B3.0 B4.1 B3.1 B4.2 B3.2 B4.3 B3.3",
)


def waved(num_devices: int, num_waves: int) -> StageGraph:
    return StageGraph.chain(2 * num_devices * num_waves, wave(num_devices, num_waves))


def looped(num_devices: int, num_chunks: int) -> StageGraph:
    return StageGraph.chain(num_devices * num_chunks, loop(num_devices, num_chunks))


def test_placements_by_hand() -> None:
    assert wave(4, 2) == (0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0)
    assert zigzag(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert [num_waves_of(wave(3, 2)), num_waves_of(loop(3, 4)), num_waves_of(zigzag(3, 3))] == [
        2,
        None,
        None,
    ]
    assert [num_loops_of(loop(3, 2)), num_loops_of(wave(3, 1)), num_loops_of((0, 1, 1))] == [
        2,
        None,
        None,
    ]
    both = two_pipelines(3)
    assert both.device_of_stage == (0, 1, 2, 2, 1, 0)
    assert both.edges == ((0, 1), (1, 2), (3, 4), (4, 5))
    with pytest.raises(ValueError, match="0 waves on each device: at least 1"):
        wave(4, 0)
    with pytest.raises(ValueError, match="0 devices: at least 1"):
        loop(0, 2)


def test_the_wave_is_the_figure_cell_by_cell() -> None:
    orders = wave_orders(waved(4, 2), 4)
    for device, row in enumerate(FIGURE):
        assert " ".join(map(str, orders[device])) == row
    # as drawn: 60 slots of one chunk's forward, backwards twice as long
    timeline = simulate(Schedule("wave", waved(4, 2), 4, orders), even_costs(waved(4, 2), 4.0, 8.0))
    assert timeline.step_s == pytest.approx(60)


@pytest.mark.parametrize("num_devices", [4, 6, 8])
@pytest.mark.parametrize("num_waves", [1, 2, 4])
@pytest.mark.parametrize(
    ("backward", "message"),
    [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (2.0, 0.01), (2.0, 0.2), (2.0, 0.5)],
)
def test_step_time_of_the_wave_is_the_closed_form(
    num_devices: int, num_waves: int, backward: float, message: float
) -> None:
    graph = waved(num_devices, num_waves)
    timeline = simulate(
        build("wave", graph, num_devices), even_costs(graph, 1.0, backward, message_s=message)
    )
    hops = 4 * (num_devices - 1) * num_waves + 2 * (num_devices - 2)
    formula = (
        num_devices * (1 + backward) + (num_devices - 1) * backward / num_waves + hops * message
    )
    assert timeline.step_s == pytest.approx(formula)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_step_times_of_interleaved_and_zero_bubble_are_the_textbook_formulas(
    num_devices: int, num_chunks: int
) -> None:
    graph = looped(num_devices, num_chunks)
    count = 3 * num_devices
    costs = even_costs(graph, 1.0, 2.0, input_share=0.5)
    step = simulate(build("interleaved", graph, count), costs).step_s
    assert step == pytest.approx(3 * count + (num_devices - 1) * 3 / num_chunks)
    zero_bubble = Schedule("zero-bubble", graph, count, zero_bubble_orders(graph, count))
    assert simulate(zero_bubble, costs).step_s == pytest.approx(
        3 * count + (num_devices - 1) / num_chunks
    )


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    assert interleaved_orders(looped(4, 1), 6) == one_f_one_b(StageGraph.chain(4), 6)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_micro_batch", [1, 2, 3, 4, 5, 7, 8, 13])
def test_any_number_of_micro_batches_is_proved(num_devices: int, num_micro_batch: int) -> None:
    for chunks in (1, 2, 3, 4):
        graph = looped(num_devices, chunks)
        check(build("interleaved", graph, num_micro_batch), require_channel_order=True)
        cap = even_costs(graph, memory_cap=num_devices)
        orders = add_messages(graph, zero_bubble_orders(graph, num_micro_batch))
        check(
            Schedule("zero-bubble", graph, num_micro_batch, orders),
            costs=cap,
            require_channel_order=True,
        )
    for waves in (1, 2, 4):
        graph = waved(num_devices, waves)
        check(build("wave", graph, num_micro_batch), require_channel_order=True)
        for unit in (1, num_devices):
            orders = add_messages(graph, wave_orders(graph, num_micro_batch, unit=unit))
            check(Schedule("units", graph, num_micro_batch, orders), require_channel_order=True)


def test_published_orders_hold_for_graphs_with_skips_and_missing_gradients() -> None:
    stages = 8
    edges = tuple((a, b) for a in range(stages) for b in range(a + 1, stages) if b - a in (1, 3))
    gradient_edges = tuple(edge for edge in edges if edge[0] != 2)
    for name, placement in (
        ("wave", wave(2, 2)),
        ("interleaved", loop(4, 2)),
        ("zero-bubble", loop(4, 2)),
    ):
        schedule = build(name, StageGraph(placement, edges, gradient_edges), 5)
        check(schedule, require_channel_order=True)


def test_first_stage_stays_whole_where_it_has_no_input_gradient() -> None:
    schedule = build("zero-bubble", StageGraph.chain(3), 4)
    kinds = [{action.kind for action in order if action.is_compute} for order in schedule.orders]
    assert kinds[0] == {Kind.FORWARD, Kind.BACKWARD}
    assert kinds[1] == kinds[2] == {Kind.FORWARD, Kind.INPUT, Kind.WEIGHT}


@pytest.mark.parametrize("name", ["wave", "interleaved"])
def test_one_stage_has_the_order_of_1f1b(name: str) -> None:
    """A script that asks for waves runs on one device, too."""
    alone = StageGraph.chain(1)
    assert build(name, alone, 4).orders == build("1f1b", alone, 4).orders


@pytest.mark.parametrize(
    ("name", "placement", "message"),
    [
        (
            "wave",
            (0, 1, 0, 1),
            "schedule 'wave' needs on each device an even number of chunks .* lie on devices",
        ),
        ("wave", (0, 1), "or take 'auto'"),
        ("interleaved", (0, 1, 1, 0), "schedule 'interleaved' needs stage s on device s modulo"),
    ],
)
def test_wrong_placement_is_refused(name: str, placement: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, StageGraph.chain(len(placement), placement), 4)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "wave", "zero-bubble", "auto"])
def test_zero_micro_batches_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_micro_batch is 0; it must be at least 1"):
        build(name, waved(2, 1) if name == "wave" else StageGraph.chain(2), 0)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("waves", "wave"), ("zerobubble", "zero-bubble"), ("Interleave", "interleaved")],
)
def test_unknown_schedules_offer_the_nearest(typed: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no schedule '{typed}'; did you mean '{nearest}'"):
        build(typed, StageGraph.chain(2), 2)
