"""Exchanges of `split` between CPU ranks of one host go through memory, and give the same bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale as wh
from tests.ranks import run_ranks

WIDTH = 32
NUM_STEPS = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()


def _train(share_memory: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights, and collectives of gloo's in the steps."""
    torch.manual_seed(0)
    wh.init({"share_memory": share_memory})
    model = Net().double()
    batch = torch.randn(8, 6, WIDTH, dtype=torch.float64)
    wh.annotate(model, {"*": wh.split(2, grid=(1, 2, 1))})
    engine: Any = wh.parallelize(model, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert engine.plan.shardings
    num_calls = 0
    all_to_all = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return all_to_all(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        losses = [engine.step(batch).loss for _ in range(NUM_STEPS)]
    finally:
        dist.all_to_all_single = all_to_all
    return losses, engine.full_state_dict(), num_calls


def test_exchanges_go_through_memory() -> None:
    through_memory = run_ranks(_train, 2, True)
    by_gloo = run_ranks(_train, 2, False)
    assert [num_calls for _, _, num_calls in through_memory] == [0, 0]
    assert all(num_calls > 0 for _, _, num_calls in by_gloo)
    assert through_memory[0][0] == by_gloo[0][0] == by_gloo[1][0]
    for name, tensor in by_gloo[0][1].items():
        assert torch.equal(tensor, through_memory[0][1][name]), name


# ---- parts of one column


def _narrow() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3)).double()


def _narrow_batch() -> Tensor:
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _mean_square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def _train_narrow() -> dict[str, Tensor]:
    """Each rank computes one column of the first layer for all samples, then all columns for half
    of them: what goes between them, and its gradient, is one column.
    """
    wh.init()
    model = wh.annotate(_narrow(), {"0": wh.split(2, grid=(1, 2, 1)), "[12]": wh.replicate(2)})
    batch = _narrow_batch()
    sgd = torch.optim.SGD
    engine: Any = wh.parallelize(
        model, batch, loss=_mean_square, optimizer=lambda p: sgd(p, lr=0.1)
    )
    patterns = {each.what: each.pattern for each in engine.plan.shardings[0].operations}
    assert "column" in patterns["0: linear"] and "samples" in patterns["2: linear"]
    engine.step(batch)
    gradients: dict[str, Tensor] = engine.full_gradients()
    return gradients


def test_one_column_is_sent_without_its_neighbours() -> None:
    """`reshape(-1)` of one column is a view with the stride of a row. Sent as it lies in memory, it
    gave the gradients of other entries.
    """
    local = _narrow()
    _mean_square(local(_narrow_batch()), None).backward()
    gradients, _ = run_ranks(_train_narrow, 2)
    for name, parameter in local.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-14)
