"""Plans in which tensors are at home outside of the device: their data, memory, transfers and
times.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale.cluster.cluster import Cluster, Disk, HostMemory
from whale.cluster.file import dumps, loads
from whale.cluster.kinds import GIGA
from whale.plans.check import contradiction
from whale.plans.plan import Plan

WIDTH = 64
HOST = HostMemory(64 * GIGA, 100 * GIGA, 12 * GIGA, 48 * GIGA)
DISK = Disk(1000 * GIGA, 3 * GIGA, 2 * GIGA)


class Net(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def cluster(number: int, memory_gb: float = 16.0) -> Cluster:
    made = Cluster.uniform(number, "V100-16GB").with_memories(HOST, DISK)
    memory_bytes = round(memory_gb * GIGA)
    devices = [
        replace(each, kind=replace(each.kind, memory_bytes=memory_bytes)) for each in made.devices
    ]
    return replace(made, devices=tuple(devices))


def plan(number: int = 1, model: nn.Module | None = None, **config: Any) -> Plan:
    sample = {"x": torch.zeros(8, WIDTH)}
    return wh.plan(model or Net(), sample, cluster=cluster(number), config=config)


# ---- plan data


def test_one_device_has_blocks_with_their_homes() -> None:
    made = plan(offload={"optimizer": "host", "activations": "disk"})
    assert made.zero == 1
    assert made.blocks and all(block.ranks == (0,) for block in made.blocks)
    assert {(block.weights, block.states) for block in made.blocks} == {("device", "host")}
    assert all(block.ends == (block.num_elements,) for block in made.blocks)
    assert [stage.activations for stage in made.stages] == ["disk"]
    names = [name for block in made.blocks for name in block.parameters]
    assert sorted(names) == sorted(name for name, _ in Net().named_parameters())


def test_copies_are_cut_before_they_leave() -> None:
    made = plan(2, offload={"weights": "host"})
    assert made.zero == 3
    assert {block.ranks for block in made.blocks} == {(0, 1)}
    assert {block.weights for block in made.blocks} == {"host"}


def test_stages_of_one_rank_have_blocks_of_their_own() -> None:
    made = plan(2, offload={"optimizer": "disk"}, num_task_graph=2, num_micro_batch=2)
    assert {block.ranks for block in made.blocks} == {(0,), (1,)}


def test_a_saved_plan_is_the_same(tmp_path: Path) -> None:
    made = plan(2, offload={"optimizer": "host", "weights": "disk", "activations": "host"})
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "host"}, "takes level 3 of ZeRO"),
        ({"gradients": "disk"}, "takes level 2 of ZeRO"),
        ({"states": "device", "updated_on": "host"}, "its optimizer state is on the device"),
        ({"ends": ()}, "no grid cuts its parameters"),
    ],
)
def test_homes_that_do_not_fit_together_are_refused(changes: dict[str, Any], words: str) -> None:
    made = plan(offload={"optimizer": "host"})
    wrong = replace(made, blocks=(replace(made.blocks[0], **changes), *made.blocks[1:]))
    assert words in (contradiction(wrong) or "")


def test_a_grid_cuts_its_blocks_itself() -> None:
    model = Net()
    wh.annotate(model, {"layers.*": wh.split(4)})
    made = plan(4, model, offload={"weights": "host"})
    assert made.blocks and not any(block.ends for block in made.blocks)
    assert contradiction(made) is None


# ---- config and cluster file


@pytest.mark.parametrize("value", [True, "host", {}, {"optimizer": "tape"}, {"optimiser": "host"}])
def test_offload_in_a_config_is_checked(value: Any) -> None:
    with pytest.raises(ValueError, match="'offload' must be 'auto', False or a dict"):
        wh.Config({"offload": value})


def test_memories_in_a_cluster_file() -> None:
    text = """
    hosts:
      - {name: a, kind: P100, host: {memory_gb: 256, memory_gb_per_s: 90, link_gb_per_s: 10}}
      - {name: b, kind: P100, count: 4}
    host: {memory_gb: 64, memory_gb_per_s: 60, link_gb_per_s: 12, links_gb_per_s: 24}
    disk: {memory_gb: 500, gb_per_s: 3, write_gb_per_s: 1, folder: /scratch}
    """
    found = loads(text)
    assert found.memories_of("a").size("host") == 256 * GIGA
    assert found.memories_of("b").size("host") == 64 * GIGA
    assert found.memories_of("b").rates("host", 4) == (6 * GIGA, 6 * GIGA)
    assert found.memories_of("b").rates("host", 1) == (12 * GIGA, 12 * GIGA)
    assert found.memories_of("b").rates("disk", 4) == (0.75 * GIGA, 0.25 * GIGA)
    assert found.memories_of("a").rates("host", 2) == (5 * GIGA, 5 * GIGA)
    assert loads(dumps(found)) == found
    with pytest.raises(ValueError, match=r"unknown key 'memory_gib' in hosts\[0\].host"):
        loads(text.replace("memory_gb: 256", "memory_gib: 256"))
