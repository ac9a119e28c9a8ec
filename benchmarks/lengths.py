"""Fine-tuning with batches padded to 20 lengths against batches of one length with as many tokens:
at most 1.1 times as long, from one capture, with the losses of the local run.

Attention is quadratic in the length, so 20 lengths have slightly more work than their mean. Ceiling:
the same two loops in plain PyTorch, which captures nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/lengths.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say

NUM_RANKS = 2
BATCH_SIZE = 8
LENGTHS = tuple(48 + 8 * ((7 * step) % 20) for step in range(20))
MEAN_LENGTH = sum(LENGTHS) // len(LENGTHS)
LONGEST = max(LENGTHS)
TARGET = 1.10
NUM_ROUNDS = 6
LIMIT_S = 50.0
MANY = "20 lengths"
ONE = "one length"
LOCAL_MANY = "local, 20 lengths"
LOCAL_ONE = "local, one length"
PLANS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "2 stages": {"num_task_graph": 2, "num_micro_batch": 4},
}


def main() -> None:
    claims = []
    for plan, config in PLANS.items():
        times, num_captures = run_ranks(measure, NUM_RANKS, plan, config)
        details = {
            "captures": num_captures,
            "ceiling": round(times.ratio(LOCAL_MANY, LOCAL_ONE), 4),
            **times.details(),
        }
        ratio = times.ratio(MANY, ONE)
        name = f"{plan}: 20 lengths / one length"
        claims.append(Claim(name, ratio, TARGET, at_most=True, details=details))
        if num_captures != 1:
            raise SystemExit(f"{plan}: the model was captured {num_captures} times instead of once")
    report("lengths", claims)


def measure(plan: str, config: dict[str, Any]) -> tuple[Times, int]:
    """Runs on every rank."""
    say(f"preparing {plan}")
    wh.init(wh.Config(config))
    names = {1: ("length", LONGEST)}
    many = wh.parallelize(
        gpt2.build(LONGEST),
        batch_of(0),
        optimizer=gpt2.make_optimizer,
        dynamic={"input_ids": names, "labels": names},
    )
    wh.init(wh.Config(config))
    one = wh.parallelize(gpt2.build(LONGEST), batch_of_mean(0), optimizer=gpt2.make_optimizer)
    sides = [
        Side(MANY, lambda step: many.step(batch_of(step)), lambda result: result.loss),
        Side(ONE, lambda step: one.step(batch_of_mean(step))),
        local_side(LOCAL_MANY),
        local_side(LOCAL_ONE),
    ]
    times = alternate(sides, NUM_ROUNDS, len(LENGTHS), LIMIT_S)
    return times, many.num_captures


def batch_of(step: int) -> dict[str, torch.Tensor]:
    return gpt2.batch(step, BATCH_SIZE, LENGTHS[step % len(LENGTHS)])


def batch_of_mean(step: int) -> dict[str, torch.Tensor]:
    return gpt2.batch(step, BATCH_SIZE, MEAN_LENGTH)


def local_side(name: str) -> Side:
    """The usual loop on the whole mini-batch, in every process for itself."""
    model = gpt2.build(LONGEST)
    optimizer = gpt2.make_optimizer(model.parameters())
    make_batch = batch_of if name == LOCAL_MANY else batch_of_mean

    def train(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**make_batch(step)).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Side(name, train, float if name == LOCAL_MANY else None)


if __name__ == "__main__":
    main()
