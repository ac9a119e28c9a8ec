"""Mixtures of experts that sort their tokens, as those of `transformers` do, under `split`: exact,
with tokens sent to their experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import EXACT_FLOAT32, Float64Mode, compare
from tests.integration.test_split import (
    Case,
    Subject,
    everything,
    merged,
    prepare_model,
    sgd,
    tokens,
    train_locally,
    train_on_rank,
    wide_mixtral,
)
from tests.ranks import ModelServer, preload, run_ranks

preload("torch", "transformers", "whale", "tests.integration.test_split_experts")

GPUS = ("V100-32GB",) * 4
TRAVEL = "by experts, tokens by all-to-all"


@pytest.fixture(scope="module")
def wide() -> Iterator[ModelServer]:
    with ModelServer(prepare_model, "wide mixtral") as server:
        yield server


def patterns(subject: Subject, grid: tuple[int, int, int]) -> list[str]:
    """The patterns of the products with experts, as `whale plan` shows them."""
    case = Case("wide mixtral", 4, everything(4, grid), kinds=GPUS)
    with Float64Mode():
        wh.init()
        wh.annotate(subject.model, {"*": wh.split(4, grid)})
        plan = wh.parallelize(
            subject.model, tokens(0), optimizer=sgd, prepared=subject.prepared, cluster=case.cluster
        ).plan
    return [
        operation.pattern
        for operation in plan.shardings[0].operations
        if "expert_mm" in operation.what
    ]


@pytest.mark.parametrize(
    "grid",
    [(1, 1, 4), *(pytest.param(grid, marks=pytest.mark.slow) for grid in ((1, 2, 2), (2, 1, 2)))],
    ids=str,
)
def test_tokens_travel_to_their_experts(wide: ModelServer, grid: tuple[int, int, int]) -> None:
    """7 experts with different numbers of tokens on 2 or 4 devices: loss, gradients and three steps
    like local training.
    """
    found = wide.run(patterns, 4, grid)[0]
    assert len(found) == 2 and all(TRAVEL in pattern for pattern in found)
    reference = wide.run_local(train_locally)
    ranks = wide.run(train_on_rank, 4, Case("wide mixtral", 4, everything(4, grid), kinds=GPUS))
    compare(reference, merged(ranks, reference.weights))


# ---- the default implementation
# -----------------------------------------------------------------------------------------


def sorting_mixtral() -> nn.Module:
    torch.manual_seed(0)
    model = wide_mixtral()
    model.config._experts_implementation = "grouped_mm"
    return model


def train_in_float32(grid: tuple[int, int, int] | None) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps of unmodified Mixtral, without Whale where there is no grid."""
    model = sorting_mixtral()
    data = [tokens(step) for step in range(3)]
    losses = []
    if grid is None:
        optimizer = sgd(model.parameters())
        for batch in data:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, dict(model.state_dict())
    wh.init({"num_micro_batch": 2})
    engine = wh.parallelize(wh.annotate(model, {"*": wh.split(2, grid)}), data[0], optimizer=sgd)
    losses = [engine.step(batch).loss for batch in data]
    return losses, engine.full_state_dict()


def test_unmodified_mixtral_in_float32() -> None:
    """Its `grouped_mm` exports sort, histc and cumsum; two micro-batches, so samples must
    not mix.
    """
    losses, state = train_in_float32(None)
    largest = max(float(tensor.abs().max()) for tensor in state.values())
    for grid in ((1, 1, 2), (1, 2, 1)):
        got, weights = run_ranks(train_in_float32, 2, grid)[0]
        assert got == pytest.approx(losses, rel=EXACT_FLOAT32)
        assert (
            max(float((weights[name] - state[name]).abs().max()) for name in state)
            <= EXACT_FLOAT32 * largest
        )


# ---- sorted by hand
# -------------------------------------------------------------------------------------------------------

WIDTH = 8
HIDDEN = 12
NUM_EXPERTS = 5


class Experts(nn.Module):
    """Tokens sorted by expert; the inverse order is another sort. `leaks`: something else reads
    sorted rows, so they stay sorted.
    """

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        self.leaks = leaks
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        product = torch.ops.transformers.grouped_mm_fallback
        flat = x.flatten(0, 1)
        share, expert = self.gate(flat).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = F.one_hot(expert, NUM_EXPERTS).sum(0).cumsum(0).to(torch.int32)
        rows = product(F.gelu(product(flat[order], self.up, ends)), self.down, ends)
        result = x + (rows[order.argsort()] * share.unsqueeze(-1)).view(x.shape)
        loss = F.mse_loss(result, target)
        return loss + rows.flip(0).mean() if self.leaks else loss


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = (
        torch.randn(6, 4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return x, target


def train_sorted(
    leaks: bool, grid: tuple[int, int, int] | None
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """(losses of two steps, weights, patterns of the products)"""
    import transformers.integrations.moe  # noqa: F401  (registers the operation)

    torch.manual_seed(0)
    model = Experts(leaks).double()
    losses: list[float] = []
    if grid is None:
        optimizer: Any = sgd(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(*batch())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, model.state_dict(), []
    wh.init()
    engine = wh.parallelize(wh.annotate(model, {"*": wh.split(4, grid)}), batch(), optimizer=sgd)
    losses = [engine.step(batch()).loss for _ in range(2)]
    return (
        losses,
        engine.full_state_dict(),
        [operation.what for operation in engine.plan.shardings[0].operations],
    )


@pytest.mark.parametrize("leaks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_sorted_by_hand(leaks: bool) -> None:
    """Where sorted rows are read by something else the products stay `grouped_mm`, whose tokens are
    whole on every device.
    """
    losses, weights, _ = train_sorted(leaks, None)
    for grid in ((1, 4, 1), (2, 2, 1)):
        got, state, operations = run_ranks(train_sorted, 4, leaks, grid)[0]
        assert any("grouped_mm" in what if leaks else "expert_mm" in what for what in operations)
        assert got == pytest.approx(losses, rel=1e-10)
        assert max(float((state[name] - weights[name]).abs().max()) for name in weights) < 1e-10
