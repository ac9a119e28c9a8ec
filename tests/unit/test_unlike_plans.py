"""Plans of model replicas that are not alike: samples, shards, files, simulation, stub, pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

from whale.api import _prepare
from whale.capture.batch import read_batch
from whale.cluster.cluster import Cluster
from whale.cluster.file import loads
from whale.cluster.kinds import EXACT
from whale.config import Config
from whale.emulation.stub import make_stub
from whale.lowering.messages import build_bridges
from whale.lowering.program import crossing_values
from whale.planning.planner import fingerprint
from whale.planning.problem import Problem
from whale.planning.replica_drafts import GroupDrafts
from whale.planning.replica_specs import ReplicaSpec, StageSpec, activations, specs_of_config
from whale.planning.replicas import plan_of_replicas
from whale.planning.stages import apply_plan
from whale.plans.plan import Plan
from whale.plans.samples import SampleMap, num_samples_by_rank, template_samples
from whale.plans.shards import Shards
from whale.report.plan_page import html, plan_json
from whale.report.plan_table import print_plan
from whale.runtime.gradients import Bucket, _Group, _queues
from whale.runtime.held import HeldParameter, Unit
from whale.search.candidate import Candidate, DeviceGroup, ReplicaChoice
from whale.search.candidate_plan import plan_of_candidate
from whale.simulation.communication import all_reduces_of
from whale.simulation.simulate import figures_in, simulate

WIDTH = 24
BATCH_SIZE = 48
FREE_LINKS = """
links: {intra_host: {gb_per_s: 1.0e+9}, inter_host: {gb_per_s: 1.0e+9}}
kinds:
  fast: {tflop_per_s: 100, memory_gb: 0.00013, gb_per_s: 5000}
  slow: {tflop_per_s: 1, memory_gb: 1, gb_per_s: 50}
"""
"""the model is small: messages would take longer than everything else, and memories are large"""


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def without_launches(cluster: Cluster) -> Cluster:
    """Its devices at the peak of their data sheets: of so small a model launches would take longer
    than everything else.
    """
    devices = tuple(
        replace(device, kind=replace(device.kind, efficiency=EXACT)) for device in cluster.devices
    )
    return replace(cluster, devices=devices)


@pytest.fixture(scope="module")
def plan_on() -> Callable[..., Plan]:
    """Makes plans of one captured model: kinds of devices, replicas, ..."""
    sample = torch.randn(BATCH_SIZE, WIDTH)
    layout, tensors = read_batch(sample)
    prepared = _prepare(Chain(), layout, tensors, None, Config(check_capture=False), "cpu")

    def problem_on(kinds: list[str], config: Config) -> Problem:
        hosts = ", ".join(f"{{name: h{i}, kind: {kind}}}" for i, kind in enumerate(kinds))
        return Problem(
            captured=prepared.captured,
            kinds=prepared.kinds,
            marks={},
            default_strategy=None,
            term_texts=prepared.term_texts(),
            not_additive=None,
            cluster=without_launches(loads(f"hosts: [{hosts}]\n{FREE_LINKS}")),
            config=config,
            batch_size=BATCH_SIZE,
        )

    def make(
        kinds: list[str], replicas: list[Any], may_leave_out: bool = False, **settings: Any
    ) -> Plan:
        config = Config({"replicas": replicas, **settings})
        problem = problem_on(kinds, config)
        specs = specs_of_config(config, activations(prepared.captured, prepared.kinds))
        model = fingerprint(prepared.captured)
        plan, _ = plan_of_replicas(GroupDrafts(problem, model), specs, may_leave_out)
        return plan

    make.prepared = prepared  # type: ignore[attr-defined]
    make.problem = problem_on  # type: ignore[attr-defined]
    return make


def stages(*ranks: Any, **settings: Any) -> dict[str, Any]:
    return {"stages": list(ranks), **settings}


A100_AND_T4 = ["A100-80GB", "T4", "T4", "T4", "T4"]
FOUR_STAGES = stages([1], [2], [3], [4], num_micro_batch=4)


def split(*ranks: int) -> dict[str, Any]:
    return {"ranks": list(ranks), "split": True, "grid": [1, len(ranks), 1]}


CASES: dict[str, tuple[list[str], list[Any]]] = {
    "one beside four": (A100_AND_T4, [stages([0]), FOUR_STAGES]),
    "three and four stages": (
        ["T4"] * 7,
        [stages([0], [1], [2], num_micro_batch=2), stages([3], [4], [5], [6], num_micro_batch=3)],
    ),
    "halves and thirds": (["T4"] * 5, [stages(split(0, 1)), stages(split(2, 3, 4))]),
    "two alike beside 2 + 1": (
        ["T4"] * 5,
        [stages([3]), stages([1]), stages([0, 4], [2], samples=20, num_micro_batch=2)],
    ),
}


@pytest.fixture(params=list(CASES))
def plan(request: pytest.FixtureRequest, plan_on: Callable[..., Plan]) -> Plan:
    return plan_on(*CASES[request.param])


@pytest.mark.parametrize("batch_size", [BATCH_SIZE, 47, 20, 200])
def test_every_sample_is_run_once(plan: Plan, batch_size: int) -> None:
    """The devices of a stage run it together, whatever the size of the mini-batch, and in order."""
    counted = [0] * batch_size
    for view in plan.by_template:
        samples = SampleMap(view, batch_size, view.num_micro_batch)
        last = view.stages[-1].virtual_device
        for micro_batch in range(view.num_micro_batch):
            for replica in range(view.num_replicas):
                for start, stop in samples.devices(micro_batch, replica, last):
                    for sample in range(start, stop):
                        counted[sample] += 1
    assert counted == [1] * batch_size
    sizes = [stop - start for start, stop in template_samples(plan, batch_size)]
    planned = [view.batch_size for view in plan.by_template]
    for size, before in zip(sizes, planned, strict=True):
        assert abs(size / batch_size - before / BATCH_SIZE) < 0.12, "not in proportion"


def test_samples_follow_speed_and_fewer_than_devices_are_refused(
    plan_on: Callable[..., Plan],
) -> None:
    plan = plan_on(*CASES["one beside four"])
    devices = simulate(plan).devices
    done = [
        max(devices[rank].events[-2].start_s for rank in view.ranks) for view in plan.by_template
    ]
    assert max(done) / min(done) < 1.25, "one kind of replica waits for the other"
    assert num_samples_by_rank(plan)[1:] == [num_samples_by_rank(plan)[1]] * 4
    with pytest.raises(ValueError, match="at least 2 samples"):
        template_samples(plan, 1)


def test_memory_keeps_samples_from_a_fast_replica(plan_on: Callable[..., Plan]) -> None:
    """It gets as many as fit, and the slow one does the rest; too many that are given are refused
    with the ranks.
    """
    kinds = ["fast", "slow", "slow"]
    two_stages = stages([1], [2], num_micro_batch=2)
    plan = plan_on(kinds, [stages([0], recompute=False), two_stages])
    fast, slow = (view.batch_size for view in plan.by_template)
    assert slow > fast, "by speed alone it would be the other way round"
    peak = simulate(plan).devices[0]
    assert 0.8 * peak.memory_bytes < peak.peak_total_bytes <= peak.memory_bytes
    with pytest.raises(ValueError, match=r"the model replica on ranks 0: .*memory"):
        plan_on(kinds, [stages([0], recompute=False, samples=fast + 8), two_stages])


def test_pieces_are_the_common_refinement(plan: Plan) -> None:
    """Entry by entry: those that hold it are those that sum its gradient, and shards of template 0
    have each once.
    """
    shards = Shards(plan)
    cut = 0
    for name in plan.holders:
        shape = (WIDTH, WIDTH) if name.endswith("weight") else (WIDTH,)
        once = torch.zeros(shape, dtype=torch.int64)
        numbers = torch.arange(once.numel()).reshape(shape)
        entries: dict[int, set[int]] = {}
        for shard in shards.held(name):
            for entry in shard.take(numbers).flatten().tolist():
                entries.setdefault(entry, set()).update(shard.ranks)
        for shard in shards.of(name):
            once.view(-1)[shard.take(numbers).flatten()] += 1
        assert bool((once == 1).all())
        found: dict[int, set[int]] = {}
        for piece in shards.pieces(name):
            for rank in piece.ranks:
                own = shards.on(name, rank).take(numbers)
                parts = [own] if piece.cells is None else [own[c] for c in piece.inside(shards.on(name, rank))]  # fmt: skip
                for entry in torch.cat([part.flatten() for part in parts]).tolist():
                    found.setdefault(entry, set()).add(rank)
            cut += piece.cells is not None
        assert found == entries and len(entries) == numbers.numel()
    is_cut = any(template.boxes for template in plan.templates)
    assert bool(cut) == (is_cut and not plan.is_uniform)


def test_all_reduces_are_those_of_the_holders(plan: Plan) -> None:
    figures = figures_in(plan)
    groups: dict[tuple[int, ...], int] = {}
    shards = Shards(plan)
    for name in plan.holders:
        for piece in shards.pieces(name):
            size = WIDTH * (WIDTH if name.endswith("weight") else 1)
            size = size if piece.cells is None else piece.num_entries
            groups[piece.ranks] = groups.get(piece.ranks, 0) + 4 * size
    predicted: dict[tuple[int, ...], int] = {}
    for state in figures.states:
        parts = state.part_bytes or ((state.weight_bytes, state.trained_bytes),)
        for ranks, (_, trained) in zip(state.groups(plan.ranks_of_stage), parts, strict=True):
            predicted[ranks] = predicted.get(ranks, 0) + trained
    assert predicted == groups
    for each in all_reduces_of(plan, figures, plan.settings.bucket_bytes, 1.0):
        for rank in each.ranks:
            own = set(plan.of_rank(rank).stages_of_rank(rank))
            assert each.stages_of(rank) and set(each.stages_of(rank)) <= own


def test_a_step_takes_as_long_as_its_slowest_replica_and_the_all_reduces(plan: Plan) -> None:
    timeline = simulate(plan)
    done = [device.events[-2].start_s for device in timeline.devices]  # waits for gradients
    all_reduces = all_reduces_of(plan, figures_in(plan), plan.settings.bucket_bytes, 1.0)
    seconds = sum(each.seconds for each in all_reduces)
    assert max(done) <= timeline.gradients_s <= max(done) + 2 * seconds
    for device in timeline.devices:
        samples = sum(num_samples_by_rank(plan)[device.rank])
        assert device.busy_s > 0 and samples > 0 and device.peak_total_bytes > 0


def test_a_file_comes_back_and_a_damaged_one_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    text = path.read_text()

    def refused(change: Callable[[dict[str, Any]], None]) -> str:
        data = json.loads(text)
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match="contradicts itself") as error:
            Plan.load(path)
        return str(error.value)

    def no_template(data: dict[str, Any]) -> None:
        data["replicas"][0]["template"] = 7

    def one_rank_twice(data: dict[str, Any]) -> None:
        data["replicas"][0]["ranks"][0][0] = data["replicas"][-1]["ranks"][0][0]

    def more_samples(data: dict[str, Any]) -> None:
        data["batch_size"] += 2

    def weight_is_missing(data: dict[str, Any]) -> None:
        del data["templates"][1]["tensors"]["layers.0.bias"]

    def other_task_graph(data: dict[str, Any]) -> None:
        data["templates"][0]["stages"][0]["task_graphs"] = [len(data["task_graphs"]) - 1]

    assert "beyond the" in refused(no_template)
    assert "ranks" in refused(one_rank_twice)
    assert "samples" in refused(more_samples)
    assert re.search("weights|layers.0.bias", refused(weight_is_missing))
    assert "TaskGraph" in refused(other_task_graph)


def test_a_stub_has_the_messages_of_all_templates(plan: Plan, plan_on: Callable[..., Plan]) -> None:
    """Sizes, peers and bytes of every message of every rank, and the groups of its weights."""
    prepared = plan_on.prepared  # type: ignore[attr-defined]
    stub = make_stub(plan, figures_in(plan))
    assert {
        shard.ranks for name in stub.plan.holders for shard in Shards(stub.plan).held(name)
    } >= {
        tuple(sorted({rank for group in state.groups(plan.ranks_of_stage) for rank in group}))
        for state in figures_in(plan).states
    }
    for number, (full, small) in enumerate(
        zip(plan.by_template, stub.plan.by_template, strict=True)
    ):
        bytes_of = {each.value: float(each.sample_bytes) for each in full.crossings}
        for rank in full.ranks:
            found = []
            for each, graph in ((full, prepared), (small, stub.prepared)):
                assignment = apply_plan(each, graph.captured, graph.kinds)
                values = crossing_values(graph.captured, assignment)
                samples = SampleMap.planned(each)
                bridges = build_bridges(each, assignment, values, samples, rank)
                unit = stub._unit_bytes[number]
                messages = {}
                for key, parts in [*bridges.sending.items(), *bridges.receiving.items()]:
                    is_stub = graph is stub.prepared
                    messages[key] = sorted(
                        (
                            part.peer,
                            part.num_samples
                            * (unit[part.value.index] if is_stub else bytes_of[part.value.name]),
                        )
                        for part in parts
                    )
                found.append(messages)
            assert found[0] == found[1]


def test_pages_draw_every_replica(plan: Plan) -> None:
    timeline = simulate(plan)
    page = html(plan, timeline)
    data = plan_json(plan, timeline)
    assert json.loads(json.dumps(data))["num_replicas"] == plan.num_replicas
    assert sum(each["batch_size"] for each in data["templates"]) == BATCH_SIZE
    for number in range(plan.num_replicas):
        assert f"model replica {number}" in page
    for device in data["devices"]:
        rank = device["rank"]
        assert device["samples"] == sum(num_samples_by_rank(plan)[rank])
        assert f'data-key="devices.{rank}.busy_s"' in page
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_plan(plan, console)
    text = console.export_text()
    assert "that are not alike" in text and "schedule" in text


def whys(plan: Plan) -> set[str]:
    """Why replicas have their devices."""
    return {each.why for each in plan.decisions if each.what.endswith("VirtualDevices")}


def test_ranks_may_be_left_out(plan_on: Callable[..., Plan], tmp_path: Path) -> None:
    """A search leaves them out: the plan says so, is simulated and drawn without them."""
    for replicas in ([stages([0]), stages([3], [1])], [stages([3]), stages([1])]):
        plan = plan_on(["T4"] * 5, replicas, may_leave_out=True)
        assert plan.left_out == tuple(
            rank for rank in range(5) if str(rank) not in json.dumps(replicas)
        )
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        timeline = simulate(plan)
        assert all(not any(map(sum, [num_samples_by_rank(plan)[r]])) for r in plan.left_out)
        assert "left out" in html(plan, timeline)
        assert whys(plan) == {'set by you ("replicas")'}
        assert plan_json(plan, timeline)["devices"][plan.left_out[0]]["stages"] == []


@hypothesis.given(st.lists(st.sets(st.integers(0, 5), min_size=2), min_size=1, max_size=24))
def test_buckets_of_overlapping_groups_go_out_in_one_order(holders: list[set[int]]) -> None:
    """Whatever parameters the ranks share: no rank waits for another one that waits for it. All
    ranks take the bucket at the head of their queues when all its holders have it there; that goes
    on until all are gone.
    """
    order = {f"p{number}": number for number in range(len(holders))}
    queues: dict[int, list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}
    for rank in range(6):
        groups: dict[tuple[int, ...], _Group] = {}
        for number, members in enumerate(holders):
            if rank in members:
                ranks = tuple(sorted(members))
                tensor = nn.Parameter(torch.zeros(1))
                unit = Unit(HeldParameter(f"p{number}", tensor, ranks, (0,)), ranks)
                bucket = Bucket([unit], None, torch.zeros(1), [])
                groups.setdefault(ranks, _Group([], False)).buckets.append(bucket)
        (queue,) = _queues(groups, order)
        queues[rank] = [
            (each.units[0].ranks, tuple(unit.name for unit in each.units)) for each in queue.buckets
        ]
    while any(queues.values()):
        heads = {rank: queue[0] for rank, queue in queues.items() if queue}
        ready = next(
            head
            for head in heads.values()
            if all(queues[rank] and queues[rank][0] == head for rank in head[0])
        )
        for rank in ready[0]:
            queues[rank].pop(0)


def test_candidates_of_the_search_become_such_plans(plan_on: Callable[..., Plan]) -> None:
    """Cuts, chunks in waves, widths, micro-batches and samples are those of the candidate; rank 5
    takes no part.
    """
    wave = ReplicaChoice(
        (DeviceGroup((4,)), DeviceGroup((1, 2))),
        num_micro_batch=2,
        schedule="wave",
        num_chunks=2,
        starts=(0, 4, 8, 12),
        num_samples=30,
    )
    alone = ReplicaChoice((DeviceGroup((0,)),), num_samples=12)
    halves = ReplicaChoice((DeviceGroup((3, 6), (1, 2, 1)),), num_samples=6)
    problem = plan_on.problem(["T4"] * 7, Config())  # type: ignore[attr-defined]
    drafts = GroupDrafts(problem, fingerprint(problem.captured))
    plan, _ = plan_of_candidate(drafts, Candidate((wave, alone, halves)))
    assert plan.left_out == (5,)
    first, second, third = plan.by_template
    assert [view.batch_size for view in plan.by_template] == [30, 12, 6]
    assert [stage.virtual_device for stage in first.stages] == [0, 1, 1, 0]
    assert first.replicas[0].ranks == ((4,), (1, 2)) and first.num_micro_batch == 2
    assert second.ranks == (0,) and third.virtual_devices[0].grid is not None
    assert simulate(plan).step_s > 0
    assert whys(plan) == {"chosen by the search"}


def test_specs_by_hand() -> None:
    """Further chunks on the same devices, and what `local` makes alike."""
    first = ReplicaSpec((StageSpec((4,)), StageSpec((2,), 3), StageSpec((4,), 6)))
    assert first.ranks == (4, 2) and first.devices == ((4,), (2,)) and first.starts == (0, 3, 6)
    second = ReplicaSpec((StageSpec((0,)), StageSpec((9,), 3), StageSpec((0,), 6)))
    assert first.local() == second.local()
    assert ReplicaSpec((StageSpec((0,)), StageSpec((1,)))).starts is None
