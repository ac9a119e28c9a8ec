"""Parameters that autograd gives one gradient in one memory: what is added to one of them, or scales
it, must not change the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.exactness import mean_square
from whale.lowering.own_gradients import give_own_memory, may_share_gradients

MAX_NORM = 0.01


class Embedded(nn.Module):
    """Two tables that are added, as of a position and of a kind of input."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(2, 3))
        self.kind = nn.Parameter(torch.randn(2, 3))
        self.bias = nn.Parameter(torch.randn(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        table = self.place[None] + self.kind[None]
        whole: Tensor = self.layer(x * table + self.bias)
        return whole


def build() -> nn.Module:
    torch.manual_seed(0)
    return Embedded().double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 2, 3, generator=generator, dtype=torch.float64)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def locally(max_norm: float | None) -> dict[str, Tensor]:
    """Whole batches, and gradients in memory of their own before they are clipped."""
    model = build()
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        mean_square(model(batch(step)), batch(step)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    "config",
    [
        {"num_micro_batch": 2},
        {"clip_grad_norm": MAX_NORM},
        {"num_micro_batch": 2, "offload": {"optimizer": "host"}},
    ],
)
def test_gradients_in_one_memory_are_not_mixed_up(config: dict[str, Any]) -> None:
    wh.init(config)
    engine = wh.parallelize(build(), batch(0), optimizer=sgd, loss=mean_square)
    for step in range(3):
        engine.step(batch(step))
    found = engine.full_state_dict()
    for name, value in locally(config.get("clip_grad_norm")).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


class InputGradientAlone(torch.autograd.Function):
    """x * weight, whose backward leaves the gradient of the weight for later, as a region that is
    recomputed does where the backward is split.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient * weight, None


def test_a_parameter_that_gets_no_gradient_yet_has_none_to_be_copied() -> None:
    """Copying it ended the job (fuzz, seed 800144)."""
    x = torch.randn(3, requires_grad=True)
    weight = nn.Parameter(torch.randn(3))
    give_own_memory({"weight": weight}, ["weight"])
    InputGradientAlone.apply(x, weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weight)
    assert weight.grad is None


def traced(function: Any, *shapes: tuple[int, ...]) -> frozenset[str]:
    """Those of parameters `p0`, `p1`, ... of these shapes that may share their gradients."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for place, shape in enumerate(shapes):
                setattr(self, f"p{place}", nn.Parameter(torch.ones(shape)))

        def forward(self, x: Tensor) -> Tensor:
            own: Tensor = function(x, *(getattr(self, f"p{n}") for n in range(len(shapes))))
            return own

    program = torch.export.export(Model(), (torch.ones(4, 3),)).run_decompositions({})
    graph = program.module().graph
    return may_share_gradients(graph)


def test_a_product_passes_the_gradient_on_to_what_is_added_to_it() -> None:
    addmm = torch.addmm
    assert traced(lambda x, a, b: addmm(a, x.T, x) + b, (3, 3), (3, 3)) == {"p0", "p1"}
    assert not traced(lambda x, a: addmm(a, x.T, x).tanh() * a, (3,))


def test_only_gradients_that_may_be_shared_are_copied() -> None:
    assert traced(lambda x, a, b: x + (a[None] + b[None]).sum(), (3,), (3,)) == {"p0", "p1"}
    assert traced(lambda x, a, b: x * torch.cat([a, b]).sum(), (3,), (3,)) == {"p0", "p1"}
    assert not traced(lambda x, a, b: torch.nn.functional.linear(x, a, b), (5, 3), (5,))
    assert not traced(lambda x, a, b: (x @ a.T) * b[None], (5, 3), (5,))
    assert not traced(lambda x, a: x + a, (3,))
