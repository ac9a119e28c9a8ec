"""How long planning takes, capture included: large models and large clusters, on one core and without weights.

    a GPT of 96 layers x 12288 for 64 stages                                     under 30 s in all, under 1 GB
    the same on 1,024 devices of 3 kinds, 128 stages x 8 replicas                under 30 s in all, under 1 GB
    BERT-Large on 16 mixed devices, 4 stages x 4 replicas                        under 1 s after the capture
    the GPT again, all of it under `split` over 64 devices, any grid             under 20 s after the capture
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python benchmarks/planning.py` finds its neighbours, too

import whale as wh
from whale import api
from whale.capture.batch import read_batch
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device, device_kind

LAYERS, WIDTH, HEADS, LENGTH, NUM_MICRO_BATCH = 96, 12288, 96, 2048, 64
LIMIT_S, LIMIT_BYTES, LIMIT_AFTER_CAPTURE_S, LIMIT_SPLIT_S = 30.0, 1e9, 1.0, 20.0
LARGE_CLUSTER = {"H100": 512, "A100-80GB": 256, "A100-40GB": 256}
MIXED_CLUSTER = {"V100-32GB": 8, "P100": 4, "T4": 4}


def cluster_of(kinds: dict[str, int]) -> wh.Cluster:
    """Hosts of 8 devices of one kind."""
    names = [kind for kind, count in kinds.items() for _ in range(count)]
    devices = tuple(Device(rank, f"host{rank // 8}", rank % 8, device_kind(name)) for rank, name in enumerate(names))
    return wh.Cluster(devices, PCIE_3_X16, ETHERNET_50G)


def gpt(cluster: wh.Cluster | int, num_stages: int, num_replicas: int) -> dict[str, Any]:
    start = time.perf_counter()
    with torch.device("meta"):
        config = transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH)
        model = transformers.GPT2LMHeadModel(config)
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


def split_gpt(num_devices: int) -> dict[str, Any]:
    """The grid is chosen among all of so many devices."""
    with torch.device("meta"):
        config = transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH)
        model = wh.annotate(transformers.GPT2LMHeadModel(config), {"*": wh.split(num_devices)})
    words = torch.zeros(NUM_MICRO_BATCH, LENGTH, dtype=torch.long)
    layout, tensors = read_batch({"input_ids": words, "labels": words})
    checked = wh.Config({"num_micro_batch": NUM_MICRO_BATCH})
    prepared = api._prepare(model, layout, tensors, None, checked, "cpu")
    begin = time.perf_counter()
    plan = api._plan(model, prepared, cluster_of({"A100-80GB": num_devices}), checked, layout)
    seconds = time.perf_counter() - begin
    grid = plan.virtual_devices[0].grid
    found = {"seconds after the capture": round(seconds, 1), "of limit": seconds / LIMIT_SPLIT_S}
    return {**found, "grid": grid.name if grid is not None else "none", "devices": plan.num_devices}


def bert() -> dict[str, Any]:
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16))
    words = torch.zeros(64, 128, dtype=torch.long)
    batch = {"input_ids": words, "labels": words}
    times = []
    # the same capture three times: to warm up, for a plan of next to nothing, and for the real one. The difference is what planning takes
    small: tuple[dict[str, int], dict[str, int]] = ({"T4": 1}, {})
    for kinds, settings in (small, small, (MIXED_CLUSTER, {"num_task_graph": 4, "num_micro_batch": 8})):
        begin = time.perf_counter()
        plan = wh.plan(model, batch, cluster=cluster_of(kinds), config=settings)
        times.append(time.perf_counter() - begin)
    seconds = max(0.0, times[2] - times[1])
    found = {"seconds": round(seconds, 2), "of limit": seconds / LIMIT_AFTER_CAPTURE_S, "in all": round(times[2], 1)}
    return {**found, "devices": plan.num_devices}


def main() -> None:
    details: dict[str, Any] = {
        "GPT, 64 devices": gpt(64, 64, 1),
        "GPT, 1,024 devices of 3 kinds": gpt(cluster_of(LARGE_CLUSTER), 128, 8),
        "BERT-Large, 16 mixed devices": bert(),
        "GPT, split over 64 devices": split_gpt(64),
    }
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    worst = max(peak_bytes / LIMIT_BYTES, *(each.pop("of limit") for each in details.values()))
    details["peak_bytes"] = peak_bytes
    print(json.dumps({"name": "planning", "ratio": round(worst, 3), "target": 1.0, "ok": worst <= 1.0, "details": details}))
    sys.exit(0 if worst <= 1.0 else 1)


if __name__ == "__main__":
    main()
