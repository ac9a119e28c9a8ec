"""The checker of schedules catches what is broken; schedules as data and as pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.schedules import actions, has_circle, stage_graphs
from whale.scheduling import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    StageGraph,
    add_messages,
    build,
    build_forward_only,
    check,
    draw,
    one_f_one_b,
    parse_action,
    start_times,
)

# ---- the checker catches what is broken


def changed(schedule: Schedule, device: int, order: list[Action] | tuple[Action, ...]) -> Schedule:
    orders = list(schedule.orders)
    orders[device] = tuple(order)
    return replace(schedule, orders=tuple(orders))


@settings(max_examples=80, deadline=None)
@given(stage_graphs(), st.integers(1, 4), st.data())
def test_dropping_or_doubling_any_action_is_caught_by_name(
    graph: StageGraph, num_micro_batch: int, data: st.DataObject
) -> None:
    schedule = build("1f1b", graph, num_micro_batch)
    device = data.draw(st.integers(0, graph.num_devices - 1))
    order = schedule.orders[device]
    index = data.draw(st.integers(0, len(order) - 1))
    with pytest.raises(ScheduleError) as missing:
        check(changed(schedule, device, order[:index] + order[index + 1 :]))
    assert str(missing.value) == f"`{order[index]}` is missing on device {device}"
    with pytest.raises(ScheduleError) as doubled:
        check(changed(schedule, device, (*order[:index], order[index], *order[index:])))
    assert f"`{order[index]}` stands 2 times on device {device}" in str(doubled.value)


@pytest.mark.parametrize(
    ("device", "first", "second", "message"),
    [
        (
            0,
            "F0.0",
            "send F 0>1.0",
            "`send F 0>1.0` on device 0 stands before `F0.0`: it sends what has not been computed",
        ),
        (
            1,
            "F1.0",
            "B1.0",
            "`B1.0` on device 1 stands before `F1.0`: a backward follows its forward",
        ),
        (
            1,
            "receive F 0>1.0",
            "F1.0",
            "`F1.0` on device 1 stands before `receive F 0>1.0`: the activation has not arrived",
        ),
        (
            0,
            "receive B 1>0.0",
            "B0.0",
            "`B0.0` on device 0 stands before `receive B 1>0.0`: the gradient has not arrived",
        ),
        (
            0,
            "F0.0",
            "F0.1",
            "`F0.1` on device 0 stands before `F0.0`: the micro-batches of a stage run in "
            "ascending order",
        ),
        (
            0,
            "B0.1",
            "synchronise 0.1",
            "`synchronise 0.1` on device 0 stands before `B0.1`: the gradients of the stage are "
            "not complete",
        ),
        (
            1,
            "synchronise 1.1",
            "update",
            "`synchronise 1.1` on device 1 stands after the update, which must be the last action",
        ),
    ],
)
def test_swapping_two_actions_is_caught(device: int, first: str, second: str, message: str) -> None:
    schedule = build("1f1b", StageGraph.chain(2), 2)
    order = list(schedule.orders[device])
    a = order.index(parse_action(first))
    b = order.index(parse_action(second))
    order[a], order[b] = order[b], order[a]
    with pytest.raises(ScheduleError) as error:
        check(changed(schedule, device, order))
    assert str(error.value) == message


def test_wrong_order_between_chunks_of_one_device_is_caught() -> None:
    graph = StageGraph.chain(2, (0, 0))
    forwards = Schedule(
        "x",
        graph,
        1,
        (actions("F1.0, F0.0, B1.0, B0.0, synchronise 0.0, synchronise 1.0, update"),),
    )
    with pytest.raises(
        ScheduleError,
        match=r"`F1.0` on device 0 stands before `F0.0`: stage 1 reads the activation of stage 0",
    ):
        check(forwards)
    backwards = Schedule(
        "x",
        graph,
        1,
        (actions("F0.0, F1.0, B0.0, B1.0, synchronise 0.0, synchronise 1.0, update"),),
    )
    with pytest.raises(
        ScheduleError,
        match=r"`B0.0` on device 0 stands before `B1.0`: the gradient of stage 0 comes from stage 1",
    ):
        check(backwards)


def test_deadlock_circle_is_caught_and_reported() -> None:
    """Device 0 wants the gradient of micro-batch 0 before it sends activation 1; device 1 wants
    that before it sends the gradient.
    """
    schedule = build("gpipe", StageGraph.chain(2), 2)
    first = actions(
        "F0.0, send F 0>1.0, receive B 1>0.0, F0.1, send F 0>1.1, B0.0, receive B 1>0.1, B0.1, "
        "synchronise 0.1, update"
    )
    with pytest.raises(ScheduleError) as error:
        check(changed(schedule, 0, first))
    assert (
        "deadlock: device 0 never passes action 2 (receive B 1>0.0 from device 1), device 1 never "
        "passes action 2 (receive F 0>1.1 from device 0), in a circle" in str(error.value)
    )


@settings(max_examples=150, deadline=None)
@given(stage_graphs(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_checker_agrees_with_the_search_for_circles_on_shuffled_orders(
    graph: StageGraph, num_micro_batch: int, random: object
) -> None:
    """Orders that respect each device alone, merged at random: the checker refuses exactly those
    that hold a circle.
    """
    shuffled: list[tuple[Action, ...]] = []
    for order in one_f_one_b(graph, num_micro_batch):
        lanes: dict[tuple[Kind, int], list[Action]] = {}
        for action in order:
            lanes.setdefault((action.kind, action.stage), []).append(action)
        picks = [key for key, lane in lanes.items() for _ in lane]
        random.shuffle(picks)  # type: ignore[attr-defined]
        shuffled.append(tuple(lanes[key].pop(0) for key in picks))
    orders = tuple(shuffled)
    circle = has_circle(graph, num_micro_batch, orders)
    try:
        check(Schedule("shuffled", graph, num_micro_batch, add_messages(graph, orders)))
        refused = False
    except ScheduleError:
        refused = True
    assert refused == circle


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("F1.0", "stage 1 is on device 1"),
        ("F0.9", r"the micro-batches are 0\.\.1"),
        ("B7.0", r"the stages are 0\.\.2"),
        ("send F 0>2.0", "there is no edge 0 -> 2"),
        ("send F 1>2.0", "stage 1 is on device 1"),
        ("receive B 1>0.0", "there is no gradient edge 0 -> 1"),
        ("synchronise 0.0", "the last backward is that of micro-batch 1"),
    ],
)
def test_foreign_actions_are_caught(extra: str, reason: str) -> None:
    schedule = build("1f1b", StageGraph((0, 1, 0), ((0, 1), (1, 2)), ((1, 2),)), 2)
    with pytest.raises(
        ScheduleError, match=f"`{extra}` on device 0 does not belong there: {reason}"
    ):
        check(changed(schedule, 0, (parse_action(extra), *schedule.orders[0])))


def test_training_and_evaluation_are_not_mixed_up() -> None:
    graph = StageGraph.chain(2)
    with pytest.raises(ScheduleError, match=r"`B0.0` is missing on device 0"):
        check(build_forward_only(graph, 1))
    with pytest.raises(ScheduleError, match="the schedule is forward only"):
        check(build("gpipe", graph, 1), forward_only=True)
    assert check(build_forward_only(graph, 1), forward_only=True).peak_in_flight == (0, 0)


def test_peaks_hand_counted() -> None:
    proof = check(build("1f1b", StageGraph.chain(3, (0, 1, 0)), 3))
    assert proof.peak_in_flight == (3, 2, 1)
    # F0.0 F2.0 F0.1 B2.0 F2.1 F0.2 B2.1 B0.0 ...: most after F0.2, with 0.0 0.1 0.2 and 2.1 open
    assert proof.peak_memory == (4, 2)


# ---- data


@pytest.mark.parametrize(
    ("action", "written"),
    [
        (Action(Kind.FORWARD, 2, 0), "F2.0"),
        (Action(Kind.BACKWARD, 12, 34), "B12.34"),
        (Action(Kind.SEND, 2, 0, peer=3), "send F 2>3.0"),
        (Action(Kind.RECEIVE, 3, 0, peer=2), "receive F 2>3.0"),
        (Action(Kind.SEND, 3, 1, peer=2, gradient=True), "send B 3>2.1"),
        (Action(Kind.RECEIVE, 2, 0, peer=3, gradient=True), "receive B 3>2.0"),
        (Action(Kind.SYNCHRONISE, 2, 7), "synchronise 2.7"),
        (Action(Kind.UPDATE), "update"),
    ],
)
def test_actions_as_text(action: Action, written: str) -> None:
    assert str(action) == written
    assert parse_action(written) == action


@pytest.mark.parametrize("written", ["", "F2", "X2.0", "send 2>3.0", "F2.0 ", "update 1", "B-1.0"])
def test_text_that_is_no_action(written: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        parse_action(written)


@pytest.mark.parametrize(
    ("device_of_stage", "edges", "gradient_edges", "message"),
    [
        ((), (), (), "at least one stage"),
        ((0, -1), (), (), "negative device"),
        ((0, 2), (), (), "device 1 of 3 holds no stage"),
        ((0, 10**15), (), (), f"device 1 of {10**15 + 1} holds no stage"),
        ((0, 1), ((1, 0),), (), "1 -> 0 does not go to a later stage"),
        ((0, 1), ((0, 0),), (), "0 -> 0 does not go to a later stage"),
        ((0, 1), ((0, 5),), (), r"0 -> 5 names a stage outside 0\.\.1"),
        ((0, 1), ((0, 1), (0, 1)), (), "lists 0 -> 1 twice"),
        ((0, 1, 2), ((0, 1),), ((0, 2),), "gradient edge 0 -> 2 is not among the edges"),
    ],
)
def test_stage_graphs_that_cannot_be(
    device_of_stage: tuple[int, ...],
    edges: tuple[tuple[int, int], ...],
    gradient_edges: tuple[tuple[int, int], ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        StageGraph(device_of_stage, edges, gradient_edges)


def test_stage_graph_neighbours() -> None:
    graph = StageGraph((0, 1, 0, 2), ((1, 3), (0, 1), (0, 3), (2, 3)), ((0, 3), (2, 3)))
    assert (graph.num_stages, graph.num_devices, graph.stages_of(0)) == (4, 3, (0, 2))
    assert (graph.producers(3), graph.gradient_producers(3)) == ((0, 1, 2), (0, 2))
    assert (graph.consumers(0), graph.gradient_consumers(0), graph.consumers(3)) == (
        (1, 3),
        (3,),
        (),
    )


# ---- pictures


def test_picture_drawn_by_hand() -> None:
    picture = draw(build("1f1b", StageGraph.chain(2), 2))
    assert picture.splitlines() == [
        "1f1b: 2 stages on 2 devices, 2 micro-batches",
        "device 0 (stage 0)  0 1 . . 0'0'. 1'1'",
        "device 1 (stage 1)  . 0 0'0'1 1'1'. .",
        "0 forward of micro-batch 0, 0' its backward, . idle",
        "bubble 33.3 %",
    ]


def test_the_legend_of_a_picture_is_not_cut_off() -> None:
    lines = draw(build("zero-bubble", StageGraph.chain(2), 16), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "a is micro-batch 10, b is 11, up to f" in " ".join(lines)


def test_picture_is_clipped_to_its_width_and_goes_beyond_ten() -> None:
    schedule = build("gpipe", StageGraph.chain(2), 12)
    whole = draw(schedule).splitlines()
    clipped = draw(schedule, width=50).splitlines()
    assert whole[1].startswith("device 0 (stage 0)  0 1 2 3 4 5 6 7 8 9 a b . . . 0'0'")
    assert "a is micro-batch 10" in whole[3]
    for full, short in zip(whole[1:3], clipped[1:3], strict=True):
        assert len(short) <= 50
        assert short[-1] == ">"
        assert full.startswith(short[:-1])
    assert "14 of 39 columns" in clipped[-2]
    # the bubble is that of the whole schedule, not of the visible part
    assert whole[-1] == clipped[-1] == "bubble 7.7 %"


def test_picture_keeps_the_ratio_of_times() -> None:
    rows = draw(build("1f1b", StageGraph.chain(1), 2), forward=2.0, backward=3.0).splitlines()
    assert rows[1] == "device 0 (stage 0)  0 0 0'0'0'1 1 1'1'1'"
    assert rows[-1] == "bubble 0.0 %"
    with pytest.raises(ValueError, match="must take time"):
        draw(build("1f1b", StageGraph.chain(1), 1), forward=0.0)
    with pytest.raises(ValueError, match="width 10 leaves no column"):
        draw(build("1f1b", StageGraph.chain(1), 1), width=10)


def test_start_times_hand_worked() -> None:
    schedule = build("1f1b", StageGraph.chain(2), 2)
    starts = start_times(schedule, {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0})
    for order, row, expected in zip(
        schedule.orders, starts, ([0.0, 1.0, 4.0, 7.0], [1.0, 2.0, 4.0, 5.0]), strict=True
    ):
        assert [
            start for action, start in zip(order, row, strict=True) if action.is_compute
        ] == expected
