"""A step in parts: which parameters its update trains, where batches reach different ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from whale.runtime.accumulation import BatchPass, StepInParts
from whale.runtime.training import Training


class OneRank:
    """A training whose batches are the names of the parameters that their loss reaches."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.step_count = 0
        device = SimpleNamespace(event=lambda: None)
        config = SimpleNamespace(clip_grad_norm=None)
        ranks = SimpleNamespace(device=device, is_distributed=False)
        self.job = SimpleNamespace(ranks=ranks, config=config)
        self.shapes = SimpleNamespace(transport=None)
        self.updater = SimpleNamespace(trained=frozenset[str](), apply=self.apply)
        self.updated: list[frozenset[str]] = []

    def run(self, batch: str, draw: int, updates_by_stage: bool) -> Any:
        self.updater.trained = frozenset(batch)
        outcome = SimpleNamespace(loss=torch.zeros(()))
        lowered = SimpleNamespace(trained=frozenset(batch), num_empty=lambda tensors: None)
        given = SimpleNamespace(loss_scale=1.0, tensors=())
        return BatchPass(lowered, given, 1, cast(Any, None), outcome, 0.0, cast(Any, ()))  # type: ignore[arg-type]

    def need_optimizer(self, caller: str) -> None:
        return

    def finish_ahead(self) -> None:
        return

    def totals(self, *args: object, **options: object) -> Any:
        return None

    def apply(self, *args: object, **options: object) -> Any:
        self.updated.append(frozenset(self.updater.trained))

    def end_step(self, *args: object) -> Any:
        return None


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> OneRank:
    monkeypatch.setattr("whale.runtime.accumulation.Totals", lambda *args: None)
    return OneRank()


def test_an_update_trains_what_any_batch_that_counts_reaches(training: OneRank) -> None:
    """Owners of whole parameters collect the gradients of these, whichever batch came last."""
    parts = StepInParts(cast(Training, training))
    for batch in ("ab", "b"):
        parts.forward_backward(batch)
        parts.accumulate(1.0)
    parts.update()
    assert training.updated == [frozenset("ab")]


def test_a_batch_that_does_not_count_trains_nothing(training: OneRank) -> None:
    parts = StepInParts(cast(Training, training))
    parts.forward_backward("a")
    parts.accumulate(1.0)
    parts.forward_backward("bc")
    parts.update()
    parts.forward_backward("c")
    parts.accumulate(1.0)
    parts.zero()
    parts.forward_backward("b")
    parts.accumulate(1.0)
    parts.update()
    assert training.updated == [frozenset("a"), frozenset("b")]
