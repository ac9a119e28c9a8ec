"""A step of an Accelerate loop on 2 ranks: `whale.integrations.accelerate.prepare` against
`accelerator.prepare` (DistributedDataParallel), with accumulation over two batches, clipping and a
schedule. At least as fast.

Ceiling: `engine.step` of Whale itself on both batches at once, without the loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/trainers.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say
from whale.integrations.accelerate import prepare

NUM_RANKS = 2
BATCH_SIZE = 16
"""of each of the two batches of a step, over all ranks"""
LENGTH = 64
NUM_BATCHES = 2
MAX_NORM = 1.0
TARGET = 1.00
NUM_STARTS = 2
NUM_ROUNDS = 10
STEPS_PER_BLOCK = 2
LIMIT_S = 60.0
STOCK = "accelerate with ddp"
ADAPTED = "accelerate with whale"
ALONE = "engine.step"


def main() -> None:
    times: Times = reduce(Times.join, (run_ranks(measure, NUM_RANKS) for _ in range(NUM_STARTS)))
    details = {"ceiling": round(times.ratio(STOCK, ALONE), 4), **times.details()}
    name = f"{STOCK} / {ADAPTED}, {NUM_BATCHES} x {BATCH_SIZE} x {LENGTH} tokens"
    claim = Claim(name, times.ratio(STOCK, ADAPTED), TARGET, at_most=False, details=details)
    report("trainers", [claim])


def measure() -> Times:
    """Runs on every rank."""
    say("preparing all sides")
    # the stock side first: afterwards Accelerate takes every rank for a process of its own
    sides = [stock_side(), adapted_side(), engine_side()]
    return alternate(sides, NUM_ROUNDS, STEPS_PER_BLOCK, LIMIT_S)


def stock_side() -> Side:
    accelerator, model, optimizer, scheduler = parts()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rank = dist.get_rank()
    own = slice(rank * BATCH_SIZE // NUM_RANKS, (rank + 1) * BATCH_SIZE // NUM_RANKS)

    def of_rank(step: int) -> dict[str, torch.Tensor]:
        whole = gpt2.batch(step, BATCH_SIZE, LENGTH)
        return {name: tensor[own] for name, tensor in whole.items()}

    def mean(loss: torch.Tensor) -> float:
        dist.all_reduce(loss)
        return float(loss) / NUM_RANKS

    return Side(STOCK, loop(accelerator, model, optimizer, scheduler, of_rank), mean)


def adapted_side() -> Side:
    accelerator, model, optimizer, scheduler = parts()
    sample = gpt2.batch(0, BATCH_SIZE, LENGTH)
    model, optimizer, scheduler = prepare(accelerator, model, optimizer, scheduler, sample=sample)

    def whole(step: int) -> dict[str, torch.Tensor]:
        return gpt2.batch(step, BATCH_SIZE, LENGTH)

    return Side(ADAPTED, loop(accelerator, model, optimizer, scheduler, whole), float)


def engine_side() -> Side:
    wh.init({"clip_grad_norm": MAX_NORM})
    engine = wh.parallelize(
        gpt2.build(LENGTH),
        gpt2.batch(0, NUM_BATCHES * BATCH_SIZE, LENGTH),
        optimizer=gpt2.make_optimizer,
    )
    return Side(ALONE, lambda step: engine.step(joined(step)))


def joined(step: int) -> dict[str, torch.Tensor]:
    parts = [gpt2.batch(NUM_BATCHES * step + k, BATCH_SIZE, LENGTH) for k in range(NUM_BATCHES)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def parts() -> tuple[Accelerator, Any, torch.optim.Optimizer, Any]:
    """What the script has before it is prepared."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_BATCHES)
    model = gpt2.build(LENGTH)
    optimizer = gpt2.make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return accelerator, model, optimizer, scheduler


def loop(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    batch: Callable[[int], dict[str, torch.Tensor]],
) -> Callable[[int], torch.Tensor]:
    """The body of the training loop, the same for both sides: one update."""

    def train(step: int) -> torch.Tensor:
        losses = []
        for k in range(NUM_BATCHES):
            with accelerator.accumulate(model):
                loss = model(**batch(NUM_BATCHES * step + k)).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return train


if __name__ == "__main__":
    main()
