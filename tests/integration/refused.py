"""A small network, its batch, and what a user reads when something is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh

WIDTH = 8
NUM_CLASSES = 3
BATCH_SIZE = 8
FOUND_WITHIN_S = 15.0
"""a mistake on one rank is seen by all in about a second; on a busy machine it may take a few more
"""


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH if not i else width, width) for i in range(2))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


class NoLoss(Net):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x)}


class LossOfEachSample(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels, reduction="none")


class Decides(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if x.sum() > 0:  # what a graph cannot hold
            x = -x
        return super().forward(x, labels)


def make_batch(seed: int = 0, batch_size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, WIDTH, generator=generator)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def message_of(call: Callable[[], Any]) -> str:
    """What a user reads; every mistake is a ValueError."""
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def assert_says(message: str, *words: str) -> None:
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


def two_stages(model: nn.Module) -> nn.Module:
    return wh.annotate(model, {"layers.0": wh.replicate(1), "layers.1": wh.replicate(1)})
