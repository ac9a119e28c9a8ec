"""The script of README and docs/moving.md before Whale, for torchrun: each rank has its own half of every
mini-batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


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

dist.init_process_group()
sampler = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=32 // dist.get_world_size(), sampler=sampler)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    losses.append(float(loss))

for step, loss in enumerate(losses, start=1):
    # in one piece: both ranks print, and torchrun takes the buffer away
    print(f"step {step}: loss {loss:.6f}\n", end="", flush=True)
dist.destroy_process_group()
