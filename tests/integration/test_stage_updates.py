"""Stages updated while the pipeline drains: the weights of one step at the end, to the bit, also
after a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.integration.test_messages import Chain
from tests.ranks import preload, run_ranks
from whale.scheduling import Kind

preload("torch", "whale", "tests.integration.test_stage_updates", "torch.export.experimental")

WAVE = {"schedule": "wave", "num_waves": 1}
OPTIMIZERS = {
    "Adam": lambda named: torch.optim.Adam([parameter for _, parameter in named], lr=0.05),
    "SGD": lambda named: torch.optim.SGD(
        [parameter for _, parameter in named], lr=0.05, momentum=0.9
    ),
}


def train(
    optimizer: str, config: dict[str, Any], folder: str | None
) -> tuple[dict[str, Tensor], int]:
    """(weights after three steps, with a checkpoint and a new engine after the second; updates of
    this rank in the last step)
    """
    wh.init({"num_micro_batch": 4, "num_task_graph": 2, "check_capture": False, **config})
    batches = [
        (torch.randn(4, 5, generator=torch.Generator().manual_seed(step)),) for step in range(3)
    ]

    def engine() -> wh.Engine:
        torch.manual_seed(0)
        return wh.parallelize(Chain(4), batches[0], optimizer=OPTIMIZERS[optimizer])

    own = engine()
    for batch in batches[:2]:
        own.step(batch)
    if folder is not None:
        own.save(folder).wait()
        own.close()
        own = engine()
        assert own.load(folder) == 2
    own.step(batches[2])
    assert own._training.last_outcome is not None
    return own.full_state_dict(), sum(
        action.kind is Kind.UPDATE for action, _, _ in own._training.last_outcome.events
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stages_are_updated_on_the_way_with_the_same_weights(
    optimizer: str, tmp_path: Path
) -> None:
    (at_end, _), *_ = at_the_end = run_ranks(train, 2, optimizer, WAVE, None)
    assert [updates for _, updates in at_the_end] == [1, 1]
    for folder in (None, str(tmp_path)):
        on_the_way = run_ranks(train, 2, optimizer, {**WAVE, "on_nonfinite": "continue"}, folder)
        assert max(updates for _, updates in on_the_way) > 1
        for name, expected in at_end.items():
            assert torch.equal(on_the_way[0][0][name], expected), name


class Lender(nn.Module):
    """The last layer reads a row of a table that is stage 0's: it is handed on, and lies in the
    table's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(200, 5))
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.table)[:, :5]
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return (x * torch.sigmoid(self.layers[-1](self.table[:1]))).square().mean()


def train_lender(on_nonfinite: str) -> tuple[dict[str, Tensor], list[int]]:
    """(weights after three steps, stages that lend a parameter)"""
    wh.init(
        {
            **WAVE,
            "num_micro_batch": 4,
            "num_task_graph": 2,
            "check_capture": False,
            "on_nonfinite": on_nonfinite,
        }
    )
    batch = (torch.randn(8, 5, generator=torch.Generator().manual_seed(0)),)
    engine = wh.parallelize(
        Lender(), batch, optimizer=lambda params: torch.optim.SGD(params, lr=0.5)
    )
    for _ in range(3):
        engine.step(batch)
    return engine.full_state_dict(), sorted(engine._shapes.first.lending)


def test_a_stage_that_hands_on_a_slice_of_a_parameter_is_updated_at_the_end() -> None:
    (expected, _), _ = run_ranks(train_lender, 2, "stop")
    (got, lending), _ = run_ranks(train_lender, 2, "continue")
    assert 0 in lending  # the planner decides how far it is handed on
    for name, weight in expected.items():
        assert torch.equal(got[name], weight), name
