"""The script of README before Whale, for torchrun: each rank has its own half of every mini-batch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """A perceptron that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


def batches(part: int, num_parts: int) -> list[dict[str, torch.Tensor]]:
    """One part of each of 5 mini-batches of 32 samples."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(5):
        x = torch.randn(32, 16, generator=generator)
        batch = {"x": x, "labels": x[:, :4].argmax(1)}
        made.append({name: value.chunk(num_parts)[part] for name, value in batch.items()})
    return made


loader = batches(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
losses = []

dist.init_process_group()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    losses.append(float(loss))

for step, loss in enumerate(losses, start=1):
    print(f"step {step}: loss {loss:.6f}", flush=True)
dist.destroy_process_group()
