"""Programs that no graph can hold, or that parts of a batch would change, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale as wh
from tests.integration.programs import DOUBLE, WIDTH, Layered, WithFunction, rows, sgd


def packed(x: Tensor) -> Tensor:
    lengths = (x[..., 0] > -9).sum(1)
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output: Tensor = nn.GRU(WIDTH, 2, batch_first=True, dtype=DOUBLE)(rows)[1]
    return output


class GradientInside(Layered):
    """An energy and its gradient, through which the loss goes back to the weights."""

    def unusual(self, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        energy = self.layer(place).square().sum()
        return x + torch.autograd.grad(energy, place, create_graph=True)[0]


def with_function(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: WithFunction(function)


class ByNumber(torch.autograd.Function):
    """Its backward looks at the number of samples: in parts it is another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * gradient.shape[0]


def by_number(x: Tensor) -> Tensor:
    return ByNumber.apply(x)


def by_count(x: Tensor) -> Tensor:
    return x * torch.bincount((x[:, 0, 0] > 0).long())[:, None]


def by_position(x: Tensor) -> Tensor:
    return x * torch.linspace(0, 1, x.size(0), dtype=DOUBLE)[:, None, None]


class Averaged(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None, dtype=DOUBLE)

    def unusual(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(x)
        return output


TRANSFORM = r"`torch\.func` transform"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "packed sequence": (with_function(packed), "the padded batch"),
    "gradient inside": (GradientInside, r"torch\.autograd\.grad"),
    "torch.func.grad": (with_function(torch.func.grad(lambda x: x.square().sum())), TRANSFORM),
    "backward that counts samples": (
        with_function(by_number),
        "looks at other samples or at their",
    ),
    "batch norm that averages all batches": (Averaged, "give the batch norm a momentum"),
    "number of each class": (with_function(by_count), r"minlength=num_classes"),
    "linspace over the samples": (with_function(by_position), r"torch\.arange\(n\)"),
    "vmap": (with_function(torch.func.vmap(lambda x: x * x.sum())), TRANSFORM),
    "vmap of grad": (
        with_function(torch.func.vmap(torch.func.grad(lambda x: x.square().sum()))),
        TRANSFORM,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_named(name: str) -> None:
    wh.init(wh.Config())
    build, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as caught:
        wh.parallelize(build(), rows(8, 3, WIDTH), optimizer=sgd)
    assert " at 0x" not in str(caught.value)


class NormByKernel(Layered):
    """The kernel of a batch norm, which knows nothing of other devices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=DOUBLE)

    def unusual(self, x: Tensor) -> Tensor:
        norm = self.norm
        found: tuple[Tensor, ...] = torch.native_batch_norm(
            x, norm.weight, norm.bias, norm.running_mean, norm.running_var, True, 0.1, 1e-5
        )
        return found[0]


def test_statistics_that_only_one_device_would_take_are_refused() -> None:
    """Planned without a word on two devices, each of which took the statistics of its own half."""
    wh.plan(NormByKernel(), rows(8, WIDTH), cluster=1)
    with pytest.raises(ValueError, match=r"`native_batch_norm` .*functional\.batch_norm"):
        wh.plan(NormByKernel(), rows(8, WIDTH), cluster=2, config={"strategy": "data"})


class Adversary(nn.Module):
    """Two losses in one step: the second one must not train the judge."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.judge = nn.Linear(WIDTH, 1, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        made = self.maker(x)
        loss = F.softplus(self.judge(made.detach())).mean()
        self.judge.requires_grad_(False)
        loss = loss + F.softplus(-self.judge(made)).mean()
        for parameter in self.judge.parameters():
            parameter.requires_grad = True
        return loss


@pytest.mark.parametrize("build", [Adversary(), Adversary])
def test_weights_that_forward_freezes_for_a_while_are_refused(build: Any) -> None:
    """A builder's model was trained with the gradients of both losses, without a word."""
    wh.init(wh.Config())
    with pytest.raises(ValueError, match=r"requires_grad changed in forward.*functional_call"):
        wh.parallelize(build, rows(8, WIDTH), optimizer=sgd)
