"""Plan files that somebody changed: each loads, and then simulates and prints, or is refused with a
sentence.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

import whale as wh
from whale.cluster.cluster import (
    ETHERNET_50G,
    PCIE_3_X16,
    Cluster,
    Device,
    Disk,
    HostMemory,
    device_kind,
)
from whale.cluster.kinds import GIGA
from whale.plans.plan import Plan
from whale.report import print_plan
from whale.report.plan_page import plan_json
from whale.report.timeline import print_timeline

WIDTH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def heterogeneous() -> Cluster:
    """Two hosts of two devices, with memory and disks."""
    kinds = ("V100-32GB", "P100", "T4", "V100-32GB")
    devices = tuple(
        Device(rank, f"host{rank // 2}", rank % 2, device_kind(kind))
        for rank, kind in enumerate(kinds)
    )
    memory = HostMemory(64 * GIGA, 100 * GIGA, 12 * GIGA, 48 * GIGA)
    disk = Disk(1000 * GIGA, 3 * GIGA, 2 * GIGA)
    return Cluster(devices, PCIE_3_X16, ETHERNET_50G).with_memories(memory, disk)


def plan_with(**config: Any) -> Plan:
    return wh.plan(Net(), torch.randn(20, WIDTH), cluster=heterogeneous(), config=config)


def pipeline() -> Plan:
    """Two replicas of two stages on heterogeneous devices, with recomputation."""
    return plan_with(num_task_graph=2, num_micro_batch=3, recompute=True)


def grid() -> Plan:
    """One stage on two devices, then one on a grid of four."""
    model = wh.annotate(Net(), {"layers.0": wh.replicate(2), "layers.[1-3]": wh.split(4)})
    return wh.plan(model, torch.randn(12, WIDTH), cluster=6, config={"num_micro_batch": 2})


def zero() -> Plan:
    """The same stages, with weights, gradients and states in parts (ZeRO 3)."""
    return plan_with(num_task_graph=2, num_micro_batch=2, zero=3)


def offloaded() -> Plan:
    """Everything that training holds is at home on a host or a disk."""
    homes = {"optimizer": "disk", "gradients": "host", "weights": "host", "activations": "host"}
    return plan_with(num_task_graph=2, num_micro_batch=2, offload=homes)


def unlike() -> Plan:
    """One device beside a replica of two stages, of which one is on a grid of two."""
    split = {"ranks": [2, 3], "split": True, "grid": [1, 2, 1]}
    replicas = [{"stages": [[0]]}, {"stages": [[1], split], "num_micro_batch": 2}]
    return plan_with(replicas=replicas)


PLANS = (pipeline, grid, zero, offloaded, unlike)
NUMBERS = range(len(PLANS))


@pytest.fixture(scope="module")
def contents() -> list[str]:
    wh.init()
    return [make().to_json() for make in PLANS]


def paths(data: Any) -> list[tuple[Any, ...]]:
    """Every place in JSON data, as the keys that lead there."""
    found: list[tuple[Any, ...]] = []
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        found.append(path)
        if isinstance(value, dict):
            waiting += [((*path, key), item) for key, item in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, place), item) for place, item in enumerate(value)]
    return found[1:]


def negate(value: Any) -> Any:
    return -value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


REPLACEMENTS: tuple[Callable[[Any], Any], ...] = (
    lambda value: None,
    lambda value: 0,
    lambda value: 1,
    lambda value: 7,
    lambda value: 10**6,
    lambda value: 10**15,
    lambda value: 10**400,
    lambda value: 1e300,
    lambda value: float("nan"),
    lambda value: float("inf"),
    lambda value: "",
    lambda value: "x",
    lambda value: [],
    lambda value: {},
    lambda value: [[]],
    lambda value: value + 1 if isinstance(value, int) else value,
    lambda value: value[::-1] if isinstance(value, (list, str)) else value,
    negate,
)


def mutate(data: Any, choose: random.Random) -> None:
    """Deletes, doubles, replaces or exchanges something somewhere."""
    path = choose.choice(paths(data))
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    last = path[-1]
    how = choose.choice(("delete", "double", "replace", "replace", "replace", "copy"))
    if how == "delete":
        del parent[last]
    elif how == "double" and isinstance(parent, list):
        parent.insert(last, parent[last])
    elif how == "copy":
        other = data
        for key in choose.choice(paths(data)):
            other = other[key]
        parent[last] = json.loads(json.dumps(other))
    else:
        parent[last] = choose.choice(REPLACEMENTS)(parent[last])


def test_times_below_zero_are_refused_and_rounded_bytes_are_not(
    contents: list[str], tmp_path: Path
) -> None:
    """Schedules for other numbers of micro-batches are made of the times of the stages."""
    file = tmp_path / "plan.json"
    data = json.loads(contents[0])
    data["devices"][0]["memory"]["sample_bytes"] = -1e-9
    data["figures"]["stages"][0]["memory"]["saved"]["sample_bytes"] = -1e-9
    file.write_text(json.dumps(data))
    Plan.load(file)
    data["templates"][0]["stages"][0]["forward_s"] = -1e-9
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"stages\[0\].forward_s is -1e-09, which is negative"):
        Plan.load(file)


def test_buckets_of_no_bytes_are_refused(contents: list[str], tmp_path: Path) -> None:
    data = json.loads(contents[0])
    data["settings"]["bucket_bytes"] = 0
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="all-reduced in buckets of 0 bytes"):
        Plan.load(tmp_path / "plan.json")


def no_such_stage(data: Any) -> None:
    for holding in data["templates"][0]["tensors"].values():
        holding["stages"] = [7]


def one_fraction_less(data: Any) -> None:
    data["figures"]["zero"][0]["fractions"].pop()


def one_stage_less(data: Any) -> None:
    data["figures"]["zero"][0]["stage_trained_bytes"].pop()


def a_group_twice(data: Any) -> None:
    data["figures"]["zero"].append(data["figures"]["zero"][0])


def another_level(data: Any) -> None:
    data["figures"]["zero"][0]["level"] = 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_such_stage, "names a stage beyond its 2"),
        (one_fraction_less, "what ranks share under ZeRO do not fit together"),
        (one_stage_less, "what ranks share under ZeRO do not fit together"),
        (a_group_twice, "a rank twice in what ranks share under ZeRO"),
        (another_level, "level 0 of ZeRO"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    contents: list[str], tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    data = json.loads(contents[PLANS.index(zero)])
    change(data)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=said):
        Plan.load(tmp_path / "plan.json")


def use(plan: Plan) -> None:
    console = Console(width=120, file=io.StringIO())
    print_plan(plan, console)
    timeline = wh.simulate(plan)
    print_timeline(plan, timeline, console)
    json.dumps(plan_json(plan, timeline))


def test_a_renamed_field_of_the_json_is_there_under_both_names_and_says_so_once() -> None:
    made = grid()
    data = plan_json(made, wh.simulate(made))
    assert data["renamed"] == {"told_bytes": "exchanged_bytes"}
    operations = [each for sharding in data["shardings"] for each in sharding["operations"]]
    assert operations
    assert all(each["told_bytes"] == each["exchanged_bytes"] for each in operations)


def changes(max_examples: int) -> Callable[[Any], Any]:
    """Runs a test with so many changed files."""

    def decorate(test: Any) -> Any:
        given_changes = given(
            which=st.sampled_from(NUMBERS),
            seed=st.integers(0, 10**9),
            number=st.sampled_from([1, 1, 1, 2]),
        )
        health = [HealthCheck.function_scoped_fixture]
        how = settings(max_examples=max_examples, deadline=None, suppress_health_check=health)
        return how(given_changes(test))

    return decorate


@changes(300)
def test_a_changed_plan_file_works_or_is_refused(
    contents: list[str], tmp_path: Path, which: int, seed: int, number: int
) -> None:
    works_or_is_refused(contents[which], tmp_path, seed, number)


@pytest.mark.slow
@changes(3000)
def test_many_changed_plan_files_work_or_are_refused(
    contents: list[str], tmp_path: Path, which: int, seed: int, number: int
) -> None:
    works_or_is_refused(contents[which], tmp_path, seed, number)


def works_or_is_refused(content: str, tmp_path: Path, seed: int, number: int) -> None:
    data = json.loads(content)
    choose = random.Random(seed)
    for _ in range(number):
        mutate(data, choose)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    try:
        plan = Plan.load(file)
    except ValueError as refused:
        assert "plan.json" in str(refused)
        return
    try:
        use(plan)
    except ValueError as refused:
        assert str(refused)


def test_the_plans_have_what_they_are_for() -> None:
    assert zero().zero == 3 and zero().blocks
    assert {block.weights for block in offloaded().blocks} == {"host"}
    assert len(unlike().templates) == 2


@pytest.mark.parametrize("which", NUMBERS)
def test_the_file_itself_loads(contents: list[str], tmp_path: Path, which: int) -> None:
    file = tmp_path / "plan.json"
    file.write_text(contents[which])
    plan = Plan.load(file)
    assert plan.to_json() == contents[which]
    use(plan)


def test_alike_replicas_are_stored_once(tmp_path: Path) -> None:
    """64 times the replicas add a few lines each, not a copy of what they run."""
    wh.init()

    def size(num_replicas: int) -> int:
        config = {"num_task_graph": 2, "num_micro_batch": 2}
        batch = torch.randn(4 * num_replicas, WIDTH)
        plan = wh.plan(Net(), batch, cluster=2 * num_replicas, config=config)
        assert len(plan.templates) == len(plan.shares) == 1
        return len(plan.to_json().splitlines())

    lines_of_replica = (size(64) - size(1)) / 63
    assert lines_of_replica < 40
