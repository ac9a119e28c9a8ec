"""The script of README and docs/moving.md with Whale; also the `train.py` that commands on the pages mean."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import whale as wh


class Net(nn.Module):
    """A perceptron that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


def samples() -> list[dict[str, torch.Tensor]]:
    """160 samples, for 5 mini-batches of 32."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for x in torch.randn(160, 16, generator=generator):
        made.append({"x": x, "labels": x[:4].argmax()})
    return made


dataset = samples()
losses = []

wh.init()
loader = DataLoader(dataset, batch_size=32)
sample_batch = next(iter(loader))
engine = wh.parallelize(
    Net(), sample_batch, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)
)

for batch in loader:
    loss = engine.step(batch).loss
    losses.append(loss)

if wh.rank() == 0:
    for step, loss in enumerate(losses, start=1):
        print(f"step {step}: loss {loss:.6f}", flush=True)
