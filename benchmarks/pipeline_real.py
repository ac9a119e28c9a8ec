"""Real compute: a GPT-2 of 4 layers on 2 ranks, 16 micro-batches of 1 x 64 tokens: our schedules
against all classes of torch that run.

Every side trains the same model on the same batches; losses are compared in every step. torch's
classes get stages of as many layers each, the embeddings on the first and the head on the last;
ours are cut by the planner. Ceiling: each rank does half of the micro-batches of the whole model
and half of the update, at the same time, with no messages at all.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/pipeline_real.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from benchmarks.torch_schedules import TORCH, TorchJob, TorchSchedule, torch_side

NUM_DEVICES = 2
NUM_MICRO_BATCH = 16
LENGTH = 64
TARGET = 1.05
ROUNDS = 20
STEPS_PER_BLOCK = 2
LIMIT_S = 150.0
OURS = {"whale auto": "auto", "whale 1f1b": "1f1b", "whale zero-bubble": "zero-bubble"}
THEIRS = {
    name: kind for name, kind in TORCH.items() if kind.num_chunks * NUM_DEVICES <= gpt2.NUM_LAYERS
}
THEIRS["torch LoopedBFS v=2"] = TorchSchedule(pipelining.ScheduleLoopedBFS, 2)
PERFECT = "perfect"


def whale_side(name: str) -> Side:
    wh.init(
        {"num_micro_batch": NUM_MICRO_BATCH, "num_task_graph": NUM_DEVICES, "schedule": OURS[name]}
    )
    model = gpt2.build(LENGTH, tied=False)
    engine = wh.parallelize(model, batch(0), optimizer=gpt2.make_optimizer)
    say(f"{name}: {len(engine.plan.stages)} stages, {engine.plan.schedule.name}")
    return Side(name, lambda step: engine.step(batch(step)), lambda result: result.loss)


def batch(step: int) -> dict[str, Tensor]:
    return gpt2.batch(step, NUM_MICRO_BATCH, LENGTH)


def inputs(step: int) -> tuple[Tensor, Tensor]:
    whole = batch(step)
    return whole["input_ids"], whole["labels"]


def perfect_side() -> Side:
    """Half of the work of a step on every rank."""
    model = gpt2.build(LENGTH, tied=False)
    parameters = list(model.parameters())
    optimizer = gpt2.make_optimizer(iter(parameters[dist.get_rank() :: NUM_DEVICES]))

    def train(step: int) -> None:
        words, labels = inputs(step)
        model.zero_grad()
        for m in range(NUM_MICRO_BATCH // NUM_DEVICES):
            logits = model(input_ids=words[m : m + 1]).logits
            gpt2.loss_of_logits(logits, labels[m : m + 1]).backward()
        optimizer.step()

    return Side(PERFECT, train)


def measure() -> Times:
    """Runs on every rank."""
    say("preparing all sides")
    job = TorchJob(
        NUM_MICRO_BATCH,
        lambda i, total: gpt2.stage(i, total, LENGTH),
        gpt2.loss_of_logits,
        gpt2.make_optimizer,
        inputs,
    )
    sides = [
        *(whale_side(name) for name in OURS),
        *(torch_side(name, kind, job) for name, kind in THEIRS.items()),
        perfect_side(),
    ]
    return alternate(sides, ROUNDS, STEPS_PER_BLOCK, LIMIT_S, warm_up=2)


def main() -> None:
    times: Times = run_ranks(measure, NUM_DEVICES)
    ours = min(OURS, key=times.median)
    theirs = min(THEIRS, key=times.median)
    details = {
        "best of ours": ours,
        "best of torch": theirs,
        "ceiling": round(times.ratio(theirs, PERFECT), 4),
        **times.details(),
    }
    report(
        "pipeline_real",
        [
            Claim(
                f"{theirs} / {ours}",
                times.ratio(theirs, ours),
                TARGET,
                at_most=False,
                details=details,
            )
        ],
    )


if __name__ == "__main__":
    main()
