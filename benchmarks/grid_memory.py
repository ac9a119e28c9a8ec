"""Peak memory of tensor grids, predicted against measured, on 2 and 4 gloo ranks: where weights
weigh most, and where activations do.

predicted   the simulated peak of a rank, which `whale plan` shows
measured    most live bytes in torch's allocator during a step (`peak_memory.py`)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python benchmarks/grid_memory.py` finds its neighbours, too

from benchmarks import gpt2
from benchmarks.peak_memory import GridShape, measure_grid, pause_in_exchanges
from benchmarks.prediction import LENGTH, Perceptron
from benchmarks.side_by_side import run_ranks, say

LEAST = 1.00
MOST = 1.15
GRIDS = ((1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2))


@dataclass(frozen=True)
class Case:
    """One model on one grid."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    grid: GridShape
    config: dict[str, Any]


def perceptron(grid: GridShape, batch_size: int, num_micro_batch: int) -> Case:
    def batch() -> dict[str, Tensor]:
        return {name: torch.randn(batch_size, 768) for name in "xy"}

    return Case(
        f"perceptron, {batch_size:,} samples",
        Perceptron,
        batch,
        grid,
        {"num_micro_batch": num_micro_batch},
    )


def transformer(grid: GridShape) -> Case:
    return Case(
        "GPT-2",
        lambda: gpt2.build(LENGTH),
        lambda: gpt2.batch(0, 16, LENGTH),
        grid,
        {"num_micro_batch": 2},
    )


def cases(num_ranks: int) -> list[Case]:
    grids = [grid for grid in GRIDS if grid[0] * grid[1] * grid[2] == num_ranks]
    return [
        *(perceptron(grid, 64, 1) for grid in grids),
        *(perceptron(grid, 1024, 2) for grid in grids),
        *(transformer(grid) for grid in grids),
    ]


def run(num_ranks: int) -> list[tuple[str, GridShape, list[float]]]:
    """On every rank: of each case predicted / measured bytes, by rank."""
    pause_in_exchanges()
    results = []
    for case in cases(num_ranks):
        found: list[Any] = [None] * num_ranks
        dist.all_gather_object(found, measure_grid(case.build, case.batch, case.grid, case.config))
        bytes_of_ranks = ", ".join(
            f"{predicted / 1e6:.1f} / {measured / 1e6:.1f} MB" for predicted, measured in found
        )
        say(
            f"{case.name} on {'x'.join(map(str, case.grid))}: {bytes_of_ranks} (predicted / "
            "measured)"
        )
        results.append(
            (case.name, case.grid, [predicted / measured for predicted, measured in found])
        )
    return results


def main() -> None:
    results = [
        each
        for num_ranks in (2, 4)
        for each in run_ranks(run, num_ranks, num_ranks, share_cores=True)
    ]
    names = list(dict.fromkeys(name for name, _, _ in results))
    table = {
        (name, grid): f"{min(ratios):.3f} to {max(ratios):.3f}" for name, grid, ratios in results
    }
    print(f"{'grid':<12}" + "".join(f"{name:>28}" for name in names))
    for grid in GRIDS:
        print(
            f"{' x '.join(map(str, grid)):<12}"
            + "".join(f"{table[name, grid]:>28}" for name in names)
        )
    ratios = [ratio for _, _, found in results for ratio in found]
    details = {"largest": round(max(ratios), 3)} | {
        f"{name} on {grid}": text for (name, grid), text in table.items()
    }
    is_ok = all(LEAST <= ratio <= MOST for ratio in ratios)
    print(
        json.dumps(
            {
                "name": "grid memory",
                "ratio": round(min(ratios), 3),
                "target": LEAST,
                "ok": is_ok,
                "details": details,
            }
        )
    )
    sys.exit(0 if is_ok else 1)


if __name__ == "__main__":
    main()
