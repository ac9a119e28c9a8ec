"""Predicted against measured: step time and peak memory of 2 CPU ranks, over models and plans.

`whale profile` is run first in the same processes, on the same two cores; every plan is made for what it measured, simulated, and then run.

    step     median of quiet rounds, barrier to barrier, against `wh.simulate(plan).step_s`
    memory   largest sum of live bytes in torch's allocator during a step, from the profiler's own memory events (`Total Allocated`),
             which are recorded from before the engine is made, against the simulated peak of that rank
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python benchmarks/prediction.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import Side, alternate, run_ranks, say
from models.drawings import Drawings
from models.m6 import M6, M6Config
from models.resnet import ResNet, ResNetConfig
from whale.profiling.measure import measure
from whale.runtime.ranks import Ranks

ROUNDS, STEPS, LIMIT_S = 6, 3, 20.0
"""quiet rounds, steps in a round, seconds for each case at most"""
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


def measure_case(case: Case, cluster: wh.Cluster) -> tuple[float, float, list[float], list[float]]:
    """(predicted step, measured step, predicted bytes by rank, measured bytes by rank)"""
    torch.manual_seed(0)
    wh.init({**case.config, "check_capture": False})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        batch, model = case.batch(), case.build()
        engine = wh.parallelize(model, batch, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4), cluster=cluster)
        del model
        for _ in range(2):
            engine.step(batch)
        with record_function(MARK):
            engine.step(batch)
    live: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(live, peak_bytes(watched))
    times = alternate([Side(case.name, lambda step: engine.step(batch))], ROUNDS, STEPS, LIMIT_S, warm_up=1)
    timeline = wh.simulate(engine.plan)
    engine.close()
    return timeline.step_s, times.median(case.name), [device.peak_total_bytes for device in timeline.devices], live


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


def run() -> list[tuple[float, float, list[float], list[float]]]:
    """On every rank."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # by which devices of the cluster are matched
    ranks = Ranks("cpu")
    cluster = measure(ranks, lambda what: None)
    found = []
    for case in CASES:
        found.append(measure_case(case, cluster))
        step_s, measured_s, predicted, live = found[-1]
        memory = ", ".join(f"{a / 1e6:.1f} / {b / 1e6:.1f} MB" for a, b in zip(predicted, live, strict=True))
        say(f"{case.name}: step {step_s * 1e3:.1f} / {measured_s * 1e3:.1f} ms, memory {memory} (predicted / measured)")
    return found


def main() -> None:
    results = run_ranks(run, 2)
    print(f"{'case':<40}{'step ms':>9}{'measured':>10}{'ratio':>8}{'memory MB':>22}{'measured':>18}{'ratio':>14}")
    details, margins = {}, []
    for case, (predicted_s, measured_s, predicted, live) in zip(CASES, results, strict=True):
        step, memory = predicted_s / measured_s, [a / b for a, b in zip(predicted, live, strict=True)]
        shown = ["  ".join(f"{value / 1e6:.1f}" for value in values) for values in (predicted, live)]
        ratios = "  ".join(f"{ratio:.3f}" for ratio in memory)
        print(f"{case.name:<40}{predicted_s * 1e3:>9.1f}{measured_s * 1e3:>10.1f}{step:>8.3f}{shown[0]:>22}{shown[1]:>18}{ratios:>14}")
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
