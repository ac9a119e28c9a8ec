"""What the first capture of a process imports and prepares, done once for all ranks: the forkserver of `tests/ranks.py` imports this file.

A first capture takes 1.7 s of CPU time, a second one 0.1 s, and ranks are forked by the hundred.
"""

from __future__ import annotations

import torch
import torch.distributed

import whale as wh
import whale.runtime.engine

torch.set_num_threads(1)  # no thread pool that a fork would lose
wh.plan(
    torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
    torch.zeros(4, 2),
    loss=lambda output, batch: output.square().mean(),
    cluster=2,
    config={"num_task_graph": 2, "num_micro_batch": 2},
)
