"""ZeRO on 2 CPU ranks against torch: level 3 against FSDP2 (`fully_shard` on every block), level 1
against DistributedDataParallel with `ZeroRedundancyOptimizer`, and what the levels cost beside our
own level 0. The same model and batches, AdamW, float32; all sides in the same processes, taking
turns.
"""

from __future__ import annotations

import sys
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/zero_vs_torch.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import Claim, Side, Times, alternate, report, run_ranks, say

NUM_RANKS = 2
BATCH_SIZE = 16
LENGTH = 128
NUM_STARTS = 2
NUM_ROUNDS = 8
STEPS_PER_BLOCK = 2
LIMIT_S = 100.0
FSDP = "fsdp2"
REDUNDANCY = "ZeroRedundancyOptimizer"


def main() -> None:
    times: Times = reduce(
        Times.join, (run_ranks(measure, NUM_RANKS, start % 2 == 1) for start in range(NUM_STARTS))
    )
    pairs = ((FSDP, "zero 3"), ("zero 3", "zero 0"), (REDUNDANCY, "zero 1"), ("zero 1", "zero 0"))
    cpu = {f"{above} / {below}": round(times.cpu_ratio(above, below), 4) for above, below in pairs}
    details = {"of CPU time": cpu, **times.details()}
    claims = [
        Claim("fsdp2 / zero 3", times.ratio(FSDP, "zero 3"), 1.2, False, details),
        Claim("zero 3 / zero 0", times.ratio("zero 3", "zero 0"), 1.15, True, {}),
        Claim(f"{REDUNDANCY} / zero 1", times.ratio(REDUNDANCY, "zero 1"), 1.05, False, {}),
        Claim("zero 1 / zero 0", times.ratio("zero 1", "zero 0"), 1.02, True, {}),
    ]
    report("zero_vs_torch", claims)


def measure(is_reversed: bool) -> Times:
    """Runs on every rank."""
    say("preparing all sides")
    makers = [lambda level=level: whale_side(level) for level in (0, 1, 3)]
    makers += [fsdp_side, redundancy_side]
    sides = [make() for make in (reversed(makers) if is_reversed else makers)]
    return alternate(sides, NUM_ROUNDS, STEPS_PER_BLOCK, LIMIT_S)


def whale_side(level: int) -> Side:
    wh.init({"zero": level})
    engine = wh.parallelize(
        gpt2.build(LENGTH, tied=False),
        gpt2.batch(0, BATCH_SIZE, LENGTH),
        optimizer=gpt2.make_optimizer,
    )
    return Side(
        f"zero {level}",
        lambda step: engine.step(gpt2.batch(step, BATCH_SIZE, LENGTH)),
        lambda result: result.loss,
    )


def fsdp_side() -> Side:
    """The usual loop; a block is gathered before it runs, in forward and in backward."""
    model = gpt2.build(LENGTH, tied=False)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = gpt2.make_optimizer(model.parameters())
    return Side(FSDP, _loop(model, optimizer), _mean)


def redundancy_side() -> Side:
    """DistributedDataParallel; every rank holds the optimizer state of its parameters."""
    model = gpt2.build(LENGTH, tied=False)
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=gpt2.LEARNING_RATE
    )
    return Side(REDUNDANCY, _loop(wrapped, optimizer), _mean)


def _loop(model, optimizer):  # type: ignore[no-untyped-def]
    """A step of a rank on its half of the mini-batch."""
    own = slice(
        dist.get_rank() * BATCH_SIZE // NUM_RANKS, (dist.get_rank() + 1) * BATCH_SIZE // NUM_RANKS
    )

    def train(step: int) -> torch.Tensor:
        whole = gpt2.batch(step, BATCH_SIZE, LENGTH)
        optimizer.zero_grad()
        loss: torch.Tensor = model(**{name: tensor[own] for name, tensor in whole.items()}).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def _mean(part: torch.Tensor) -> float:
    """The loss of the whole mini-batch; every rank has the mean of its half."""
    dist.all_reduce(part)
    return float(part) / NUM_RANKS


if __name__ == "__main__":
    main()
