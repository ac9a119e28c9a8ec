"""Adafactor on parts of a stack with norms of the whole, against Adafactor on the whole. Each part is
updated in a thread, as a rank would; a barrier stands for the all-reduce.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from whale.distributed.ranks import Ranks
from whale.plans.shards import Shard, Shards
from whale.runtime import summed_norms
from whale.runtime.summed_norms import SummedNorms, holders_of

SHAPE = (7, 4, 5)
NUM_STEPS = 4


class OneStack:
    """Parts of one parameter on ranks; the last rank has nothing."""

    def __init__(self, parts: dict[tuple[int, int], tuple[int, ...]]) -> None:
        rest = ((0, SHAPE[1]),), ((0, SHAPE[2]),)
        self.shards = [Shard("w", ((rows,), *rest), ranks, SHAPE) for rows, ranks in parts.items()]

    def of(self, name: str) -> list[Shard]:
        return self.shards

    def on(self, name: str, rank: int) -> Shard:
        return next(shard for shard in self.shards if rank in shard.ranks)


class AllReduce:
    """The all-reduce of some threads."""

    def __init__(self, number: int) -> None:
        self._barrier = threading.Barrier(number, timeout=20)
        self._given: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor, group: object) -> None:
        self._given[threading.get_ident()] = tensor.clone()
        self._barrier.wait()
        total = torch.stack(list(self._given.values())).sum(0)
        self._barrier.wait()
        tensor.copy_(total)


def gradients(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return (1 + 9 * step) * torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def start() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def update(part: torch.nn.Parameter, rows: slice, norms: SummedNorms | None) -> None:
    optimizer = torch.optim.Adafactor([part], lr=0.1, weight_decay=0.02)
    for step in range(NUM_STEPS):
        part.grad = gradients(step)[rows].clone()
        if norms is None:
            optimizer.step()
            continue
        with norms.of_the_whole({"w"}):
            optimizer.step()


@pytest.mark.parametrize(
    "parts",
    [
        {(0, 3): (0,), (3, 7): (1,), (7, 7): (2,)},
        {(0, 5): (0, 2), (5, 7): (1, 3)},
    ],
    ids=["uneven, one without experts", "two model replicas"],
)
def test_parts_are_updated_like_the_whole(
    parts: dict[tuple[int, int], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.nn.Parameter(start())
    update(whole, slice(None), None)
    shards = cast(Shards, OneStack(parts))
    ranks = holders_of(shards, "w")
    monkeypatch.setattr(summed_norms, "dist", SimpleNamespace(all_reduce=AllReduce(len(ranks))))
    updated: dict[int, Any] = {}
    threads = []
    for rows, holders in parts.items():
        for rank in set(holders) & set(ranks):
            part = updated[rank] = torch.nn.Parameter(start()[slice(*rows)].clone())
            here = SimpleNamespace(
                rank=rank, device=SimpleNamespace(name="cpu"), group=lambda members: object()
            )
            norms = SummedNorms(("w",), {"w": part}, {"w": SHAPE}, shards, cast(Ranks, here))
            threads.append(threading.Thread(target=update, args=(part, slice(*rows), norms)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rows, holders in parts.items():
        for rank in set(holders) & set(ranks):
            torch.testing.assert_close(
                updated[rank].detach(), whole.detach()[slice(*rows)], rtol=1e-12, atol=1e-12
            )


def test_parts_alone_are_another_optimizer() -> None:
    """What the norms of the whole are for."""
    whole = torch.nn.Parameter(start())
    part = torch.nn.Parameter(start()[:3].clone())
    update(whole, slice(None), None)
    update(part, slice(0, 3), None)
    assert not torch.allclose(part, whole[:3], rtol=1e-6)
