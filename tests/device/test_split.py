"""A `split` TaskGraph on test devices: collectives are those of a backend with even ones."""

from __future__ import annotations

import pytest
import torch

from tests.device import streams
from tests.device.collectives import BACKEND
from tests.device.local_device import use_test_device
from tests.ranks import ModelServer

NUM_STEPS = 3
LEARNING_RATE = 0.1


class Net(torch.nn.Module):
    """Wide enough that a backend without even collectives reduces a partial sum in two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 512)
        self.second = torch.nn.Linear(512, 512)
        self.last = torch.nn.Linear(512, 4)

    def forward(self, x_BK: torch.Tensor) -> torch.Tensor:
        hidden_BN = torch.relu(self.second(torch.relu(self.first(x_BK))))
        loss: torch.Tensor = self.last(hidden_BN).pow(2).mean()
        return loss


def model_and_batch() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(64, 8, dtype=torch.float64)


def prepare() -> None:
    use_test_device()


def train(_: None) -> tuple[str, list[float]]:
    import whale as wh

    wh.init(wh.Config())
    model, batch = model_and_batch()
    wh.annotate(model, {"*": wh.split(2, grid=(1, 2, 1))})
    engine = wh.parallelize(
        model, batch, optimizer=lambda params: torch.optim.SGD(params, lr=LEARNING_RATE)
    )
    losses = [float(engine.step(batch).loss) for _ in range(NUM_STEPS)]
    streams.synchronize()  # raises races that nobody has noticed yet
    return next(engine.named_parameters())[1].device.type, losses


def train_locally() -> list[float]:
    model, batch = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_a_split_trains_like_the_cpu() -> None:
    server = ModelServer(prepare)
    try:
        found = server.run(train, 2, backend=BACKEND)
    finally:
        server.close()
    expected = train_locally()
    for device, losses in found:
        assert device != "cpu"
        assert losses == pytest.approx(expected, rel=1e-10)
