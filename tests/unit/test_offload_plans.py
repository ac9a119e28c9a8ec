"""Plans in which tensors are at home outside of the device: their data, memory, transfers and
times.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import whale as wh
from whale.cluster.cluster import Cluster, Disk, HostMemory
from whale.cluster.file import dumps, loads
from whale.cluster.kinds import GIGA
from whale.plans.away import AwayFigures
from whale.plans.check import contradiction
from whale.plans.moves import residence_problem, weight_uses
from whale.plans.plan import Plan
from whale.plans.shares import DoesNotFit
from whale.report.advice_page import advice_html, advice_json, print_advice
from whale.report.tables import hidden_text, memory_table
from whale.scheduling.residence import MoveKind, ResidenceError, check_moves, moves_of
from whale.search.advice import Advice, RankedPlan
from whale.units import human_bytes

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


# ---- the account


def test_optimizer_states_leave_the_device() -> None:
    """4 layers of 64 x 64 + 64 float32: 66,560 bytes; Adam's states are twice that."""
    trained = 4 * (WIDTH * WIDTH + WIDTH) * 4
    made = plan(offload={"optimizer": "host"})
    whole = plan()
    assert whole.memory[0].optimizer_bytes == 2 * trained
    assert made.memory[0].optimizer_bytes == 0
    away = wh.simulate(made).devices[0].away
    assert away is not None
    held = {(each.what, each.memory): each.num_bytes for each in away.held}
    assert held["optimizer state", "host"] == 2 * trained
    moved = {each.what: (each.in_bytes, each.out_bytes) for each in away.traffic}
    if away.updated_on == "host":
        assert held["weights", "host"] == trained
        assert moved == {"weights": (trained, 0), "gradients": (0, trained)}
    else:
        assert moved == {"optimizer state": (2 * trained, 2 * trained)}


def test_the_shorter_update_is_taken() -> None:
    """A host with a slow memory streams states through the device; one with a fast memory and slow
    links updates there: it moves a gradient out and a weight in, not two states each way.
    """
    sample = {"x": torch.zeros(8, WIDTH)}
    where = []
    for memory_rate, link_rate in ((1, 100), (1000, 1)):
        memory = HostMemory(64 * GIGA, memory_rate * GIGA, link_rate * GIGA)
        devices = Cluster.uniform(1, "V100-16GB").with_memories(memory)
        config = {"offload": {"optimizer": "host"}}
        made = wh.plan(Net(), sample, cluster=devices, config=config)
        where.append({block.updated_on for block in made.blocks})
    assert where == [{"device"}, {"host"}]


def test_what_torch_has_beside_weights_goes_with_them() -> None:
    """On accelerators gradients and states are where the parameter is: nothing of an update moves."""
    made = plan(offload={"weights": "host"}, num_micro_batch=2)
    homes = {(each.weights, each.gradients, each.states) for each in made.blocks}
    assert homes == {("host", "host", "host")}
    assert {block.updated_on for block in made.blocks} == {"host"}
    trained = 4 * (WIDTH * WIDTH + WIDTH) * 4
    away = wh.simulate(made).devices[0].away
    assert away is not None
    moved = {each.what: (each.in_bytes, each.out_bytes) for each in away.traffic}
    assert moved == {"weights": (4 * trained, 0), "gradients": (0, 2 * trained)}
    assert (away.update.in_s, away.update.out_s) == (0, 0) and away.update.work_s > 0


def test_cpu_ranks_update_states_where_they_lie() -> None:
    devices = Cluster.uniform(2, "CPU").with_memories(HOST, DISK)
    config = {"strategy": "data", "offload": {"optimizer": "host"}}
    sample = {"x": torch.zeros(8, WIDTH)}
    made = wh.plan(Net(), sample, cluster=devices, config=config)
    assert {block.updated_on for block in made.blocks} == {"host"}
    away = wh.simulate(made).devices[0].away
    assert away is not None and not away.traffic and not away.pool_bytes
    assert {each.what for each in away.held} == {"optimizer state"}


def test_gradients_alone_do_not_leave_an_accelerator() -> None:
    with pytest.raises(ValueError, match=r"gradients at home elsewhere are for weights or"):
        plan(offload={"gradients": "host"})
    made = plan(offload={"gradients": "host", "optimizer": "host"})
    assert {(each.weights, each.updated_on) for each in made.blocks} == {("device", "host")}


# ---- what is shown


def test_transfers_that_nothing_hides_are_shown() -> None:
    """Forwards and backwards of microseconds hide little of what a link does in that time."""
    here = wh.simulate(plan())
    away = wh.simulate(plan(offload={"weights": "host"}))
    device = away.devices[0]
    assert device.compute_s - device.exposed_s == pytest.approx(here.devices[0].compute_s)
    assert device.exposed_s > 0
    assert "backwards, which take" in hidden_text(device)
    hidden = replace(device, exposed_s=0.0)
    assert "backwards, which hide it" in hidden_text(hidden)
    slow = replace(away, devices=(replace(device, exposed_s=0.9 * away.step_s),))
    assert slow.limit.startswith("transfers from and to the host")


def test_memory_is_shown_by_device_host_and_disk() -> None:
    made = plan(offload={"optimizer": "disk", "weights": "host"})
    timeline = wh.simulate(made)
    trained = 4 * (WIDTH * WIDTH + WIDTH) * 4
    held = timeline.devices[0].elsewhere_bytes
    assert held == {"host": 2 * trained, "disk": 2 * trained}, "weights and gradients; states"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(memory_table(timeline))
    text = console.export_text()
    assert "on the host" in text and "on disk" in text and human_bytes(held["disk"]) in text


def test_advice_has_memory_and_traffic_of_every_plan() -> None:
    made = plan(offload={"weights": "host"})
    timeline = wh.simulate(made)
    ranked = RankedPlan("data parallel", "data parallel", made, timeline)
    advice = Advice((ranked,), (), (), None, (), (), "whale run train.py")
    shown = advice_json(advice)["plans"][0]
    away = timeline.devices[0].away
    assert away is not None
    assert shown["elsewhere_bytes"] == {"host": on_host(away), "disk": 0.0}
    moved = sum(each.in_bytes + each.out_bytes for each in away.traffic)
    assert shown["traffic_bytes"] == moved > 0
    console = Console(width=200, record=True, file=io.StringIO())
    print_advice(advice, console)
    text = console.export_text()
    assert "on the host" in text and "on disk" not in text and human_bytes(moved) in text
    page = advice_html(advice)
    assert f'data-key="plans.0.traffic_bytes" data-value="{moved}"' in page


# ---- activations


class Wide(nn.Module):
    """Layers that save a tensor of 8 MB for each of 8 samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def wide(memory: HostMemory, **config: Any) -> Plan:
    sample = {"x": torch.zeros(8, 2**15, WIDTH)}
    devices = Cluster.uniform(1, "V100-16GB").with_memories(memory)
    settings = {"offload": {"activations": "host"}, **config}
    return wh.plan(Wide(), sample, cluster=devices, config=settings)


def on_host(away: AwayFigures) -> float:
    """Bytes in the memory of the host."""
    return sum(each.num_bytes for each in away.held if each.memory == "host")


def test_three_segments_of_activations_are_on_the_device() -> None:
    """A sample saves 24 tensors of 8 MiB (the batch itself stays): 1,536 MiB of 8 samples go out. A
    segment ends with the tensor that fills it, of 64 MiB.
    """
    mib = 2**20
    here = wide(HOST, offload=False)
    away = wide(HOST)
    held = wh.simulate(away).devices[0].away
    assert held is not None
    assert on_host(held) == 24 * 64 * mib
    assert held.forward[0].num_pieces == 1536 // (64 + 32)
    segments = 3 * (64 + 32) * mib
    freed = [wh.simulate(each).devices[0].peak_bytes["activations"] for each in (here, away)]
    inside = 0.02 * (24 - 3) * 64 * mib
    assert freed[0] - freed[1] == pytest.approx(24 * 64 * mib - segments + inside, rel=1e-6)


def test_a_host_that_is_too_small_for_all_of_them_makes_some_recomputed() -> None:
    small = HostMemory(10**9, 100 * GIGA, 12 * GIGA)
    made = wide(small)
    stage = made.stages[0]
    assert 0 < stage.num_recomputed < stage.num_regions
    away = wh.simulate(made).devices[0].away
    assert away is not None and 0 < on_host(away) <= 10**9


class Perceptron(nn.Module):
    """6 layers that save 10 tensors of 67 MB each: input and result of the norm, and 4 times as wide
    input and result of a gelu.
    """

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(torch.nn.functional.gelu(up(norm(x))))
        return x.square().mean()


def test_where_the_host_is_too_small_cheap_operations_are_recomputed_first() -> None:
    """4.0 GB of activations for 3.1 GB: 4 results of gelus, of 268 MB each, are made again, and no
    product is.
    """
    unit = 8 * 2048 * 1024 * 4
    steps = []
    for memory_bytes in (64 * GIGA, 3.1 * GIGA):
        with torch.device("meta"):
            model = Perceptron()
            sample = {"x": torch.zeros(8, 2048, 1024)}
        devices = Cluster.uniform(1, "V100-16GB").with_memories(
            HostMemory(round(memory_bytes), 100 * GIGA, 12 * GIGA)
        )
        config = {"offload": {"activations": "host"}}
        made = wh.plan(model, sample, cluster=devices, config=config)
        timeline = wh.simulate(made)
        away = timeline.devices[0].away
        assert away is not None
        steps.append((made.stages[0], timeline.devices[0], on_host(away)))
    (_, all_saved, large_bytes), (stage, some_again, small_bytes) = steps
    assert stage.has_cheap_regions and stage.num_recomputed == 4
    assert [len(region) for region in stage.recomputed] == [2] * 4, "a gelu and its product each"
    assert large_bytes - small_bytes == pytest.approx(4 * 4 * unit, rel=1e-3)
    alone_s = [each.compute_s - each.exposed_s for each in (all_saved, some_again)]
    assert 1 < alone_s[1] / alone_s[0] < 1.02


def test_ranks_of_a_host_share_its_link() -> None:
    """Two links for eight devices: each gets a quarter of one."""
    assert HOST.bytes_per_s(8) == 6 * GIGA
    one = wh.simulate(plan(offload={"weights": "host", "optimizer": "host"}))
    assert one.devices[0].away is not None
    weights = 4 * (WIDTH * WIDTH + WIDTH) * 4
    transfers = one.devices[0].away.forward[0]
    assert transfers.fixed_in_s == pytest.approx(weights / (12 * GIGA))


def test_a_host_that_is_too_small_is_refused_with_its_numbers() -> None:
    small = HostMemory(100_000, 100 * GIGA, 12 * GIGA)
    devices = Cluster.uniform(1, "V100-16GB").with_memories(small)
    sample = {"x": torch.zeros(8, WIDTH)}
    with pytest.raises(ValueError, match=r"memory of host0 is too small.*of 100 KB"):
        config = {"offload": {"optimizer": "host"}}
        wh.plan(Net(), sample, cluster=devices, config=config)


def test_offload_without_a_host_memory_is_refused() -> None:
    devices = Cluster.uniform(1, "V100-16GB")
    sample = {"x": torch.zeros(8, WIDTH)}
    with pytest.raises(ValueError, match="the cluster says nothing"):
        config = {"offload": {"optimizer": "host"}}
        wh.plan(Net(), sample, cluster=devices, config=config)


# ---- auto


def big(memory_gb: float, **config: Any) -> Plan:
    """A perceptron of 10 MB of weights on two devices with so much memory."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(10)))
    return wh.plan(
        model,
        (torch.zeros(8, 512),),
        loss=lambda output, batch: output.square().mean(),
        cluster=cluster(2, memory_gb),
        config={"strategy": "data", **config},
    )


def test_auto_leaves_what_fits_as_it_is() -> None:
    made = big(16.0)
    assert made.zero == 0 and not made.blocks and made.figures is not None
    assert not made.figures.away


def test_auto_moves_what_does_not_fit() -> None:
    """42 MB of weights, gradients and states, and 10 of buckets, on 24 MB."""
    made = big(0.024)
    decision = next(each for each in made.decisions if each.what == "memory")
    assert "nothing fits on the devices alone" in decision.why
    timeline = wh.simulate(made)
    for device in timeline.devices:
        assert device.peak_total_bytes <= device.memory_bytes


def test_offload_false_moves_nothing() -> None:
    with pytest.raises(DoesNotFit):
        big(0.004, offload=False)


def test_even_disks_may_be_too_small() -> None:
    with pytest.raises(DoesNotFit, match="Not even with memories beside the devices"):
        big(0.0002)


# ---- moves


def uses_of_layers(number: int) -> list[Any]:
    """Forward and backward through so many blocks."""
    return [*range(number), *reversed(range(number))]


def test_moves_of_blocks_hold() -> None:
    uses = uses_of_layers(6)
    slot_of = {block: block % 3 for block in uses}
    check_moves(uses, moves_of(uses, slot_of), slot_of)


def test_mutated_moves_are_refused() -> None:
    """A fetch that is left out, comes late or too early, and a store that is left out or comes
    early: each is found.
    """
    uses = uses_of_layers(5)
    slot_of = {block: block % 2 for block in uses}
    moves = moves_of(uses, slot_of)
    check_moves(uses, moves, slot_of)
    for number, move in enumerate(moves):
        wrong = [moves[:number] + moves[number + 1 :]]
        shifts = (2, -2) if move.kind is MoveKind.FETCH else (-1,)
        for shift in shifts:
            place = move.place + shift
            if 0 <= place < len(uses):
                wrong.append([*moves[:number], replace(move, place=place), *moves[number + 1 :]])
        for each in wrong:
            with pytest.raises(ResidenceError):
                check_moves(uses, each, slot_of)


def test_weights_of_a_plan_are_proved() -> None:
    made = plan(2, offload={"weights": "host"}, num_micro_batch=4)
    uses, slot_of = weight_uses(made, 0)
    assert len(uses) == 4 * 2 * len(made.blocks)
    assert residence_problem(made) is None
    one_slot = dict.fromkeys(slot_of, 0)
    with pytest.raises(ResidenceError):
        check_moves(uses, moves_of(uses, slot_of), one_slot)


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
