"""Weights that are not always here (ZeRO-3, offload), read in ways that are easily missed: by an
operation with several results of which the loss uses one, through lists of views, by operations in
whose backward a region is recomputed, and as results of a stage that are weights themselves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.exactness import mean_square
from tests.ranks import run_ranks

WIDTH = 6
NUM_SAMPLES = 4
NUM_STEPS = 3
HOST = {"offload": {"weights": "host"}}
TWO_STAGES = {"num_task_graph": 2, "num_micro_batch": 2}


class LastState(nn.Module):
    """Only the state of the recurrent layer is used, not its outputs."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.cell(x.unflatten(1, (2, WIDTH)))
        last = state[0] if isinstance(state, tuple) else state
        return x + torch.cat([last[0], last[0]], 1)


class Packed(nn.Module):
    """Two matrices in one parameter, taken apart by `unbind` or `chunk`."""

    def __init__(self, factor: int, by_chunk: bool) -> None:
        super().__init__()
        self.by_chunk = by_chunk
        inner = factor * 2 * WIDTH
        shape = (2 * 2 * WIDTH, inner) if by_chunk else (2, 2 * WIDTH, inner)
        self.weight = nn.Parameter(0.05 * torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2) if self.by_chunk else self.weight.unbind(0)
        inner = (x @ first).tanh() * (x @ second)
        return x + inner.unflatten(1, (-1, 2 * WIDTH)).sum(1)


class Branches(nn.Module):
    """A region under `torch.utils.checkpoint` with branches that have no backward: when it is
    recomputed, their weights come behind, or between, those that the running backward reads.
    """

    def __init__(self, trained: tuple[int, ...]) -> None:
        super().__init__()
        self.trained = trained
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(7))

    def region(self, x: Tensor) -> Tensor:
        found = []
        for place in range(1, 5):
            value: Tensor = self.layers[place](x)
            found.append(value if place in self.trained else value.detach())
        return found[0] + found[1] + found[2] + found[3]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).tanh()
        x = checkpoint(self.region, x, use_reentrant=False).tanh()
        result: Tensor = self.layers[6](self.layers[5](x).tanh())
        return result


class HandsOn(nn.Module):
    """A view of the first weight that waits until the end, in another stage where there are two; a
    bias that a buffer gets. Both blocks have lost their slots by then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(8))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        row = self.layers[0].weight[0]
        self.seen.copy_(self.layers[0].bias.detach())
        for layer in self.layers:
            x = layer(x).tanh()
        return x + row


class GivesWeights(HandsOn):
    """Two weights are results of the model."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.layers[0].weight[:2], self.layers[1].weight


BRANCHES = {"first": (1,), "middle": (2,), "last": (4,), "two": (1, 2)}
"""which layers of the region have a backward"""

FACTORS = (3, 3, 3, 5, 5, 3, 3, 3)
"""sizes with which neighbouring layers get the same slot"""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in BRANCHES:
        return Branches(BRANCHES[name]).double()
    if name == "hands on":
        return HandsOn().double()
    if name in ("unbind", "chunk"):
        layers: list[nn.Module] = [Packed(factor, name == "chunk") for factor in FACTORS]
    else:
        layers = [LastState({"lstm": nn.LSTM, "gru": nn.GRU}[name]) for _ in range(6)]
    return nn.Sequential(*layers).double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(NUM_SAMPLES, 2 * WIDTH, generator=generator, dtype=torch.float64)


def sgd(pairs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(pairs, lr=0.1)


def train(name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    wh.init({"strategy": "data", "check_replicas": 0, **settings})
    engine = wh.parallelize(build(name), batch(0), optimizer=sgd, loss=mean_square)
    for step in range(NUM_STEPS):
        engine.step(batch(step))
    state = engine.full_state_dict()
    engine.close()
    return state


def train_locally(name: str) -> dict[str, Tensor]:
    model = build(name)
    optimizer = sgd(model.named_parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        mean_square(model(batch(step)), batch(step)).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("name", "num_ranks", "settings"),
    [
        ("lstm", 1, HOST),
        ("unbind", 2, {"zero": 3}),
        ("chunk", 1, HOST),
        ("first", 1, HOST),
        ("last", 1, HOST),
        ("middle", 1, HOST),
        ("two", 1, HOST),
        ("first", 2, {"zero": 3}),
        ("last", 2, {"zero": 3}),
        ("hands on", 1, HOST),
        ("hands on", 2, {"strategy": "auto", **TWO_STAGES, **HOST}),
        pytest.param("gru", 2, {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("unbind", 1, {"offload": {"weights": "disk"}}, marks=pytest.mark.slow),
        pytest.param("chunk", 2, {"zero": 3, "recompute": True}, marks=pytest.mark.slow),
    ],
)
def test_backward_finds_its_weights(
    name: str, num_ranks: int, settings: dict[str, Any], tmp_path: Any
) -> None:
    settings = {**settings, "run_folder": str(tmp_path)}
    state = run_ranks(train, num_ranks, name, settings)[0]
    for key, value in train_locally(name).items():
        torch.testing.assert_close(state[key], value, rtol=1e-10, atol=1e-10)


def outputs_of() -> tuple[Any, Any]:
    """What a step and an evaluation give."""
    wh.init({"strategy": "data", **HOST})
    torch.manual_seed(0)
    model = GivesWeights().double()
    engine = wh.parallelize(
        model, batch(0), optimizer=sgd, loss=lambda outputs, x: mean_square(outputs[0], x)
    )
    stepped = engine.step(batch(0), outputs=True).outputs
    evaluated = engine.evaluate(batch(0), outputs=True).outputs
    engine.close()
    return stepped, evaluated


def test_results_of_the_model_that_are_weights() -> None:
    torch.manual_seed(0)
    model = GivesWeights().double()
    optimizer = sgd(model.named_parameters())
    for got in outputs_of():
        wanted = model(batch(0))
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-10, atol=1e-10)
        optimizer.zero_grad()
        mean_square(wanted[0], batch(0)).backward()
        optimizer.step()
