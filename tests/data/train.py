"""The script of README with Whale; also the `train.py` that commands on the pages mean."""

import torch
from torch import nn

import whale as wh


class Net(nn.Module):
    """A perceptron that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


def batches() -> list[dict[str, torch.Tensor]]:
    """5 mini-batches of 32 samples."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(5):
        x = torch.randn(32, 16, generator=generator)
        made.append({"x": x, "labels": x[:, :4].argmax(1)})
    return made


loader = batches()
sample_batch = loader[0]
losses = []

wh.init()
engine = wh.parallelize(
    Net(), sample_batch, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)
)

for batch in loader:
    loss = engine.step(batch).loss
    losses.append(loss)

if wh.rank() == 0:
    for step, loss in enumerate(losses, start=1):
        print(f"step {step}: loss {loss:.6f}", flush=True)
