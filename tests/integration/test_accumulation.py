"""A step in parts (`forward_backward`, `accumulate`, `clip_grad_norm`, `update`) against local
training.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.ranks import run_ranks

FACTORS = (0.25, 2.0, 0.5)
MAX_NORM = 0.3
NUM_UPDATES = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Linear(4, 8)
        self.top = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.top(torch.tanh(self.bottom(x))), labels)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batches(update: int) -> list[dict[str, Tensor]]:
    """Three batches of different sizes."""
    generator = torch.Generator().manual_seed(update)
    made = []
    for size in (6, 4, 5):
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        made.append({"x": x, "labels": torch.randint(0, 3, (size,), generator=generator)})
    return made


def local() -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses, norms = [], []
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        for batch, factor in zip(batches(update), FACTORS, strict=True):
            loss = model(**batch)
            (factor * loss).backward()
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        norms.append(float(norm))
        optimizer.step()
    return losses, norms, {name: t.detach() for name, t in model.state_dict().items()}


def in_parts(
    stages: bool, config: dict[str, Any] | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    wh.init({"num_micro_batch": 2 if stages else 1, **(config or {})})
    model = net()
    if stages:
        wh.annotate(model, {"bottom": wh.replicate(1), "top": wh.replicate(1)})
    engine = wh.parallelize(
        model, batches(0)[0], optimizer=lambda pairs: torch.optim.AdamW(pairs, lr=0.1)
    )
    losses, norms = [], []
    for update in range(NUM_UPDATES):
        for batch, factor in zip(batches(update), FACTORS, strict=True):
            losses.append(engine.forward_backward(batch).loss)
            engine.accumulate(factor)
        norms.append(engine.clip_grad_norm(MAX_NORM))
        result = engine.update()
        expected = sum(f * loss for f, loss in zip(FACTORS, losses[-3:], strict=True))
        assert result.loss == pytest.approx(expected, rel=1e-12)
    return losses, norms, engine.full_state_dict()


def check(found: tuple[list[float], list[float], dict[str, Tensor]]) -> None:
    losses, norms, weights = local()
    assert max(norms) > MAX_NORM > 0.0
    assert found[0] == pytest.approx(losses, rel=1e-12)
    assert found[1] == pytest.approx(norms, rel=1e-12)
    for name, tensor in found[2].items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-10, atol=1e-12)


def test_one_process() -> None:
    check(in_parts(stages=False))


@pytest.mark.parametrize("stages", [False, True])
def test_two_ranks(stages: bool) -> None:
    first, second = run_ranks(in_parts, 2, stages)
    check(first)
    assert second[:2] == first[:2]


UNLIKE = {"replicas": [{"stages": [[0]], "samples": 2}, {"stages": [[1], [2]], "samples": 4}]}


@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [
        pytest.param(2, {"zero": 1}, marks=pytest.mark.slow),
        pytest.param(2, {"zero": 2, "num_micro_batch": 2}, marks=pytest.mark.slow),
        (2, {"zero": 3}),
        pytest.param(3, {"zero": 3, "share_memory": False}, marks=pytest.mark.slow),
        (3, UNLIKE),
    ],
)
def test_zero_and_replicas_that_are_not_alike(num_ranks: int, config: dict[str, Any]) -> None:
    found = run_ranks(in_parts, num_ranks, False, config)
    check(found[0])
    for other in found[1:]:
        assert other[:2] == found[0][:2]


def test_a_batch_that_does_not_count_leaves_no_trace() -> None:
    wh.init()
    engine = wh.parallelize(
        net(), batches(0)[0], optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1)
    )
    reference = wh.parallelize(
        net(), batches(0)[0], optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1)
    )
    first, second, third = batches(1)
    engine.forward_backward(first)  # not accumulated
    engine.forward_backward(second)
    engine.accumulate()
    engine.forward_backward(third)  # not accumulated, and behind one that is
    engine.update()
    reference.step(second)
    for name, tensor in reference.full_state_dict().items():
        torch.testing.assert_close(engine.full_state_dict()[name], tensor, rtol=0, atol=0)


def test_parts_in_the_wrong_order_are_refused() -> None:
    wh.init()
    engine = wh.parallelize(
        net(), batches(0)[0], optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1)
    )
    with pytest.raises(ValueError, match=r"engine\.forward_backward first"):
        engine.accumulate()
    with pytest.raises(ValueError, match="no gradient was accumulated"):
        engine.update()
    engine.forward_backward(batches(0)[0])
    engine.accumulate()
    with pytest.raises(ValueError, match="gradients of 1 batches"):
        engine.step(batches(0)[1])
    engine.zero_gradients()
    engine.step(batches(0)[1])


def test_clipping_twice() -> None:
    """The second one took the norm before the first: gradients were scaled down again."""
    wh.init()
    model = net()
    engine = wh.parallelize(
        model, batches(0)[0], optimizer=lambda pairs: torch.optim.SGD(pairs, lr=0.1)
    )
    reference = net()
    limits = (MAX_NORM, MAX_NORM, MAX_NORM / 4, MAX_NORM / 2)
    for batch in batches(1)[:2]:  # clipped gradients are added to as they are
        reference(**batch).backward()
        own = reference.parameters
        expected = [float(torch.nn.utils.clip_grad_norm_(own(), limit)) for limit in limits]
        engine.forward_backward(batch)
        engine.accumulate()
        assert [engine.clip_grad_norm(limit) for limit in limits] == pytest.approx(expected)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    engine.update()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(engine.full_state_dict()[name], tensor, rtol=1e-10, atol=1e-12)
