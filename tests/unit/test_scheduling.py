"""Schedules against hand-worked orders, closed formulas, and an independent search for circles in the dependency graph."""

from __future__ import annotations

import json
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import many
from whale.scheduling import (
    ORDERS,
    Action,
    Kind,
    Orders,
    Schedule,
    ScheduleError,
    StageGraph,
    add_messages,
    arrived_by,
    build,
    build_forward_only,
    check,
    draw,
    forward_only,
    gpipe,
    one_f_one_b,
    parse_action,
    start_times,
)
from whale.scheduling.picture import bubble


def text(order: tuple[Action, ...]) -> str:
    """`F0 F1 B0`: kinds and micro-batches, without the stage."""
    return " ".join(f"{action.kind}{action.micro_batch}" for action in order)


def actions(line: str) -> tuple[Action, ...]:
    return tuple(parse_action(part.strip()) for part in line.split(","))


@st.composite
def stage_graphs(draw_from: st.DrawFn) -> StageGraph:
    num_stages = draw_from(st.integers(1, 7))
    raw = draw_from(st.lists(st.integers(0, 4), min_size=num_stages, max_size=num_stages))
    number = {device: index for index, device in enumerate(dict.fromkeys(raw))}
    pairs = [(a, b) for b in range(num_stages) for a in range(b)]
    edges = [pair for pair in pairs if draw_from(st.booleans())]
    gradient_edges = [edge for edge in edges if draw_from(st.booleans())]
    return StageGraph(tuple(number[device] for device in raw), tuple(edges), tuple(gradient_edges))


def longest_path(graph: StageGraph, stage: int) -> int:
    return 1 + max((longest_path(graph, b) for a, b in graph.edges if a == stage), default=0)


def has_circle(graph: StageGraph, num_micro_batch: int, orders: Orders) -> bool:
    """Independent of the checker: the order on each device and all data dependencies, as one graph of compute actions."""
    needs: dict[str, set[str]] = {}
    for order in orders:
        names = [str(action) for action in order if action.is_compute]
        for before, after in pairwise(names):
            needs.setdefault(after, set()).add(before)
    for m in range(num_micro_batch):
        for a, b in graph.edges:
            needs.setdefault(f"F{b}.{m}", set()).add(f"F{a}.{m}")
        for a, b in graph.gradient_edges:
            needs.setdefault(f"B{a}.{m}", set()).add(f"B{b}.{m}")
        for s in range(graph.num_stages):
            needs.setdefault(f"B{s}.{m}", set()).add(f"F{s}.{m}")
    try:
        list(TopologicalSorter(needs).static_order())
    except CycleError:
        return True
    return False


# ---- orders


def test_1f1b_hand_worked_four_stages_eight_micro_batches() -> None:
    """whale.md, appendix A."""
    orders = one_f_one_b(StageGraph.chain(4), 8)
    assert text(orders[0]) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert text(orders[1]) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"
    assert text(orders[2]) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"
    assert text(orders[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_micro_batch", [1, 2, 3, 5, 9])
def test_1f1b_on_a_chain_is_warm_up_then_alternate_then_drain(num_stages: int, num_micro_batch: int) -> None:
    orders = one_f_one_b(StageGraph.chain(num_stages), num_micro_batch)
    for stage, order in enumerate(orders):
        warm_up = min(num_stages - 1 - stage, num_micro_batch)
        expected = [f"F{m}" for m in range(warm_up)]
        for m in range(num_micro_batch - warm_up):
            expected += [f"F{m + warm_up}", f"B{m}"]
        expected += [f"B{m}" for m in range(num_micro_batch - warm_up, num_micro_batch)]
        assert text(order) == " ".join(expected)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_micro_batch"), [(1, 3), (4, 8), (5, 2), (8, 8)])
def test_bubble_on_a_chain_is_the_textbook_formula(name: str, num_stages: int, num_micro_batch: int) -> None:
    schedule = build(name, StageGraph.chain(num_stages), num_micro_batch)
    assert bubble(schedule, 1.5, 2.5) == pytest.approx((num_stages - 1) / (num_micro_batch + num_stages - 1))


def test_gpipe_does_all_forwards_then_all_backwards() -> None:
    for order in gpipe(StageGraph.chain(3), 3):
        assert text(order) == "F0 F1 F2 B0 B1 B2"
    # a stage that is entered again pipelines: stage 2 waits for stage 1 while stage 0 goes on
    order = gpipe(StageGraph.chain(3, (0, 1, 0)), 3)[0]
    assert " ".join(map(str, order)) == "F0.0 F0.1 F2.0 F0.2 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2"


def test_1f1b_with_a_device_entered_twice() -> None:
    """Slots by hand: F(s,m) = 2m + s, B(s,m) = 2m + 5 - s; equal slots: backward first, then the later stage."""
    order = one_f_one_b(StageGraph.chain(3, (0, 1, 0)), 3)[0]
    assert " ".join(map(str, order)) == "F0.0 F2.0 F0.1 B2.0 F2.1 F0.2 B2.1 B0.0 F2.2 B2.2 B0.1 B0.2"
    # F(s,m) = 2m + s, B(s,m) = 2m + 3 - s: slots 0, 1, 2, 2, 3, 3, 4, 5
    order = one_f_one_b(StageGraph.chain(2, (0, 0)), 2)[0]
    assert " ".join(map(str, order)) == "F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 B0.1"


@settings(max_examples=150, deadline=None)
@given(stage_graphs(), st.integers(1, 9))
def test_any_graph_gives_complete_orders_without_circle_and_within_the_bound(graph: StageGraph, num_micro_batch: int) -> None:
    every = [(kind, s, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for s in range(graph.num_stages) for m in range(num_micro_batch)]
    for name, make in ORDERS.items():
        orders = make(graph, num_micro_batch)
        flat = [(action.kind, action.stage, action.micro_batch) for order in orders for action in order]
        assert sorted(flat) == sorted(every)
        assert not has_circle(graph, num_micro_batch, orders)
        for device, order in enumerate(orders):
            assert {graph.device_of_stage[action.stage] for action in order} == {device}
            for stage in graph.stages_of(device):
                for kind in (Kind.FORWARD, Kind.BACKWARD):
                    own = [action.micro_batch for action in order if action.kind is kind and action.stage == stage]
                    assert own == list(range(num_micro_batch))
        proof = check(build(name, graph, num_micro_batch))
        assert proof.channels_in_order
        bound = [min(longest_path(graph, s), num_micro_batch) if name == "1f1b" else num_micro_batch for s in range(graph.num_stages)]
        assert list(proof.peak_in_flight) == bound


@settings(max_examples=80, deadline=None)
@given(stage_graphs(), st.integers(1, 6))
def test_messages_only_between_devices_one_pair_for_each_edge_and_micro_batch(graph: StageGraph, num_micro_batch: int) -> None:
    schedule = build("1f1b", graph, num_micro_batch)
    place = graph.device_of_stage
    crossing = sum(place[a] != place[b] for a, b in graph.edges) + sum(place[a] != place[b] for a, b in graph.gradient_edges)
    flat = [action for order in schedule.orders for action in order]
    for kind in (Kind.SEND, Kind.RECEIVE):
        assert len([action for action in flat if action.kind is kind]) == crossing * num_micro_batch
    assert len(set(flat) - {Action(Kind.UPDATE)}) == len(flat) - graph.num_devices
    for order in schedule.orders:
        assert order[-1] == Action(Kind.UPDATE)


@settings(max_examples=50, deadline=None)
@given(stage_graphs(), st.integers(1, 6))
def test_forward_only_and_json_round_trip(graph: StageGraph, num_micro_batch: int) -> None:
    evaluation = build_forward_only(graph, num_micro_batch)
    kinds = {action.kind for order in evaluation.orders for action in order}
    assert kinds <= {Kind.FORWARD, Kind.SEND, Kind.RECEIVE}
    assert not has_circle(graph, num_micro_batch, forward_only(graph, num_micro_batch))
    for schedule in (evaluation, build("gpipe", graph, num_micro_batch)):
        assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


# ---- messages


def test_messages_hand_worked_two_stages_two_micro_batches() -> None:
    schedule = build("1f1b", StageGraph.chain(2), 2)
    assert schedule.orders[0] == actions(
        "F0.0, send F 0>1.0, F0.1, send F 0>1.1, receive B 1>0.0, B0.0, receive B 1>0.1, B0.1, synchronise 0.1, update"
    )
    assert schedule.orders[1] == actions(
        "receive F 0>1.0, F1.0, B1.0, send B 1>0.0, receive F 0>1.1, F1.1, B1.1, send B 1>0.1, synchronise 1.1, update"
    )


def test_local_edges_and_edges_without_gradient_send_less() -> None:
    # 0 and 2 share a device; 0 -> 1 carries no gradient back
    graph = StageGraph((0, 1, 0), ((0, 1), (0, 2), (1, 2)), ((0, 2), (1, 2)))
    messages = {str(action) for order in build("gpipe", graph, 1).orders for action in order if action.kind is Kind.SEND}
    assert messages == {"send F 0>1.0", "send F 1>2.0", "send B 2>1.0"}


def test_receives_move_ahead_so_that_a_channel_keeps_its_order() -> None:
    # stage 0 sends to 1 and 2, both on device 1; 2 runs later, but its message leaves before the next one for 1
    graph = StageGraph((0, 1, 1), ((0, 1), (0, 2)), ((0, 1), (0, 2)))
    orders = (actions("F0.0, F0.1"), actions("F1.0, F1.1, F2.0, F2.1"))
    result = add_messages(graph, 2, orders)
    assert result[0] == actions("F0.0, send F 0>1.0, send F 0>2.0, F0.1, send F 0>1.1, send F 0>2.1")
    assert result[1] == actions("receive F 0>1.0, F1.0, receive F 0>2.0, receive F 0>1.1, F1.1, F2.0, receive F 0>2.1, F2.1")


def test_channels_out_of_order_are_reported() -> None:
    graph = StageGraph((0, 1, 1), ((0, 1), (0, 2)), ())
    late = (actions("F0.0, send F 0>1.0, send F 0>2.0"), actions("receive F 0>2.0, F2.0, receive F 0>1.0, F1.0"))
    assert not check(Schedule("late", graph, 1, late), forward_only=True).channels_in_order
    early = (late[0], actions("receive F 0>1.0, receive F 0>2.0, F2.0, F1.0"))
    assert check(Schedule("early", graph, 1, early), forward_only=True).channels_in_order


def test_unknown_schedule_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'1F1'.*did you mean '1f1b'"):
        build("1F1", StageGraph.chain(2), 2)
    with pytest.raises(ValueError, match="did you mean 'gpipe'"):
        build("pipe", StageGraph.chain(2), 2)
    with pytest.raises(ValueError, match="num_micro_batch is 0"):
        build("gpipe", StageGraph.chain(2), 0)


# ---- the checker catches what is broken


def changed(schedule: Schedule, device: int, order: list[Action] | tuple[Action, ...]) -> Schedule:
    orders = list(schedule.orders)
    orders[device] = tuple(order)
    return replace(schedule, orders=tuple(orders))


@settings(max_examples=80, deadline=None)
@given(stage_graphs(), st.integers(1, 4), st.data())
def test_dropping_or_doubling_any_action_is_caught_by_name(graph: StageGraph, num_micro_batch: int, data: st.DataObject) -> None:
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
        (0, "F0.0", "send F 0>1.0", "`send F 0>1.0` on device 0 stands before `F0.0`: it sends what has not been computed"),
        (1, "F1.0", "B1.0", "`B1.0` on device 1 stands before `F1.0`: a backward follows its forward"),
        (1, "receive F 0>1.0", "F1.0", "`F1.0` on device 1 stands before `receive F 0>1.0`: the activation has not arrived"),
        (0, "receive B 1>0.0", "B0.0", "`B0.0` on device 0 stands before `receive B 1>0.0`: the gradient has not arrived"),
        (0, "F0.0", "F0.1", "`F0.1` on device 0 stands before `F0.0`: the micro-batches of a stage run in ascending order"),
        (0, "B0.1", "synchronise 0.1", "`synchronise 0.1` on device 0 stands before `B0.1`: the gradients of the stage are not complete"),
        (1, "synchronise 1.1", "update", "`synchronise 1.1` on device 1 stands after the update, which must be the last action"),
    ],
)
def test_swapping_two_actions_is_caught(device: int, first: str, second: str, message: str) -> None:
    schedule = build("1f1b", StageGraph.chain(2), 2)
    order = list(schedule.orders[device])
    a, b = order.index(parse_action(first)), order.index(parse_action(second))
    order[a], order[b] = order[b], order[a]
    with pytest.raises(ScheduleError) as error:
        check(changed(schedule, device, order))
    assert str(error.value) == message


def test_wrong_order_between_chunks_of_one_device_is_caught() -> None:
    graph = StageGraph.chain(2, (0, 0))
    forwards = Schedule("x", graph, 1, (actions("F1.0, F0.0, B1.0, B0.0, synchronise 0.0, synchronise 1.0, update"),))
    with pytest.raises(ScheduleError, match=r"`F1.0` on device 0 stands before `F0.0`: stage 1 reads the activation of stage 0"):
        check(forwards)
    backwards = Schedule("x", graph, 1, (actions("F0.0, F1.0, B0.0, B1.0, synchronise 0.0, synchronise 1.0, update"),))
    with pytest.raises(ScheduleError, match=r"`B0.0` on device 0 stands before `B1.0`: the gradient of stage 0 comes from stage 1"):
        check(backwards)


def test_deadlock_circle_is_caught_and_told() -> None:
    """Device 0 wants the gradient of micro-batch 0 before it sends activation 1; device 1 wants that before it sends the gradient."""
    schedule = build("gpipe", StageGraph.chain(2), 2)
    first = actions("F0.0, send F 0>1.0, receive B 1>0.0, F0.1, send F 0>1.1, B0.0, receive B 1>0.1, B0.1, synchronise 0.1, update")
    with pytest.raises(ScheduleError) as error:
        check(changed(schedule, 0, first))
    assert "deadlock: device 0 waits at `receive B 1>0.0`, device 1 waits at `receive F 0>1.1`, and so on in a circle" in str(error.value)


@settings(max_examples=150, deadline=None)
@given(stage_graphs(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_checker_agrees_with_the_search_for_circles_on_shuffled_orders(graph: StageGraph, num_micro_batch: int, random: object) -> None:
    """Orders that respect each device alone, merged at random: the checker refuses exactly those that hold a circle."""
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
        check(Schedule("shuffled", graph, num_micro_batch, add_messages(graph, num_micro_batch, orders)))
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
    with pytest.raises(ScheduleError, match=f"`{extra}` on device 0 does not belong there: {reason}"):
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
    assert proof.peak_in_flight_of_device == (4, 2)


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
        ((0, 1), ((1, 0),), (), "1 -> 0 does not go to a later stage"),
        ((0, 1), ((0, 0),), (), "0 -> 0 does not go to a later stage"),
        ((0, 1), ((0, 5),), (), r"0 -> 5 names a stage outside 0\.\.1"),
        ((0, 1), ((0, 1), (0, 1)), (), "lists 0 -> 1 twice"),
        ((0, 1, 2), ((0, 1),), ((0, 2),), "gradient edge 0 -> 2 is not among the edges"),
    ],
)
def test_stage_graphs_that_cannot_be(
    device_of_stage: tuple[int, ...], edges: tuple[tuple[int, int], ...], gradient_edges: tuple[tuple[int, int], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StageGraph(device_of_stage, edges, gradient_edges)


def test_stage_graph_neighbours() -> None:
    graph = StageGraph((0, 1, 0, 2), ((1, 3), (0, 1), (0, 3), (2, 3)), ((0, 3), (2, 3)))
    assert (graph.num_stages, graph.num_devices, graph.stages_of(0)) == (4, 3, (0, 2))
    assert (graph.producers(3), graph.gradient_producers(3)) == ((0, 1, 2), (0, 2))
    assert (graph.consumers(0), graph.gradient_consumers(0), graph.consumers(3)) == ((1, 3), (3,), ())


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


def test_picture_is_clipped_to_its_width_and_goes_beyond_ten() -> None:
    schedule = build("gpipe", StageGraph.chain(2), 12)
    whole, clipped = draw(schedule).splitlines(), draw(schedule, width=50).splitlines()
    assert whole[1].startswith("device 0 (stage 0)  0 1 2 3 4 5 6 7 8 9 a b . . . 0'0'")
    assert "a is micro-batch 10" in whole[3]
    for full, short in zip(whole[1:3], clipped[1:3], strict=True):
        assert len(short) <= 50
        assert short[-1] == ">"
        assert full.startswith(short[:-1])
    assert "14 of 39 columns" in clipped[4]
    # the bubble is that of the whole schedule, not of the visible part
    assert whole[-1] == clipped[-1] == "bubble 7.7 %"


def test_picture_keeps_the_ratio_of_times() -> None:
    rows = draw(build("1f1b", StageGraph.chain(1), 2), forward=2.0, backward=3.0).splitlines()
    assert rows[1] == "device 0 (stage 0)  0 0 0'0'0'1 1 1'1'1'"
    assert rows[-1] == "bubble 0.0 %"
    with pytest.raises(ValueError, match="must take time"):
        draw(build("1f1b", StageGraph.chain(1), 1), forward=0.0)
    with pytest.raises(ValueError, match="width 10 leaves no room"):
        draw(build("1f1b", StageGraph.chain(1), 1), width=10)


def test_start_times_hand_worked() -> None:
    schedule = build("1f1b", StageGraph.chain(2), 2)
    starts = start_times(schedule, {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0})
    for order, row, expected in zip(schedule.orders, starts, ([0.0, 1.0, 4.0, 7.0], [1.0, 2.0, 4.0, 5.0]), strict=True):
        assert [start for action, start in zip(order, row, strict=True) if action.is_compute] == expected


# ---- when a send is known to have arrived


def test_a_receive_shows_which_sends_have_arrived() -> None:
    """1F1B of 3 micro-batches on 2 devices, by hand. Device 1: F0 B0 F1 B1 F2 B2. Its gradient of micro-batch m shows that activation m
    has arrived; the activation of micro-batch m + 2 shows that gradient m has."""
    schedule = build("1f1b", StageGraph.chain(2), 3)
    first, second = (arrived_by(schedule.stage_graph, schedule.orders, device) for device in range(2))
    assert {str(message): [str(sent) for sent in before] for message, before in first.items()} == {
        "receive B 1>0.0": ["send F 0>1.0"],
        "receive B 1>0.1": ["send F 0>1.1"],
        "receive B 1>0.2": ["send F 0>1.2"],
    }
    assert {str(message): [str(sent) for sent in before] for message, before in second.items()} == {
        "receive F 0>1.0": [],
        "receive F 0>1.1": [],
        "receive F 0>1.2": ["send B 1>0.0"],
    }


@given(stage_graphs(), st.integers(1, 5), st.sampled_from(("gpipe", "1f1b")))
@settings(max_examples=many(200))
def test_what_a_receive_shows_is_true_in_every_order_of_events(graph: StageGraph, num_micro_batch: int, name: str) -> None:
    """Independently: a send has arrived when its receive comes before the message in the graph of all orders and messages."""
    schedule = build(name, graph, num_micro_batch)
    before: dict[tuple[int, Action], set[tuple[int, Action]]] = {}
    holder = graph.device_of_stage
    for device, order in enumerate(schedule.orders):
        for place, action in enumerate(order):
            found = before[device, action] = {(device, order[place - 1])} if place else set()
            if action.kind is Kind.RECEIVE:
                found.add((holder[action.source], action.counterpart))
    ancestors: dict[tuple[int, Action], set[tuple[int, Action]]] = {}
    for event in TopologicalSorter(before).static_order():
        ancestors[event] = before[event].union(*(ancestors[earlier] for earlier in before[event]))
    for device, order in enumerate(schedule.orders):
        shown = arrived_by(graph, schedule.orders, device)
        assert set(shown) == {action for action in order if action.kind is Kind.RECEIVE}
        named = [sent for sends in shown.values() for sent in sends]
        assert len(named) == len(set(named))
        for received, sends in shown.items():
            for sent in sends:
                assert (holder[sent.destination], sent.counterpart) in ancestors[device, received]
