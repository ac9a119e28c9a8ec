"""The search for annotated models: what is marked stays, and the rest is chosen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from torch.fx import Node

import whale as wh
from tests.unit.test_search import Net, plan_of, problem_of, strategy_of
from tests.unit.test_search_memory import HOST, MEGA, TRAINED_BYTES, fits, is_elsewhere
from tests.unit.test_search_memory import Net as Deep
from tests.unit.test_search_memory import cluster as two_hosts
from whale.annotation import Mark, Scope, Strategy
from whale.capture.graph import module_name
from whale.cluster.cluster import Cluster, Device, DeviceKind, Link
from whale.planning.planner import make_plan
from whale.planning.problem import Problem
from whale.plans.plan import Plan
from whale.search.drafting import actions_seconds
from whale.search.marked import MarkedSearch, new_marked_search

FAST = DeviceKind("fast", 2e8, 10**9, 1e9)
OLD = DeviceKind("old", 1.5e8, 10**9, 8e8)


def cluster(*kinds: DeviceKind, between: float = 1e7) -> Cluster:
    """Slow devices on slow links, so that both count; every kind has a host of its own."""
    devices = []
    for rank, kind in enumerate(kinds):
        devices.append(Device(rank, kind.name, kinds[:rank].count(kind), kind))
    return Cluster(tuple(devices), Link(1e7, 1e-6), Link(between, 1e-5))


MIXED = cluster(FAST, FAST, OLD, OLD)


def score_s(plan: Plan) -> float:
    return wh.simulate(plan).step_s + actions_seconds(plan)


def why_of(plan: Plan) -> str:
    return next(each.why for each in plan.decisions if each.what == "strategy")


def hand_marks(problem: Problem, layers: int) -> Iterator[dict[Node, Mark]]:
    """Every way to give the layers in front of the last one, which is marked, devices of their own:
    all cuts between two layers, all widths that go with four devices.
    """
    last = next(iter(problem.marks.values()))
    for own in (1, 3):  # with the one of the mark two or four
        for stages in range(1, own + 1):
            for borders in combinations(range(1, own), stages - 1):
                widths = [b - a for a, b in pairwise([0, *borders, own])]
                for starts in combinations(range(1, layers - 1), stages - 1):
                    marks: dict[Node, Mark] = {}
                    for node in problem.captured.compute_nodes():
                        parts = module_name(node).split(".")
                        if len(parts) < 2 or node in problem.marks:
                            continue
                        stage = sum(int(parts[1]) >= start for start in starts)
                        marks[node] = Mark(("glob", stage), Strategy("replicate", widths[stage]))
                    mark = replace(last, order=("glob", stages))
                    yield {**marks, **dict.fromkeys(problem.marks, mark)}


def test_the_unmarked_rest_is_as_fast_as_the_best_by_hand() -> None:
    layers = 6
    model = wh.annotate(Net(layers), {f"layers.{layers - 1}": wh.replicate(1)})
    found: list[Plan] = []
    problem = problem_of(lambda: found.append(plan_of(model, MIXED, strategy="auto")))
    by_hand: list[Mapping[Node, Mark]] = [problem.marks, *hand_marks(problem, layers)]
    steps = []
    for marks in by_hand:
        for number in (1, 4, 8):
            config = problem.config.replace(num_micro_batch=number, schedule="auto")
            changed = replace(problem, marks=marks, config=config, keeps_marks=True)
            steps.append(score_s(make_plan(changed)[0]))
    default_s = min(steps[:3])
    assert len(by_hand) > 15
    assert score_s(found[0]) <= 1.02 * min(steps)
    assert score_s(found[0]) < 0.9 * default_s
    assert re.search(r"not marked: layers.0.0 .. layers.4.1, \d TaskGraph", why_of(found[0]))


@pytest.mark.parametrize(
    ("pattern", "scope"),
    [
        ("layers.7", wh.split(2, grid=(1, 2, 1))),
        ("layers.3", wh.replicate(2)),
        ("layers.0", wh.replicate(1)),
    ],
)
def test_what_is_marked_stays(pattern: str, scope: Scope) -> None:
    plan = plan_of(wh.annotate(Net(), {pattern: scope}), MIXED, strategy="auto")
    strategy = scope.strategy
    assert len(plan.task_graphs) > 1
    (marked,) = [each for each in plan.task_graphs if each.label == pattern]
    device = plan.virtual_devices[marked.virtual_device]
    assert marked.strategy == str(strategy)
    assert marked.num_devices == device.num_devices == strategy.num_devices
    assert (device.grid is not None) == (strategy.kind == "split")
    if strategy.grid is not None and device.grid is not None:
        assert (device.grid.gx, device.grid.gy, device.grid.gz) == strategy.grid
    held = [name for name in plan.holders if name.startswith(f"{pattern}.")]
    stages = {stage for name in held for stage in plan.holders[name]}
    assert held and {plan.stages[each].virtual_device for each in stages} == {device.index}
    assert f"as marked: {pattern}: {strategy}" in why_of(plan)


def test_marked_stages_are_not_cut_again() -> None:
    """Chunks would be faster, but they are cut by time alone."""
    marks = {"layers.[0-1]": wh.replicate(1), "layers.[2-7]": wh.replicate(1)}
    devices = cluster(FAST, FAST)
    found: list[Plan] = []
    model = wh.annotate(Net(), marks)
    problem = problem_of(lambda: found.append(plan_of(model, devices, strategy="auto")))
    plan = found[0]
    config = problem.config.replace(num_micro_batch=2, schedule="auto")
    assert len(make_plan(replace(problem, config=config))[0].stages) > 2
    first = {f"layers.{layer}.0.{name}" for layer in (0, 1) for name in ("weight", "bias")}
    assert [set(stage.parameters) & first for stage in plan.stages] == [first, set()]
    assert plan.num_micro_batch > 1


def test_other_plans_are_listed() -> None:
    plan = plan_of(wh.annotate(Net(), {"layers.7": wh.replicate(1)}), MIXED, strategy="auto")
    steps = [each.step_s for each in plan.alternatives]
    assert len(steps) > 2 and steps == sorted(steps)
    assert strategy_of(plan) not in {each.what for each in plan.alternatives}


def test_a_mark_on_all_devices_leaves_the_rest_shared_or_split() -> None:
    """The rest is split with the marked layer, or copied to all devices: whatever is faster."""
    devices = cluster(FAST, FAST)
    model = wh.annotate(Net(), {"layers.7": wh.split(2)})
    found_s = score_s(plan_of(model, devices, strategy="auto"))
    marks = {"layers.[0-6]": wh.replicate(2), "layers.7": wh.split(2)}
    for by_hand in ({"layers.7": wh.split(2)}, marks):
        plan = plan_of(wh.annotate(Net(), by_hand), devices)
        assert found_s <= score_s(plan) * (1 + 1e-9)


def test_memory_that_is_short_gets_zero_instead_of_a_refusal() -> None:
    devices = two_hosts(4.2 * TRAINED_BYTES)
    sample = torch.zeros(8, 256)
    model = wh.annotate(Deep(), {"layers.*": wh.replicate(2)})
    with pytest.raises(ValueError, match="does not fit"):
        wh.plan(model, sample, cluster=devices)
    plan = wh.plan(model, sample, cluster=devices, config={"strategy": "auto"})
    assert plan.zero and fits(plan) and "ZeRO 1" in strategy_of(plan)
    with pytest.raises(ValueError, match="does not fit"):
        wh.plan(model, sample, cluster=devices, config={"strategy": "auto", "zero": 0})


def test_memory_that_is_short_uses_that_of_hosts() -> None:
    devices = two_hosts(1.99 * TRAINED_BYTES, HOST)
    model = wh.annotate(Deep(), {"layers.*": wh.replicate(2)})
    plan = wh.plan(model, torch.zeros(8, 256), cluster=devices, config={"strategy": "auto"})
    assert is_elsewhere(plan) and fits(plan)


def test_recomputation_competes_with_zero() -> None:
    """Weights are small beside what forward saves: nothing of them makes it fit."""
    model = wh.annotate(Deep(), {"layers.*": wh.replicate(2)})
    settings = {"strategy": "auto", "num_micro_batch": 1}
    plan = wh.plan(model, torch.zeros(65536, 256), cluster=two_hosts(400 * MEGA), config=settings)
    assert fits(plan) and any(stage.num_recomputed for stage in plan.stages)


def test_devices_that_marks_have_no_place_for_are_left_out() -> None:
    marks = {"layers.[0-3]": wh.replicate(1), "layers.[4-7]": wh.replicate(1)}
    plan = plan_of(wh.annotate(Net(), marks), cluster(FAST, OLD, FAST), strategy="auto")
    assert plan.left_out == (1,)
    text = next(each.why for each in plan.decisions if each.what == "devices left out")
    assert "1 + 1 = 2 devices, which does not divide 3" in text


def test_a_device_that_makes_the_step_longer_is_left_out() -> None:
    crawling = DeviceKind("crawling", 1e5, 10**9, 1e6)
    model = wh.annotate(Net(), {"*": wh.replicate(1)})
    devices = cluster(FAST, FAST, crawling, between=1e3)
    plan = plan_of(model, devices, strategy="auto")
    assert plan.left_out == (2,)
    least_s = score_s(plan_of(wh.annotate(Net(), {"*": wh.replicate(1)}), cluster(FAST, FAST)))
    assert score_s(plan) <= least_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("marks", "settings", "message"),
    [
        ({"layers.7": wh.split(2)}, {"num_task_graph": 4}, '"num_task_graph": 4 .* annotated'),
        ({"layers.7": wh.split(8)}, {}, "ask for 8 = 8 devices, which does not divide 4"),
        ({"layers.7": wh.split(2)}, {"num_micro_batch": 64}, "64"),
    ],
)
def test_contradictions_are_named(
    marks: dict[str, Scope], settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(wh.annotate(Net(), marks), MIXED, strategy="auto", **settings)


def test_an_interrupted_search_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = MarkedSearch.draft
    drafts = 0

    def interrupted(self: MarkedSearch, *args: object, **options: object) -> object:
        nonlocal drafts
        drafts += 1
        if drafts == 3:
            raise KeyboardInterrupt
        return draft(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(MarkedSearch, "draft", interrupted)
    model = wh.annotate(Net(), {"layers.7": wh.replicate(1)})
    plan = plan_of(model, MIXED, strategy="auto")
    assert "interrupted" in why_of(plan) and drafts == 3


def test_progress_is_shown_and_drafts_are_few() -> None:
    model = wh.annotate(Net(), {"layers.7": wh.replicate(1)})
    problem = problem_of(lambda: plan_of(model, MIXED, strategy="auto"))
    texts: list[str] = []
    done = new_marked_search(problem, lambda progress: texts.append(progress.text))
    done.run()
    assert re.match(r"search: unmarked operations 1 of \d; no plan yet", texts[0])
    assert any("best so far" in text for text in texts)
    assert len(done.tried) < 60
