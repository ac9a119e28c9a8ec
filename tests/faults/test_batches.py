"""Ranks that are given different batches after the steps in which values are compared: named at
once, not after a stall.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch

import whale as wh
from tests.ranks import RankError, run_ranks

LONG_S = 30.0
"""longer than a rank needs to hear of another one's failure"""


def train(how: str, file: str) -> None:
    os.dup2(
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2
    )  # the watch speaks there before it ends a rank
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    wh.init({"num_micro_batch": 2})  # stall_timeout_s is half an hour
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    if how != "data parallel":
        wh.annotate(model, {"0": wh.replicate(1), "2": wh.replicate(1)})
    x = torch.randn(8, 4, 6)
    longer = torch.randn(8, 5, 6)
    engine = wh.parallelize(
        model,
        x,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda y, x: y.square().mean(),
    )
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
def test_different_shapes_are_named(how: str, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(train, 2, how, str(tmp_path / "stderr.txt"))
    message = (tmp_path / "stderr.txt").read_text()
    assert (
        "rank 1 was given another batch than rank 0: the batch [8, 5, 6], rank 0 has the batch "
        "[8, 4, 6]" in message
    )
    assert "Every rank must be given the same whole mini-batch" in message


def evaluate_with_an_unknown_token(file: str) -> None:
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 6), torch.nn.Linear(6, 6))
    tokens = torch.randint(0, 10, (8, 4))
    engine = wh.parallelize(
        model,
        tokens,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda y, x: y.square().mean(),
    )
    for _ in range(4):  # values are not compared any more
        engine.step(tokens)
    try:
        result = engine.evaluate(tokens if os.environ["RANK"] == "0" else tokens + 10)
    except IndexError:
        if os.environ["RANK"] == "0":
            raise
        time.sleep(LONG_S)  # a script that goes on by itself
    assert result.loss > 0


def test_a_rank_that_raises_in_evaluate_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"Rank \d of 2 died \(exit code 13\)"):
        run_ranks(evaluate_with_an_unknown_token, 2, str(tmp_path / "stderr.txt"), timeout_s=LONG_S)
    assert re.search(
        r"whale: rank 1 failed at the evaluation before step 4, action 1 of 1, F0\.0: IndexError: index out of range.*"
        r"The others stood: rank 0 at the evaluation before step 4, its end",
        (tmp_path / "stderr.txt").read_text(),
    )
