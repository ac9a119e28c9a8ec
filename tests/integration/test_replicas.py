"""Holders of the same weights are compared: rounding is made good, more ends the job with names."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale as wh
from tests.ranks import RankError, preload, run_ranks
from whale.runtime.replicas import TILE, hash_bits

preload("tests.integration.test_replicas")
WIDTH = 8


class Tied(nn.Module):
    """Two stages that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.table(x)))).square().mean()  # type: ignore[no-any-return]


def _engine(plan: str, config: dict[str, Any]) -> Any:
    """`replicas`: 2 of the model; `tied`: 2 stages that share a weight; `split`: 2 replicas of a
    split over 2 devices.
    """
    wh.init({"check_replicas": 1, **config})
    torch.manual_seed(0)
    model = Tied()
    if plan == "tied":
        wh.annotate(model, {"table|middle": wh.replicate(1), "head": wh.replicate(1)})
    elif plan == "split":
        wh.annotate(model, {"table|middle|head": wh.split(2, grid=(1, 2, 1))})
    return wh.parallelize(
        model, _batch(0), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )


def _batch(step: int) -> Tensor:
    return torch.randint(0, WIDTH, (8, 4), generator=torch.Generator().manual_seed(step))


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _disturbed(
    plan: str, name: str, rank: int, relative: float, config: dict[str, Any]
) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after steps in which one rank's parameter was changed, and what was logged."""
    said = _Messages()
    logging.getLogger("whale").addHandler(said)
    engine = _engine(plan, config)
    engine.step(_batch(0))
    if dist.get_rank() == rank:
        weight = dict(engine.named_parameters())[name]
        with torch.no_grad():
            weight.view(-1)[3] += relative * weight.abs().max()
    engine.step(_batch(1))  # begins to compare at its end
    engine.step(_batch(2))  # and looks at it
    weights = {name: tensor.detach().clone() for name, tensor in engine.named_parameters()}
    return weights, [text for text in said.texts if "on several ranks" in text]


PLANS = [
    ("replicas", 2, "middle.weight"),
    ("tied", 2, "table.weight"),
    ("split", 4, "table.weight"),
]


@pytest.mark.parametrize(("plan", "num_ranks", "name"), PLANS)
def test_rounding_is_made_good(plan: str, num_ranks: int, name: str) -> None:
    """All get the values of the first holder, with a message."""
    found = run_ranks(_disturbed, num_ranks, plan, name, num_ranks - 1, 3e-7, {})
    assert [len(said) for _, said in found] == [1] + [0] * (num_ranks - 1)
    assert f"{name} on rank {num_ranks - 1} by " in found[0][1][0]
    undisturbed = run_ranks(_disturbed, num_ranks, plan, name, num_ranks - 1, 0.0, {})
    assert undisturbed[0][1] == []
    other = 0 if plan != "split" else 1  # who holds the same part as the last rank
    for each, tensor in found[other][0].items():
        if each in found[-1][0]:
            assert torch.equal(tensor, found[-1][0][each]), each


@pytest.mark.parametrize(("plan", "num_ranks", "name"), PLANS)
def test_more_than_rounding_ends_the_job(plan: str, num_ranks: int, name: str) -> None:
    with pytest.raises(
        RankError,
        match=rf"after step 1, weights .* differ: (?s:.)*{name} on rank {num_ranks - 1} by .* from",
    ):
        run_ranks(_disturbed, num_ranks, plan, name, num_ranks - 1, 0.01, {})


def test_the_check_can_be_left_out() -> None:
    found = run_ranks(_disturbed, 2, "replicas", "middle.weight", 1, 0.01, {"check_replicas": 0})
    assert not torch.equal(found[0][0]["middle.weight"], found[1][0]["middle.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("numel", [1, 3, 8, 1000, 2 * TILE + 5])
def test_a_hash_sees_every_bit_and_its_place(dtype: torch.dtype, numel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1 << 62, (TILE,), generator=generator) * 2 + 1
    tensor = torch.randn(numel, generator=generator).to(dtype)
    own = hash_bits(tensor, numbers)
    assert hash_bits(tensor.clone(), numbers) == own
    for place in {0, numel // 2, numel - 1}:
        changed = tensor.clone()
        changed.view(torch.uint8)[place * dtype.itemsize] ^= 1
        assert hash_bits(changed, numbers) != own
    if numel > 1:
        up_and_down = tensor.clone().view(torch.uint8)
        up_and_down[0] ^= 1
        up_and_down[-dtype.itemsize] ^= 1
        assert hash_bits(up_and_down.view(dtype), numbers) != own
