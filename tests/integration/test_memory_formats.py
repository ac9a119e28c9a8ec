"""Parameters whose entries do not lie in the order of their dims, such as `channels_last`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import mean_square
from tests.ranks import run_ranks

NUM_STEPS = 3
NUM_SAMPLES = 8


class Images(nn.Module):
    """Two convolutions in `channels_last` and a head whose weight is a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3))
        self.layers = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.head = nn.Parameter((0.1 * torch.randn(5, 64)).t())
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).tanh().flatten(1) @ self.head


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)


def sgd(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(pairs, lr=0.1, momentum=0.9, fused=True)


def adamw(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pairs, lr=0.01, fused=True)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def train(name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Weights after some steps on this rank's share."""
    wh.init({"strategy": "data", **settings})
    engine = wh.parallelize(Images(), batch(0), optimizer=OPTIMIZERS[name], loss=mean_square)
    for step in range(NUM_STEPS):
        engine.step(batch(step))
    state = engine.full_state_dict()
    engine.close()
    return state


def train_locally(name: str, max_norm: float | None) -> dict[str, Tensor]:
    model = Images()
    optimizer = OPTIMIZERS[name](model.named_parameters())
    for step in range(NUM_STEPS):
        mean_square(model(batch(step)), batch(step)).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sgd", {}),
        ("adamw", {"clip_grad_norm": 0.01}),
        ("adamw", {"zero": 1}),
        pytest.param("sgd", {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("adamw", {"offload": {"optimizer": "host"}}, marks=pytest.mark.slow),
    ],
)
def test_fused_updates_follow_the_strides_of_parameters(
    name: str, settings: dict[str, Any]
) -> None:
    state = run_ranks(train, 2, name, settings)[0]  # full states are on rank 0
    for key, value in train_locally(name, settings.get("clip_grad_norm")).items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12)
