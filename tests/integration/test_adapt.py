"""Samples move to other ranks in the middle of a run, and the training stays that of one device."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whale as wh
from tests.exactness import Float64Mode, Trace, compare, local_training
from tests.ranks import ModelServer, preload
from whale import api
from whale.capture.batch import read_batch
from whale.capture.prepare import CapturedModel
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device, DeviceKind
from whale.emulation.pace import Pace
from whale.planning.adapt import StepTimes, predicted_seconds, rebalance, samples_by_rank
from whale.runtime.executor import Executor
from whale.scheduling import Kind

preload("tests.integration.test_adapt")

WIDTH = 32
NUM_LAYERS = 6
BATCH_SIZE = 48
NUM_STEPS = 12
SAMPLE_S = 2e-3
"""what a forward of a sample takes on every rank, in truth: emulated by sleeping, since tests share
their cores
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH_SIZE, WIDTH, generator=generator, dtype=torch.float64)
        for _ in range(NUM_STEPS)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def prepare_net() -> CapturedModel:
    torch.set_num_threads(1)
    with Float64Mode():
        layout, tensors = read_batch(batches()[0])
        return api._prepare(Net(), layout, tensors, None, wh.Config(), "cpu", check=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_net) as started:
        yield started


@pytest.fixture(scope="module")
def local() -> Trace:
    with Float64Mode():
        return local_training(Net(), batches(), None, sgd)


@dataclass
class Run:
    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    """on rank 0"""
    shares: list[tuple[int, ...]]
    """samples by rank, before every step"""
    messages: list[str]
    num_rebalanced: int


def believed_cluster(*speeds: float) -> wh.Cluster:
    """What the planner is told; in truth all ranks are cores of one machine."""
    kinds = [DeviceKind(f"x{speed:g}", speed * 1e11, 10**12, 1e15) for speed in speeds]
    return wh.Cluster(
        tuple(Device(rank, "localhost", rank, kind) for rank, kind in enumerate(kinds)),
        PCIE_3_X16,
        ETHERNET_50G,
    )


def alike(engine: wh.Engine, step: int) -> None:
    """All ranks take the same time for a sample, whatever the planner believes."""
    engine.own_samples(BATCH_SIZE)  # the program of the next step is there from now on
    for executor in engine.executors():
        samples = [stop - start for start, stop in executor.program.samples]
        parts = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
        executor.pace = Pace(
            {
                a: SAMPLE_S * parts[a.kind] * samples[a.micro_batch]
                for a in executor.program.actions
                if a.is_compute
            }
        )


def train(
    prepared: CapturedModel,
    config: dict[str, Any],
    speeds: tuple[float, ...],
    between: Callable[[wh.Engine, int], None] = alike,
) -> Run:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("whale").addHandler(handler)
    torch.set_num_threads(1)
    with Float64Mode():
        # the search would leave the slowest device out
        fixed = {} if "num_task_graph" in config else {"strategy": "data"}
        wh.init(wh.Config({**fixed, **config}))
        data = batches()
        engine = wh.parallelize(
            Net(), data[0], optimizer=sgd, prepared=prepared, cluster=believed_cluster(*speeds)
        )
        losses = []
        shares = []
        gradients = {}
        for step, batch in enumerate(data):
            between(engine, step)
            shares.append(samples_by_rank(engine.plan, BATCH_SIZE))
            losses.append(engine.step(batch).loss)
            gradients = gradients or {
                name: gradient.clone() for name, gradient in engine.gradients().items()
            }
        engine.close()
        return Run(
            losses, gradients, engine.full_state_dict(), shares, messages, engine.num_rebalanced
        )


def compare_with(local: Trace, runs: list[Run]) -> None:
    gradients = {name: gradient for run in runs for name, gradient in run.gradients.items()}
    compare(local, Trace(runs[0].losses, gradients, runs[0].weights))


WRONG = (1.0, 4.0)
"""the planner is told that rank 1 is four times as fast, so it gives it four fifths of the samples;
in truth they are alike
"""
ADAPT = {"adapt": "on", "adapt_steps": 2, "adapt_threshold": 0.1}


def test_shares_follow_the_real_speed_and_training_stays_exact(
    server: ModelServer, local: Trace, tmp_path: Path
) -> None:
    runs = server.run(train, 2, {**ADAPT, "run_folder": str(tmp_path)}, WRONG)
    compare_with(local, runs)
    assert all(run.shares == runs[0].shares for run in runs)
    first = runs[0].shares[0]
    last = runs[0].shares[-1]
    assert first in ((9, 39), (10, 38)) and runs[0].num_rebalanced >= 1
    assert last[0] > first[0] and all(sum(shares) == BATCH_SIZE for shares in runs[0].shares)
    told = [message for message in runs[0].messages if "predicted share of the speed" in message]
    assert (
        len(told) == runs[0].num_rebalanced
        and f"samples by rank {first[0]}+{first[1]} -> " in told[0]
    )
    assert not any(
        "predicted share" in message for message in runs[1].messages
    )  # rank 0 speaks for all
    for rank in range(2):
        lines = [
            json.loads(line)
            for line in (tmp_path / "metrics" / f"rank_{rank:05d}.jsonl").read_text().splitlines()
        ]
        assert [line["own_samples"] for line in lines] == [
            shares[rank] for shares in runs[0].shares
        ]
        assert lines[-1]["num_rebalanced"] == len({line["num_rebalanced"] for line in lines}) - 1


def test_suggest_says_so_and_changes_nothing(server: ModelServer, local: Trace) -> None:
    runs = server.run(train, 2, {**ADAPT, "adapt": "suggest"}, WRONG)
    compare_with(local, runs)
    first = runs[0].shares[0]
    assert set(runs[0].shares) == {first} and runs[0].num_rebalanced == 0
    assert any(
        f"samples by rank {first[0]}+{first[1]} -> " in message
        and '"adapt": "on" would do it' in message
        for message in runs[0].messages
    )


def slow_replica(engine: wh.Engine, step: int) -> None:
    """The plan as if stage 1 of replica 1 had been found three times too slow."""
    if step == NUM_STEPS // 2:
        times = list(predicted_seconds(engine.plan, BATCH_SIZE))
        times[3] *= 3
        found = rebalance(engine.plan, [StepTimes(BATCH_SIZE, tuple(times))], 0.1, step - 1)
        assert found is not None
        engine._training.next_plan = found.plan
        engine.take_new_shares()


def test_replicas_of_a_pipeline_share_again_in_the_middle_of_a_run(
    server: ModelServer, local: Trace
) -> None:
    config = {"num_task_graph": 2, "num_micro_batch": 4, "schedule": "zero-bubble"}
    runs = server.run(train, 4, config, (1.0, 1.0, 1.0, 1.0), slow_replica)
    compare_with(local, runs)
    assert runs[0].shares[0] == (24, 24, 24, 24) and runs[0].shares[-1] == (36, 36, 12, 12)


def train_with_loader(
    prepared: CapturedModel, config: dict[str, Any]
) -> tuple[list[float], list[tuple[int, ...]]]:
    torch.set_num_threads(1)
    with Float64Mode():
        wh.init(wh.Config({"strategy": "data", **config}))
        data = batches()
        engine = wh.parallelize(
            Net(), data[0], optimizer=sgd, prepared=prepared, cluster=believed_cluster(*WRONG)
        )
        loader = engine.loader(
            TensorDataset(torch.cat(data)),
            BATCH_SIZE,
            collate=lambda rows: torch.stack([row for (row,) in rows]),
        )
        losses = []
        shares = []
        for _ in range(2):
            for batch in loader:
                alike(engine, 0)
                shares.append(samples_by_rank(engine.plan, BATCH_SIZE))
                losses.append(engine.step(batch).loss)
        return losses, shares


def test_a_loader_takes_new_shares_with_its_next_epoch(server: ModelServer) -> None:
    with Float64Mode():
        twice = local_training(Net(), batches() * 2, None, sgd)
    losses, shares = server.run(train_with_loader, 2, ADAPT)[0]
    assert losses == pytest.approx(twice.losses, rel=1e-10)
    assert (
        len(set(shares[:NUM_STEPS])) == len(set(shares[NUM_STEPS:])) == 1
        and shares[-1][0] > shares[0][0]
    )


def steps_that_count(prepared: CapturedModel) -> int:
    """Which steps count where their programs all run for the first time, each one in the memory of
    the one before.
    """
    with Float64Mode():
        wh.init(wh.Config({"strategy": "data", "adapt": "suggest", "adapt_steps": 100}))
        engine = wh.parallelize(Net(), batches()[0], optimizer=sgd, prepared=prepared)
        engine.step(batches()[0])
        assert engine._training.last_outcome is not None
        for step in range(1, 20):
            engine._training.adapting.after_step(
                object.__new__(Executor), engine._training.last_outcome, BATCH_SIZE, step
            )
        return len(engine._training.adapting._own)


def test_a_new_program_is_not_taken_for_one_that_is_gone(server: ModelServer) -> None:
    """Python gives the `id` of an object that is gone to a new one, on some ranks: then they would
    not meet in the exchange of times.
    """
    assert server.run(steps_that_count, 2) == [0, 0]
