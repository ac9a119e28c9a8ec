"""Attention stays one operation from the model to the kernel: flash attention is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import whale as wh
from tests.ranks import run_ranks
from whale.operations.nodes import op_name

ATTENTION = "scaled_dot_product_attention"
NUM_BLOCKS = 2
WIDTH = 16
LENGTH = 8


class Attention(nn.Module):
    """Causal, with 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BLD: Tensor) -> Tensor:
        parts = []
        for layer in (self.query, self.key, self.value):
            parts.append(layer(x_BLD).unflatten(-1, (4, -1)).transpose(1, 2))
        mixed_BHLK = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x_BLD + self.out(mixed_BHLK.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(NUM_BLOCKS))

    def forward(self, x_BLD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return x_BLD.square().mean()


class Calls(TorchDispatchMode):
    """Counts the operations that reach kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _attentions(is_split: bool, config: dict[str, Any]) -> tuple[int, int, int]:
    """Attention nodes of this rank's chunks, and fused kernels of a step: forward, backward."""
    torch.manual_seed(0)
    wh.init({"num_micro_batch": 1, **config})
    model = Model()
    batch = torch.randn(4, LENGTH, WIDTH)
    if is_split:
        wh.annotate(model, {"*": wh.split(2, grid=(1, 2, 1))})
    engine: Any = wh.parallelize(model, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert bool(engine.plan.shardings) == is_split
    num_nodes = 0
    for chunk in engine._shapes.first.chunks.values():
        for module in chunk.module_for(len(batch)).modules():
            nodes = getattr(getattr(module, "graph", None), "nodes", ())
            num_nodes += sum(op_name(node) == ATTENTION for node in nodes)
    with Calls() as calls:
        engine.step(batch)
    fused = {name: number for name, number in calls.counts.items() if "flash_attention" in name}
    forward = sum(number for name, number in fused.items() if "backward" not in name)
    return num_nodes, forward, sum(fused.values()) - forward


def test_attention_is_one_operation_in_a_chunk() -> None:
    assert _attentions(False, {}) == (NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS)


def test_attention_is_one_operation_under_bf16() -> None:
    assert _attentions(False, {"precision": "bf16"}) == (NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS)


def test_attention_that_is_recomputed_runs_twice() -> None:
    found = _attentions(False, {"recompute": ["blocks.*"]})
    assert found == (NUM_BLOCKS, 2 * NUM_BLOCKS, NUM_BLOCKS)


def test_attention_of_a_split_runs_on_the_heads_of_each_device() -> None:
    for rank in run_ranks(_attentions, 2, True, {}):
        assert rank == (NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS)
