"""The search against brute force (`tests/enumerated_plans.py`) on small random cases: models of up to
8 layers on up to 6 devices of 3 kinds on 2 hosts, every third of them short of memory. Nothing in the
space, drafted and simulated by the same code, may be faster than the search's plan by more than 2 %.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import whale as wh
from tests.enumerated_plans import EnumeratedPlans
from whale import api
from whale.cluster.cluster import Cluster, Device, DeviceKind, Link
from whale.planning.problem import Problem
from whale.search import refusals
from whale.search.search import search
from whale.search.settings import OpenSettings

COUNTS = (1, 2, 4)
BATCH = 8
NEAR = 1.02
SETTINGS = OpenSettings(schedule="1f1b", recompute=False)
"""the space of both sides: any devices, replicas alike or not, 1F1B, nothing recomputed"""
TOO_MANY = (170, 180, 220, 300)
"""seeds with 6 devices whose enumeration takes ten minutes and more (docs/log.md): others run instead"""


class Layers(nn.Module):
    """Layers of random widths."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(before, after) for before, after in itertools.pairwise(widths)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def case(seed: int, most_devices: int, most_layers: int) -> Problem:
    """A model and a cluster; every third cluster is short of memory."""
    draw = random.Random(seed)
    widths = [draw.choice((16, 32, 64, 128)) for _ in range(draw.randint(2, most_layers) + 1)]
    kinds = [
        DeviceKind(f"k{index}", draw.uniform(2e8, 2e9), 10**9, draw.uniform(1e9, 1e10))
        for index in range(3)
    ]
    number = draw.randint(2, most_devices)
    if seed % 3 == 0:
        states = 4 * 4 * sum(a * b + b for a, b in itertools.pairwise(widths))
        memory = int(draw.uniform(0.8, 2.0) * states) + 60_000
        kinds = [replace(kind, memory_bytes=memory) for kind in kinds]
    on_first = draw.randint(1, number)
    devices = tuple(
        Device(
            rank,
            "a" if rank < on_first else "b",
            rank if rank < on_first else rank - on_first,
            draw.choice(kinds),
        )
        for rank in range(number)
    )
    between = Link(draw.choice((1e7, 1e8, 1e9)), 1e-5)
    cluster = Cluster(devices, Link(1e9, 1e-6), between)
    problem = problem_of(widths, cluster)
    return replace(problem, config=refusals.open_up(problem.config))


def problem_of(widths: list[int], cluster: Cluster) -> Problem:
    problems: list[Problem] = []
    config = {"strategy": "data", "recompute": False}
    with api.planning_only(cluster.num_devices, cluster, problems.append):
        try:
            wh.plan(Layers(widths), torch.randn(BATCH, widths[0]), cluster=cluster, config=config)
        except ValueError:
            assert problems  # data parallelism does not fit: the problem is all that is wanted
    return problems[0]


def check(seed: int, most_devices: int, most_layers: int) -> None:
    problem = case(seed, most_devices, most_layers)
    best = search(problem, SETTINGS).best
    plans = EnumeratedPlans(problem, COUNTS, has_unlike=True)
    if best is None:
        faster, _ = plans.faster_than(float("inf"))
        assert faster is None, f"seed {seed}: nothing found, but {faster.candidate.describe()} fits"
        return
    faster, number = plans.faster_than(best.score_s / NEAR)
    assert faster is None, (
        f"seed {seed}: {best.candidate.describe()} takes {best.score_s / faster.score_s:.4f} of "
        f"{faster.candidate} (draft {number})"
    )


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_faster_than_the_plan_of_the_search(seed: int) -> None:
    check(seed, 3, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)  # all plans of a seed, on a busy machine
@pytest.mark.parametrize("seed", [seed for seed in range(20, 304) if seed not in TOO_MANY])
def test_nothing_is_faster_than_the_plan_of_the_search_on_more_devices(seed: int) -> None:
    """Every tenth on up to 6 devices with up to 8 layers."""
    sizes = {0: (6, 8), 1: (5, 8), 2: (6, 4)}
    check(seed, *sizes.get(seed % 10, (4, 6)))
