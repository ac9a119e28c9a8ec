"""What the first capture of a process imports and prepares, done once for all ranks: the forkserver
of `tests/ranks.py` imports this file.

A first capture takes 1.7 s of CPU time, a second one 0.1 s, and ranks are forked by the hundred.
Torch also keeps what it finds out about an operation when it first meets it, so this model has the
operations that most tests use.
"""

from __future__ import annotations

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
import whale.runtime.engine


class Usual(nn.Module):
    """Words and numbers in, a loss of each usual kind out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.statistics = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 5)
        self.dropout = nn.Dropout(0.1)

    def forward(self, words: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(words) + x)  # (batch, length, 4)
        hidden = hidden + F.softmax(hidden @ hidden.transpose(1, 2) / 2.0, -1) @ hidden
        hidden = self.statistics(F.gelu(self.first(hidden)).mean(1))
        logits = self.second(self.dropout(torch.tanh(F.relu(hidden))))
        return (
            F.cross_entropy(logits, labels) + F.mse_loss(hidden, x[:, 0]) + logits.square().mean()
        )


torch.set_num_threads(1)  # no thread pool that a fork would lose
for dtype in (torch.float32, torch.float64):
    labels = torch.zeros(4, dtype=torch.int64)
    batch = {
        "words": torch.zeros(4, 3, dtype=torch.int64),
        "x": torch.zeros(4, 3, 4, dtype=dtype),
        "labels": labels,
    }
    wh.plan(
        Usual().to(dtype),
        batch,
        cluster=2,
        config={"num_task_graph": 2, "num_micro_batch": 2, "loss_per_micro_batch": True},
    )
