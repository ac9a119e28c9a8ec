"""Stages updated while the pipeline drains: the weights of one step at the end, to the bit, also after a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whale as wh
from tests.integration.test_messages import Chain
from tests.ranks import preload, run_ranks
from whale.scheduling import Kind

preload("torch", "whale", "tests.integration.test_stage_updates", "torch.export.experimental")

OPTIMIZERS = {
    "Adam": lambda named: torch.optim.Adam([parameter for _, parameter in named], lr=0.05),
    "SGD": lambda named: torch.optim.SGD([parameter for _, parameter in named], lr=0.05, momentum=0.9),
}


def train(optimizer: str, config: dict[str, Any], folder: str | None) -> tuple[dict[str, Tensor], int]:
    """(weights after three steps, with a checkpoint and a new engine after the second; updates of this rank in the last step)"""
    wh.init({"num_micro_batch": 4, "num_task_graph": 2, "check_capture": False, **config})
    batches = [(torch.randn(4, 5, generator=torch.Generator().manual_seed(step)),) for step in range(3)]

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
    assert own._last_outcome is not None
    return own.full_state_dict(), sum(action.kind is Kind.UPDATE for action, _, _ in own._last_outcome.events)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stages_are_updated_on_the_way_with_the_same_weights(optimizer: str, tmp_path: Path) -> None:
    schedule = {"schedule": "wave", "num_waves": 1}
    (at_end, _), *_ = at_the_end = run_ranks(train, 2, optimizer, schedule, None)
    assert [updates for _, updates in at_the_end] == [1, 1]
    for folder in (None, str(tmp_path)):
        on_the_way = run_ranks(train, 2, optimizer, {**schedule, "on_nonfinite": "continue"}, folder)
        assert max(updates for _, updates in on_the_way) > 1
        for name, expected in at_end.items():
            assert torch.equal(on_the_way[0][0][name], expected), name
