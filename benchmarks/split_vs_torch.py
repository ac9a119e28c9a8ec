"""A GPT block of width 512 on 2 ranks: `wh.split(2)` against `torch.distributed.tensor.parallel` on
the same model, 1.1x at least, and against what no messages would take, 1.25x and 1.10x at most.

torch gets the plan of its own tutorial: query, key, value and the first layer of the MLP by
columns, the others by rows, an all-reduce behind each pair. Ideal: what half of the same block takes
on one rank without any message.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/split_vs_torch.py` finds its neighbours, too

import whale as wh
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

NUM_RANKS = 2
WIDTH = 512
NUM_HEADS = 8
LEARNING_RATE = 1e-4
STEPS_PER_BLOCK = 2
LIMIT_S = 100.0
"""of each case"""


@dataclass(frozen=True)
class Case:
    samples: int
    length: int
    num_blocks: int
    target: float
    most_of_ideal: float
    """times the ideal step that ours may take"""
    num_rounds: int

    @property
    def shape(self) -> str:
        blocks = "1 block" if self.num_blocks == 1 else f"{self.num_blocks} blocks"
        return f"{blocks}, {self.samples} x {self.length} tokens"

    @property
    def name(self) -> str:
        return f"torch / whale, {self.shape}"

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        shape = (self.samples, self.length, WIDTH)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


CASES = (
    Case(samples=2, length=64, num_blocks=2, target=1.1, most_of_ideal=1.25, num_rounds=30),
    Case(samples=4, length=128, num_blocks=2, target=1.1, most_of_ideal=1.1, num_rounds=15),
)


class Block(nn.Module):
    """As GPT-2 has it, with query, key and value apart, so that torch can cut each by heads."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, width) for _ in range(3))
        self.out = nn.Linear(width, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * width)
        self.down = nn.Linear(4 * width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        by_head = (x.shape[0], x.shape[1], -1, WIDTH // NUM_HEADS)
        q, k, v = (
            layer(h).view(by_head).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Blocks and the mean squared distance to what should come out."""

    def __init__(self, num_blocks: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


def make_optimizer(parameters: Iterator[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def main() -> None:
    report("split_vs_torch", [claim for case in CASES for claim in claims_of(case)])


def claims_of(case: Case) -> list[Claim]:
    times: Times = run_ranks(measure, NUM_RANKS, case)
    of_ideal = Claim(
        f"whale / ideal, {case.shape}",
        times.ratio("whale", "ideal"),
        case.most_of_ideal,
        at_most=True,
        details={"of CPU time": round(times.cpu_ratio("whale", "ideal"), 4)},
    )
    return [claim_against_torch(case.name, times, case.target), of_ideal]


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
    wh.init()
    model = Model(case.num_blocks)
    wh.annotate(model, {"blocks.*": wh.split(NUM_RANKS)})
    engine = wh.parallelize(model, case.batch(0), optimizer=make_optimizer)
    return Side("whale", lambda step: engine.step(case.batch(step)), lambda result: result.loss)


def torch_side(case: Case) -> Side:
    model = Model(case.num_blocks)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    by_columns = ("query", "key", "value", "up")
    by_rows = ("out", "down")
    plan = {name: ColwiseParallel() for name in by_columns} | {
        name: RowwiseParallel() for name in by_rows
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return Side("torch", _training(model, case), _loss)


def ideal_side(case: Case) -> Side:
    """Half of the heads and half of the MLP, alone: what both ranks must do at least."""
    return Side("ideal", _training(Model(case.num_blocks, WIDTH // NUM_RANKS), case))


def _training(model: Model, case: Case) -> Any:
    optimizer = make_optimizer(model.parameters())

    def train(step: int) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(*case.batch(step))
        loss.backward()
        optimizer.step()
        return loss

    return train


def _loss(loss: Tensor) -> float:
    value = loss.detach()
    dist.broadcast(value, src=0)
    return float(value)


if __name__ == "__main__":
    main()
