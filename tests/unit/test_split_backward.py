"""A backward in two parts gives the gradients of a whole one, and really leaves the weight products
to the second part.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

from whale.capture.graph import Recomputed
from whale.runtime.code import compile_chunk
from whale.runtime.split import Deferred, Product, run_products

aten = torch.ops.aten


class Layers(nn.Module):
    """Every kind of layer that is split, one weight used twice, one frozen, one computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.image = nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2)
        self.sound = nn.Conv1d(4, 2, 2, dilation=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = aten.linear.default(
            F.layer_norm(x, [8], self.norm.weight, self.norm.bias),
            self.linear.weight,
            self.linear.bias,
        )
        x = aten.linear.default(torch.tanh(x), self.frozen.weight, self.frozen.bias)
        x = aten.addmm.default(self.bias, x.reshape(-1, 8), self.weight).view_as(x)
        x = aten.matmul.default(x, self.weight)  # the same weight again, the other way to call it
        x = aten.linear.default(x, self.linear.weight * 2.0)  # computed: stays whole
        x = aten.conv2d.default(
            x.reshape(-1, 2, 4, 4), self.image.weight, self.image.bias, [2, 2], [1, 1], [1, 1], 2
        )
        return aten.conv1d.default(x.flatten(2), self.sound.weight, None, [1], [0], [2])


def saved_bytes(products: list[Product]) -> int:
    """Bytes that are held for the weight gradients: gradient and input of each layer."""
    storages = set()
    for _, arguments in products:
        storages |= {each.untyped_storage() for each in arguments[:2]}
    return sum(storage.nbytes() for storage in storages)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def model() -> Layers:
    return Layers().double()


def inputs(count: int) -> list[Tensor]:
    return [torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def test_two_parts_give_the_gradients_of_a_whole_backward(model: Layers) -> None:
    batches = inputs(3)
    for x in batches:
        model(x).square().sum().backward()
    expected = gradients(model)
    expected_inputs = [x.grad for x in batches]
    model.zero_grad()
    deferred = Deferred()
    function = compile_chunk(symbolic_trace(model), "stage 0", deferred)
    again = [x.detach().requires_grad_() for x in batches]
    products = []
    for x in again:
        result = function(x)
        products.append(deferred.begin())
        result.square().sum().backward()  # type: ignore[attr-defined]
    for x, wanted in zip(again, expected_inputs, strict=True):
        torch.testing.assert_close(x.grad, wanted, rtol=1e-12, atol=1e-12)
    assert all(len(each) == 5 for each in products)  # linear, addmm, matmul, 2 convolutions
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        "norm.weight",
        "norm.bias",
        "linear.weight",
    }
    for each in (products[1], products[0], products[2]):  # in any order
        assert saved_bytes(each) > 0
        run_products(each)
        assert not each
    got = gradients(model)
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-12, atol=1e-12)


def test_a_recomputed_region_is_split_too(model: Layers) -> None:
    (x,) = inputs(1)
    model(x).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    region = Graph()
    region.output(region.graph_copy(symbolic_trace(model).graph, {}))
    outer = Graph()
    outer.output(outer.call_module("region", (outer.placeholder("x"),)))
    module = GraphModule({"region": Recomputed(GraphModule(model, region))}, outer)
    deferred = Deferred()
    function = compile_chunk(module, "stage 0", deferred)
    result = function(x.detach().requires_grad_())
    products = deferred.begin()
    result.square().sum().backward()  # type: ignore[attr-defined]
    assert len(products) == 5
    run_products(products)
    for name, got in gradients(model).items():
        torch.testing.assert_close(got, expected[name], rtol=1e-12, atol=1e-12)


class Unusual(nn.Module):
    """Legal layers that are not `x @ weight + bias`: all stay whole, but for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))
        self.vector = nn.Parameter(torch.randn(8))
        self.one = nn.Parameter(torch.randn(1))
        self.plain = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = aten.addmm.default(self.bias, x.reshape(-1, 8), self.weight, beta=0.5, alpha=2.0)
        x = aten.addmm.default(self.one, x, self.weight)
        x = x * aten.linear.default(x, self.vector).unsqueeze(-1) + aten.matmul.default(
            x, self.vector
        ).unsqueeze(-1)
        return aten.linear.default(x, self.plain)


def test_layers_that_are_not_plain_stay_whole() -> None:
    model = Unusual().double()
    (x,) = inputs(1)
    model(x).square().sum().backward()
    expected = gradients(model) | {"x": x.grad}
    model.zero_grad()
    deferred = Deferred()
    again = x.detach().requires_grad_()
    result = compile_chunk(symbolic_trace(model), "stage 0", deferred)(again)
    products = deferred.begin()
    result.square().sum().backward()  # type: ignore[attr-defined]
    assert len(products) == 1  # the last layer's
    run_products(products)
    torch.testing.assert_close(
        gradients(model) | {"x": again.grad}, expected, rtol=1e-12, atol=1e-12
    )


def test_an_input_without_gradient_leaves_nothing_to_put_off() -> None:
    weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
    deferred = Deferred()

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return aten.linear.default(x, self.weight)

    x = torch.randn(2, 3, dtype=torch.float64)
    result = compile_chunk(symbolic_trace(First()), "stage 0", deferred)(x)
    products = deferred.begin()
    result.sum().backward()  # type: ignore[attr-defined]
    assert products == []
    (expected,) = torch.autograd.grad(F.linear(x, weight).sum(), weight)
    assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]


def test_under_autocast_weight_gradients_have_the_type_of_the_weight() -> None:
    linear = nn.Linear(8, 8)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return aten.linear.default(x, self.linear.weight, self.linear.bias)

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x).float().square().sum().backward()
    expected = gradients(linear)
    linear.zero_grad()
    deferred = Deferred()
    with torch.autocast("cpu", torch.bfloat16):
        result = compile_chunk(symbolic_trace(Cast()), "stage 0", deferred)(
            x.detach().requires_grad_()
        )
        products = deferred.begin()
        result.float().square().sum().backward()  # type: ignore[attr-defined]
    run_products(products)
    for name, got in gradients(linear).items():
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected[name], rtol=1e-2, atol=1e-2)
