"""SUMMA through planner, lowering and engine: exact on 2 x 2 and 2 x 2 x 2, shown in the plan, and
the bytes of the formula.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.exactness import compare
from tests.integration.test_split import (
    MODELS,
    Case,
    build,
    merged,
    prepare_model,
    sgd,
    train_locally,
    train_on_rank,
)
from tests.ranks import ModelServer, preload, run_ranks
from whale.lowering.exchange import sent

SAMPLES = 8
WIDTH = 8
HIDDEN = 12
DOUBLE = 8
"""bytes"""


class Block(nn.Module):
    """Attention of four heads and a gated MLP, every product a linear layer; sizes that 2
    divides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.stack((x, x.roll(1, 1), x * x), 1)  # three positions
        by_head = (x.shape[0], 3, 4, WIDTH // 4)
        q, k, v = (
            part.view(by_head).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        h = self.norm_2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return F.cross_entropy(self.head(x[:, -1]), labels)


MODELS["summa block"] = (Block, MODELS["mlp"][1])
preload("tests.integration.test_split_summa")


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(prepare_model, "summa block") as found:
        yield found


@pytest.mark.parametrize(
    ("num_ranks", "grid"),
    [(4, (2, 2, 1)), (8, (2, 2, 2)), (4, None)],
    ids=["2 x 2", "2 x 2 x 2", "grid left to Whale"],
)
def test_trains_like_local(
    server: ModelServer, num_ranks: int, grid: tuple[int, int, int] | None
) -> None:
    case = Case("summa block", num_ranks, {"*": ("split", num_ranks, grid, "summa")})
    reference = server.run_local(train_locally)
    compare(reference, merged(server.run(train_on_rank, num_ranks, case), reference.weights))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_plan_says_so(depth: int) -> None:
    model = wh.annotate(
        build("summa block"), {"*": wh.split(4 * depth, (2, 2, depth), method="summa")}
    )
    plan = wh.plan(
        model, MODELS["summa block"][1](0), cluster=wh.Cluster.uniform(4 * depth, "V100-16GB")
    )
    patterns = {
        op.pattern
        for stage in plan.shardings
        for op in stage.operations
        if op.what.endswith(": linear")
    }
    assert patterns == {"SUMMA over xy" + (", by samples over z" if depth > 1 else "")}


def count(depth: int) -> tuple[int, float]:
    """(bytes that this rank sent in one step, those that the plan gives to the loss behind the two
    linear layers).
    """
    wh.init()
    torch.manual_seed(0)
    model = wh.annotate(
        MODELS["mlp"][0]().double(), {"*": wh.split(4 * depth, (2, 2, depth), method="summa")}
    )
    batch = MODELS["mlp"][1](0, SAMPLES)
    engine = wh.parallelize(model, batch, optimizer=sgd)
    engine.step(batch)
    sent.reset()
    engine.step(batch)
    operations = engine.plan.shardings[0].operations
    return sent.num_bytes, sum(
        op.sent_bytes for op in operations if not op.what.endswith(": linear")
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_bytes_are_those_of_the_formula(depth: int) -> None:
    """research/tensor3d.md 1.1: 3 (q-1)/q^2 (MK/d + KN) and, over the depth, 2 (d-1)/d KN/q^2. The
    first layer's x needs no gradient, so there it is 2 instead of 3."""
    expected = 0
    for times, k, n in ((2, WIDTH, HIDDEN), (3, HIDDEN, WIDTH)):
        expected += times * (SAMPLES * k // depth + k * n) // 4 + 2 * (depth - 1) * k * n // (
            depth * 4
        )
    for counted, others in run_ranks(count, 4 * depth, depth):
        assert counted - others == DOUBLE * expected
