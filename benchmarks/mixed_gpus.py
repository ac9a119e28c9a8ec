"""The cluster of the README: GPT-2 with 1.3 B parameters on two RTX 3090, an RTX 4090 and four V100,
64 x 512 tokens a step. The plan that Whale chooses against what people do with such cards today:
full copies (DDP), even pipelines, and even shards of weights and samples (FSDP's rule). All by our own
simulator.

`python benchmarks/mixed_gpus.py fp16` does it in half precision.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import transformers
from torch import nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/mixed_gpus.py` finds its neighbours, too

import whale as wh
from benchmarks import paper_models
from benchmarks.side_by_side import Claim, report, say
from whale.simulation import simulate

CLUSTER = Path(__file__).parents[1] / "examples" / "mixed_gpus.yaml"
BATCH = 64
LENGTH = 512
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
TARGET = 1.5


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=24,
        n_embd=2048,
        n_head=16,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config)


def words(batch_size: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch_size, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def even_step_s(
    model: paper_models.Captured, cluster: wh.Cluster, name: str, **config: object
) -> float | None:
    """The shortest step of even plans over numbers of micro-batches; None where none fits."""
    found = []
    for number in MICRO_BATCHES:
        try:
            plan = model.even_plan(cluster, BATCH, num_micro_batch=number, **config)
            timeline = simulate(plan)
        except ValueError as error:
            say(f"{name}, {number} micro-batches: {str(error).splitlines()[0][:120]}")
            continue
        over = [
            device.rank
            for device in timeline.devices
            if device.peak_total_bytes > device.memory_bytes
        ]
        verdict = f"does not fit on rank {over[0]}" if over else "fits"
        say(f"{name}, {number} micro-batches: {timeline.step_s:.2f} s, {verdict}")
        if not over:
            found.append(timeline.step_s)
    return min(found, default=None)


def main() -> None:
    precision = sys.argv[1] if len(sys.argv) > 1 else "default"
    cluster = wh.Cluster.load(CLUSTER)
    paper_models.MODELS["GPT-2 1.3B"] = (gpt2, words)
    model = paper_models.capture("GPT-2 1.3B")
    begin = time.perf_counter()
    chosen = wh.plan(gpt2, words(BATCH), cluster=cluster, config={"precision": precision})
    ours = simulate(chosen)
    took_s = time.perf_counter() - begin
    say(f"Whale's choice: {ours.step_s:.2f} s, found in {took_s:.1f} s with capture")
    others = {
        "full copies": even_step_s(
            model,
            cluster,
            "a full copy on every card (DDP)",
            strategy="data",
            zero=0,
            recompute=False,
            precision=precision,
        ),
        "even pipelines": even_step_s(
            model,
            cluster,
            "even pipeline, 7 stages, 1F1B",
            strategy="data",
            num_task_graph=7,
            schedule="1f1b",
            precision=precision,
        ),
        "even shards of weights and samples": even_step_s(
            model,
            cluster,
            "even shards (FSDP's rule)",
            strategy="data",
            zero=3,
            precision=precision,
        ),
    }
    claims = []
    for name, step_s in others.items():
        if step_s is None:
            say(f"{name}: fits with no number of micro-batches")
            continue
        details = {"whale_s": round(ours.step_s, 3), "other_s": round(step_s, 3)}
        claims.append(
            Claim(f"times faster than {name}", step_s / ours.step_s, TARGET, False, details)
        )
    report("mixed_gpus", claims)


if __name__ == "__main__":
    main()
