"""Ranks that are given batches of unlike shapes after the steps in which values are compared: named at once, not after a stall."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import whale as wh
from tests.ranks import RankError, run_ranks


def train(how: str, file: str) -> None:
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)  # the watch speaks there before it ends a rank
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    wh.init({"num_micro_batch": 2})  # stall_timeout_s is half an hour
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    if how != "data parallel":
        wh.annotate(model, {"0": wh.replicate(1), "2": wh.replicate(1)})
    x, longer = torch.randn(8, 4, 6), torch.randn(8, 5, 6)
    engine = wh.parallelize(model, x, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=lambda y, x: y.square().mean())
    for _ in range(4):
        engine.step(x)
    if how == "known shapes":  # both are captured: no rank captures again when they differ
        engine.step(longer)
    if how == "evaluation":
        engine.evaluate(longer if rank == 1 else x)
    else:
        for _ in range(3):
            engine.step(longer if rank == 1 else x)


@pytest.mark.parametrize("how", ["known shapes", "data parallel", "stages", "evaluation"])
def test_unlike_shapes_are_named(how: str, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(train, 2, how, str(tmp_path / "stderr.txt"))
    message = (tmp_path / "stderr.txt").read_text()
    assert "rank 1 was given another batch than rank 0: the batch [8, 5, 6], rank 0 has the batch [8, 4, 6]" in message
    assert "Every rank must be given the same whole mini-batch" in message
