"""Split operations and ZeRO in the search: what is worth a grid, and that found plans are at least as
fast as annotated ones.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import whale as wh
from whale.cluster.cluster import Cluster, Device, DeviceKind, Link
from whale.operations.nodes import op_name
from whale.planning.problem import Problem
from whale.plans.plan import Plan
from whale.search.budget import Budget
from whale.search.candidate import MemoryChoice
from whale.search.drafting import actions_seconds
from whale.search.memory_drafts import estimates_with
from whale.search.outline import Outline
from whale.search.search import new_search
from whale.search.settings import OpenSettings
from whale.search.split_parts import split_operations
from whale.search.tensor_groups import tensor_groups
from whale.search.zero_terms import ZeroTerms
from whale.session import planning_only

WIDTH = 32
CLASSES = 4096
BATCH = 32


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        self.backbone = nn.Sequential(*layers)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classifier(self.backbone(x)), labels)


class Layers(nn.Module):
    """Activations that are larger than weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1).expand(-1, 64, -1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(x.mean(1), labels % WIDTH)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(BATCH, WIDTH), "labels": torch.randint(0, CLASSES, (BATCH,))}


def devices(number: int, memory_bytes: int = 10**9, link: float = 1e8) -> Cluster:
    kind = DeviceKind("card", 1e10, memory_bytes, 1e11)
    made = tuple(Device(rank, "a", rank, kind) for rank in range(number))
    return Cluster(made, Link(link, 1e-6), Link(link, 1e-6))


def planned(model: nn.Module, cluster: Cluster, **config: object) -> Plan:
    return wh.plan(model, batch(), cluster=cluster, config=dict(config))


def strategy_of(plan: Plan) -> str:
    return next(each.choice for each in plan.decisions if each.what == "strategy")


def test_a_large_classifier_is_split_and_as_fast_as_annotated() -> None:
    found = planned(Classifier(), devices(4))
    annotated = Classifier()
    wh.annotate(annotated, {"backbone": wh.replicate(4), "classifier": wh.split(4)})
    by_hand = planned(annotated, devices(4), num_micro_batch=1)
    data = planned(Classifier(), devices(4), strategy="data")
    assert "classifier" in strategy_of(found) and "split" in strategy_of(found)
    assert wh.simulate(found).step_s <= wh.simulate(by_hand).step_s * (1 + 1e-9)
    assert wh.simulate(found).step_s < wh.simulate(data).step_s


def test_a_classifier_is_split_over_some_devices_while_a_slow_one_takes_no_part() -> None:
    two = devices(2)
    slow = Device(2, "b", 0, DeviceKind("crawling", 1e8, 10**9, 1e9))
    three = Cluster((*two.devices, slow), two.intra_host, Link(1e7, 1e-5))
    plan = planned(Classifier(), three)
    assert plan.ranks == (0, 1)
    assert "classifier" in strategy_of(plan) and "split" in strategy_of(plan)
    alone_s = wh.simulate(planned(Classifier(), two)).step_s
    assert wh.simulate(plan).step_s == pytest.approx(alone_s)


def test_the_loss_follows_the_classifier() -> None:
    """What stands behind the last weights is split with them; what stands before is not."""
    problems: list[Problem] = []
    with planning_only(2, devices(2), problems.append):
        planned(Classifier(), devices(2), strategy="data")
    outline = Outline(problems[0])
    split = split_operations(outline, ["classifier.weight"])
    targets = [op_name(node) for node in outline.activations if node in split]
    assert targets[:2] == ["linear", "cross_entropy_loss"] and "tanh" not in targets


def test_an_optimizer_that_looks_at_whole_stacks_keeps_them_whole() -> None:
    def muon_like(named: object) -> torch.optim.Optimizer:
        return torch.optim.Adafactor([parameter for _, parameter in named])  # type: ignore[attr-defined]

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(8, WIDTH, 16 * WIDTH))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.einsum("bd,edf->ebf", x, self.up).square().mean()
            return result

    plan = wh.plan(Experts(), batch(), cluster=devices(4), config={}, optimizer=muon_like)
    assert not plan.shardings


def test_zero_is_taken_where_memory_is_short() -> None:
    roomy = planned(Layers(), devices(4), strategy="data", recompute=False)
    trained = 4 * sum(each.numel() for each in Layers().parameters())
    short = round(roomy.memory[0].total_bytes(BATCH // 4) - trained / 2)
    settings = {"num_task_graph": 1, "num_micro_batch": 1, "recompute": False, "strategy": "auto"}
    plan = planned(Layers(), devices(4, short), **settings)
    assert plan.zero > 0
    assert "ZeRO" in strategy_of(plan)


def test_states_in_parts_are_taken_where_updates_take_long() -> None:
    """Memory is not short: each rank updates a part, and sends as much as without."""
    cluster = devices(4, link=1e11)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(2)), Mean())
    sample = torch.randn(BATCH, 512)

    def score_s(**config: object) -> float:
        plan = wh.plan(model, sample, cluster=cluster, config=dict(config))
        return wh.simulate(plan).step_s + actions_seconds(plan)

    by_hand_s = score_s(strategy="data", zero=1)
    assert by_hand_s < 0.97 * score_s(strategy="data")
    assert score_s() <= 1.01 * by_hand_s


def test_levels_on_one_stage_are_estimated_however_many_pipelines_there_are() -> None:
    """By the guess all pipelines come before one stage, whose all-reduce takes long."""
    problems: list[Problem] = []
    cluster = devices(4, link=1e7)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), Mean())
    with planning_only(4, cluster, problems.append):
        wh.plan(model, torch.randn(BATCH, 512), cluster=cluster, config={"strategy": "data"})
    search = new_search(problems[0], OpenSettings(zero=None), Budget(estimates=8))
    found = estimates_with(search, MemoryChoice(zero=1))
    assert {each.point.shape.num_stages == 1 for each in found} == {True, False}


def test_a_level_that_is_set_holds() -> None:
    plan = planned(Layers(), devices(4), zero=2, strategy="auto", num_task_graph=1)
    assert plan.zero == 2


def test_measures_come_cheapest_first() -> None:
    levels = [each.zero for each in OpenSettings(zero=None).memory_measures()]
    assert levels == [0, 1, 2, 3]
    assert [each.zero for each in OpenSettings(zero=2).memory_measures()] == [2]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_higher_level_holds_less_and_sends_more(level: int) -> None:
    lower = ZeroTerms(level - 1, 2.0, 0.0, True) if level > 1 else None
    terms = ZeroTerms(level, 2.0, 0.0, True)
    if lower is not None:
        assert terms.held_bytes(1e6, 0.25) < lower.held_bytes(1e6, 0.25)
        assert terms.backward_s(0.0, 1e6, 1e-9) > lower.backward_s(0.0, 1e6, 1e-9)
    assert terms.left_to_reduce == {1: 1.0, 2: 0.5, 3: 0.0}[level]


def test_groups_have_the_devices_of_one_kind_and_host() -> None:
    fast = DeviceKind("fast", 2e10, 10**9, 1e11)
    slow = DeviceKind("slow", 1e10, 10**9, 1e11)
    made = [Device(rank, "a", rank, fast) for rank in range(4)]
    made += [Device(4 + place, "b", place, slow) for place in range(2)]
    cluster = Cluster(tuple(made), Link(1e9, 1e-6), Link(1e8, 1e-6))
    (groups,) = tensor_groups(cluster)
    assert groups.width == 2 and groups.members == ((0, 1), (2, 3), (4, 5))
    assert [device.kind.memory_bytes for device in groups.cluster.devices] == [2 * 10**9] * 3
