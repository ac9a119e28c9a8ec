"""Measured operations in the cost model: hand-worked points, the way through a cluster file, and a
real measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import whale as wh
from whale.calibration import operations, turns
from whale.calibration.turns import Speed
from whale.capture.batch import read_batch
from whale.capture.capture import capture_training
from whale.capture.export import Task
from whale.cluster.cluster import Cluster, Device, Link
from whale.cluster.file import dumps, loads
from whale.cluster.kinds import DEVICE_KINDS, DeviceKind, OperationPoint
from whale.costs.costs import NodeCost, backward_factors, backward_seconds, node_costs, seconds
from whale.costs.measured import measured_seconds, update_costs
from whale.distributed.ranks import Ranks
from whale.planning.stages import carries_gradient
from whale.planning.workload import Workload

POINTS = (
    OperationPoint("linear", 1e6, 1e-4, 2e-4),
    OperationPoint("linear", 1e8, 1e-3, 4e-3),
    OperationPoint("add", 1e3, 1e-6, 3e-6),
    OperationPoint("add", 1e6, 1e-4, 1e-4),
    OperationPoint("gelu", 1e3, 2e-6, 5e-6),
    OperationPoint("view", 1e3, 5e-7, 1e-6),
)
MEASURED = DeviceKind("CPU-measured", 1e11, 10**9, 1e10, bf16_flop_per_s=4e11, operations=POINTS)


def test_between_two_points_time_is_straight_in_logarithms() -> None:
    # 1e7 FLOP is half way between 1e6 and 1e8: the geometric mean of 1e-4 and 1e-3
    assert measured_seconds(MEASURED, "aten.linear", 1e7, 1.0, False) == pytest.approx(10**-3.5)
    assert measured_seconds(MEASURED, "aten.linear", 1e7, 1.0, True) == pytest.approx(
        (2e-4 * 4e-3) ** 0.5
    )
    assert measured_seconds(MEASURED, "aten.linear", 10.0, 1.0, False) == pytest.approx(
        1e-4
    )  # overhead
    assert measured_seconds(MEASURED, "aten.linear", 3e8, 1.0, False) == pytest.approx(
        3e-3
    )  # in proportion


def test_a_product_that_is_not_square_takes_the_time_of_its_bytes_besides() -> None:
    # 1e6 FLOP: 50 x 100 x 100, where a square one has sides of 79.4 numbers
    square = 3 * 4 * 500_000 ** (2 / 3)
    assert measured_seconds(MEASURED, "aten.linear", 1e6, square, False) == pytest.approx(1e-4)
    assert measured_seconds(MEASURED, "aten.linear", 1e6, square + 1e6, False) == pytest.approx(
        1e-4 + 1e6 / 1e10
    )
    assert measured_seconds(MEASURED, "aten.linear", 1e6, square + 1e6, True) == pytest.approx(
        2e-4 + 2e6 / 1e10
    )


def test_an_update_goes_by_the_number_of_parameters_and_by_their_bytes() -> None:
    # without state 1 us and 1 ns a byte, with two states 3 us and 5 ns a byte
    costs = (("sgd", 1e-6, 1e-9), ("adamw", 3e-6, 5e-9))
    points = [
        OperationPoint(name, size, each_s + byte_s * size, 1.0)
        for name, each_s, byte_s in costs
        for size in (1e3, 1e6)
    ]
    kind = replace(MEASURED, operations=(*POINTS, *points))
    assert update_costs(kind, 0.0) == pytest.approx((1e-6, 1e-9))
    assert update_costs(kind, 1.0) == pytest.approx((2e-6, 3e-9))  # SGD with momentum
    assert update_costs(kind, 2.0) == pytest.approx((3e-6, 5e-9))
    assert update_costs(MEASURED, 2.0) is None
    one_size = replace(kind, operations=(*POINTS, *points[1::2]))  # by hand, in a cluster file
    assert update_costs(one_size, 0.0) == pytest.approx((0.0, 1e-9 + 1e-12))


def test_operations_that_were_not_measured_go_by_one_that_was() -> None:
    assert measured_seconds(MEASURED, "aten.addmm", 1e6, 1.0, False) == pytest.approx(1e-4)
    assert measured_seconds(MEASURED, "aten.exp", 0.0, 1e3, False) == pytest.approx(2e-6)  # as gelu
    assert measured_seconds(
        MEASURED, "aten.an_operation_of_tomorrow", 0.0, 1e6, False
    ) == pytest.approx(1e-4)  # as add
    assert measured_seconds(MEASURED, "aten.permute", 0.0, 0.0, False) == pytest.approx(
        5e-7
    )  # a view
    assert measured_seconds(MEASURED, "aten.tanh", 0.0, 1e3, False) == pytest.approx(
        1e-6
    )  # neither it nor its stand-in: as add
    assert measured_seconds(DEVICE_KINDS["V100-16GB"], "aten.linear", 1e6, 1.0, False) is None


def test_the_cost_model_takes_measured_times_where_there_are_any() -> None:
    cost = NodeCost(flop=1e6, moved_bytes=1e4, output_bytes=100, operation="aten.linear")
    assert seconds(cost, MEASURED) == pytest.approx(1e-4)
    assert seconds(cost, MEASURED, "bf16") == pytest.approx(1e-4 / 4)  # by the ratio of the rates
    assert seconds(cost, replace(MEASURED, operations=())) == pytest.approx(1e6 / 1e11 + 1e4 / 1e10)


def test_a_batch_norm_over_devices_takes_no_less_than_one_alone() -> None:
    # measured in 2 us where one alone took 3, its backward in 9 us where one alone took 5
    points = (
        OperationPoint("batch_norm", 1e3, 3e-6, 5e-6),
        OperationPoint("batch_norm_over_devices", 1e3, 2e-6, 9e-6),
    )
    layout, tensors = read_batch(torch.ones(4, 6))
    task = Task(lambda output, batch: output.sum(), "cpu", None)
    captured = capture_training(
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), layout, tensors, task
    ).captured
    norm = next(node for node in captured.compute_nodes() if "batch_norm" in str(node.target))
    more = Workload(captured, 4, carries_gradient(captured), 0.0, share=2).over_devices(
        norm, replace(MEASURED, operations=points)
    )
    assert more is not None
    for num_samples in (1, 2, 4):
        assert more.forward.of(num_samples) == 0.0 < more.backward.of(num_samples)


def test_each_operand_of_a_product_is_half_of_its_measured_backward() -> None:
    layout, tensors = read_batch(torch.ones(4, 6))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    captured = capture_training(
        model, layout, tensors, Task(lambda output, batch: output.sum(), "cpu", None)
    ).captured
    gradients = carries_gradient(captured)
    costs = node_costs(captured, 4)
    first, second = (node for node in captured.compute_nodes() if "linear" in str(node.target))
    whole = measured_seconds(
        MEASURED, "aten.linear", costs[first].flop, costs[first].moved_bytes, True
    )
    assert whole is not None
    factors = [backward_factors(node, costs[node], gradients) for node in (first, second)]
    assert backward_seconds(costs[first], factors[0], MEASURED, "fp32") == pytest.approx(
        (0.0, whole / 2)
    )
    assert backward_seconds(costs[second], factors[1], MEASURED, "fp32") == pytest.approx(
        (whole / 2, whole / 2)
    )


def test_measured_operations_survive_the_cluster_file() -> None:
    link = Link(1e9, 1e-5)
    cluster = Cluster((Device(0, "here", 0, MEASURED),), link, link)
    (device,) = loads(dumps(cluster)).devices
    assert device.kind.operations == tuple(
        OperationPoint(
            point.name, point.work, pytest.approx(point.forward_s), pytest.approx(point.backward_s)
        )
        for point in POINTS
    )
    with pytest.raises(ValueError, match="operations"):
        loads(dumps(cluster).replace("1000000", "-3", 1))


def test_a_real_measurement_has_every_operation_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operations, "WIDTHS", {False: (8, 32)})
    monkeypatch.setattr(turns, "STRETCH_S", 1e-3)
    monkeypatch.setattr(turns, "MOST_S", 0.0)
    subjects = operations.operations_of(Ranks("cpu"))
    seconds = turns.take_turns(
        {number: each.subject for number, each in enumerate(subjects)},
        Ranks("cpu"),
        lambda what: None,
    )
    points = [
        point for number, each in enumerate(subjects) for point in each.points(seconds[number])
    ]
    found = sorted((point.name, point.work) for point in points)
    assert found == sorted(
        (trial.name, trial.work) for width in (8, 32) for trial in operations.trials("cpu", width)
    )
    assert all(point.forward_s > 0 and point.backward_s > 0 and point.work > 0 for point in points)
    # the work of a linear layer is what torch itself counts
    x = torch.ones(32, 32)
    w = torch.ones(32, 32)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        torch.nn.functional.linear(x, w)
    assert counter.get_total_flops() in [point.work for point in points if point.name == "linear"]


def test_plans_of_measured_devices_take_their_times() -> None:
    link = Link(1e9, 1e-5)
    cluster = Cluster((Device(0, "here", 0, MEASURED), Device(1, "here", 1, MEASURED)), link, link)
    plan = wh.plan(
        nn.Linear(100, 50, bias=False),
        torch.randn(200, 100),
        loss=lambda output, batch: output.square().sum(),
        cluster=cluster,
    )
    assert (
        plan.figures is not None and not plan.figures.overlaps
    )  # a CPU sums gradients on the core that computes
    forward = plan.figures.stages[0].times["CPU-measured"].forward
    # 100 samples: 2 * 100 * 100 * 50 FLOP, and the square and sum of 100 x 50 numbers
    product = measured_seconds(MEASURED, "aten.linear", 1e6, 1.0, False)
    assert product is not None and forward.of(100) > product == pytest.approx(1e-4)


def _typical(*stretches: turns.Stretch) -> list[float]:
    record = turns.Record()
    for stretch in stretches:
        record.add(stretch, look_s=1.0)
    return record.typical()


def test_another_guest_of_the_processor_does_not_count() -> None:
    """It makes the core slow for a second or for ten: in most stretches, and not in all."""
    alone = turns.Stretch([[1e-3]] * 60)
    slow = turns.Stretch([[2e-3]] * 30)
    assert _typical(slow, alone, slow, slow, alone, slow, alone, slow) == pytest.approx([1e-3])


def test_a_process_that_shares_the_core_counts() -> None:
    """Every tenth turn loses the core for 10 ms: twice the time in the long run, which no median of
    turns shows.
    """
    shared = turns.Stretch([[1.1e-2 if number % 10 == 5 else 1e-3] for number in range(60)], 0.5)
    assert _typical(shared, shared, shared, shared) == pytest.approx([2e-3])
    # a third of the stretches had the core for themselves; it was no faster in them
    lucky = turns.Stretch([[1e-3]] * 60, 1.0)
    halved = turns.Stretch([[2e-3]] * 30, 0.5)
    assert _typical(*[lucky, halved, halved] * 3) == pytest.approx([2e-3])
    assert _typical(*[lucky, halved, lucky] * 3) == pytest.approx(
        [1e-3]
    )  # something that ran for a moment


def test_what_a_process_takes_is_shared_by_all_pieces_of_a_turn() -> None:
    """A turn of 1 + 3 ms that loses the core for 4 ms in every second turn, in one piece or the
    other.
    """
    taken = [[1e-3, 3e-3], [5e-3, 3e-3], [1e-3, 3e-3], [1e-3, 7e-3]] * 4
    assert _typical(turns.Stretch(taken, 4 / 6)) == pytest.approx([1.5e-3, 4.5e-3])


class Core(Speed):
    """One that is slow at some moments, which are told by the number of stretches up to then. Each
    stretch has five turns.
    """

    def __init__(self, is_slow: Callable[[int], bool]) -> None:
        super().__init__()
        self._is_slow = is_slow
        self.turns = {"a": 0, "b": 0}

    def look(self) -> float:
        return 2.0 if self._is_slow(sum(turns // 5 for turns in self.turns.values())) else 1.0

    @property
    def best_s(self) -> float:
        return 1.0

    def subject(self, name: str) -> turns.Subject:
        def turn() -> list[float]:
            seconds = self.look()
            self.turns[name] += 1
            return [seconds]

        return turns.Subject(turn, is_together=True)


@pytest.mark.parametrize(("num_slow", "passes"), [(0, 6), (3, 6), (12, 15)])
def test_passes_continue_until_enough_stretches_had_a_fast_core(
    monkeypatch: pytest.MonkeyPatch, num_slow: int, passes: int
) -> None:
    core = Core(lambda done: done < num_slow)
    monkeypatch.setattr(turns, "Speed", lambda device: core)
    assert turns.take_turns({"a": core.subject("a")}, Ranks("cpu"), lambda what: None) == {
        "a": pytest.approx([1.0])
    }
    assert core.turns["a"] == 5 * passes + 1  # one to get warm


def test_only_what_met_too_few_fast_moments_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first six passes (a b, a b, ...) the core is fast from the beginning to the end of
    every other b.
    """
    core = Core(lambda done: done < 12 and done % 4 not in (1, 2))
    said: list[str] = []
    monkeypatch.setattr(turns, "Speed", lambda device: core)
    turns.take_turns({name: core.subject(name) for name in "ab"}, Ranks("cpu"), said.append)
    assert core.turns == {"a": 5 * (6 + 3) + 1, "b": 5 * 6 + 1}
    assert said[-2:] == ["pass 6 over 2 of 2 kinds of work", "pass 7 over 1 of 2 kinds of work"]


def test_what_is_short_comes_after_each_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TURNS_TOGETHER", 1), ("MOST_S", 0.0)):
        monkeypatch.setattr(turns, name, value)
    done: list[str] = []

    def subject(name: str) -> turns.Subject:
        def turn() -> list[float]:
            done.append(name)
            return [1.0]

        return turns.Subject(turn, is_together=True, is_short=name == "x")

    turns.take_turns({name: subject(name) for name in "axb"}, Ranks("cpu"), lambda what: None)
    # warm; then one pass, in which ranks meet in one turn before the one that is timed
    assert "".join(done) == "axb" + "aaxx" + "bbxx"


def test_a_core_that_is_never_fast_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(turns, "Speed", lambda device: core)
    monkeypatch.setattr(turns, "MOST_S", 0.01)
    core = Core(lambda done: True)
    assert turns.take_turns({"a": core.subject("a")}, Ranks("cpu"), said.append) == {
        "a": pytest.approx([2.0])
    }
    assert said[-1].startswith(
        "1 of 1 kinds of work met too few moments with fast cores in 0 s, and their times may be "
        "too long"
    )


def test_a_look_sees_a_core_that_got_slow() -> None:
    speed = Speed()
    looks = [speed.look() for _ in range(40)]
    assert speed.slowness(speed.best_s) == 1.0 and min(looks) <= speed.best_s <= sorted(looks)[3]
    assert (
        Speed(is_core=False).look() == Speed(is_core=False).look()
    )  # of a device that is no core nothing is known
