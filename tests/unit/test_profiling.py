"""Costs of nodes: FLOPs against torch's own counter on the eager model, bytes against arithmetic by
hand.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import whale as wh
from whale.capture.batch import read_batch
from whale.capture.capture import capture_training
from whale.capture.export import Task
from whale.capture.graph import CapturedGraph
from whale.cluster.cluster import DeviceKind
from whale.costs.costs import (
    NodeCost,
    backward_factors,
    node_costs,
    seconds,
    value_bytes,
)
from whale.operations.sizes import shape_at
from whale.planning.stages import carries_gradient
from whale.planning.workload import INSIDE_OPERATIONS

SAMPLE_BATCH = 4
OTHER_BATCH = 7


class Function(nn.Module):
    """A model that is one function of its inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def capture(model: nn.Module, *tensors: Tensor) -> CapturedGraph:
    """The model's graph with a symbolic batch; parameters are placeholders here, which costs the
    same as `get_attr`.
    """
    batch = torch.export.Dim("batch", min=2, max=4096)
    dynamic_shapes = tuple({0: batch} for _ in tensors)
    shapes = (
        (dynamic_shapes,) if isinstance(model, Function) else dynamic_shapes
    )  # `*tensors` is one argument for export
    graph = torch.export.export(model, tensors, dynamic_shapes=shapes, strict=False).graph
    symbol = next(
        iter(
            next(node for node in graph.nodes if _symbolic(node))
            .meta["val"]
            .shape[0]
            .node.expr.free_symbols
        )
    )
    return CapturedGraph(graph, (), {}, {}, symbol, SAMPLE_BATCH)


def _symbolic(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor) and value.dim() > 0 and isinstance(value.shape[0], torch.SymInt)
    )


def flop_of(captured: CapturedGraph, batch_size: int) -> float:
    return sum(cost.flop for cost in node_costs(captured, batch_size).values())


def eager_flop(model: nn.Module, *tensors: Tensor) -> int:
    """What torch counts; attention and LSTM in their plain form, since torch has no formula for the
    fused ones of the CPU.
    """
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),
    ):
        model(*tensors)
    return counter.get_total_flops()


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden)[0]


def tokens(batch_size: int) -> Tensor:
    return torch.randint(0, 50, (batch_size, 6))


def floats(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch_size: torch.randn(batch_size, *shape)


# name -> the model, and what makes each of its inputs for a batch size
MODELS: dict[str, tuple[Callable[[], nn.Module], list[Callable[[int], Tensor]]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3, bias=False)),
        [floats(5, 8)],
    ),
    "attention": (lambda: Attention(24, 3), [floats(6, 24)]),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 50)),
        [tokens],
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        [floats(6, 16)],
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2)
        ),
        [floats(4, 12, 10)],
    ),
    "conv 1d, 3d": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.Unflatten(2, (2, 2, 2)), nn.Conv3d(6, 3, 2)),
        [floats(4, 10)],
    ),
    "padding by name": (lambda: nn.Conv2d(4, 6, 3, padding="same"), [floats(4, 8, 8)]),
    "transposed conv": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), [floats(4, 5, 5)]),
    "lstm": (
        lambda: Recurrent(nn.LSTM(5, 7, num_layers=2, bidirectional=True, batch_first=True)),
        [floats(6, 5)],
    ),
    "gru": (lambda: Recurrent(nn.GRU(5, 7, batch_first=True)), [floats(6, 5)]),
    "matmul": (lambda: Function(lambda a, b: a @ b), [floats(3, 5, 4), floats(1, 4, 6)]),
    "addmm": (
        lambda: Function(lambda a: torch.addmm(a.new_zeros(6), a, a.new_ones(8, 6))),
        [floats(8)],
    ),
    "baddbmm": (
        lambda: Function(lambda a, b, c: torch.baddbmm(a, b, c)),
        [floats(3, 5), floats(3, 4), floats(4, 5)],
    ),
    "tensordot": (
        lambda: Function(lambda a: torch.tensordot(a, a.new_ones(4, 3, 5), dims=([2, 1], [0, 1]))),
        [floats(3, 4)],
    ),
    "einsum": (
        lambda: Function(lambda a, b: torch.einsum("bik, bjk -> bij", a, b)),
        [floats(3, 5), floats(4, 5)],
    ),
    "einsum implicit": (
        lambda: Function(lambda a, b: torch.einsum("bik,kj", a, b[0])),
        [floats(3, 5), floats(5, 2)],
    ),
    "einsum dots": (
        lambda: Function(lambda a, b: torch.einsum("...ik,...kj->...ij", a, b)),
        [floats(3, 4, 5), floats(1, 5, 6)],
    ),
    "einsum of three": (
        lambda: Function(lambda a, b, c: torch.einsum("bi,bij,bj->b", a, b, c)),
        [floats(3), floats(3, 4), floats(4)],
    ),
    "einsum, sum of one": (
        lambda: Function(lambda a, b: torch.einsum("bik,bkj->bi", a, b)),
        [floats(3, 5), floats(5, 4)],
    ),
    "einsum, broadcast sum": (
        lambda: Function(lambda a, b: torch.einsum("bkl,bklj->bj", a, b)),
        [floats(1, 3), floats(5, 3, 4)],
    ),
    "einsum elementwise": (
        lambda: Function(lambda a, b: torch.einsum("bi,bj->bij", a, b)),
        [floats(3), floats(4)],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_flop_equal_torch(name: str) -> None:
    build, inputs = MODELS[name]
    model = build()
    captured = capture(model, *(make(SAMPLE_BATCH) for make in inputs))
    for batch_size in (SAMPLE_BATCH, OTHER_BATCH):
        expected = eager_flop(model, *(make(batch_size) for make in inputs))
        assert flop_of(captured, batch_size) == expected
    assert (expected > 0) == (name != "einsum elementwise")


def test_attention_with_few_key_heads() -> None:
    """Eager repeats the keys and values for the heads that share them; the product has the queries'
    heads.
    """
    function = Function(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    inputs = floats(6, 5, 8), floats(2, 9, 8), floats(2, 9, 4)
    captured = capture(function, *(make(SAMPLE_BATCH) for make in inputs))
    assert (
        flop_of(captured, 3)
        == eager_flop(function, *(make(3) for make in inputs))
        == 2 * 3 * 6 * 5 * 9 * (8 + 4)
    )


def test_products_that_torch_does_not_count() -> None:
    """By hand: every token meets one expert of 8 x 16; a matrix times a vector; a bilinear form as
    two steps.
    """
    experts = Function(
        lambda x: F.grouped_mm(
            x, x.new_ones(2, 8, 16), offs=torch.tensor([1, 4], dtype=torch.int32)
        )
    )
    assert (
        flop_of(capture(experts, torch.ones(SAMPLE_BATCH, 8, dtype=torch.bfloat16)), 4)
        == 2 * 4 * 8 * 16
    )
    vector = Function(lambda x: x @ x.new_ones(8))
    assert flop_of(capture(vector, torch.ones(SAMPLE_BATCH, 8)), 5) == 2 * 5 * 8
    bilinear = Function(lambda x: F.bilinear(x, x[:, :3], x.new_ones(7, 8, 3)))
    assert flop_of(capture(bilinear, torch.ones(SAMPLE_BATCH, 8)), 5) == 2 * 5 * 7 * (8 * 3 + 3)


def cost_by_operation(captured: CapturedGraph, batch_size: int) -> dict[str, NodeCost]:
    return {
        str(node.target): cost
        for node, cost in node_costs(captured, batch_size).items()
        if node.op == "call_function"
    }


def test_elementwise_operations_read_and_write() -> None:
    captured = capture(
        Function(lambda a, b: torch.relu(a + b).to(torch.float64)),
        torch.ones(SAMPLE_BATCH, 6),
        torch.ones(SAMPLE_BATCH, 6),
    )
    costs = cost_by_operation(captured, 5)
    num_bytes = 5 * 6 * 4
    assert costs["aten.add.Tensor"] == NodeCost(0.0, 3 * num_bytes, num_bytes, "aten.add")
    assert costs["aten.relu.default"] == NodeCost(0.0, 2 * num_bytes, num_bytes, "aten.relu")
    assert costs["aten.to.dtype"] == NodeCost(0.0, 3 * num_bytes, 2 * num_bytes, "aten.to")


def test_views_are_free() -> None:
    def views(a: Tensor) -> Tensor:
        first, _ = (
            a.view(a.shape[0] * 2, 3)
            .reshape(-1, 6)
            .transpose(0, 1)
            .t()
            .unsqueeze(1)
            .expand(-1, 4, -1)[:, 1:]
            .split(3, dim=2)
        )
        return first.to(torch.float32).squeeze().detach().permute(2, 0, 1).select(0, 1)

    costs = node_costs(capture(Function(views), torch.ones(SAMPLE_BATCH, 6)), 5)
    assert sum(node.op == "call_function" for node in costs) > 10
    assert {(cost.flop, cost.moved_bytes) for cost in costs.values()} == {(0.0, 0.0)}


def test_an_embedding_reads_only_its_rows() -> None:
    costs = cost_by_operation(capture(nn.Embedding(100_000, 8), tokens(SAMPLE_BATCH)), 5)
    ids_bytes = 5 * 6 * 8
    rows_bytes = 5 * 6 * 8 * 4
    assert costs["aten.embedding.default"] == NodeCost(
        0.0, ids_bytes + 2 * rows_bytes, rows_bytes, "aten.embedding"
    )


def test_a_product_also_moves_its_weights() -> None:
    cost = cost_by_operation(capture(nn.Linear(8, 16), torch.ones(SAMPLE_BATCH, 8)), 5)[
        "aten.linear.default"
    ]
    assert cost == NodeCost(
        2 * 5 * 8 * 16, 4 * (5 * 8 + 8 * 16 + 16 + 5 * 16), 4 * 5 * 16, "aten.linear"
    )


def test_value_bytes_of_tensors_tuples_and_sizes() -> None:
    captured = capture(
        Function(lambda a: torch.topk(a.repeat(a.shape[0], 1), 2)[0]), torch.ones(SAMPLE_BATCH, 6)
    )
    sizes = {
        str(node.target): value_bytes(node, captured.batch_symbol, 5)
        for node in captured.graph.nodes
    }
    assert sizes["aten.sym_size.int"] == 0
    assert sizes["aten.repeat.default"] == 25 * 6 * 4
    assert sizes["aten.topk.default"] == 25 * 2 * (4 + 8)  # values and int64 indices


def test_shape_at() -> None:
    captured = capture(
        Function(lambda a: a.reshape(-1, 3)[::2].float()), torch.ones(SAMPLE_BATCH, 6)
    )
    shape = captured.output.args[0][0].meta["val"].shape  # type: ignore[index, union-attr]
    assert [shape_at(shape, captured.batch_symbol, size) for size in (1, 5, 6)] == [
        (1, 3),
        (5, 3),
        (6, 3),
    ]
    stranger = type(captured.batch_symbol)("s1", integer=True)
    with pytest.raises(ValueError, match=r"not only on the batch \(s1\)"):
        shape_at(shape, stranger, 5)


def test_the_cost_model() -> None:
    kind = DeviceKind("toy", flop_per_s=100.0, memory_bytes=1, bytes_per_s=10.0)
    cost = NodeCost(flop=50.0, moved_bytes=20.0, output_bytes=8)
    assert seconds(cost, kind) == 2.5


def test_a_backward_is_one_product_for_each_operand_that_gets_a_gradient() -> None:
    """The first layer needs no gradient of the batch; the bias is no operand; whatever is no
    product counts twice.
    """
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False))
    layout, tensors = read_batch(torch.ones(SAMPLE_BATCH, 6))
    captured = capture_training(
        model, layout, tensors, Task(lambda output, batch: output.sum(), "cpu", None)
    ).captured
    gradients = carries_gradient(captured)
    costs = node_costs(captured, OTHER_BATCH)
    found = [
        backward_factors(node, costs[node], gradients)
        for node in captured.compute_nodes()
        if costs[node].moved_bytes
    ]
    assert found[:3] == [(0.0, 1.0), (2.0, 0.0), (1.0, 1.0)]
    assert backward_factors(
        next(iter(captured.compute_nodes())), NodeCost(1.0, 1.0, 1), frozenset()
    ) == (0.0, 0.0)


def test_a_graph_of_8000_nodes() -> None:
    """One layer's nodes, many times over."""
    layer = capture(Attention(24, 3), torch.ones(SAMPLE_BATCH, 6, 24))
    graph = torch.fx.Graph()
    while len(graph.nodes) < 8000:
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in layer.graph.nodes:
            if node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
    captured = CapturedGraph(graph, (), {}, {}, layer.batch_symbol, SAMPLE_BATCH)
    costs = node_costs(captured, OTHER_BATCH)
    assert len(costs) == len(graph.nodes)


def test_gradients_that_came_in_stay_until_the_backward_is_over() -> None:
    """The widest product works on two gradients of 64 numbers. The 8 numbers that the tanh behind
    it has kept are gone by then, but not the gradient of as many that came back for them."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8))
    marked = wh.annotate(model, {"[0-2]": wh.replicate(1), "3": wh.replicate(1)})
    plan = wh.plan(
        marked,
        torch.randn(4, 8),
        loss=lambda output, batch: output.sum(),
        cluster=2,
        config={"recompute": False},
    )
    assert plan.figures is not None
    stage = plan.figures.stages[0]
    assert (
        stage.memory.workspace.sample_bytes - INSIDE_OPERATIONS * stage.memory.saved.sample_bytes
        == pytest.approx(2 * 64 * 4)
    )
