"""A stack of like layers with its batches, for tests of whole training jobs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh

WIDTH = 8
NUM_CLASSES = 3
NUM_LAYERS = 8
BATCH_SIZE = 9
EXACT = 1e-10


class Layers(nn.Module):
    """Many parameters of the same shape, two of them read by every operation: an exchange of any
    two changes the training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


def make_batch(seed: int, batch_size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator)}


def build() -> Layers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Layers().double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def in_two_stages(model: nn.Module) -> nn.Module:
    return wh.annotate(model, {"layers.[0-3]": wh.replicate(1), "layers.[4-7]": wh.replicate(1)})
