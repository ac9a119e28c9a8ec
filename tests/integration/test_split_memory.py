"""Memory of a grid where activations weigh more than weights: what exchanges hold for a moment is a part of what is predicted."""

from __future__ import annotations

import pytest

from benchmarks.grid_memory import GridShape, measure, pause_in_exchanges, perceptron
from tests.ranks import preload, run_ranks

preload("benchmarks.grid_memory", "tests.integration.test_split_memory")


def measure_perceptron(grid: GridShape) -> tuple[float, float]:
    """On every rank: (predicted, measured) bytes."""
    pause_in_exchanges()
    return measure(perceptron(grid, 1024, 2))


@pytest.mark.parametrize("grid", [(2, 1, 1)])
def test_a_rank_needs_what_was_predicted(grid: GridShape) -> None:
    for predicted, measured in run_ranks(measure_perceptron, 2, grid):
        assert 1.0 <= predicted / measured <= 1.15
