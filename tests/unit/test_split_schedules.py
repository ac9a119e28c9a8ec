"""Split backwards in messages, proof, memory and pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.schedules import actions
from whale.scheduling import (
    Action,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    StageGraph,
    add_messages,
    build,
    check,
    draw,
    even_costs,
    list_orders,
    lower_bound,
    parse_action,
    simulate,
)
from whale.scheduling.placement import wave


def by_hand() -> Schedule:
    """Two stages, two micro-batches; stage 1 split and finished in the order 1, 0."""
    graph = StageGraph.chain(2)
    orders = (actions("F0.0, F0.1, B0.0, B0.1"), actions("F1.0, I1.0, F1.1, I1.1, W1.1, W1.0"))
    return Schedule("by hand", graph, 2, add_messages(graph, orders))


def changed(device: int, line: str) -> Schedule:
    schedule = by_hand()
    orders = list(schedule.orders)
    orders[device] = actions(line)
    return replace(schedule, orders=tuple(orders))


@pytest.mark.parametrize(("kind", "written"), [(Kind.INPUT, "I2.0"), (Kind.WEIGHT, "W2.0")])
def test_parts_as_text(kind: Kind, written: str) -> None:
    assert str(Action(kind, 2, 0)) == written
    assert parse_action(written) == Action(kind, 2, 0)
    assert Action(kind, 2, 0).is_compute


def test_gradients_leave_after_the_input_gradient_and_synchronise_names_the_last_weight_one() -> (
    None
):
    schedule = by_hand()
    assert schedule.orders[1] == actions(
        "receive F 0>1.0, F1.0, I1.0, send B 1>0.0, receive F 0>1.1, F1.1, I1.1, send B 1>0.1, "
        "W1.1, W1.0, synchronise 1.0, update"
    )
    proof = check(schedule, require_channel_order=True)
    assert proof.peak_in_flight == (2, 2)  # until the weight gradient
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_whole_backwards_may_finish_out_of_order() -> None:
    graph = StageGraph.chain(2)
    orders = (actions("F0.0, F0.1, B0.1, B0.0"), actions("F1.0, F1.1, B1.1, B1.0"))
    schedule = Schedule("backwards", graph, 2, add_messages(graph, orders))
    check(schedule, require_channel_order=True)
    assert [str(order[-2]) for order in schedule.orders] == ["synchronise 0.0", "synchronise 1.0"]


START = "receive F 0>1.0, F1.0, I1.0, send B 1>0.0, receive F 0>1.1, F1.1, "


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            START + "I1.1, send B 1>0.1, W1.1, synchronise 1.1, update",
            "`W1.0` is missing on device 1",
        ),
        (
            START + "send B 1>0.1, W1.1, W1.0, synchronise 1.0, update",
            "`I1.1` is missing on device 1",
        ),
        (START + "send B 1>0.1, W1.0, synchronise 1.0, update", "`B1.1` is missing on device 1"),
        (
            START + "I1.1, send B 1>0.1, W1.1, W1.0, B1.0, synchronise 1.0, update",
            "`I1.0` on device 1 does not belong there: `B1.0`, the whole backward, is there too",
        ),
        (
            START + "W1.1, I1.1, send B 1>0.1, W1.0, synchronise 1.0, update",
            "`W1.1` on device 1 stands before `I1.1`: the weight gradient follows the input gradient",
        ),
        (
            START + "send B 1>0.1, I1.1, W1.1, W1.0, synchronise 1.0, update",
            "`send B 1>0.1` on device 1 stands before `I1.1`: it sends what has not been computed",
        ),
        (
            START + "I1.1, send B 1>0.1, W1.1, synchronise 1.0, W1.0, update",
            "`synchronise 1.0` on device 1 stands before `W1.0`: the gradients of the stage are "
            "not complete",
        ),
        (
            START + "I1.1, send B 1>0.1, W1.1, W1.0, synchronise 1.1, update",
            "`synchronise 1.1` on device 1 does not belong there: the last backward is that of "
            "micro-batch 0",
        ),
        (
            "receive F 0>1.0, I1.0, F1.0, send B 1>0.0, receive F 0>1.1, F1.1, I1.1, send B "
            "1>0.1, W1.1, W1.0, synchronise 1.0, update",
            "`I1.0` on device 1 stands before `F1.0`: a backward follows its forward",
        ),
    ],
)
def test_broken_splits_are_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        check(changed(1, line))
    assert str(error.value) == message


def test_channels_that_differ_are_refused_when_they_must_be_in_order() -> None:
    graph = StageGraph((0, 1, 1), ((0, 1), (0, 2)), ())
    orders = (
        actions("F0.0, send F 0>1.0, send F 0>2.0"),
        actions("receive F 0>2.0, F2.0, receive F 0>1.0, F1.0"),
    )
    schedule = Schedule("late", graph, 1, orders)
    message = r"message 0 from device 0 to device 1 is sent as `send F 0>1.0` but received as `receive F 0>2.0`"
    with pytest.raises(ScheduleError, match=message):
        check(schedule, forward_only=True, require_channel_order=True)


def test_memory_is_proved_against_the_cap() -> None:
    graph = StageGraph.chain(2)
    # stage 1 keeps 3 after a forward and 5 between input and weight gradient, as with recompute
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), saved=(2.0, 3.0), weight_gradient=(2.0, 5.0))
    # device 1: F 3, I 5, F 8, I 10, W 5, W 0
    assert check(by_hand(), costs=costs).peak_memory == (4.0, 10.0)
    assert simulate(by_hand(), costs).peak_memory == (4.0, 10.0)
    check(by_hand(), costs=replace(costs, memory_cap=(4.0, 10.0)))
    with pytest.raises(
        ScheduleError,
        match=r"device 1 holds activations of 10 at its peak, but its memory cap is 9.5",
    ):
        check(by_hand(), costs=replace(costs, memory_cap=(4.0, 9.5)))
    with pytest.raises(
        ScheduleError, match="device 0 holds activations of 3 at its peak, but its memory cap is 2"
    ):
        build("gpipe", graph, 3, even_costs(graph, memory_cap=2))


def test_parts_that_need_more_memory_than_the_forward_stay_within_the_cap() -> None:
    """With recompute the weight gradient can keep more than the forward left: then backwards are
    whole where memory is short.
    """
    graph = StageGraph.chain(4, wave(2, 1))
    ones = (1.0,) * 4
    for cap in (2.0, 4.0, 9.0):
        costs = Costs(ones, ones, ones, weight_gradient=(3.0,) * 4, memory_cap=(cap, cap))
        check(build("auto", graph, 6, costs), costs=costs)


@pytest.mark.parametrize("name", ["auto", "zero-bubble"])
def test_memory_cap_below_one_micro_batch_is_refused(name: str) -> None:
    graph = StageGraph.chain(4, wave(2, 1))
    with pytest.raises(
        ValueError,
        match=r"device 0 has a memory cap of 0.9, but one micro-batch alone saves 1 there",
    ):
        build(name, graph, 4, even_costs(graph, memory_cap=0.9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_backward_s": (1.0,)}, "input_backward_s has 1 entries, but forward_s has 2"),
        ({"forward_s": (1.0, -2.0)}, r"forward_s holds -2.0; nothing takes less than 0"),
        ({"message_s": {(0, 1): -1.0}}, "a message or action takes less than 0"),
    ],
)
def test_bad_costs_are_refused(change: dict[str, object], message: str) -> None:
    values: dict[str, object] = {
        "forward_s": (1.0, 1.0),
        "input_backward_s": (1.0, 1.0),
        "weight_backward_s": (1.0, 1.0),
    }
    with pytest.raises(ValueError, match=message):
        Costs(**{**values, **change})  # type: ignore[arg-type]


def test_costs_for_other_stages_are_refused() -> None:
    costs = even_costs(StageGraph.chain(2))
    with pytest.raises(ValueError, match="the costs are for 2 stages, but there are 3"):
        list_orders(StageGraph.chain(3), costs, 2)
    with pytest.raises(ValueError, match="memory_cap has 1 entries, but there are 2 devices"):
        list_orders(StageGraph.chain(2), replace(costs, memory_cap=(1.0,)), 2)


def test_times_worked_by_hand() -> None:
    """F 1, I 2, W 3, a message 0.5, 0.25 for each action; device 1 then computes without a gap from
    1.75 to 16.25.
    """
    costs = Costs((1.0, 1.0), (2.0, 2.0), (3.0, 3.0), message_s={(0, 1): 0.5}, action_s=0.25)
    timeline = simulate(by_hand(), costs)
    started = [
        {str(action): start for action, start in zip(order, starts, strict=True)}
        for order, starts in zip(timeline.schedule.orders, timeline.starts, strict=True)
    ]
    assert [started[1][name] for name in ("F1.0", "I1.0", "F1.1", "I1.1", "W1.1", "W1.0")] == [
        1.75,
        3.0,
        5.25,
        6.5,
        8.75,
        12.0,
    ]
    assert [started[0][name] for name in ("F0.0", "F0.1", "B0.0", "B0.1")] == [
        0.0,
        1.25,
        5.75,
        11.0,
    ]
    assert timeline.step_s == 16.25
    assert timeline.busy_s == (2 * 1.25 + 2 * 5.25, 2 * 1.25 + 2 * 2.25 + 2 * 3.25)
    assert timeline.bubble == pytest.approx(1 - (13 + 13.5) / 32.5)
    # device 1: 1.75 until its first forward, then its work, at least one action for each forward
    # and backward
    assert lower_bound(timeline.schedule.stage_graph, costs, 2) == pytest.approx(
        1.75 + 2 * (1.25 + 5.25)
    )


def test_picture_of_a_split_backward() -> None:
    assert draw(by_hand()).splitlines()[1:4] == [
        "device 0 (stage 0)  0 1 . 0'0'1'1'",
        "device 1 (stage 1)  . 0 0-1 1-1+0+",
        "0 forward of micro-batch 0, 0' its backward, 0- and 0+ its input and weight gradient, . idle",
    ]
