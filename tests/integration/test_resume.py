"""Resuming is exact: a job that is saved and continues under other plans and rank counts trains
like one that was never interrupted.

4 ranks (2 stages x DP 2) -> 2 ranks (DP 2) -> 3 ranks (3 stages) -> 1 rank. The reference is plain
PyTorch on the same samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

import whale as wh
from tests.exactness import EXACT_FLOAT64, Trace, compare
from tests.ranks import ModelServer

WIDTH = 8
NUM_CLASSES = 3
NUM_LAYERS = 6
BATCH_SIZE, NUM_SAMPLES = (
    6,
    26,
)  # 4 mini-batches an epoch and 2 samples left over: positions and epochs differ between the parts
SEED = 5


class Net(nn.Module):
    """Layers of one shape, a head, and a frozen parameter: what is saved under a wrong
    name shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


class Samples(torch.utils.data.Dataset[Any]):
    """Sample i, made from its number; remembers which were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (), generator=generator)}


def order(epoch: int) -> list[int]:
    """Another order for each epoch, known to both sides."""
    return torch.randperm(
        NUM_SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch)
    ).tolist()


def build() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Two groups with their own settings: they must come back as they were."""
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    decayed = [parameter for name, parameter in named if name.endswith("weight")]
    others = [parameter for name, parameter in named if not name.endswith("weight")]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-2},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)


@dataclass(frozen=True)
class Leg:
    """A part of the training under one plan."""

    num_ranks: int
    num_steps: int
    config: dict[str, Any] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    """a glob for each stage, each on one device; none: data parallel"""

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks, {len(self.stages) or 1} stages"


TWO_STAGES = ("layers.[0-2]", "layers.[3-5]|head")
THREE_STAGES = ("layers.[0-1]", "layers.[2-3]", "layers.[4-5]|head")
FOUR = Leg(4, 3, {"num_micro_batch": 2}, TWO_STAGES)
TWO = Leg(2, 3)
THREE = Leg(3, 3, {"num_micro_batch": 3}, THREE_STAGES)
ONE = Leg(1, 2)


def warm_up() -> None:
    wh.plan(build(), default_collate([Samples()[index] for index in range(BATCH_SIZE)]), cluster=1)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(warm_up) as started:
        yield started


@dataclass
class RankOutcome:
    losses: list[float]
    learning_rates: list[float]
    state: dict[str, Tensor]
    """whole model on rank 0"""
    moments: dict[str, dict[str, Tensor]]
    """AdamW's state of this rank's parameters"""
    read: list[int]
    """sample numbers in the order in which this rank read them"""
    loaded: int | None


def train_leg(prepared: None, leg: Leg, folder: Path, forgets: str = "") -> RankOutcome:
    """One rank: continues from the folder's checkpoint if there is one, trains and saves.
    `forgets`: what is lost on the way.
    """
    wh.init(
        {**leg.config, "seed": int(os.environ.get("WORLD_SIZE", "1"))}
    )  # the seed must not matter: there is no dropout
    model = build()
    if leg.stages:
        wh.annotate(model, {glob: wh.replicate(1) for glob in leg.stages})
    samples = Samples()
    sample = default_collate([Samples()[index] for index in range(BATCH_SIZE)])
    engine = wh.parallelize(model, sample, optimizer=make_optimizer, scheduler=make_scheduler)
    loader = engine.loader(samples, BATCH_SIZE, sampler=order)
    loaded = engine.load(folder, data=None if forgets == "position" else loader)
    if forgets == "moments":
        for state in engine.optimizer.state.values():
            state["exp_avg"].zero_()
    elif forgets == "learning rate":
        for group in engine.optimizer.param_groups:
            group["lr"] *= 1.01
    if loaded is None:
        assert engine.step_count == 0
    last = engine.step_count + leg.num_steps
    losses = []
    rates = []
    while engine.step_count < last:
        for batch in loader:
            result = engine.step(batch)
            losses.append(result.loss)
            rates.append(result.learning_rate)
            if engine.step_count == last:
                break
    engine.save(folder, data=loader).wait()
    optimizer = engine.optimizer
    assert optimizer is not None
    moments = {
        name: {
            key: torch.as_tensor(value).clone() for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in engine.named_parameters()
    }
    engine.close()
    return RankOutcome(losses, rates, engine.full_state_dict(), moments, samples.read, loaded)


@dataclass
class Local:
    """Plain training, never interrupted."""

    trace: Trace
    learning_rates: list[float]
    moments: dict[str, dict[str, Tensor]]
    batches: list[list[int]]


def train_locally(num_steps: int) -> Local:
    model = build()
    optimizer = make_optimizer(model.named_parameters())
    scheduler = make_scheduler(optimizer)
    samples = Samples()
    batches = []
    epoch = 0
    while len(batches) < num_steps:
        numbers = order(epoch)
        batches += [
            numbers[start : start + BATCH_SIZE]
            for start in range(0, NUM_SAMPLES - BATCH_SIZE + 1, BATCH_SIZE)
        ]
        epoch += 1
    losses = []
    rates = []
    for batch in batches[:num_steps]:
        optimizer.zero_grad()
        loss = model(**default_collate([samples[index] for index in batch]))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    moments = {
        name: optimizer.state[parameter]
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Local(Trace(losses, {}, weights), rates, moments, batches[:num_steps])


def check_samples(read: list[list[int]], batches: list[list[int]], leg: Leg) -> None:
    """All ranks together read the samples of exactly these batches, and a data-parallel rank none
    twice.

    A loader that fetches ahead would read more: then the test must look at what was given out
    instead.
    """
    wanted = [number for batch in batches for number in batch]
    readers = [numbers for numbers in read if numbers]
    if leg.stages:
        assert all(set(numbers) <= set(wanted) for numbers in readers)
    else:
        assert sorted(number for numbers in readers for number in numbers) == sorted(wanted)


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param((FOUR, TWO), marks=pytest.mark.slow),
        pytest.param((TWO, FOUR, THREE), marks=pytest.mark.slow),
        (FOUR, TWO, THREE, ONE),
        (ONE, THREE, FOUR),
    ],
    ids=lambda legs: " -> ".join(str(leg.num_ranks) for leg in legs),
)
def test_resume_is_exact(server: ModelServer, tmp_path: Path, legs: tuple[Leg, ...]) -> None:
    losses: list[float] = []
    rates: list[float] = []
    outcomes: list[RankOutcome] = []
    local = train_locally(sum(leg.num_steps for leg in legs))
    for number, leg in enumerate(legs):
        before = len(losses)
        outcomes = server.run(train_leg, leg.num_ranks, leg, tmp_path)
        assert [outcome.loaded for outcome in outcomes] == [
            before if number else None
        ] * leg.num_ranks
        assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)
        check_samples(
            [outcome.read for outcome in outcomes],
            local.batches[before : before + leg.num_steps],
            leg,
        )
        losses += outcomes[0].losses
        rates += outcomes[0].learning_rates
    compare(local.trace, Trace(losses, {}, outcomes[0].state))
    assert rates == pytest.approx(local.learning_rates, rel=EXACT_FLOAT64)
    seen: set[str] = set()
    for outcome in outcomes:
        for name, state in outcome.moments.items():
            seen.add(name)
            assert state.keys() == local.moments[name].keys()
            for key, value in state.items():
                torch.testing.assert_close(
                    value,
                    local.moments[name][key],
                    rtol=1e-8,
                    atol=EXACT_FLOAT64,
                    msg=f"{name}: {key}",
                )
    assert seen == set(local.moments)


@pytest.mark.parametrize("forgets", ["", "moments", "learning rate", "position"])
def test_what_is_lost_would_show(server: ModelServer, tmp_path: Path, forgets: str) -> None:
    """The comparison of this file sees each kind of state: with any of it lost the second part ends
    elsewhere.
    """
    server.run(train_leg, 1, ONE, tmp_path)
    second = server.run(train_leg, 2, TWO, tmp_path, forgets)
    weights = train_locally(ONE.num_steps + TWO.num_steps).trace.weights
    if forgets:
        with pytest.raises(AssertionError, match="weight differs"):
            compare(Trace([], {}, weights), Trace([], {}, second[0].state))
    else:
        compare(Trace([], {}, weights), Trace([], {}, second[0].state))


def load_older(prepared: None, folder: Path) -> tuple[int | None, int, dict[str, Tensor]]:
    wh.init()
    engine = wh.parallelize(
        build(),
        default_collate([Samples()[i] for i in range(BATCH_SIZE)]),
        optimizer=make_optimizer,
    )
    return engine.load(folder), engine.step_count, engine.full_state_dict()


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    server: ModelServer, tmp_path: Path
) -> None:
    server.run(train_leg, 2, TWO, tmp_path)
    server.run(train_leg, 4, FOUR, tmp_path)
    files = sorted((tmp_path / "step_00000006").glob("*.safetensors"))
    content = bytearray(files[1].read_bytes())
    content[-9] ^= 1
    files[1].write_bytes(content)
    for step, count, state in server.run(load_older, 3, tmp_path):
        assert (step, count) == (3, 3)
        if state:
            compare(Trace([], {}, train_locally(3).trace.weights), Trace([], {}, state))
