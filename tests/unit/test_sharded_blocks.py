"""The pass that brings blocks of weights in the graph of a device on a grid, on graphs made by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from whale.capture.graph import Recomputed
from whale.lowering.blocks import BlockWeights, backward_uses
from whale.lowering.sharded_blocks import bring_blocks

NAMES = ("a", "b", "c")


class Bringer:
    """One buffer for all blocks: it holds what was asked for last, and all else is NaN."""

    def __init__(self, root: nn.Module) -> None:
        self.weights = {name: getattr(root, name) for name in NAMES}
        self.values = {name: each.detach().clone() for name, each in self.weights.items()}
        self.asked: list[tuple[int, ...]] = []

    def need(self, *blocks: int) -> None:
        self.asked.append(blocks)
        for number, name in enumerate(NAMES):
            value = self.values[name] if number in blocks else torch.full((3, 3), torch.nan)
            self.weights[name].data.copy_(value)


def root_module() -> nn.Module:
    torch.manual_seed(0)
    root = nn.Module()
    for name in NAMES:
        root.register_parameter(name, nn.Parameter(torch.randn(3, 3, dtype=torch.float64)))
    return root


def plain(root: nn.Module) -> GraphModule:
    """tanh(x a) b, then the transpose of c, which is read through a view."""
    graph = Graph()
    x = graph.placeholder("x")
    a, b, c = (graph.get_attr(name) for name in NAMES)
    x = graph.call_function(torch.tanh, (graph.call_function(torch.mm, (x, a)),))
    x = graph.call_function(torch.mm, (x, b))
    turned = graph.call_function(torch.t, (c,))
    graph.output((graph.call_function(torch.mm, (x, turned)), turned))
    return GraphModule(root, graph)


def taken_early(root: nn.Module) -> GraphModule:
    """A view of a, which others have taken the buffer of when it leaves."""
    graph = Graph()
    x = graph.placeholder("x")
    a, b, c = (graph.get_attr(name) for name in NAMES)
    turned = graph.call_function(torch.t, (a,))
    for weight in (a, b, c):
        x = graph.call_function(torch.mm, (x, weight))
    graph.output((x, turned))
    return GraphModule(root, graph)


def around(root: nn.Module, body: Graph) -> GraphModule:
    """A product with a, and then the region, which reads b and c."""
    root.add_module("region", Recomputed(GraphModule(nn.Module(), body)))
    graph = Graph()
    given = graph.placeholder("x")
    a, b, c = (graph.get_attr(name) for name in NAMES)
    x = graph.call_function(torch.tanh, (graph.call_function(torch.mm, (given, a)),))
    call = graph.call_module("region", (x, b, c))
    parts: list[Node] = [graph.call_function(operator.getitem, (call, place)) for place in range(2)]
    graph.output(tuple(parts))
    return GraphModule(root, graph)


def with_region(root: nn.Module) -> GraphModule:
    """The same with the last two products in a region that is recomputed, which also hands on the
    view of its weight.
    """
    body = Graph()
    x, b, c = (body.placeholder(name) for name in ("x", "b", "c"))
    turned = body.call_function(torch.t, (c,))
    x = body.call_function(torch.mm, (body.call_function(torch.mm, (x, b)), turned))
    body.output((x, turned))
    return around(root, body)


def with_side_branch(root: nn.Module) -> GraphModule:
    """A region that is recomputed when backward is about to read b, and that reads c after b."""
    body = Graph()
    x, b, c = (body.placeholder(name) for name in ("x", "b", "c"))
    main = body.call_function(torch.mm, (x, b))
    turned = body.call_function(torch.t, (c,))
    side = body.call_function(torch.detach, (body.call_function(torch.mm, (x, turned)),))
    body.output((body.call_function(torch.add, (main, side)), turned))
    return around(root, body)


def results(module: GraphModule, root: nn.Module) -> list[Tensor]:
    """Result, the view that leaves, and gradients."""
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    value, turned = module(x)
    value.square().sum().backward()
    return [value.detach(), turned.detach(), *(getattr(root, name).grad for name in NAMES)]


@pytest.mark.parametrize(
    ("build", "announced"),
    [
        (plain, [(0,), (1,), (2,)]),
        (taken_early, [(0,), (1,), (2,)]),
        (with_region, [(0,), (2,), (1,), (2,), (2,)]),
        (with_side_branch, [(0,), (1,), (2,), (2,)]),
    ],
)
def test_readers_find_their_weights_in_forward_and_backward(
    build: Callable[[nn.Module], GraphModule], announced: list[tuple[int, ...]]
) -> None:
    expected_root = root_module()
    expected = results(build(expected_root), expected_root)
    root = root_module()
    module = build(root)
    bringer = Bringer(module)
    block_of = {name: number for number, name in enumerate(NAMES)}
    uses = bring_blocks(module, BlockWeights(bringer, block_of, (0, 1, 2)))
    got = results(module, root)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert [use.blocks for use in uses] == announced
    assert bringer.asked[: len(announced)] == announced
    assert set(bringer.asked[len(announced) :]) <= set(backward_uses(uses))


def test_blocks_that_take_turns_cannot_be_read_at_once() -> None:
    root = root_module()
    graph = Graph()
    x = graph.placeholder("x")
    a, b = graph.get_attr("a"), graph.get_attr("b")
    graph.output((graph.call_function(torch.addmm, (a, x, b)),))
    weights = BlockWeights(Bringer(root), {"a": 0, "b": 1}, (0, 0))
    with pytest.raises(ValueError, match="several layers at once"):
        bring_blocks(GraphModule(root, graph), weights)
