"""Layers of a captured model, timed on this machine: which they are, that they run, and that the
planner takes their times.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale import api
from whale.calibration import turns
from whale.calibration.layers import TimedRegion, layer_groups, layer_modules, measure_layers
from whale.capture.batch import read_batch
from whale.capture.graph import CapturedGraph
from whale.capture.prepare import CapturedModel
from whale.cli.profile_ranks import captured_by, describe_layers
from whale.cluster.cluster import Cluster
from whale.cluster.layer_times import beside, save_layer_times
from whale.costs.layer_times import regions_of_modules
from whale.distributed.ranks import Ranks

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU())
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inner(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.words = nn.Embedding(30, WIDTH)
        self.body.h = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 30)

    def forward(self, words: Tensor) -> Tensor:
        x = self.body.words(words)
        for block in self.body.h:
            x = block(x)
        return self.head(x).square().mean(dim=(1, 2)).mean()


BATCH = {"words": torch.zeros(4, 6, dtype=torch.long)}


@pytest.fixture(scope="module")
def prepared() -> CapturedModel:
    layout, tensors = read_batch(BATCH)
    return api._prepare(Net(), layout, tensors, None, wh.Config(), "cpu")


@pytest.fixture(scope="module")
def captured(prepared: CapturedModel) -> CapturedGraph:
    return prepared.captured


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MOST_S", 0.0)
    monkeypatch.setattr(turns, "STRETCH_S", 0.001)


def test_layers_are_the_outermost_numbered_modules_and_what_is_beside_them(
    captured: CapturedGraph,
) -> None:
    assert layer_modules(captured) == ["body.words", "body.h.0", "body.h.1", "body.h.2", "head"]
    groups = [group.modules for group in layer_groups(captured)]
    assert groups == [("body.words",), ("body.h.0", "body.h.1", "body.h.2"), ("head",)]


def test_a_region_alone_computes_what_its_module_does(captured: CapturedGraph) -> None:
    """The weights are those that the region has: all 0.02."""
    (region,) = regions_of_modules(captured, ["body.h.1"])
    timed = TimedRegion(captured, region, Ranks("cpu"))
    block = Block(WIDTH)
    for parameter in block.parameters():
        nn.init.constant_(parameter, 0.02)
    x = torch.rand(2, 6, WIDTH)
    (result,) = timed._module(x)
    torch.testing.assert_close(result, block(x))
    forward_s, backward_s = timed.turn_of(2)()
    assert forward_s > 0 and backward_s > 0


def test_measured_layers_go_into_a_plan(
    prepared: CapturedModel, quickly: None, tmp_path: Path
) -> None:
    cluster = Cluster.uniform(1, "CPU")
    said: list[str] = []
    times = measure_layers(prepared, 4, cluster, Ranks("cpu"), said.append)
    assert [layer.kind for layer in times.layers] == ["CPU"] * 3
    assert [point.samples for point in times.layers[1].times] == [1, 2, 4]
    assert "3 different layers of 5" in said[0]
    assert "body.h.0 and 2 more" in describe_layers(times)
    path = tmp_path / "cluster.yaml"
    cluster.save(path)
    save_layer_times(times, beside(path))
    plan = wh.plan(Net(), BATCH, cluster=path)
    decision = next(each for each in plan.decisions if each.what == "layer times")
    assert decision.choice == "5 modules on CPU"
    assert plan.figures is not None
    (stage,) = plan.figures.stages[0].times.values()
    blocks = Cluster.load(path).layer_times
    assert blocks is not None
    # times are exact for half of the mini-batch; the loss is beside the layers, and short
    measured = sum(len(layer.modules) * layer.seconds(2)[0] for layer in blocks.layers)
    assert 0.999 * measured <= stage.forward.of(2) <= 1.2 * measured


def test_a_script_is_captured_and_goes_no_further(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, whale as wh\n"
        "wh.init()\n"
        "width = int(sys.argv[1])\n"
        "wh.parallelize(torch.nn.Linear(width, 1), torch.zeros(4, width),\n"
        "               loss=lambda out, batch: out.mean())\n"
        "raise SystemExit('not reached')\n"
    )
    ready = captured_by(script, ["3"])
    assert ready.batch_size == 4
    shapes = {state.shape for state in ready.prepared.captured.state.values()}
    assert (1, 3) in shapes
    script.write_text("import whale as wh\nwh.init()\n")
    with pytest.raises(ValueError, match="ended before it called"):
        captured_by(script, [])
