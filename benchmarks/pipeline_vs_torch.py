"""A pipeline of 2 stages on 2 ranks against `torch.distributed.pipelining` (1F1B, same cut): as
fast, and faster with small micro-batches.

Ceiling: 1F1B computed from the times that torch's own stages take on their own, without messages
and without waiting.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/pipeline_vs_torch.py` finds its neighbours, too

import whale as wh
from benchmarks import gpt2
from benchmarks.side_by_side import (
    Claim,
    Side,
    Times,
    alternate,
    claim_against_torch,
    report,
    run_ranks,
    say,
)

NUM_STAGES = 2
CUT = gpt2.NUM_LAYERS // NUM_STAGES
"""layers before the cut"""
STEPS_PER_BLOCK = 2
LIMIT_S = 100.0
"""of each case"""


@dataclass(frozen=True)
class Case:
    """One claim."""

    num_micro_batch: int
    samples: int
    """in a micro-batch"""
    length: int
    target: float
    num_rounds: int

    @property
    def batch_size(self) -> int:
        return self.num_micro_batch * self.samples

    @property
    def name(self) -> str:
        return (
            f"torch / whale, {self.num_micro_batch} micro-batches of {self.samples} x "
            f"{self.length} tokens"
        )

    def batch(self, step: int) -> dict[str, Tensor]:
        return gpt2.batch(step, self.batch_size, self.length)


CASES = (
    Case(num_micro_batch=8, samples=2, length=128, target=1.00, num_rounds=25),
    Case(num_micro_batch=16, samples=1, length=64, target=1.05, num_rounds=50),
)


def main() -> None:
    report("pipeline_vs_torch", [claim(case) for case in CASES])


def claim(case: Case) -> Claim:
    return claim_against_torch(case.name, run_ranks(measure, NUM_STAGES, case), case.target)


def measure(case: Case) -> Times:
    """Runs on every rank."""
    say(f"{case.name}: preparing both sides")
    return alternate(
        [whale_side(case), torch_side(case), ideal_side(case)],
        case.num_rounds,
        STEPS_PER_BLOCK,
        LIMIT_S,
    )


def whale_side(case: Case) -> Side:
    wh.init({"num_micro_batch": case.num_micro_batch})
    model = gpt2.build(case.length, tied=False)
    first, last = (
        f"transformer.h.[{start}-{stop - 1}]" for start, stop in ((0, CUT), (CUT, gpt2.NUM_LAYERS))
    )
    wh.annotate(
        model,
        {
            f"transformer.wte|transformer.wpe|{first}": wh.replicate(1),
            f"{last}|transformer.ln_f|lm_head": wh.replicate(1),
        },
    )
    engine = wh.parallelize(model, case.batch(0), optimizer=gpt2.make_optimizer)
    return Side("whale", lambda step: engine.step(case.batch(step)), lambda result: result.loss)


def torch_stage(case: Case) -> nn.Module:
    """This rank's part of the same model."""
    return gpt2.stage(dist.get_rank(), NUM_STAGES, case.length)


def torch_side(case: Case) -> Side:
    module = torch_stage(case)
    optimizer = gpt2.make_optimizer(module.parameters())
    stage = PipelineStage(module, dist.get_rank(), NUM_STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.num_micro_batch, loss_fn=gpt2.loss_of_logits)

    def train(step: int) -> list[Tensor]:
        batch = case.batch(step)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if stage.is_first:
            schedule.step(batch["input_ids"], return_outputs=False)
        else:
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        optimizer.step()
        return losses

    def loss_of(losses: list[Tensor]) -> float:
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        loss = loss.detach()
        dist.broadcast(loss, src=NUM_STAGES - 1)
        return float(loss)

    return Side("torch", train, loss_of)


@dataclass
class Alone:
    """What one stage does without the other: mean seconds of a forward, a backward and the
    update.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0


def ideal_side(case: Case) -> Side:
    """Both stages at the same time, each on its own on made-up inputs; the time is that of 1F1B
    with these actions and free messages.
    """
    module = torch_stage(case)
    optimizer = gpt2.make_optimizer(module.parameters())
    is_first = dist.get_rank() == 0
    hidden = torch.randn(case.samples, case.length, gpt2.WIDTH)

    def forward(batch: dict[str, Tensor], m: int) -> Tensor:
        samples = slice(m * case.samples, (m + 1) * case.samples)
        if is_first:
            result: Tensor = module(batch["input_ids"][samples])
            return result
        return gpt2.loss_of_logits(
            module(hidden.detach().requires_grad_()), batch["labels"][samples]
        )

    def run(step: int) -> Alone:
        batch = case.batch(step)
        alone = Alone()
        optimizer.zero_grad()
        for m in range(case.num_micro_batch):
            result, seconds = timed(lambda: forward(batch, m))  # noqa: B023
            alone.forward_s += seconds / case.num_micro_batch
            _, seconds = timed(lambda: result.backward(hidden if is_first else None))  # noqa: B023
            alone.backward_s += seconds / case.num_micro_batch
        _, alone.update_s = timed(optimizer.step)
        return alone

    def block_s(steps: list[Alone]) -> float:
        own = torch.tensor(
            [[a.forward_s, a.backward_s, a.update_s] for a in steps], dtype=torch.float64
        ).mean(dim=0)
        every = [torch.empty_like(own) for _ in range(NUM_STAGES)]
        dist.all_gather(every, own)
        return ideal_s([Alone(*stage.tolist()) for stage in every], case.num_micro_batch)

    return Side("ideal", run, seconds_per_step=block_s)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def ideal_s(stages: list[Alone], num_micro_batch: int) -> float:
    """End of the last update when every action starts as soon as 1F1B and its inputs allow."""
    num_stages = len(stages)
    orders = [one_f_one_b(num_stages - s, num_micro_batch) for s in range(num_stages)]
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * num_stages
    places = [0] * num_stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for s, stage in enumerate(stages):
            if places[s] == len(orders[s]):
                continue
            kind, m = orders[s][places[s]]
            source = s - 1 if kind == "forward" else s + 1
            if 0 <= source < num_stages and (kind, source, m) not in done:
                continue
            start = max(free[s], done.get((kind, source, m), 0.0))
            free[s] = done[kind, s, m] = start + (
                stage.forward_s if kind == "forward" else stage.backward_s
            )
            places[s] += 1
    return max(end + stage.update_s for end, stage in zip(free, stages, strict=True))


def one_f_one_b(num_ahead: int, num_micro_batch: int) -> list[tuple[str, int]]:
    """A stage runs `num_ahead` forwards, then backwards and forwards in turns."""
    ahead = min(num_ahead, num_micro_batch)
    order = [("forward", m) for m in range(ahead)]
    for m in range(num_micro_batch):
        order.append(("backward", m))
        if m + ahead < num_micro_batch:
            order.append(("forward", m + ahead))
    return order


if __name__ == "__main__":
    main()
