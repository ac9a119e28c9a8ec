"""How long planning takes, capture included: large models and large clusters, on one core and
without weights.

    a GPT of 96 layers x 12288 for 64 stages                                     under 30 s in all, under 1 GB
    the same on 1,024 devices of 3 kinds, 128 stages x 8 replicas                under 30 s in all, under 1 GB
    BERT-Large on 16 mixed devices, 4 stages x 4 replicas                        under 1 s after the capture
    the GPT again, all of it under `split` over 64 devices, any grid             under 20 s after the capture

Each in a process of its own, as `whale plan` runs; importing torch and transformers is not counted.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/planning.py` finds its neighbours, too

import whale as wh
from whale import api
from whale.capture.batch import read_batch
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device, device_kind
from whale.model_planner import ModelPlanner
from whale.plans.plan import Plan

LAYERS = 96
WIDTH = 12288
HEADS = 96
LENGTH = 2048
NUM_MICRO_BATCH = 64
LIMIT_S = 30.0
LIMIT_BYTES = 1e9
LIMIT_AFTER_CAPTURE_S = 1.0
LIMIT_SPLIT_S = 20.0
LARGE_CLUSTER = {"H100": 512, "A100-80GB": 256, "A100-40GB": 256}
SPLIT_DEVICES = 64
MIXED_CLUSTER = {"V100-32GB": 8, "P100": 4, "T4": 4}


def cluster_of(kinds: dict[str, int]) -> wh.Cluster:
    """Hosts of 8 devices of one kind."""
    names = [kind for kind, count in kinds.items() for _ in range(count)]
    devices = tuple(
        Device(rank, f"host{rank // 8}", rank % 8, device_kind(name))
        for rank, name in enumerate(names)
    )
    return wh.Cluster(devices, PCIE_3_X16, ETHERNET_50G)


def gpt(cluster: wh.Cluster | int, num_stages: int, num_replicas: int) -> dict[str, Any]:
    start = time.perf_counter()
    with torch.device("meta"):
        config = GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH)
        model = GPT2LMHeadModel(config)
    words = torch.zeros(NUM_MICRO_BATCH * num_replicas, LENGTH, dtype=torch.long)
    settings = {"num_task_graph": num_stages, "num_micro_batch": NUM_MICRO_BATCH}
    plan = wh.plan(model, {"input_ids": words, "labels": words}, cluster=cluster, config=settings)
    seconds = time.perf_counter() - start
    times = [stage.forward_s for stage in plan.stages]
    return {
        "seconds": round(seconds, 1),
        "of limit": seconds / LIMIT_S,
        "devices": plan.num_devices,
        "stages": len(plan.stages),
        "stages that compute again": sum(stage.num_recomputed > 0 for stage in plan.stages),
        "slowest stage / mean": round(max(times) / (sum(times) / len(times)), 3),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def gpt_on_like_devices() -> dict[str, Any]:
    return gpt(64, 64, 1)


def gpt_on_three_kinds() -> dict[str, Any]:
    return gpt(cluster_of(LARGE_CLUSTER), 128, 8)


def split_gpt() -> dict[str, Any]:
    """The grid is chosen among all of so many devices."""
    with torch.device("meta"):
        config = GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH)
        model = wh.annotate(GPT2LMHeadModel(config), {"*": wh.split(SPLIT_DEVICES)})
    words = torch.zeros(NUM_MICRO_BATCH, LENGTH, dtype=torch.long)
    cluster = cluster_of({"A100-80GB": SPLIT_DEVICES})
    settings = {"num_micro_batch": NUM_MICRO_BATCH}
    plan, (seconds, in_all), _ = after_capture(model, words, cluster, settings)
    grid = plan.virtual_devices[0].grid
    found = {
        "seconds after the capture": round(seconds, 1),
        "of limit": seconds / LIMIT_SPLIT_S,
        "in all": round(in_all, 1),
    }
    return {**found, "grid": grid.name if grid is not None else "none", "devices": plan.num_devices}


def bert() -> dict[str, Any]:
    with torch.device("meta"):
        model = BertForMaskedLM(
            BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16)
        )
    words = torch.zeros(64, 128, dtype=torch.long)
    settings = {"num_task_graph": 4, "num_micro_batch": 8}
    plan, (seconds, in_all), _ = after_capture(model, words, cluster_of(MIXED_CLUSTER), settings)
    found = {
        "seconds after the capture": round(seconds, 2),
        "of limit": seconds / LIMIT_AFTER_CAPTURE_S,
        "in all": round(in_all, 1),
    }
    return {**found, "devices": plan.num_devices}


Both = tuple[float, float]
"""after the capture, and in all"""


def after_capture(
    model: torch.nn.Module, words: torch.Tensor, cluster: wh.Cluster, settings: dict[str, Any]
) -> tuple[Plan, Both, Both]:
    """What `wh.plan` does, with a look at the clock between capture and planning: (plan, seconds,
    CPU seconds).
    """
    moments = [(time.perf_counter(), time.process_time())]
    layout, tensors = read_batch({"input_ids": words, "labels": words})
    config = wh.Config(settings)
    prepared = api._prepare(model, layout, tensors, None, config, "cpu")
    moments.append((time.perf_counter(), time.process_time()))
    plan = ModelPlanner(model, cluster, config, layout.batch_size).plan(prepared, {})
    moments.append((time.perf_counter(), time.process_time()))
    start, captured, end = moments
    clock, cpu = (
        (last - middle, last - first)
        for first, middle, last in zip(start, captured, end, strict=True)
    )
    return plan, clock, cpu


def alone(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """In a new process, with its peak of memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_with_memory, case).result()


def _with_memory(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found = case()
    return {**found, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
    details = {
        "GPT, 64 devices": alone(gpt_on_like_devices),
        "GPT, 1,024 devices of 3 kinds": alone(gpt_on_three_kinds),
        "BERT-Large, 16 mixed devices": alone(bert),
        "GPT, split over 64 devices": alone(split_gpt),
    }
    for each in details.values():
        each["ratio"] = round(max(each.pop("of limit"), each["peak_bytes"] / LIMIT_BYTES), 3)
        each["target"] = 1.0
    worst = max(each["ratio"] for each in details.values())
    print(
        json.dumps(
            {
                "name": "planning",
                "ratio": round(worst, 3),
                "target": 1.0,
                "ok": worst <= 1.0,
                "details": details,
            }
        )
    )
    sys.exit(0 if worst <= 1.0 else 1)


if __name__ == "__main__":
    main()
