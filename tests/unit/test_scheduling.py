"""Schedules against hand-worked orders, closed formulas, and an independent search for circles in
the dependency graph.
"""

from __future__ import annotations

import json
from graphlib import TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import many
from tests.unit.schedules import actions, has_circle, longest_path, stage_graphs, text
from whale.scheduling import (
    ORDERS,
    Action,
    Kind,
    Schedule,
    StageGraph,
    add_messages,
    arrived_by,
    build,
    build_forward_only,
    check,
    forward_only,
    gpipe,
    one_f_one_b,
)
from whale.scheduling.picture import bubble

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
def test_1f1b_on_a_chain_is_warm_up_then_alternate_then_drain(
    num_stages: int, num_micro_batch: int
) -> None:
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
def test_bubble_on_a_chain_is_the_textbook_formula(
    name: str, num_stages: int, num_micro_batch: int
) -> None:
    schedule = build(name, StageGraph.chain(num_stages), num_micro_batch)
    assert bubble(schedule, 1.5, 2.5) == pytest.approx(
        (num_stages - 1) / (num_micro_batch + num_stages - 1)
    )


def test_gpipe_does_all_forwards_then_all_backwards() -> None:
    for order in gpipe(StageGraph.chain(3), 3):
        assert text(order) == "F0 F1 F2 B0 B1 B2"
    # a stage that is entered again pipelines: stage 2 waits for stage 1 while stage 0 goes on
    order = gpipe(StageGraph.chain(3, (0, 1, 0)), 3)[0]
    assert (
        " ".join(map(str, order)) == "F0.0 F0.1 F2.0 F0.2 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2"
    )


def test_1f1b_with_a_device_entered_twice() -> None:
    """Slots by hand: F(s,m) = 2m + s, B(s,m) = 2m + 5 - s; equal slots: backward first, then the
    later stage.
    """
    order = one_f_one_b(StageGraph.chain(3, (0, 1, 0)), 3)[0]
    assert (
        " ".join(map(str, order)) == "F0.0 F2.0 F0.1 B2.0 F2.1 F0.2 B2.1 B0.0 F2.2 B2.2 B0.1 B0.2"
    )
    # F(s,m) = 2m + s, B(s,m) = 2m + 3 - s: slots 0, 1, 2, 2, 3, 3, 4, 5
    order = one_f_one_b(StageGraph.chain(2, (0, 0)), 2)[0]
    assert " ".join(map(str, order)) == "F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 B0.1"


@settings(max_examples=150, deadline=None)
@given(stage_graphs(), st.integers(1, 9))
def test_any_graph_gives_complete_orders_without_circle_and_within_the_bound(
    graph: StageGraph, num_micro_batch: int
) -> None:
    every = [
        (kind, s, m)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
        for s in range(graph.num_stages)
        for m in range(num_micro_batch)
    ]
    for name, make in ORDERS.items():
        orders = make(graph, num_micro_batch)
        flat = [
            (action.kind, action.stage, action.micro_batch) for order in orders for action in order
        ]
        assert sorted(flat) == sorted(every)
        assert not has_circle(graph, num_micro_batch, orders)
        for device, order in enumerate(orders):
            assert {graph.device_of_stage[action.stage] for action in order} == {device}
            for stage in graph.stages_of(device):
                for kind in (Kind.FORWARD, Kind.BACKWARD):
                    own = [
                        action.micro_batch
                        for action in order
                        if action.kind is kind and action.stage == stage
                    ]
                    assert own == list(range(num_micro_batch))
        proof = check(build(name, graph, num_micro_batch))
        assert proof.channels_in_order
        bound = [
            min(longest_path(graph, s), num_micro_batch) if name == "1f1b" else num_micro_batch
            for s in range(graph.num_stages)
        ]
        assert list(proof.peak_in_flight) == bound


@settings(max_examples=80, deadline=None)
@given(stage_graphs(), st.integers(1, 6))
def test_messages_only_between_devices_one_pair_for_each_edge_and_micro_batch(
    graph: StageGraph, num_micro_batch: int
) -> None:
    schedule = build("1f1b", graph, num_micro_batch)
    place = graph.device_of_stage
    crossing = sum(place[a] != place[b] for a, b in graph.edges) + sum(
        place[a] != place[b] for a, b in graph.gradient_edges
    )
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
        "F0.0, send F 0>1.0, F0.1, send F 0>1.1, receive B 1>0.0, B0.0, receive B 1>0.1, B0.1, "
        "synchronise 0.1, update"
    )
    assert schedule.orders[1] == actions(
        "receive F 0>1.0, F1.0, B1.0, send B 1>0.0, receive F 0>1.1, F1.1, B1.1, send B 1>0.1, "
        "synchronise 1.1, update"
    )


def test_local_edges_and_edges_without_gradient_send_less() -> None:
    # 0 and 2 share a device; 0 -> 1 carries no gradient back
    graph = StageGraph((0, 1, 0), ((0, 1), (0, 2), (1, 2)), ((0, 2), (1, 2)))
    messages = {
        str(action)
        for order in build("gpipe", graph, 1).orders
        for action in order
        if action.kind is Kind.SEND
    }
    assert messages == {"send F 0>1.0", "send F 1>2.0", "send B 2>1.0"}


def test_receives_move_ahead_so_that_a_channel_keeps_its_order() -> None:
    # stage 0 sends to 1 and 2, both on device 1; 2 runs later, but its message leaves before the
    # next one for 1
    graph = StageGraph((0, 1, 1), ((0, 1), (0, 2)), ((0, 1), (0, 2)))
    orders = (actions("F0.0, F0.1"), actions("F1.0, F1.1, F2.0, F2.1"))
    result = add_messages(graph, orders)
    assert result[0] == actions(
        "F0.0, send F 0>1.0, send F 0>2.0, F0.1, send F 0>1.1, send F 0>2.1"
    )
    assert result[1] == actions(
        "receive F 0>1.0, F1.0, receive F 0>2.0, receive F 0>1.1, F1.1, F2.0, receive F 0>2.1, F2.1"
    )


def test_channels_out_of_order_are_reported() -> None:
    graph = StageGraph((0, 1, 1), ((0, 1), (0, 2)), ())
    late = (
        actions("F0.0, send F 0>1.0, send F 0>2.0"),
        actions("receive F 0>2.0, F2.0, receive F 0>1.0, F1.0"),
    )
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


# ---- when a send is known to have arrived


def test_a_receive_shows_which_sends_have_arrived() -> None:
    """1F1B of 3 micro-batches on 2 devices, by hand. Device 1: F0 B0 F1 B1 F2 B2. Its gradient of
    micro-batch m shows that activation m has arrived; the activation of micro-batch m + 2 shows
    that gradient m has."""
    schedule = build("1f1b", StageGraph.chain(2), 3)
    first, second = (
        arrived_by(schedule.stage_graph, schedule.orders, device) for device in range(2)
    )
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
def test_what_a_receive_shows_is_true_in_every_order_of_events(
    graph: StageGraph, num_micro_batch: int, name: str
) -> None:
    """Independently: a send has arrived when its receive comes before the message in the graph of
    all orders and messages.
    """
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
