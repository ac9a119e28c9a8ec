"""Data parallelism on 2 ranks against `DistributedDataParallel`: at least as fast.

Ceiling: DDP under `no_sync`, which communicates nothing.
"""

from __future__ import annotations

import sys
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/dp_vs_ddp.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say

NUM_RANKS = 2
BATCH_SIZE = 16
LENGTH = 128
TARGET = 1.00
NUM_STARTS = 4
"""fresh processes, in which the sides are made in turns first and last"""
NUM_ROUNDS = 10
"""of each start"""
STEPS_PER_BLOCK = 2
LIMIT_S = 50.0
ALONE = "ddp without synchronisation"


def main() -> None:
    times: Times = reduce(
        Times.join, (run_ranks(measure, NUM_RANKS, start % 2 == 1) for start in range(NUM_STARTS))
    )
    details = {"ceiling": round(times.ratio("ddp", ALONE), 4), **times.details()}
    name = f"ddp / whale, {BATCH_SIZE} x {LENGTH} tokens"
    report(
        "dp_vs_ddp",
        [Claim(name, times.ratio("ddp", "whale"), TARGET, at_most=False, details=details)],
    )


def measure(is_reversed: bool) -> Times:
    """Runs on every rank."""
    say("preparing both sides")
    makers = [whale_side, lambda: ddp_side("ddp"), lambda: ddp_side(ALONE, synchronise=False)]
    sides = [make() for make in (reversed(makers) if is_reversed else makers)]
    return alternate(sides, NUM_ROUNDS, STEPS_PER_BLOCK, LIMIT_S)


def whale_side() -> Side:
    wh.init()
    engine = wh.parallelize(
        gpt2.build(LENGTH), gpt2.batch(0, BATCH_SIZE, LENGTH), optimizer=gpt2.make_optimizer
    )
    return Side(
        "whale",
        lambda step: engine.step(gpt2.batch(step, BATCH_SIZE, LENGTH)),
        lambda result: result.loss,
    )


def ddp_side(name: str, synchronise: bool = True) -> Side:
    """The usual loop: every rank takes its half of the mini-batch."""
    model = gpt2.build(LENGTH)
    wrapped = DistributedDataParallel(model)
    optimizer = gpt2.make_optimizer(model.parameters())
    own = slice(
        dist.get_rank() * BATCH_SIZE // NUM_RANKS, (dist.get_rank() + 1) * BATCH_SIZE // NUM_RANKS
    )

    def train(step: int) -> torch.Tensor:
        whole = gpt2.batch(step, BATCH_SIZE, LENGTH)
        optimizer.zero_grad()
        loss: torch.Tensor = wrapped(**{name: tensor[own] for name, tensor in whole.items()}).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    def train_alone(step: int) -> torch.Tensor:
        with wrapped.no_sync():
            return train(step)

    def loss_of(part: torch.Tensor) -> float:
        dist.all_reduce(part)
        return float(part) / NUM_RANKS

    return Side(name, train, loss_of) if synchronise else Side(name, train_alone)


if __name__ == "__main__":
    main()
