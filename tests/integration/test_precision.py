"""fp16 on several ranks against `torch.amp.GradScaler` in a plain loop: the same steps are skipped,
on every rank.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.ranks import run_ranks

NUM_STEPS = 4
OVERFLOWS = 1
"""the step in which one sample, of the last rank, is too large for half precision once the loss is
scaled
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(4, 4)
        self.top = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (
            (self.top(torch.tanh(self.bottom(x))).float() * x.mean(1, keepdim=True)).square().mean()
        )


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    if step == OVERFLOWS:
        x[-1] = 1000.0
    return x


def optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)  # type: ignore[arg-type]


def train(stages: bool) -> tuple[list[bool], list[float], float, dict[str, Tensor]]:
    wh.init({"precision": "fp16", "num_micro_batch": 2})
    model = (
        wh.annotate(build(), {"bottom": wh.replicate(1), "top": wh.replicate(1)})
        if stages
        else build()
    )
    engine = wh.parallelize(model, batch(0), optimizer=optimizer)
    results = [engine.step(batch(step)) for step in range(NUM_STEPS)]
    assert engine._training.updater.loss_scale is not None
    return (
        [r.skipped for r in results],
        [r.loss for r in results],
        engine._training.updater.loss_scale.scale,
        engine.full_state_dict(),
    )


def train_locally() -> tuple[list[bool], list[float], float, dict[str, Tensor]]:
    model = build()
    scaler = torch.amp.GradScaler("cpu")
    local = optimizer(model.parameters())
    skipped = []
    losses = []
    for step in range(NUM_STEPS):
        local.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(batch(step))
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(local)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
        losses.append(loss.item())
    return skipped, losses, scaler.get_scale(), model.state_dict()


@pytest.mark.parametrize("stages", [False, True])
def test_fp16_skips_on_every_rank_what_torch_skips(stages: bool) -> None:
    skipped, losses, scale, weights = train_locally()
    assert skipped == [step == OVERFLOWS for step in range(NUM_STEPS)]
    ranks = run_ranks(train, 2, stages)
    for found in ranks:
        assert found[0] == skipped
        assert found[1] == pytest.approx(losses, rel=1e-2)  # half precision
        assert found[2] == scale
    for name, tensor in ranks[0][3].items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-2, atol=1e-3)
