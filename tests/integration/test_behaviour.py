"""How a training job behaves beyond one exact step: agreement of ranks, clipping."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import run_loss
from tests.ranks import ModelServer, preload

preload("torch", "whale", "tests.integration.training", "torch.export.experimental")  # the last: what the first export imports

WIDTH, NUM_CLASSES, NUM_LAYERS, BATCH_SIZE = 8, 3, 8, 9
EXACT = 1e-10


class Layers(nn.Module):
    """Many parameters of the same shape, two of them read by every operation: an exchange of any two changes the training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), labels)


def make_batch(seed: int, batch_size: int = BATCH_SIZE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, NUM_CLASSES, (batch_size,), generator=generator)}


def build() -> Layers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Layers().double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def in_two_stages(model: nn.Module) -> nn.Module:
    return wh.annotate(model, {"layers.[0-3]": wh.replicate(1), "layers.[4-7]": wh.replicate(1)})


def warm_up() -> None:
    """The first capture of a process takes a second longer than the others: ranks inherit what it leaves."""
    wh.plan(build(), make_batch(0), cluster=1)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(warm_up) as started:
        yield started


# ---- ranks that are not copies of each other --------------------------------------------------------------------------


def train_after_other_work(prepared: None) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Rank 1 has captured other models before, so that nothing lies at the same address as on rank 0."""
    wh.init()
    kept = [wh.plan(build(), make_batch(0), cluster=1) for _ in range(3 * int(os.environ["RANK"]))]
    engine = wh.parallelize(build(), make_batch(0), optimizer=sgd)
    engine.step(make_batch(0))
    del kept
    gradients = {name: gradient.clone() for name, gradient in engine.gradients().items()}
    return [name for name, _ in engine.named_parameters()], gradients, engine.full_state_dict()


def test_ranks_sum_the_same_parameters(server: ModelServer) -> None:
    """Each rank captures for itself: what goes into a bucket, and in which order, may depend on the graph and on nothing else."""
    (names, gradients, state), (other_names, other_gradients, _) = server.run(train_after_other_work, 2)
    assert names == other_names
    model = build()
    loss = run_loss(model, make_batch(0), None)
    loss.backward()
    sgd(model.named_parameters()).step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(gradients[name], other_gradients[name]), f"{name} has another gradient on rank 1"
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(state[name], parameter.detach(), rtol=EXACT, atol=EXACT)


# ---- clipping ---------------------------------------------------------------------------------------------------------

CLIP = 0.05


def train_clipped(prepared: None, num_stages: int) -> tuple[list[float], dict[str, Tensor]]:
    wh.init({"num_micro_batch": 2, "clip_grad_norm": CLIP})
    model = in_two_stages(build()) if num_stages == 2 else build()
    engine = wh.parallelize(model, make_batch(0), optimizer=sgd)
    norms = [engine.step(make_batch(step)).grad_norm for step in range(3)]
    return norms, engine.full_state_dict()


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_clipping_uses_the_norm_of_the_whole_model(server: ModelServer, num_ranks: int, num_stages: int) -> None:
    ranks = server.run(train_clipped, num_ranks, num_stages)
    model = build()
    optimizer = sgd(model.named_parameters())
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        run_loss(model, make_batch(step), None).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    assert min(norms) > CLIP, "nothing was clipped: the test shows nothing"
    for rank_norms, _ in ranks:
        assert rank_norms == pytest.approx(norms, rel=EXACT)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ranks[0][1][name], parameter.detach(), rtol=EXACT, atol=EXACT)
