"""Less memory on a grid: regions that are recomputed in backward, and gathered tensors that are
gathered again there.

Both are exact whether the config asks for them or the planner finds that memory does, and both send
more messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import whale as wh
from tests.exactness import Trace, compare
from tests.integration.test_split import (
    Case,
    Subject,
    everything,
    merged,
    prepare_model,
    train_locally,
    train_on_rank,
)
from tests.ranks import ModelServer, preload
from whale.cluster.cluster import ETHERNET_50G, PCIE_3_X16, Device
from whale.cluster.kinds import DeviceKind
from whale.lowering.exchange import sent

preload("tests.integration.test_split", "tests.integration.test_split_recompute")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ModelServer, Trace]]:
    """A server with the model captured, and its local training."""
    with ModelServer(prepare_model, "chain") as found:
        yield found, found.run_local(train_locally)


MESSAGES: dict[tuple[int, int, int], int] = {}
"""of a grid, with everything kept: what rank 0 sends"""


def train_and_count(subject: Subject, case: Case) -> tuple[Any, int]:
    """(what training gave, messages that this rank sent)."""
    sent.reset()
    return train_on_rank(subject, case), sent.num_messages


@pytest.mark.parametrize(
    "config",
    [
        {"recompute": ["blocks.*"]},
        {"recompute": True},
        {"keep_gathered": False},
        {"recompute": ["blocks.1"], "keep_gathered": False},
    ],
    ids=["named blocks again", "everything again", "gathered again", "both"],
)
@pytest.mark.parametrize(
    "grid", [(1, 2, 1), (1, 1, 2), (2, 2, 1)], ids=["weights cut", "weights gathered", "plane"]
)
def test_less_memory_is_exact_and_sends_more(
    server: tuple[ModelServer, Trace], grid: tuple[int, int, int], config: dict[str, Any]
) -> None:
    ranks, reference = server
    num_ranks = grid[0] * grid[1] * grid[2]
    again = ranks.run(
        train_and_count, num_ranks, Case("chain", num_ranks, everything(num_ranks, grid), config)
    )
    compare(reference, merged([trained for trained, _ in again], reference.weights))
    if grid not in MESSAGES:
        kept = ranks.run(
            train_and_count, num_ranks, Case("chain", num_ranks, everything(num_ranks, grid))
        )
        compare(reference, merged([trained for trained, _ in kept], reference.weights))
        MESSAGES[grid] = kept[0][1]
    assert again[0][1] > MESSAGES[grid], "what was gathered is gathered again in backward"


# ---- the planner's choice
# -----------------------------------------------------------------------------------------------


class Wide(torch.nn.Module):
    """Blocks whose activations weigh more than their weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            (
                torch.nn.LayerNorm(64),
                torch.nn.Linear(64, 256),
                torch.nn.GELU(),
                torch.nn.Linear(256, 64),
            )
            for _ in range(4)
        ]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*each) for each in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def plan_with(memory_bytes: int, **config: Any) -> wh.Plan:
    kind = DeviceKind("card", 1e13, memory_bytes, 1e12)
    cluster = wh.Cluster(
        tuple(Device(rank, "host", rank, kind) for rank in range(4)), PCIE_3_X16, ETHERNET_50G
    )
    model = wh.annotate(Wide(), {"*": wh.split(4, (1, 2, 2))})
    return wh.plan(model, torch.zeros(16, 64, 64), cluster=cluster, config=config)


def needed(plan: wh.Plan) -> float:
    """Bytes of the device that needs most."""
    return max(memory.static_bytes + 16 * memory.sample_bytes for memory in plan.memory)


def test_memory_decides_what_is_saved() -> None:
    """Less and less memory: everything saved, gathered again, recomputed; refused at last.
    Each takes more time.
    """
    free = plan_with(10**12, recompute=False)
    again = plan_with(10**12, recompute=False, keep_gathered=False)
    assert free.shardings[0].keeps_gathered and not again.shardings[0].keeps_gathered
    assert needed(again) < needed(free) and again.shardings[0].seconds > free.shardings[0].seconds
    assert plan_with(int(needed(free) * 1.01)).shardings[0].keeps_gathered
    tight = plan_with(int(needed(again) * 1.01), recompute=False)
    assert not tight.shardings[0].keeps_gathered
    assert any(
        decision.what == "gathered tensors" and "memory" in decision.why
        for decision in tight.decisions
    )
    small = plan_with(int(needed(again) * 0.8))
    assert small.stages[0].num_recomputed > 0 and needed(small) <= needed(again) * 0.8
    assert wh.simulate(small).step_s > wh.simulate(free).step_s
    with pytest.raises(ValueError, match="does not fit"):
        plan_with(int(needed(again) * 0.8), recompute=False)


def test_a_grid_has_memory_for_the_update() -> None:
    """Half a weight, its gradient, AdamW's two averages, and the two tensors that AdamW makes for a
    moment.
    """
    kind = DeviceKind("card", 1e13, 10**9, 1e12)
    cluster = wh.Cluster(
        tuple(Device(rank, "host", rank, kind) for rank in range(2)), PCIE_3_X16, ETHERNET_50G
    )
    model = wh.annotate(
        torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False)), {"*": wh.split(2, (1, 2, 1))}
    )
    plan = wh.plan(
        model,
        torch.zeros(2, 512),
        loss=lambda output, batch: output.square().mean(),
        cluster=cluster,
    )
    for device, memory in zip(wh.simulate(plan).devices, plan.memory, strict=True):
        assert 6 * 512 * 256 * 4 <= device.peak_total_bytes <= memory.total_bytes(2)
