"""`wh.plan` of a 96-layer, 12288-wide GPT on `meta` for 64 stages: under 30 s in all, under 1 GB."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import replace

import torch
import transformers

import whale as wh
from whale.cluster.cluster import device_kind

LAYERS, WIDTH, HEADS, LENGTH, NUM_STAGES = 96, 12288, 96, 2048, 64
LIMIT_S, LIMIT_BYTES = 30.0, 1e9


def main() -> None:
    start = time.perf_counter()
    with torch.device("meta"):
        config = transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH)
        model = transformers.GPT2LMHeadModel(config)
    words = torch.zeros(NUM_STAGES, LENGTH, dtype=torch.long)
    # without limits of memory: float32 weights, Adam and 64 micro-batches in flight fit on no V100, and the time of planning is the subject
    cluster = wh.Cluster.uniform(NUM_STAGES, replace(device_kind("V100-32GB"), memory_bytes=0))
    plan = wh.plan(
        model, {"input_ids": words, "labels": words}, cluster=cluster, config={"num_task_graph": NUM_STAGES, "num_micro_batch": NUM_STAGES}
    )
    seconds = time.perf_counter() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times = [stage.forward_s for stage in plan.stages]
    details = {
        "seconds": round(seconds, 1),
        "peak_bytes": peak_bytes,
        "stages": len(plan.stages),
        "slowest stage / mean": round(max(times) / (sum(times) / len(times)), 3),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    ok = seconds <= LIMIT_S and peak_bytes <= LIMIT_BYTES
    worst = max(seconds / LIMIT_S, peak_bytes / LIMIT_BYTES)
    print(json.dumps({"name": "planning", "ratio": round(worst, 3), "target": 1.0, "ok": ok, "details": details}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
