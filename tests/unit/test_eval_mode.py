"""A model in eval mode, as `from_pretrained` returns it: `engine.step` trains it in training mode, and
says so.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import whale as wh
from tests.ranks import run_ranks


def _model() -> nn.Module:
    """In training mode its batch norm takes the statistics of the batch, and dropout drops."""
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    return nn.Sequential(*layers).double().eval()


def _loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("is_checked", [True, False])
def test_it_trains_in_training_mode_and_says_so(
    is_checked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    batch = torch.randn(6, 4, dtype=torch.float64)
    model = _model()
    wh.init({"check_capture": is_checked})
    with caplog.at_level(logging.WARNING, "whale"):
        engine = wh.parallelize(
            model, batch, optimizer=lambda params: torch.optim.SGD(params, lr=0.0), loss=_loss
        )
    assert "the model was in eval mode" in caplog.text
    losses = {engine.step(batch).loss for _ in range(4)}
    assert len(losses) == 4, "dropout draws in every step"
    assert engine.full_state_dict()["1.num_batches_tracked"] == 4


def _warnings_of_rank() -> list[str]:
    """Warnings of Whale on this rank."""
    found: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logging.getLogger("whale").addHandler(Notes())
    batch = torch.randn(6, 4, dtype=torch.float64)
    wh.init({})
    wh.parallelize(_model(), batch, loss=_loss)
    return [text for text in found if "was in eval mode" in text]


def test_one_rank_says_so() -> None:
    first, second = run_ranks(_warnings_of_rank, 2)
    assert len(first) == 1
    assert second == []


def test_a_module_that_is_in_eval_mode_alone_stays_so() -> None:
    batch = torch.randn(6, 4, dtype=torch.float64)
    model = _model().train()
    model[1].eval()  # type: ignore[index]
    model[2].eval()  # type: ignore[index]
    expected = float(_loss(model(batch), batch).detach())
    wh.init({})
    engine = wh.parallelize(
        model, batch, optimizer=lambda params: torch.optim.SGD(params, lr=0.0), loss=_loss
    )
    assert engine.step(batch).loss == pytest.approx(expected, rel=1e-12)
