"""Dropout, bf16 and activations that are recomputed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.exactness import Trace, compare, local_training, run_loss
from tests.integration.layers import NUM_CLASSES, WIDTH, Layers, in_two_stages, make_batch, sgd
from tests.ranks import run_ranks

# ---- dropout
# ----------------------------------------------------------------------------------------------------------

NUM_MASKED = 64  # entries of a mask: two masks are equal by chance with probability 2**-64


class Dropped(nn.Module):
    """Its gradient shows the mask: entry j gets 2 x the sum of 2**i over the samples i whose entry
    j was kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUM_MASKED, dtype=torch.float64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x * self.weight).sum()


def powers(batch_size: int) -> Tensor:
    return (
        (2.0 ** torch.arange(batch_size, dtype=torch.float64))
        .unsqueeze(1)
        .expand(batch_size, NUM_MASKED)
        .contiguous()
    )


def masks_of(gradient: Tensor, batch_size: int) -> list[list[int]]:
    """The entries of each sample that dropout left, read from the bits of the gradient."""
    numbers = [int(number) // 2 for number in gradient.tolist()]
    return [[number >> sample & 1 for number in numbers] for sample in range(batch_size)]


def drop(seed: int) -> tuple[list[float], list[Tensor], float | None]:
    """(losses, gradients of two steps, loss in evaluation)."""
    wh.init({"num_micro_batch": 2, "seed": seed})
    engine = wh.parallelize(
        Dropped(), powers(8), optimizer=lambda params: torch.optim.SGD(params, lr=0.0)
    )
    losses = []
    gradients = []
    for _ in range(2):
        losses.append(engine.step(powers(8)).loss)
        gradients.append(engine.gradients()["weight"].clone())
    return losses, gradients, engine.evaluate(powers(8)).loss


def test_dropout_differs_between_samples_and_comes_again_with_the_seed() -> None:
    """2 devices x 2 micro-batches of 2 samples each: no two samples of a step, and no two steps,
    get the same mask.
    """
    first, again, other = (run_ranks(drop, 2, seed)[0] for seed in (1, 1, 2))
    assert first[0] == again[0] and all(
        torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True)
    )
    assert first[0] != other[0]
    seen = [tuple(mask) for gradient in (*first[1], *other[1]) for mask in masks_of(gradient, 8)]
    assert len(set(seen)) == len(seen), "two samples got the same mask"
    assert 0.35 < sum(map(sum, seen)) / (len(seen) * NUM_MASKED) < 0.65
    assert first[2] == powers(8).sum().item(), "there is no dropout in evaluation"


COINS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": lambda x: torch.randn_like(x) > 0,
    "rand of sizes": lambda x: torch.rand(x.shape[0], NUM_MASKED) > 0.5,
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "rsample": lambda x: Normal(torch.zeros_like(x), 1.0).rsample() > 0,
    "gumbel": lambda x: F.gumbel_softmax(torch.stack((x, x), -1) * 0, hard=True)[..., 0],
    "dropout in evaluation": lambda x: F.dropout(torch.ones_like(x), 0.5) > 0,
}


class Noisy(Dropped):
    """Draws in training and in evaluation. Its loss shows the masks of forward, its gradient those
    of backward.
    """

    def __init__(self, coin: str) -> None:
        super().__init__()
        self.coin = COINS[coin]

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.coin(x)
        return (2 * x * self.weight * kept.to(x.dtype)).sum()


Draws = tuple[list[float], list[Tensor], list[float]]


def draw_noise(coin: str, seed: int) -> Draws:
    """(losses, gradients of two steps, losses of two evaluations after them)."""
    wh.init({"num_micro_batch": 2, "seed": seed})
    engine = wh.parallelize(
        Noisy(coin), powers(8), optimizer=lambda params: torch.optim.SGD(params, lr=0.0)
    )
    losses = []
    gradients = []
    for _ in range(2):
        losses.append(engine.step(powers(8)).loss)
        gradients.append(engine.gradients()["weight"].clone())
    evaluated = [engine.evaluate(powers(8)).loss for _ in range(2)]
    return losses, gradients, [loss for loss in evaluated if loss is not None]


def draw_all_noise() -> dict[str, tuple[Draws, Draws, Draws]]:
    return {coin: (draw_noise(coin, 1), draw_noise(coin, 1), draw_noise(coin, 2)) for coin in COINS}


def test_noise_differs_between_samples_and_comes_again_with_the_seed() -> None:
    """No two samples of 2 devices x 2 micro-batches x 2 steps x 2 seeds get the same noise."""
    on_ranks = run_ranks(draw_all_noise, 2)
    for coin in COINS:
        first, again, other = on_ranks[0][coin]
        assert first[0] == again[0] and first[2] == again[2], coin
        seen = []
        for losses, gradients, evaluated in (first, other):
            for loss, gradient in zip(losses, gradients, strict=True):
                assert loss == gradient.sum().item(), "backward knows the noise of forward"
                seen += [tuple(mask) for mask in masks_of(gradient, 8)]
            assert len({*losses, *evaluated}) == 4, f"{coin}: two batches got the same noise"
        assert len(set(seen)) == len(seen) == 32, f"{coin}: two samples got the same noise"
        assert 0.4 < sum(map(sum, seen)) / (len(seen) * NUM_MASKED) < 0.6
        assert on_ranks[1][coin][0][0] == first[0], "the ranks have one loss"


# ---- mixed precision
# --------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """What crosses is the result of a matrix product: bfloat16 under autocast. With `residual` it
    is a sum with the float32 input.
    """

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return F.cross_entropy(self.head(x), labels)


def chain(residual: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Chain(residual)


def float_batch(seed: int) -> dict[str, Tensor]:
    batch = make_batch(seed)
    return {"x": batch["x"].float(), "labels": batch["labels"]}


def train_bf16(residual: bool) -> tuple[list[float], list[int], set[torch.dtype]]:
    wh.init({"num_micro_batch": 3, "precision": "bf16"})
    model = wh.annotate(
        chain(residual), {"layers.[0-1]": wh.replicate(1), "layers.[2-3]|head": wh.replicate(1)}
    )
    engine = wh.parallelize(model, float_batch(0), optimizer=sgd)
    losses = [engine.step(float_batch(step)).loss for step in range(3)]
    dtypes = {parameter.dtype for _, parameter in engine.named_parameters()} | {
        g.dtype for g in engine.gradients().values()
    }
    return losses, [crossing.sample_bytes for crossing in engine.plan.crossings], dtypes


@pytest.mark.parametrize(("residual", "itemsize"), [(False, 2), (True, 4)])
def test_bf16_sends_tensors_in_their_own_dtype(residual: bool, itemsize: int) -> None:
    model = chain(residual)
    optimizer = sgd(model.named_parameters())
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run_loss(model, float_batch(step), None)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, sizes, dtypes in run_ranks(train_bf16, 2, residual):
        assert losses == pytest.approx(expected, rel=1e-2)
        assert sizes == [WIDTH * itemsize]
        assert dtypes == {torch.float32}, "weights and gradients stay in float32"


# ---- activations recomputed
# ---------------------------------------------------------------------------------------


class Recomputing(Layers):
    """The same layers, those from 2 to 5 under torch.utils.checkpoint: two regions on each
    stage.
    """

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = (
                checkpoint(self.block, layer, x, use_reentrant=False)
                if 2 <= number <= 5
                else self.block(layer, x)
            )
        return F.cross_entropy(self.head(x), labels)

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(layer(x))
        return x


class Keeping(Recomputing):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.block(layer, x)
        return F.cross_entropy(self.head(x), labels)


def recomputing(kind: type[Recomputing]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().double()


def train_recomputing() -> list[tuple[dict[str, Tensor], int, dict[str, Tensor]]]:
    """Gradients, tensors that autograd saved in a step, and state: with regions recomputed, and
    without.
    """
    found = []
    for kind in (Recomputing, Keeping):
        wh.init({"num_micro_batch": 2})
        engine = wh.parallelize(in_two_stages(recomputing(kind)), make_batch(0), optimizer=sgd)
        kept: list[None] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: (kept.append(None), tensor)[1], lambda tensor: tensor
        ):
            engine.step(make_batch(0))
        found.append((engine.gradients(), len(kept), engine.full_state_dict()))
    return found


def test_checkpointed_regions_are_exact_and_keep_fewer_tensors() -> None:
    reference = local_training(recomputing(Keeping), [make_batch(0)], None, sgd)
    ranks = run_ranks(train_recomputing, 2)
    for kind in (0, 1):
        gradients = {name: gradient for rank in ranks for name, gradient in rank[kind][0].items()}
        compare(reference, Trace(reference.losses, gradients, ranks[0][kind][2]))
    for (_, fewer, _), (_, all_kept, _) in ranks:
        assert fewer < 0.8 * all_kept, "two of four layers on each stage keep their inputs only"
