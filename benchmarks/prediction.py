"""Predicted against measured: step time and peak memory of 2 CPU ranks, over models and plans.

`whale profile` runs in the same processes, on the same two cores; then each plan is made for what it found, and run.

    step     the fastest steps, against `wh.simulate(plan).step_s`. Other guests of the processor make a core up to twice as slow for
             seconds: what `whale profile` measures then does not count either
    memory   largest sum of live bytes in torch's allocator during a step, from the profiler's own memory events (`Total Allocated`),
             which are recorded from before the engine is made, against the simulated peak of that rank
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says on every start and stop that it does

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python benchmarks/prediction.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import run_ranks, say
from models.drawings import Drawings
from models.m6 import M6, M6Config
from models.resnet import ResNet, ResNetConfig
from whale.profiling.measure import measure
from whale.profiling.speed import NEARLY, Speed
from whale.profiling.turns import NUM_FASTEST
from whale.runtime.ranks import Ranks

STEPS_S = 190.0
"""of steps, for all cases together, at most"""
NUM_FAST, LEAST_S = 8, 5.0
"""steps of a case at fast moments (`whale/profiling/speed.py`), and seconds, that are enough"""
STEP_WITHIN, LEAST_MEMORY, MOST_MEMORY = 0.10, 1.00, 1.05
MARK = "measured step"
LENGTH = 64


class Perceptron(nn.Module):
    """Wide linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(768, 768), nn.GELU())))

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
    return {"build": Perceptron, "batch": lambda: {"x": torch.randn(batch_size, 768), "y": torch.randn(batch_size, 768)}}


def _resnet(batch_size: int) -> dict[str, Any]:
    labels = torch.zeros(batch_size, dtype=torch.long)
    small = ResNetConfig(num_classes=10, blocks=(2, 2), width=16)
    return {"build": lambda: ResNet(small), "batch": lambda: {"images": torch.randn(batch_size, 3, 64, 64), "labels": labels}}


PIPELINE = {"num_task_graph": 2, "num_micro_batch": 4}
CASES = (
    Case("GPT-2, data parallel", **_gpt2(16), config={}),
    Case("GPT-2, 2 micro-batches, data parallel", **_gpt2(16), config={"num_micro_batch": 2}),
    Case("GPT-2, 2 stages", **_gpt2(16), config=PIPELINE),
    Case("perceptron, data parallel", **_perceptron(256), config={}),
    Case("perceptron, 2 stages", **_perceptron(256), config=PIPELINE),
    Case("ResNet, data parallel", **_resnet(16), config={}),
    Case("small M6, data parallel", build=lambda: M6(M6Config.small()), batch=lambda: Drawings(100).batch(range(16)), config={}),
)


@dataclass(frozen=True)
class Found:
    """Of one case."""

    predicted_s: float
    """of a step"""
    measured_s: float
    predicted_bytes: list[float]
    """by rank"""
    measured_bytes: list[float]

    @property
    def step(self) -> float:
        """predicted / measured"""
        return self.predicted_s / self.measured_s

    @property
    def memory(self) -> list[float]:
        return [predicted / measured for predicted, measured in zip(self.predicted_bytes, self.measured_bytes, strict=True)]


def make_optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4)


def measure_case(case: Case, cluster: wh.Cluster, speed: Speed, limit_s: float) -> Found:
    """Runs the plan for what was measured."""
    torch.manual_seed(0)
    gc.collect()  # what is left of the case before must not be freed while this one is recorded
    wh.init({**case.config, "check_capture": False})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        batch = {name: tensor.clone() for name, tensor in case.batch().items()}  # in torch's memory, wherever it came from
        model = case.build()
        engine = wh.parallelize(model, batch, optimizer=make_optimizer, cluster=cluster)
        del model
        for _ in range(2):
            engine.step(batch)
        with record_function(MARK):
            engine.step(batch)
    live: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(live, peak_bytes(watched))
    measured_s = step_seconds(case.name, lambda: engine.step(batch), speed, limit_s)
    timeline = wh.simulate(engine.plan)
    engine.close()
    return Found(timeline.step_s, measured_s, [device.peak_total_bytes for device in timeline.devices], live)


def step_seconds(name: str, step: Callable[[], object], speed: Speed, limit_s: float) -> float:
    """Of the slowest rank, in the fastest steps: as `whale profile` counts the fastest stretches. Goes on until some moments were fast."""
    steps: list[float] = []
    looks, num_fast, begin, passed_s = [speed.look()], 0, time.perf_counter(), 0.0
    while passed_s < (limit_s if num_fast < NUM_FAST else LEAST_S):
        dist.barrier()
        start = time.perf_counter()
        step()
        took_s = time.perf_counter() - start
        looks.append(speed.look())
        slowest = torch.tensor([took_s, time.perf_counter() - begin, speed.slowness(max(looks[-2:]))], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        took_s, passed_s, slowness = (float(value) for value in slowest)
        num_fast += slowness <= NEARLY
        steps.append(took_s)
    found, median = statistics.fmean(sorted(steps)[:NUM_FASTEST]), statistics.median(steps)
    say(f"{name}: {num_fast} of {len(steps)} steps at a fast moment; the fastest {found * 1e3:.1f} ms, median {median * 1e3:.1f} ms")
    return found


def peak_bytes(watched: profile) -> float:
    """Most live bytes of torch's CPU allocator during the marked step."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        watched.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    step = next(event for event in events if event.get("name") == MARK and event.get("ph") == "X")
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    # what earlier recordings saw allocated and did not see freed
    before = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    inside = [event for event in memory if step["ts"] <= event["ts"] <= step["ts"] + step["dur"]]
    return float(max(event["args"]["Total Allocated"] for event in inside) - before)


def run() -> list[Found]:
    """On every rank."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # by which devices of the cluster are matched
    ranks = Ranks("cpu")
    begin = time.perf_counter()
    cluster = measure(ranks, lambda what: say(f"{time.perf_counter() - begin:5.1f} s  {what}"))
    results = []
    speed, left_s = Speed(), STEPS_S
    for place, case in enumerate(CASES):
        begin = time.perf_counter()
        found = measure_case(case, cluster, speed, left_s / (len(CASES) - place))
        left_s -= ranks.from_first(time.perf_counter() - begin)
        results.append(found)
        memory = ", ".join(f"{a / 1e6:.1f} / {b / 1e6:.1f} MB" for a, b in zip(found.predicted_bytes, found.measured_bytes, strict=True))
        say(f"{case.name}: step {found.predicted_s * 1e3:.1f} / {found.measured_s * 1e3:.1f} ms, memory {memory} (predicted / measured)")
    return results


def main() -> None:
    results = run_ranks(run, 2)
    print(f"{'case':<40}{'step ms':>9}{'measured':>10}{'ratio':>8}{'memory MB':>22}{'measured':>18}{'ratio':>14}")
    details, margins = {}, []
    for case, found in zip(CASES, results, strict=True):
        step, memory, step_ms = found.step, found.memory, found.predicted_s * 1e3
        shown = ["  ".join(f"{value / 1e6:.1f}" for value in values) for values in (found.predicted_bytes, found.measured_bytes)]
        ratios = "  ".join(f"{ratio:.3f}" for ratio in memory)
        print(f"{case.name:<40}{step_ms:>9.1f}{found.measured_s * 1e3:>10.1f}{step:>8.3f}{shown[0]:>22}{shown[1]:>18}{ratios:>14}")
        details[case.name] = {
            "step predicted / measured": round(step, 3),
            "memory predicted / measured": [round(each, 3) for each in memory],
        }
        margins.append((abs(step - 1), all(LEAST_MEMORY <= each <= MOST_MEMORY for each in memory)))
    worst = max(error for error, _ in margins)
    details["mean error of the step"] = {"ratio": round(statistics.fmean(error for error, _ in margins), 3)}
    is_ok = worst <= STEP_WITHIN and all(fits for _, fits in margins)
    print(json.dumps({"name": "prediction", "ratio": round(1 + worst, 4), "target": 1 + STEP_WITHIN, "ok": is_ok, "details": details}))
    sys.exit(0 if is_ok else 1)


if __name__ == "__main__":
    main()
