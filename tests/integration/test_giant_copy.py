"""M6-MoE-10T in small: a copy with the same layers and a millionth of the parameters really trains on 8
ranks under emulated memories of the same proportions, by a plan of the same kind as
`benchmarks/giant_models.py` makes, and exactly like local training.

512 V100-32GB on 64 hosts become 8 devices on one host. A number has 8 bytes here and 2 there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whale as wh
from benchmarks.giant_models import HOSTS
from models.drawings import Drawings
from models.m6_moe import M6MoE, M6MoEConfig
from tests.exactness import Trace, compare, local_training
from tests.integration.test_split_offload import EPS1
from tests.ranks import ModelServer, preload
from whale import api
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import GIGA, Cluster
from whale.emulation.settings import EmulationSettings
from whale.model_planner import ModelPlanner
from whale.plans.plan import Plan

preload("tests.integration.test_giant_copy")

NUM_RANKS = 8
NUM_STEPS = 3
NUM_SAMPLES = 16
SCALE = 10**6
NUMBER_BYTES = 8 / 2
"""of a float64 here for each byte of a number there"""
V100_BYTES = 32 * GIGA
DEVICE_BYTES = 512 * V100_BYTES / SCALE * NUMBER_BYTES / NUM_RANKS
TIMEOUT_S = 500.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def cluster_file(name: str) -> str:
    """A host with 8 devices and memories that are to its devices as those of `giant_models.py`."""
    memory, disk = HOSTS[name]
    on_host = NUM_RANKS * DEVICE_BYTES / (8 * V100_BYTES) / GIGA
    lines = [
        "hosts: [{name: host0, kind: small-V100, count: 8}]",
        f"kinds: {{small-V100: {{tflop_per_s: 15.7, memory_gb: {DEVICE_BYTES / GIGA:.9f}, "
        "gb_per_s: 900}}",
        "links: {intra_host: {gb_per_s: 100}}",
        f"host: {{memory_gb: {memory.memory_bytes * on_host:.9f}, memory_gb_per_s: 100, "
        "link_gb_per_s: 12, links_gb_per_s: 48}",
    ]
    if disk is not None:
        lines.append(f"disk: {{memory_gb: {disk.memory_bytes * on_host:.9f}, gb_per_s: 12}}")
    return "\n".join(lines)


@dataclass
class Subject:
    """What a model server has ready for its ranks."""

    model: M6MoE
    prepared: CapturedModel


def adafactor(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(pairs, eps=(EPS1, 1e-3))


def build() -> M6MoE:
    torch.manual_seed(0)
    return M6MoE(M6MoEConfig.m6_moe_10t_copy()).double()


def batch(step: int) -> dict[str, Tensor]:
    first = step * NUM_SAMPLES
    drawn = Drawings(NUM_STEPS * NUM_SAMPLES).batch(range(first, first + NUM_SAMPLES))
    return {key: each.double() if each.is_floating_point() else each for key, each in drawn.items()}


def prepare() -> Subject:
    torch.set_num_threads(1)
    model = build()
    layout, tensors = read_batch(batch(0))
    prepared = api._prepare(model, layout, tensors, None, wh.Config(), "cpu")
    return Subject(model, prepared)


def annotate(model: M6MoE) -> None:
    """Annotates the model as `giant_models.py` does."""
    wh.set_default_strategy(wh.replicate(NUM_RANKS))
    wh.annotate(model, {"*.experts": wh.split(NUM_RANKS)})


def make_plan(subject: Subject, file: str) -> Plan:
    annotate(subject.model)
    config = wh.Config({"num_micro_batch": 2})
    cluster = Cluster.load(file)
    planner = ModelPlanner(subject.model, cluster, config, NUM_SAMPLES, optimizer=adafactor)
    return planner.plan(subject.prepared, {})


def train(
    subject: Subject, plan: Plan, settings: EmulationSettings, folder: str
) -> tuple[Any, ...]:
    """Three steps on one emulated rank: losses, first gradients, weights, bytes moved by class."""
    settings.pass_on()
    wh.init({"num_micro_batch": 2, "run_folder": folder})
    annotate(subject.model)
    engine = wh.parallelize(
        subject.model,
        batch(0),
        optimizer=adafactor,
        prepared=subject.prepared,
        plan=plan,
    )
    losses = []
    gradients: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        losses.append(engine.step(batch(step)).loss)
        if step == 0:
            gradients = engine.full_gradients()
    state = engine.full_state_dict()
    moved = {what: homes.num_bytes_moved for what, homes in engine._job.home_makers.items()}
    engine.close()
    return losses, gradients, state, moved


def train_locally(subject: Subject) -> Trace:
    data = [batch(step) for step in range(NUM_STEPS)]
    return local_training(subject.model, data, None, adafactor)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare, timeout_s=TIMEOUT_S) as made:
        yield made


@pytest.mark.parametrize("memories", HOSTS)
def test_a_copy_of_ten_trillion_trains_like_local(
    server: ModelServer, memories: str, tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(cluster_file(memories))
    plan: Plan = server.run_local(make_plan, str(file), timeout_s=TIMEOUT_S)
    _check_plan(plan, has_disks="disks" in memories)
    settings = EmulationSettings(str(file), str(tmp_path / "emulation"))
    run = (plan, settings, str(tmp_path / "run"))
    ranks = server.run(train, NUM_RANKS, *run, timeout_s=TIMEOUT_S)
    reference = server.run_local(train_locally, timeout_s=TIMEOUT_S)
    losses, gradients, state, _ = ranks[0]
    weights = {name: state[name] for name in reference.weights}
    compare(reference, Trace(losses, gradients, weights))
    for rank, (*_, moved) in enumerate(ranks):
        assert moved["weights"] > 0, f"no weights moved on rank {rank}"
        written = json.loads((tmp_path / "emulation" / f"rank_{rank:05d}.json").read_text())
        assert sum(written["peak_bytes"].values()) <= DEVICE_BYTES
    assert not list((tmp_path / "run").glob("spill")), "files are left behind"


def _check_plan(plan: Plan, has_disks: bool) -> None:
    """It is of the kind that ten trillion parameters get: experts cut over all devices, everything
    that a grid cuts at home elsewhere.
    """
    stacks = [name for name in plan.holders if ".experts." in name]
    assert len(stacks) == 48
    in_blocks = {name for block in plan.blocks for name in block.parameters}
    assert in_blocks.issuperset(stacks)
    homes = {home for block in plan.blocks for home in (block.weights, block.gradients)}
    assert homes == ({"host", "disk"} if has_disks else {"host"})
    assert all(block.states != "device" for block in plan.blocks)
    assert not any("other values" in note for note in plan.notes)
