"""Whatever plan the search takes trains like local PyTorch: random models on random clusters of
CPUs of different speeds, on real ranks. Losses of three steps and the weights after them.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

import whale as wh
from tests.exactness import mean_square
from tests.ranks import preload, run_ranks

preload("tests.integration.test_search_training")

STEPS = 3
BATCH = 12


def model(seed: int) -> nn.Module:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    widths = [draw.choice((8, 16, 24)) for _ in range(draw.randint(3, 7))]
    layers: list[nn.Module] = []
    for before, after in zip(widths, [*widths[1:], widths[-1]], strict=True):
        layers += [nn.Linear(before, after), draw.choice((nn.Tanh, nn.GELU, nn.Sigmoid))()]
    if draw.random() < 0.3:
        layers.insert(2, nn.LayerNorm(widths[1]))
    return nn.Sequential(*layers).double()


def mini_batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = next(each for each in model(seed).modules() if isinstance(each, nn.Linear)).in_features
    return [
        torch.randn(BATCH, width, generator=generator, dtype=torch.float64) for _ in range(STEPS)
    ]


def cluster_file(seed: int) -> tuple[str, int]:
    """(text, devices): slow devices, so that compute counts, of two or three kinds."""
    draw = random.Random(1000 + seed)
    number = draw.randint(2, 4)
    devices = ", ".join(f"{{kind: k{draw.randint(0, 2)}}}" for _ in range(number))
    kinds = [
        f"  k{index}: {{tflop_per_s: {10 ** draw.uniform(-6, -4.5):.3g}, memory_gb: 1, "
        f"gb_per_s: {10 ** draw.uniform(-2, 0):.3g}}}"
        for index in range(3)
    ]
    rate = 10 ** draw.uniform(-3, 0)
    links = f"links:\n  intra_host: {{gb_per_s: {rate:.3g}, latency_us: 10}}\n"
    hosts = f"hosts: [{{name: localhost, devices: [{devices}]}}]\n"
    return hosts + links + "kinds:\n" + "\n".join(kinds) + "\n", number


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)  # type: ignore[arg-type]


def train(file: str, seed: int) -> tuple[list[float], dict[str, torch.Tensor] | None, str]:
    wh.init({"cluster": file, "strategy": "auto"})
    batches = mini_batches(seed)
    engine = wh.parallelize(model(seed), batches[0], optimizer=sgd, loss=mean_square)
    losses = [engine.step(batch).loss for batch in batches]
    weights = engine.full_state_dict()
    choice = next(each.choice for each in engine.plan.decisions if each.what == "strategy")
    return losses, weights if wh.rank() == 0 else None, choice


def check(seed: int, folder: Path) -> None:
    text, number = cluster_file(seed)
    (folder / "cluster.yaml").write_text(text)
    results = run_ranks(train, number, str(folder / "cluster.yaml"), seed)
    local = model(seed)
    optimizer = sgd(local.parameters())
    losses = []
    for batch in mini_batches(seed):
        optimizer.zero_grad()
        loss = mean_square(local(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, _, choice in results:
        assert found == pytest.approx(losses, rel=1e-11), choice
    weights = results[0][1]
    assert weights is not None
    for name, value in local.state_dict().items():
        torch.testing.assert_close(weights[name].to(value), value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_found_plans_train_like_local_pytorch(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 40))
def test_more_found_plans_train_like_local_pytorch(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
