"""Models with an `autograd.Function` of their own train like local."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.programs import WIDTH, Cases, WithFunction, rows, trains_like_local


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return -ctx.scale * gradient * x.cos(), None


class TwoResults(torch.autograd.Function):
    """The newer form, with a context of its own, two inputs and two results."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sign(), x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return first.clamp(-1, 1) + second * y, second * x


def through(x: Tensor) -> Tensor:
    return StraightThrough.apply(x)


def reversed_gradient(x: Tensor) -> Tensor:
    return Reversed.apply(x, 0.5)


def two_results(x: Tensor) -> Tensor:
    first, second = TwoResults.apply(x, x.tanh())
    return first + second


CASES: Cases = {
    "straight-through Function": (lambda: WithFunction(through), lambda: rows(8, WIDTH)),
    "gradient reversal": (lambda: WithFunction(reversed_gradient), lambda: rows(8, WIDTH)),
    "Function with two results": (lambda: WithFunction(two_results), lambda: rows(8, WIDTH)),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_like_local(name: str) -> None:
    trains_like_local(*CASES[name])
