"""`"compile": true`: chunks really run through torch.compile, and train like local PyTorch, with whole and with split backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.ranks import preload, run_ranks

preload("torch", "whale", "tests.integration.test_compile", "torch.export.experimental")

pytestmark = pytest.mark.slow  # a C++ compiler runs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def inside(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


class Recomputing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def train(block: type[Block], config: dict[str, Any], batch_size: int) -> tuple[dict[str, Tensor], int, set[str]]:
    """(weights after two steps, kernels that torch made, kinds of actions that ran)"""
    torch._dynamo.utils.counters.clear()
    wh.init({"num_task_graph": 2, "compile": True, **config})
    torch.manual_seed(0)
    model, batch = Net(block).double(), torch.randn(batch_size, 8, dtype=torch.float64)
    engine = wh.parallelize(model, batch, optimizer=sgd)
    for _ in range(2):
        engine.step(batch)
    made = sum(torch._dynamo.utils.counters["aot_autograd"].values())
    return engine.full_state_dict(), made, {str(action.kind) for action in engine.executors()[0].program.actions}


@pytest.mark.parametrize(
    ("block", "config", "kinds", "batch_size"),
    [
        (Block, {"num_micro_batch": 2}, {"B"}, 4),
        (Block, {"num_micro_batch": 3, "schedule": "zero-bubble"}, {"I", "W"}, 8),  # micro-batches of 3, 3 and 2 samples
        (Recomputing, {"num_micro_batch": 2, "schedule": "zero-bubble"}, {"I", "W"}, 4),
    ],
    ids=["whole backward", "split backward, unlike micro-batches", "split backward, recomputed"],
)
def test_compiled_chunks_train_like_local(block: type[Block], config: dict[str, Any], kinds: set[str], batch_size: int) -> None:
    torch.manual_seed(0)
    local, x = Net(block).double(), torch.randn(batch_size, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        local(x).backward()
        optimizer.step()
    answers = run_ranks(train, 2, block, config, batch_size, timeout_s=100.0)
    assert all(made > 0 for _, made, _ in answers), "torch.compile made nothing"
    assert kinds <= answers[1][2]
    for name, expected in local.state_dict().items():
        torch.testing.assert_close(answers[0][0][name], expected, rtol=1e-10, atol=1e-12)
