"""The split backward of a chunk: the gradients of its inputs at once, the gradients of its weights
when the schedule says.

The products that make weight gradients (linear layers, convolutions) are nearly half of a backward,
and no other stage waits for them. In a chunk that is split, those layers are called through the
functions below, one for each row of the table of operations that is a `layer`. Their backward gives
the gradient of the layer's input and puts the other product off, into the list of its micro-batch;
`run_products` does it later and adds it straight to `.grad`.
Everything else in the chunk (norms, attention, embeddings) is differentiated as always. No walk
over the autograd graph: what is put off was known when the chunk was compiled.

Where the input of a layer needs no gradient, its weight is no parameter but computed, or it is no
plain layer (a weight that is a vector, a bias that is broadcast, `addmm` with factors), the layer
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from whale.operations.table import LAYERS

aten = torch.ops.aten

Settings = tuple[list[int], list[int], list[int]]
"""stride, padding and dilation of a convolution"""
Product = tuple[Callable[..., None], tuple[Any, ...]]
"""a function that adds a weight gradient, and what it takes"""


class Deferred:
    """The list where the layers of one chunk put their weight products: that of the micro-batch
    whose backward runs now.
    """

    def __init__(self) -> None:
        self.products: list[Product] = []

    def begin(self) -> list[Product]:
        """Starts and returns the list of one micro-batch."""
        self.products = []
        return self.products


def run_products(products: list[Product]) -> None:
    """Computes the weight gradients that one backward put off."""
    with torch.no_grad():
        products.reverse()  # popped in the order of the backward: each frees its tensors at once
        while products:
            function, arguments = products.pop()
            function(*arguments)


def replacements(deferred: Deferred) -> dict[Any, Callable[..., Tensor]]:
    """The functions that stand in for operations that can be split, with the same arguments."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _is_split(x, weight, bias) and _is_layer(weight, bias, 0):
            return _apply(_Linear, deferred, x, weight, bias)
        return F.linear(x, weight, bias)

    def addmm(
        bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        if _is_split(x, weight, bias) and _is_layer(weight, bias, 1) and beta == alpha == 1:
            return _apply(_Linear, deferred, x, weight.detach().t(), bias, weight)
        return torch.addmm(bias, x, weight, beta=beta, alpha=alpha)

    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        if _is_split(x, weight, None) and _is_layer(weight, None, 1) and x.ndim >= 2:
            return _apply(_Linear, deferred, x, weight.detach().t(), None, weight)
        return torch.matmul(x, weight)

    def convolution(operation: Any) -> Callable[..., Tensor]:
        def convolve(
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> Tensor:
            # torch computes a complex convolution as several real ones
            if _is_split(x, weight, bias) and x.ndim == weight.ndim and not x.is_complex():
                settings = [_per_dim(each, x.ndim - 2) for each in (stride, padding, dilation)]
                return _apply(_Convolution, deferred, x, weight, bias, settings, groups)
            result: Tensor = operation(x, weight, bias, stride, padding, dilation, groups)
            return result

        return convolve

    functions: dict[str, Callable[..., Tensor]] = {
        "linear": linear,
        "addmm": addmm,
        "mm": matmul,
        "matmul": matmul,
        "conv1d": convolution(torch.conv1d),
        "conv2d": convolution(torch.conv2d),
        "conv3d": convolution(torch.conv3d),
    }
    # a layer of the table without a function here is an error: its memory was planned as split
    return {getattr(aten, name).default: functions[name] for name in LAYERS}


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """`function.apply`, which torch leaves untyped."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _is_split(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether both gradients are wanted, and weight and bias are parameters themselves: only a
    leaf has a `.grad` to add to.
    """
    own_bias = bias is None or bias.is_leaf
    return (
        torch.is_grad_enabled()
        and x.requires_grad
        and weight.requires_grad
        and weight.is_leaf
        and own_bias
    )


def _is_layer(weight: Tensor, bias: Tensor | None, output_dim: int) -> bool:
    """Whether the weight is a matrix and the bias, if any, has a number for each output: nothing is
    broadcast.
    """
    return weight.ndim == 2 and (
        bias is None or bias.shape == weight.shape[output_dim : output_dim + 1]
    )


def _per_dim(setting: Any, num_dims: int) -> list[int]:
    """A setting of a convolution as one number for each spatial dim."""
    values = list(setting) if isinstance(setting, (list, tuple)) else [setting]
    return values * num_dims if len(values) == 1 else values


class _Linear(torch.autograd.Function):
    """`x @ weight.t() + bias`. `transposed`: the parameter itself, where `weight` is a view of it
    the other way round.
    """

    @staticmethod
    def forward(
        ctx: Any,
        deferred: Deferred,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: Tensor | None = None,
    ) -> Tensor:
        ctx.deferred = deferred
        ctx.bias = bias
        ctx.parameter = weight if transposed is None else transposed
        ctx.is_transposed = transposed is not None
        ctx.save_for_backward(x, weight)
        if transposed is None or bias is None:
            return F.linear(x, weight, bias)
        return torch.addmm(bias, x, transposed)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.deferred.products.append(
            (_add_linear, (gradient, x, ctx.parameter, ctx.bias, ctx.is_transposed))
        )
        of_input = torch.matmul(gradient, _as(weight, gradient).conj()).to(x.dtype)
        return None, of_input, None, None, None


def _add_linear(
    gradient: Tensor, x: Tensor, parameter: Tensor, bias: Tensor | None, is_transposed: bool
) -> None:
    """Adds the gradients of weight and bias to `.grad`; in place where its dtype allows."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    # the conjugate of a real tensor is the tensor itself
    inputs = _as(x, gradient).conj().reshape(-1, x.shape[-1])
    left, right = (inputs.t(), rows) if is_transposed else (rows.t(), inputs)
    if parameter.grad is None:
        parameter.grad = torch.mm(left, right).to(parameter.dtype)
    elif parameter.grad.dtype == gradient.dtype and parameter.grad.layout == torch.strided:
        parameter.grad.addmm_(left, right)
    else:
        parameter.grad = parameter.grad + torch.mm(left, right).to(parameter.dtype)
    if bias is not None and bias.requires_grad:
        _add(bias, rows.sum(dim=0))


class _Convolution(torch.autograd.Function):
    """A convolution of 1 to 3 dims, not transposed."""

    @staticmethod
    def forward(
        ctx: Any,
        deferred: Deferred,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
        groups: int,
    ) -> Tensor:
        ctx.deferred = deferred
        ctx.bias = bias
        ctx.settings = settings
        ctx.groups = groups
        ctx.parameter = weight
        ctx.save_for_backward(x, weight)
        stride, padding, dilation = settings
        return torch.convolution(
            x, weight, bias, stride, padding, dilation, False, [0] * (x.ndim - 2), groups
        )

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.deferred.products.append(
            (_add_convolution, (gradient, x, ctx.parameter, ctx.bias, ctx.settings, ctx.groups))
        )
        given = _convolution_backward(
            gradient, x, weight, ctx.settings, ctx.groups, [True, False, False]
        )
        return None, given[0].to(x.dtype), None, None, None, None


def _add_convolution(
    gradient: Tensor,
    x: Tensor,
    parameter: Tensor,
    bias: Tensor | None,
    settings: Settings,
    groups: int,
) -> None:
    """Adds the gradients of weight and bias to `.grad`."""
    with_bias = bias is not None and bias.requires_grad
    _, of_weight, of_bias = _convolution_backward(
        gradient, x, parameter, settings, groups, [False, True, with_bias]
    )
    _add(parameter, of_weight)
    if bias is not None and with_bias:
        _add(bias, of_bias)


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, settings: Settings, groups: int, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias; those that are not `wanted` are None."""
    sizes = [weight.shape[0]] if wanted[2] else None
    given: tuple[Tensor, Tensor, Tensor] = aten.convolution_backward(
        gradient,
        _as(x, gradient),
        _as(weight, gradient),
        sizes,
        *settings,
        False,
        [0] * (x.ndim - 2),
        groups,
        wanted,
    )
    return given


def _add(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to `.grad`, in place unless it is sparse."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.layout == torch.strided:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = parameter.grad + gradient


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the dtype of a gradient: under autocast a layer computes in another dtype than
    its input and its weight have.
    """
    return tensor if tensor.dtype == like.dtype else tensor.to(like.dtype)
