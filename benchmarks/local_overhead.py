"""One rank: `engine.step` against a plain PyTorch loop of the same model takes at most 2 %
longer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/local_overhead.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say

BATCH_SIZE = 8
LENGTH = 128
TARGET = 1.02
NUM_ROUNDS = 30
STEPS_PER_BLOCK = 2
LIMIT_S = 200.0


def main() -> None:
    times: Times = run_ranks(measure, 1)
    name = f"whale / pytorch, {BATCH_SIZE} x {LENGTH} tokens"
    report(
        "local_overhead",
        [
            Claim(
                name, times.ratio("whale", "pytorch"), TARGET, at_most=True, details=times.details()
            )
        ],
    )


def measure() -> Times:
    say("preparing both sides")
    return alternate([whale_side(), pytorch_side()], NUM_ROUNDS, STEPS_PER_BLOCK, LIMIT_S)


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


def pytorch_side() -> Side:
    model = gpt2.build(LENGTH)
    optimizer = gpt2.make_optimizer(model.parameters())

    def train(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**gpt2.batch(step, BATCH_SIZE, LENGTH)).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Side("pytorch", train, float)


if __name__ == "__main__":
    main()
