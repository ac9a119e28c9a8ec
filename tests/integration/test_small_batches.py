"""Batches with too little in them: no label that counts, fewer samples than devices. The message
says what is wrong and what to try.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.ranks import run_ranks
from whale.runtime.step_update import NonFiniteError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(4, 4)
        self.top = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.top(torch.tanh(self.bottom(x))), labels)


def make_engine(stages: bool = False, **options: object) -> wh.Engine:
    torch.manual_seed(0)
    wh.init(options)
    model = (
        wh.annotate(Net(), {"bottom": wh.replicate(1), "top": wh.replicate(1)}) if stages else Net()
    )
    return wh.parallelize(model, batch(8), optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1))


def batch(num_samples: int, label: int = 1) -> dict[str, Tensor]:
    return {"x": torch.randn(num_samples, 4), "labels": torch.full((num_samples,), label)}


def train_on_nothing(stages: bool) -> str:
    engine = make_engine(stages)
    engine.step(batch(8))
    with pytest.raises(NonFiniteError) as refused:
        engine.step(batch(8, label=-100))
    engine.step(batch(8))
    return str(refused.value)


@pytest.mark.parametrize("stages", [False, True])
def test_all_labels_ignored(stages: bool) -> None:
    for message in run_ranks(train_on_nothing, 2, stages):
        assert message.startswith("step 1: the loss is nan")
        assert (
            "none counts in this mini-batch (all labels ignored, or a mask of zeros): leave such "
            "batches out" in message
        )
        assert "learning rate" not in message


def test_other_numbers_that_are_not_finite_keep_their_advice() -> None:
    engine = make_engine()
    bad = batch(8)
    bad["x"][0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="Lower the learning rate"):
        engine.step(bad)


def evaluate_few() -> tuple[str, float | None]:
    engine = make_engine()
    with pytest.raises(ValueError) as refused:
        engine.evaluate(batch(1))
    torch.manual_seed(1)
    return str(refused.value), engine.evaluate(batch(2)).loss


def test_fewer_samples_than_devices_in_evaluation() -> None:
    for message, loss in run_ranks(evaluate_few, 2):
        assert message.startswith(
            "engine.evaluate: a batch of 1 samples cannot be cut over 2 devices, each needs one. "
            "Try: at least 2 samples at a time"
        )
        torch.manual_seed(0)
        model = Net()
        torch.manual_seed(1)
        assert loss == pytest.approx(model(**batch(2)).item(), rel=1e-5)
