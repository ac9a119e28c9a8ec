"""Memory of a grid where activations weigh more than weights: what exchanges hold for a moment is a
part of what is predicted.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peak_memory import GridShape, measure_grid, pause_in_exchanges
from tests.ranks import preload, run_ranks

preload("benchmarks.peak_memory", "tests.integration.test_split_memory")

WIDTH = 256
BATCH_SIZE = 1024


class Perceptron(nn.Module):
    """That of docs/split.md, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


def make_batch() -> dict[str, Tensor]:
    return {name: torch.randn(BATCH_SIZE, WIDTH) for name in "xy"}


def measure(grid: GridShape) -> tuple[float, float]:
    """(predicted, measured) bytes of every rank."""
    pause_in_exchanges()
    return measure_grid(Perceptron, make_batch, grid, {"num_micro_batch": 2})


@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 1, 2)], ids=["weights cut", "weights gathered"])
def test_a_rank_needs_what_was_predicted(grid: GridShape) -> None:
    for predicted, measured in run_ranks(measure, 2, grid):
        assert 1.0 <= predicted / measured <= 1.15
