"""A run follows the settings in its plan, whatever the config says now."""

from __future__ import annotations

import torch
from torch import nn

import whale as wh
from tests.ranks import preload, run_ranks

preload("tests.integration.test_plan_settings")

SMALL_BUCKETS = {"bucket_bytes": 2048, "check_capture": False}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))


def _mean_square(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _num_buckets(with_plan: bool) -> int:
    """Buckets that gradients are all-reduced in, where only the plan asks for small ones."""
    batch = torch.ones(8, 32)
    plan = wh.plan(_model(), batch, cluster=2, config=SMALL_BUCKETS, loss=_mean_square)
    wh.init({"check_capture": False})
    engine = wh.parallelize(
        _model(),
        batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=_mean_square,
        plan=plan if with_plan else None,
    )
    engine.step(batch)
    return sum(len(group.buckets) for group in engine._training.gradients._groups.values())


def test_buckets_are_those_of_the_plan() -> None:
    by_plan = run_ranks(_num_buckets, 2, True)
    by_config = run_ranks(_num_buckets, 2, False)
    assert by_plan[0] == by_plan[1] > by_config[0] == by_config[1]
