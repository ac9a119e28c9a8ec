"""Experts behind `grouped_mm` under `split`: every device has some of them, and training is that of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.ranks import ModelServer

WIDTH, HIDDEN, NUM_EXPERTS = 8, 12, 5
NUM_STEPS, LEARNING_RATE = 2, 0.1


class Experts(nn.Module):
    """Tokens sorted by expert, as Mixtral of `transformers` does it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        product = torch.ops.transformers.grouped_mm_fallback
        tokens = x.flatten(0, 1)
        share, expert = self.gate(tokens).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = F.one_hot(expert, NUM_EXPERTS).sum(0).cumsum(0).to(torch.int32)
        rows = product(F.gelu(product(tokens[order], self.up, ends)), self.down, ends)
        return x + (rows[order.argsort()] * share.unsqueeze(-1)).view(x.shape)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.experts(x), target)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = (torch.randn(6, 4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


def prepare() -> None:
    import transformers.integrations.moe  # noqa: F401  (registers the operation, once for all ranks)


def train_on_rank(prepared: None, grid: tuple[int, int, int]) -> tuple[list[float], dict[str, Tensor], list[str]]:
    wh.init()
    model = wh.annotate(Model().double(), {"experts": wh.split(4, grid=grid)})
    engine = wh.parallelize(model, batch(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE))
    losses = [engine.step(batch()).loss for _ in range(NUM_STEPS)]
    axes = ["".join(stored.axes) for name, stored in engine.plan.shardings[0].stored.items() if name in ("experts.up", "experts.down")]
    return losses, engine.full_state_dict(), axes


def train_locally() -> tuple[list[float], dict[str, Tensor]]:
    model = Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(*batch())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def test_experts_train_like_local() -> None:
    prepare()
    losses, weights = train_locally()
    with ModelServer(prepare) as server:
        for grid in [(1, 4, 1), (2, 2, 1)]:
            answers = server.run(train_on_rank, 4, grid)
            for found, _, axes in answers:
                assert found == pytest.approx(losses, rel=1e-10)
                assert all(axes), "the experts' weights are cut"
            state = answers[0][1]
            assert max(float((state[name] - weights[name]).abs().max()) for name in weights) < 1e-10
