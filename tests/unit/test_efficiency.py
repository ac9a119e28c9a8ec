"""What is reached of a data sheet, TF32, what optimizers launch, and measured layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale.cluster.cluster import Cluster, Device, device_kind
from whale.cluster.file import dumps, loads
from whale.cluster.kinds import DeviceKind, Efficiency
from whale.cluster.layer_times import (
    Layer,
    LayerTime,
    LayerTimes,
    beside,
    load_layer_times,
    save_layer_times,
)
from whale.costs.costs import NodeCost, seconds
from whale.costs.layer_times import all_modules, regions_of_modules, signature
from whale.costs.optimizers import update_work

NAMES = ["a.weight", "a.bias", "b.weight"]


def test_the_formula_of_the_data_sheet() -> None:
    """2e12 FLOP at half of 1e12/s, 3e9 bytes at half of 1e9/s and at 3e9/s on the chip, 0.5 s."""
    reached = Efficiency(0.5, 0.5, 3e9, 0.5)
    kind = DeviceKind("k", 1e12, 0, 1e9, efficiency=reached)
    assert seconds(NodeCost(2e12, 3e9, 0, "aten.linear"), kind) == pytest.approx(4 + 6 + 1 + 0.5)
    assert seconds(NodeCost(0.0, 0.0, 8, "aten.view"), kind) == 0.0
    exact = DeviceKind("k", 1e12, 0, 1e9)
    assert seconds(NodeCost(2e12, 3e9, 0, "aten.linear"), exact) == pytest.approx(2 + 3)


def test_a_file_keeps_what_is_reached() -> None:
    mine = DeviceKind("mine", 1e13, 10**10, 1e12, efficiency=Efficiency(0.8, 0.7, 5e12, 2e-6))
    cluster = Cluster.uniform(1, mine)
    assert loads(dumps(cluster)).devices[0].kind == mine
    with pytest.raises(ValueError, match=r"unknown key 'product' in kinds\.mine\.efficiency"):
        loads(dumps(cluster).replace("products", "product"))


def test_fast_memories_are_reached_less_than_slow_ones() -> None:
    reached = [
        device_kind(name).reached_bytes_per_s / device_kind(name).bytes_per_s
        for name in ("T4", "V100-16GB", "A100-40GB", "GH200")
    ]
    assert reached == sorted(reached, reverse=True)


@pytest.mark.parametrize(
    ("make", "how", "operations", "passes"),
    [
        # SGD for-loop: weight += -lr gradient reads both and writes one
        (lambda p: torch.optim.SGD([w for _, w in p], 0.1, foreach=False), "for-loop", 1, 3),
        (lambda p: torch.optim.SGD([w for _, w in p], 0.1), "foreach", 0, 3),
        # reads weight, gradient and two averages, writes all but the gradient
        (lambda p: torch.optim.Adam([w for _, w in p], fused=True), "fused", 0, 8),
    ],
)
def test_updates_are_counted_as_they_are_launched(
    make: wh.api.OptimizerFactory, how: str, operations: float, passes: float
) -> None:
    work = update_work(make, NAMES)
    assert work is not None
    assert (work.how, work.operations) == (how, operations)
    assert work.passes == pytest.approx(passes, abs=1.01)


def test_adam_tensor_by_tensor_launches_many_operations_and_moves_more() -> None:
    loop = update_work(lambda p: torch.optim.Adam([w for _, w in p], foreach=False), NAMES)
    many = update_work(lambda p: torch.optim.Adam([w for _, w in p]), NAMES)
    fused = update_work(lambda p: torch.optim.Adam([w for _, w in p], fused=True), NAMES)
    assert loop is not None and many is not None and fused is not None
    assert loop.operations >= 6
    assert many.operations == fused.operations == 0
    assert loop.passes > 1.5 * fused.passes
    v100 = device_kind("V100-16GB")
    times = [work.seconds(4e8, 300, v100) for work in (loop, many, fused)]
    assert times[0] > times[1] > times[2]


def test_a_masked_update_is_the_fused_one_unless_the_user_chose() -> None:
    plain = update_work(lambda p: torch.optim.Adam([w for _, w in p]), NAMES, is_masked=True)
    chosen = update_work(
        lambda p: torch.optim.Adam([w for _, w in p], foreach=False), NAMES, is_masked=True
    )
    assert plain is not None and plain.how == "fused"
    assert chosen is not None and chosen.how == "for-loop"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x))).square().sum(-1).mean()


BATCH = {"x": torch.zeros(8, 16)}


def plan_on(*kinds: str, layer_times: LayerTimes | None = None) -> wh.Plan:
    devices = tuple(
        Device(rank, "host", rank, device_kind(kind)) for rank, kind in enumerate(kinds)
    )
    plain = Cluster.uniform(1)
    cluster = Cluster(devices, plain.intra_host, plain.inter_host, layer_times=layer_times)
    return wh.plan(Net(), BATCH, cluster=cluster, config={"strategy": "data", "num_micro_batch": 1})


def choice(plan: wh.Plan, what: str) -> str | None:
    return next((each.choice for each in plan.decisions if each.what == what), None)


def test_tf32_is_a_setting_of_the_plan() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        plain = plan_on("A100-40GB")
        assert choice(plain, "float32 products") is None
        torch.set_float32_matmul_precision("high")
        told = plan_on("A100-40GB")
        assert choice(told, "float32 products") == "TF32"
        assert told.settings.float32_precision == "high"
        assert told.stages[0].forward_s < plain.stages[0].forward_s
        mixed = plan_on("A100-40GB", "V100-16GB")
        assert choice(mixed, "float32 products") == "float32"
    finally:
        torch.set_float32_matmul_precision(before)


def times(*points: tuple[int, float, float]) -> tuple[LayerTime, ...]:
    return tuple(LayerTime(*point) for point in points)


def test_layer_times_between_and_beyond_what_was_measured() -> None:
    layer = Layer(("h.*",), "T4", times((2, 0.2, 0.6), (4, 0.3, 1.0)))
    assert layer.seconds(3) == pytest.approx((0.25, 0.8))
    assert layer.seconds(8) == pytest.approx((0.5, 1.8))
    assert layer.seconds(1) == pytest.approx((0.15, 0.4))
    assert Layer(("h",), "T4", times((2, 0.2, 0.6))).seconds(8) == pytest.approx((0.8, 2.4))
    noisy = Layer(("h",), "T4", times((2, 0.4, 0.6), (4, 0.3, 1.0)))
    assert noisy.seconds(4)[0] == noisy.seconds(2)[0] == 0.4
    with pytest.raises(ValueError, match="no times of shard width 2, only of 1"):
        layer.seconds(1, width=2)


def test_the_planner_takes_measured_layers_before_its_own_times() -> None:
    layers = LayerTimes(
        (Layer(("layers.*",), "t4", times((1, 0.5, 1.0), (8, 4.0, 8.0))),), "elsewhere"
    )
    plan = plan_on("T4", layer_times=layers)
    figures = plan.figures
    assert figures is not None
    (found,) = figures.stages[0].times.values()
    assert found.forward.of(8) == pytest.approx(4 * 4.0, rel=0.01)
    assert found.backward.of(8) == pytest.approx(4 * 8.0, rel=0.01)
    assert choice(plan, "layer times") == "4 modules on T4"
    # another kind of device has none of them
    other = plan_on("P100", layer_times=layers)
    assert choice(other, "layer times") == "0 modules on P100"


def test_layers_that_repeat_have_one_signature_and_others_do_not_fit() -> None:
    captured = wh.api._prepare(Net(), *_read(), None, wh.Config(), "cpu").captured
    regions = {r.module: r for r in regions_of_modules(captured, all_modules(captured))}
    assert len({signature(regions[f"layers.{number}"]) for number in range(4)}) == 1
    assert signature(regions["head"]) != signature(regions["layers.0"])
    wrong = LayerTimes((Layer(("layers.*",), "T4", times((1, 0.5, 1.0)), "0" * 12),))
    assert choice(plan_on("T4", layer_times=wrong), "layer times") == "0 modules on T4"


def _read() -> tuple[object, ...]:
    from whale.capture.batch import read_batch

    return read_batch(BATCH)


def test_a_file_of_layer_times_beside_the_cluster_file(tmp_path: Path) -> None:
    layers = LayerTimes((Layer(("h.*",), "T4", times((1, 0.5, 1.0)), "0123456789ab"),), "mine")
    cluster = Cluster.uniform(2, "T4")
    path = tmp_path / "cluster.yaml"
    cluster.save(path)
    assert Cluster.load(path).layer_times is None
    save_layer_times(layers, beside(path))
    assert Cluster.load(path).layer_times == layers
    beside(path).write_text("layers: [{modules: [h], kind: T4, times: [[0, 1, 2, 3]]}]")
    with pytest.raises(ValueError, match=r"layers\.0\.times\.0\.0: input should be greater"):
        load_layer_times(beside(path))


@pytest.mark.parametrize("written, said", [(".inf", "not inf"), ("yes", "not true")])
def test_a_layer_time_that_is_no_finite_number_is_refused(
    tmp_path: Path, written: str, said: str
) -> None:
    path = tmp_path / "cluster.layers.yaml"
    path.write_text(f"layers: [{{modules: [h], kind: T4, times: [[1, 1, {written}, 3]]}}]")
    with pytest.raises(ValueError, match=rf"layers\.0\.times\.0\.2: .* {said}"):
        load_layer_times(path)
