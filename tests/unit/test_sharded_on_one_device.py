"""Operations of `split` that contain communication, as one device sees them: what they refuse, and
their precision.
"""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from whale.compat import fake_mode
from whale.devices import GLOO
from whale.lowering.communication import RealCommunication
from whale.lowering.sharded_linear import LinearPlan, sharded_linear
from whale.lowering.sharded_vocabulary import cross_entropy, embedding
from whale.lowering.subgroups import GridGroups, Subgroup
from whale.operations.operation import Shapes
from whale.operations.reductions import SUM
from whale.plans.grid import Grid
from whale.plans.layout import Cut, whole
from whale.sharding.emit import Special
from whale.sharding.local import local_call
from whale.sharding.redistribution_steps import Redistribution
from whale.sharding.space import layout_of

ALONE = Subgroup(1, 0, None)
FIRST = 2
HERE = 3
NUM_CLASSES = 7
"""this device has the classes 2, 3 and 4 of 7"""


def _loss(labels: list[int]) -> Tensor:
    return cross_entropy(
        torch.randn(len(labels), HERE),
        torch.tensor(labels),
        None,
        SUM,
        -100,
        0.0,
        NUM_CLASSES,
        FIRST,
        ALONE,
    )


@pytest.mark.parametrize("wrong", [-1, 7, 100])
def test_numbers_that_do_not_exist_are_refused_by_every_device(wrong: int) -> None:
    assert _loss([0, 2, 6, -100]).isfinite()
    with pytest.raises(IndexError, match=f"label is {wrong}: only 0 to 6"):
        _loss([0, wrong, -100])
    table = torch.randn(HERE, 4)
    assert embedding(table, torch.tensor([0, 3, 6]), FIRST, NUM_CLASSES)[1].equal(table[1])
    with pytest.raises(IndexError, match=f"token is {wrong}: only 0 to 6"):
        embedding(table, torch.tensor([0, wrong]), FIRST, NUM_CLASSES)


@pytest.mark.parametrize("keep", [True, False])
def test_a_linear_layer_under_autocast(keep: bool) -> None:
    layout = layout_of((), {})
    nothing = Redistribution(layout, layout, (), ())
    plan = LinearPlan(nothing, nothing, nothing, keep=keep)
    tensors = [
        torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
        for shape in ((5, 6), (7, 6), (7,))
    ]
    results = []
    for run in (F.linear, lambda x, weight, bias: sharded_linear(x, weight, bias, plan, {})):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(*tensors)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), tensors)))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


OPERATIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "softmax": (torch.ops.aten.softmax.int, (-1,)),
    "log_softmax": (torch.ops.aten.log_softmax.int, (-1,)),
    "layer_norm": (torch.ops.aten.layer_norm.default, ([NUM_CLASSES],)),
    "rms_norm": (torch.ops.aten.rms_norm.default, ([NUM_CLASSES],)),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_norms_and_softmax_have_the_type_that_autocast_gives_there(name: str, device: str) -> None:
    """torch itself says it for fake tensors of any device; ours then runs on the CPU."""
    operation, arguments = OPERATIONS[name]
    x = torch.randn(5, NUM_CLASSES, generator=torch.Generator().manual_seed(0)).bfloat16()
    graph = Graph()
    node = graph.call_function(operation, (graph.placeholder("x"), *arguments))
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, torch.bfloat16)
        with fake_mode():
            node.meta["val"] = operation(
                torch.empty(x.shape, dtype=x.dtype, device=device), *arguments
            )
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
    layout = whole([Cut(5), Cut(NUM_CLASSES)])
    special = Special("softmax" if "softmax" in name else "norm", node, (), (layout,), (layout,), 0)
    found = RealCommunication(GridGroups(Grid(1, 1, 1), 0, {}, {}), GLOO).operation(special)(x)
    assert (
        found.dtype
        == node.meta["val"].dtype
        == (torch.float32 if device == "cuda" else torch.bfloat16)
    )
    torch.testing.assert_close(found, operation(x.to(found.dtype), *arguments))


def test_a_loss_is_not_rounded_under_autocast() -> None:
    """A sum over many rows in bfloat16 has two digits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, NUM_CLASSES, generator=generator)
    labels = torch.randint(0, NUM_CLASSES, (1000,), generator=generator)
    results = []
    for run in (
        lambda x: F.cross_entropy(x, labels, reduction="sum"),
        lambda x: cross_entropy(x, labels, None, SUM, -100, 0.0, NUM_CLASSES, 0, ALONE),
    ):
        x = logits.to(torch.bfloat16).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(x)
        results.append((loss, *torch.autograd.grad(loss / 3, [x])))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


def test_a_mean_loss_divides_by_what_its_tensors_give_together() -> None:
    """A target wider than the input: a sum on each device, divided by the number of all
    differences.
    """
    x = torch.randn(4, 1)
    y = torch.randn(4, 6)
    captured = Graph()
    local = Graph()
    sources = captured.placeholder("x"), captured.placeholder("y")
    for source, value in zip(sources, (x, y), strict=True):
        source.meta["val"] = value
    node = captured.call_function(torch.ops.aten.mse_loss.default, sources)
    given = local.placeholder("x"), local.placeholder("y")
    local.output(local_call(local, node, (given, {}), None, Shapes(sympy.Symbol("samples"))))
    torch.testing.assert_close(GraphModule(nn.Module(), local)(x, y), F.mse_loss(x.expand(4, 6), y))
