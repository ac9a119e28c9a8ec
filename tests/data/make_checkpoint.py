"""Makes the checkpoint in `checkpoint_0_1_0`, with the Whale of that version:

    whale run -n 2 tests/data/make_checkpoint.py tests/data/checkpoint_0_1_0

Two ranks hold each a part of every weight. `expected.json` beside the checkpoint says what was
saved, and how the training continued from there.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh

WIDTH = 4
NUM_CLASSES = 3
BATCH_SIZE = 4
NUM_SAMPLES = 18
NUM_STEPS = 6
"""one epoch and the start of the next"""
CONFIG = {"num_micro_batch": 2, "seed": 3, "clip_grad_norm": 1.0}


class Net(nn.Module):
    """A frozen parameter among others, and weights that a grid cuts along either dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.down(torch.tanh(self.up(x)))), labels)


class Samples(torch.utils.data.Dataset[Any]):
    """Sample i, made from its number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (), generator=generator)}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    weights = [parameter for name, parameter in named if name.endswith("weight")]
    others = [parameter for name, parameter in named if not name.endswith("weight")]
    groups = [
        {"params": weights, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-2},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def make_engine(strategy: Any = None) -> Any:
    """`strategy`: of the whole model; None: Whale's own choice."""
    torch.manual_seed(0)
    model = Net().double()
    if strategy is not None:
        wh.annotate(model, {"up|down|head": strategy})
    batch = torch.utils.data.default_collate([Samples()[index] for index in range(BATCH_SIZE)])
    return wh.parallelize(
        model,
        batch,
        optimizer=make_optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
    )


def make_loader(engine: Any) -> Any:
    return engine.loader(Samples(), BATCH_SIZE, shuffle=True, seed=5)


def endless(loader: Any) -> Iterator[Any]:
    """Mini-batches of one epoch after the other."""
    while True:
        yield from loader


def random_numbers() -> list[float]:
    """The next number of each generator that a checkpoint holds."""
    return [
        torch.rand(()).item(),
        np.random.standard_normal(),
        random.gauss(0, 1),
        random.random(),
    ]


def main(folder: Path) -> None:
    wh.init(wh.Config(CONFIG))
    engine = make_engine(wh.split(2))
    loader = make_loader(engine)
    torch.manual_seed(11)
    np.random.seed(12)
    random.seed(13)
    np.random.standard_normal()  # these two draw a second number and keep it for the next call
    random.gauss(0, 1)
    steps = endless(loader)
    for _ in range(NUM_STEPS):
        engine.step(next(steps))
    engine.save(folder, data=loader).wait()
    expected: dict[str, Any] = {
        "data": loader.state_dict(),
        "random": random_numbers(),
        "learning_rates": [group["lr"] for group in engine.optimizer.param_groups],
    }
    saved = engine.full_state_dict()
    expected["losses_after"] = [engine.step(next(steps)).loss for _ in range(2)]
    after = engine.full_state_dict()
    if wh.rank() == 0:
        expected["weights"] = {name: tensor.tolist() for name, tensor in saved.items()}
        expected["weights_after"] = {name: tensor.tolist() for name, tensor in after.items()}
        (folder / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
