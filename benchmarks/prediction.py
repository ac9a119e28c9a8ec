"""Predicted against measured: step time and peak memory of 2 CPU ranks, over models and plans.

`whale profile` runs in the same processes, on the same two cores; then each plan is made for what
it found, and run.

    step     the fastest steps, against `wh.simulate(plan).step_s`. Other guests of the processor make a core up to twice as slow for
             seconds: what `whale profile` measures then does not count either. So all cases take turns, too
    memory   largest sum of live bytes in torch's allocator during a step, from the profiler's own memory events (`Total Allocated`),
             which are recorded from before the engine is made, against the simulated peak of that rank. Six more cases, whose weights
             and states are not all here, for memory only; `--memory` runs these alone
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # torch's profiler says on every start and stop that it does

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/prediction.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.peak_memory import MARK, peak_bytes
from benchmarks.side_by_side import run_ranks, say
from models.drawings import Drawings
from models.m6 import M6, M6Config
from models.resnet import ResNet, ResNetConfig
from whale.calibration.measure import measure
from whale.calibration.turns import NEARLY, NUM_FASTEST, Speed
from whale.distributed.ranks import Ranks

STEPS_S = 190.0
"""of steps, for all cases together, at most"""
TURN_S = 1.0
NUM_FAST = 8
FEWEST_STEPS = 20
"""steps of a case at fast moments (`whale/calibration/turns.py`), and steps in all, that are enough
"""
STEP_WITHIN = 0.10
LEAST_MEMORY = 1.00
MOST_MEMORY = 1.05
LENGTH = 64


class Perceptron(nn.Module):
    """Wide linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(6) for layer in (nn.Linear(768, 768), nn.GELU()))
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


@dataclass(frozen=True)
class Case:
    """One model with one plan."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    config: dict[str, Any]


def _gpt2(batch_size: int) -> dict[str, Any]:
    return {"build": lambda: gpt2.build(LENGTH), "batch": lambda: gpt2.batch(0, batch_size, LENGTH)}


def _perceptron(batch_size: int) -> dict[str, Any]:
    return {
        "build": Perceptron,
        "batch": lambda: {"x": torch.randn(batch_size, 768), "y": torch.randn(batch_size, 768)},
    }


def _resnet(batch_size: int) -> dict[str, Any]:
    labels = torch.zeros(batch_size, dtype=torch.long)
    small = ResNetConfig(num_classes=10, blocks=(2, 2), width=16)
    return {
        "build": lambda: ResNet(small),
        "batch": lambda: {"images": torch.randn(batch_size, 3, 64, 64), "labels": labels},
    }


PIPELINE = {"num_task_graph": 2, "num_micro_batch": 4}
CASES = (
    Case("GPT-2, data parallel", **_gpt2(16), config={}),
    Case("GPT-2, 2 micro-batches, data parallel", **_gpt2(16), config={"num_micro_batch": 2}),
    Case("GPT-2, 2 stages", **_gpt2(16), config=PIPELINE),
    Case("perceptron, data parallel", **_perceptron(256), config={}),
    Case("perceptron, 2 stages", **_perceptron(256), config=PIPELINE),
    Case("ResNet, data parallel", **_resnet(16), config={}),
    Case(
        "small M6, data parallel",
        build=lambda: M6(M6Config.small()),
        batch=lambda: Drawings(100).batch(range(16)),
        config={},
    ),
)
ZERO_3 = {"zero": 3}
DISK = {"offload": {"optimizer": "disk"}}
MEMORY_CASES = (
    Case("GPT-2, zero 3", **_gpt2(16), config=ZERO_3),
    Case("perceptron, zero 3", **_perceptron(256), config=ZERO_3),
    Case("ResNet, zero 3", **_resnet(16), config=ZERO_3),
    Case("GPT-2, states on disk", **_gpt2(16), config=DISK),
    Case("perceptron, 2 stages, states on disk", **_perceptron(256), config={**PIPELINE, **DISK}),
    Case("ResNet, states on disk", **_resnet(16), config=DISK),
)
"""only their memory is compared"""


@dataclass(frozen=True)
class Memory:
    """Of one case."""

    predicted_bytes: list[float]
    """by rank"""
    measured_bytes: list[float]

    @property
    def ratios(self) -> list[float]:
        """predicted / measured"""
        return [
            predicted / measured
            for predicted, measured in zip(self.predicted_bytes, self.measured_bytes, strict=True)
        ]

    @property
    def is_ok(self) -> bool:
        return all(LEAST_MEMORY <= each <= MOST_MEMORY for each in self.ratios)

    def __str__(self) -> str:
        shown = [
            "  ".join(f"{value / 1e6:.1f}" for value in values)
            for values in (self.predicted_bytes, self.measured_bytes)
        ]
        ratios = "  ".join(f"{ratio:.3f}" for ratio in self.ratios)
        return f"{shown[0]:>22}{shown[1]:>18}{ratios:>14}"


@dataclass(frozen=True)
class Found:
    """Of one case."""

    predicted_s: float
    """of a step"""
    measured_s: float
    """of the fastest steps"""
    median_s: float
    num_fast: int
    """steps at moments when all cores were fast"""
    memory: Memory

    @property
    def step(self) -> float:
        """predicted / measured"""
        return self.predicted_s / self.measured_s


@dataclass
class Running:
    """A case whose steps are timed."""

    case: Case
    engine: wh.Engine
    batch: Any
    live_bytes: list[float]
    """the largest sum during a step, by rank"""
    steps: list[float] = field(default_factory=list)
    """seconds on the slowest rank"""
    num_fast: int = 0
    """of them at moments when all cores were fast, as far as was known then"""

    @property
    def measured_s(self) -> float:
        """The fastest steps count, as in `whale profile` the fastest stretches."""
        return statistics.fmean(sorted(self.steps)[:NUM_FASTEST])


def make_optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4)


def start(case: Case, cluster: wh.Cluster | None) -> Running:
    """Makes the plan for what was measured, and runs its first steps, which tell the memory."""
    torch.manual_seed(0)
    wh.init({**case.config, "check_capture": False})
    gc.collect()  # what is left of the case before must not be freed while this one is recorded
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        batch = {
            name: tensor.clone() for name, tensor in case.batch().items()
        }  # in torch's memory, wherever it came from
        model = case.build()
        engine = wh.parallelize(model, batch, optimizer=make_optimizer, cluster=cluster)
        del model
        for _ in range(2):
            engine.step(batch)
        with record_function(MARK):
            engine.step(batch)
    live: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(live, peak_bytes(watched))
    return Running(case, engine, batch, live)


def time_steps(cases: Sequence[Running], speed: Speed) -> None:
    """A second of each case in turn, until each had enough steps at moments when all cores were
    fast.
    """
    begin = time.perf_counter()
    passed_s = 0.0
    waiting = list(cases)
    while waiting and passed_s < STEPS_S:
        for running in waiting:
            until_s = passed_s + TURN_S
            before_s = speed.look()
            while passed_s < until_s:
                dist.barrier()
                start = time.perf_counter()
                running.engine.step(running.batch)
                took_s = time.perf_counter() - start
                after_s = speed.look()
                here = [took_s, time.perf_counter() - begin, speed.slowness(max(before_s, after_s))]
                slowest = torch.tensor(here, dtype=torch.float64)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                took_s, passed_s, slowness = slowest.tolist()
                running.steps.append(took_s)
                running.num_fast += slowness <= NEARLY
                before_s = after_s
        waiting = [
            running
            for running in cases
            if running.num_fast < NUM_FAST or len(running.steps) < FEWEST_STEPS
        ]


def compare_memory(folder: str) -> list[Memory]:
    """On every rank: the cases of which only the memory counts."""
    results = []
    for case in MEMORY_CASES:
        running = start(replace(case, config={**case.config, "run_folder": folder}), None)
        results.append(_memory(running))
        say(f"{case.name:<40}{results[-1]}")
        running.engine.close()
        del running  # or it would be freed while the next one is recorded
    return results


def _memory(running: Running) -> Memory:
    timeline = wh.simulate(running.engine.plan)
    predicted = [device.peak_total_bytes for device in timeline.devices]
    return Memory(predicted, running.live_bytes)


def run() -> list[Found]:
    """On every rank."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # by which devices of the cluster are matched
    ranks = Ranks("cpu")
    begin = time.perf_counter()
    cluster = measure(ranks, lambda what: say(f"{time.perf_counter() - begin:5.1f} s  {what}"))
    cases = [start(case, cluster) for case in CASES]
    time_steps(cases, Speed())
    results = []
    for each in cases:
        timeline = wh.simulate(each.engine.plan)
        median_s = statistics.median(each.steps)
        results.append(
            Found(
                timeline.step_s,
                each.measured_s,
                median_s,
                each.num_fast,
                _memory(each),
            )
        )
        say(
            f"{each.case.name}: {each.num_fast} of {len(each.steps)} steps at a fast moment; the "
            f"fastest {each.measured_s * 1e3:.1f} ms, "
            f"median {median_s * 1e3:.1f} ms"
        )
        each.engine.close()
    return results


def main() -> None:
    results = run_ranks(run, 2) if "--memory" not in sys.argv else []
    with tempfile.TemporaryDirectory() as folder:
        memories = run_ranks(compare_memory, 2, folder)
    print(
        f"{'case':<40}{'step ms':>9}{'fastest':>10}{'ratio':>8}{'memory MB':>22}{'measured':>18}{'ratio':>14}"
    )
    details: dict[str, dict[str, Any]] = {}
    errors = []
    for case, found in zip(CASES, results, strict=bool(results)):
        step_ms = found.predicted_s * 1e3
        print(
            f"{case.name:<40}{step_ms:>9.1f}{found.measured_s * 1e3:>10.1f}{found.step:>8.3f}{found.memory}"
        )
        details[case.name] = {
            "step predicted / fastest": round(found.step, 3),
            "step predicted / median": round(found.predicted_s / found.median_s, 3),
            "steps with fast cores": found.num_fast,
        }
        errors.append(abs(found.step - 1))
    for case, memory in zip(MEMORY_CASES, memories, strict=True):
        print(f"{case.name:<67}{memory}")
    every = [(case, found.memory) for case, found in zip(CASES, results)]
    every += zip(MEMORY_CASES, memories)
    for case, memory in every:
        ratios = [round(each, 3) for each in memory.ratios]
        details.setdefault(case.name, {})["memory predicted / measured"] = ratios
    worst = max(errors, default=0.0)
    if errors:
        details["mean error of the step"] = {"ratio": round(statistics.fmean(errors), 3)}
    is_ok = worst <= STEP_WITHIN and all(memory.is_ok for _, memory in every)
    print(
        json.dumps(
            {
                "name": "prediction",
                "ratio": round(1 + worst, 4),
                "target": 1 + STEP_WITHIN,
                "ok": is_ok,
                "details": details,
            }
        )
    )
    sys.exit(0 if is_ok else 1)


if __name__ == "__main__":
    main()
