"""`"compile": true`: chunks really run through torch.compile, and train like local PyTorch, with
whole and with split backwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

import whale as wh
from whale.runtime.code import compile_chunk
from whale.runtime.split import Deferred, run_products

aten = torch.ops.aten

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # a C++ compiler runs, most of a minute each


@pytest.fixture(autouse=True)
def compile_here() -> Iterator[None]:
    """No workers beside the two cores of a test run; and nothing that an earlier test compiled."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + aten.linear.default(
            torch.tanh(aten.linear.default(x, self.up.weight, self.up.bias)),
            self.down.weight,
            self.down.bias,
        )
        return torch.sigmoid(x) * x


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_a_compiled_chunk_leaves_its_weight_products_to_the_second_part() -> None:
    """Micro-batches of 3 and 2 samples: their gradients, in two parts, are those of the eager
    model.
    """
    model = Block().double()
    batches = [torch.randn(size, 8, dtype=torch.float64, requires_grad=True) for size in (3, 2)]
    for x in batches:
        model(x).square().sum().backward()
    expected = gradients(model)
    expected_inputs = [x.grad for x in batches]
    model.zero_grad()
    deferred = Deferred()
    function = compile_chunk(symbolic_trace(model), "stage 1", deferred, with_torch=True)
    again = [x.detach().requires_grad_() for x in batches]
    products = []
    for x in again:
        result = function(x)
        products.append(deferred.begin())
        result.square().sum().backward()  # type: ignore[attr-defined]
    assert num_graphs() >= 2  # before, between and after the two layers
    assert [len(each) for each in products] == [2, 2] and not gradients(model)
    for each in reversed(products):
        run_products(each)
    for x, wanted in zip(again, expected_inputs, strict=True):
        torch.testing.assert_close(x.grad, wanted, rtol=1e-10, atol=1e-12)
    got = gradients(model)
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-10, atol=1e-12)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x)).square().mean()


@pytest.mark.parametrize("mode", [True, "reduce-overhead"])
def test_an_engine_with_compiled_chunks_trains_like_local(mode: bool | str) -> None:
    """The second mode has no graphs of launches on a CPU; the rest of it is the same."""
    torch.manual_seed(0)
    local = Net().double()
    x = torch.randn(4, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        local(x).backward()
        optimizer.step()
    torch.manual_seed(0)
    wh.init({"num_micro_batch": 2, "compile": mode})
    engine = wh.parallelize(Net().double(), x, optimizer=sgd)
    for _ in range(2):
        engine.step(x)
    assert num_graphs() == 1  # one whole graph, and no new one for the second micro-batch or step
    for name, expected in local.state_dict().items():
        torch.testing.assert_close(engine.full_state_dict()[name], expected, rtol=1e-10, atol=1e-12)
