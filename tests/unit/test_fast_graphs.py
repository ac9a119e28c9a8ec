"""What the capture and the executor do for speed must not change any value: causal masks, reshapes,
chunks as plain functions.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from whale.capture.simplify import simplify
from whale.operations.nodes import aten_name
from whale.runtime.code import compile_chunk

LENGTH = 6
WIDTH = 8


def _packed_mask(batch_size: int, step: int) -> Tensor:
    """A mask as `transformers` makes it: causal, and only inside one of the texts of a sample, of
    which positions with `step` 1 show one.
    """
    positions = (torch.arange(LENGTH) * step)[None].expand(batch_size, -1)
    texts = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    places = torch.arange(LENGTH)
    samples = torch.arange(batch_size)
    same_text = (
        texts[samples[:, None, None], places[None, :, None]]
        == texts[samples[:, None, None], places[None, None, :]]
    )
    return (places[None, None, :] <= places[None, :, None]) & same_text


class Attention(nn.Module):
    """Attention over [batch, LENGTH, WIDTH] with a mask that is written out, as while tracing."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        places = torch.arange(LENGTH)
        square = {
            "causal": places[None, :] <= places[:, None],
            "window": (places[None, :] <= places[:, None])
            & (places[None, :] > places[:, None] - 3),
            "later": places[None, :] >= places[:, None],
            "packed": _packed_mask(x.shape[0], 1),
            "packed_apart": _packed_mask(x.shape[0], 2),
            "padded": (places[None, :] <= places[:, None]) & allowed[:, None, :],
        }[self.mask]
        mask = square if square.ndim == 3 else square[None].expand(x.shape[0], -1, -1)
        y = self.linear(x)
        return (
            F.scaled_dot_product_attention(y, y, y, mask)
            .reshape(-1, 2, WIDTH)
            .reshape(-1, LENGTH, WIDTH)
            .sum(dim=1)
        )


def exported(model: nn.Module, *inputs: Tensor) -> GraphModule:
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        model, inputs, dynamic_shapes=tuple({0: batch} for _ in inputs), strict=False
    )
    module = program.module()
    for node in list(module.graph.nodes):
        if node.op == "call_module":
            module.graph.erase_node(node)  # the guards of torch.export
    module.recompile()
    assert isinstance(module, GraphModule)
    return module


def attention_of(graph: Graph) -> Node:
    return next(node for node in graph.nodes if aten_name(node) == "scaled_dot_product_attention")


def inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch_size)
    allowed = torch.rand(batch_size, LENGTH, generator=generator) > 0.3
    allowed[:, 0] = True
    return torch.randn(batch_size, LENGTH, WIDTH, generator=generator, dtype=torch.float64), allowed


@pytest.mark.parametrize(
    ("mask", "becomes_causal"),
    [
        ("causal", True),
        ("packed", True),
        ("packed_apart", False),
        ("window", False),
        ("later", False),
        ("padded", False),
    ],
)
def test_only_a_causal_mask_becomes_is_causal(mask: str, becomes_causal: bool) -> None:
    model = Attention(mask).double()
    module = exported(model, *inputs(4))
    simplify(module.graph)
    module.recompile()
    attention = attention_of(module.graph)
    assert bool(attention.kwargs.get("is_causal")) == becomes_causal
    for batch_size in (2, 5):  # other sizes than the sample's
        expected = model(*inputs(batch_size))
        got = module(*inputs(batch_size))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_reshapes_in_a_row_become_one() -> None:
    model = Attention("causal").double()
    module = exported(model, *inputs(4))
    num_before = sum(aten_name(node) == "reshape" for node in module.graph.nodes)
    simplify(module.graph)
    module.recompile()
    assert num_before == 2
    assert (
        sum(aten_name(node) == "reshape" for node in module.graph.nodes) == 0
    )  # together they change nothing
    torch.testing.assert_close(module(*inputs(3)), model(*inputs(3)), rtol=1e-12, atol=1e-12)


class Everything(nn.Module):
    """Operations that `compile_chunk` calls in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.embedding(words))
        x = torch.cat([x, 2.0 * x - 1.0], dim=-1)[..., :WIDTH]
        x = F.gelu(self.linear(x), approximate="tanh") + F.scaled_dot_product_attention(
            x, x, x, is_causal=True, scale=0.3
        )
        x = torch.addmm(self.weight[0], x.view(-1, WIDTH), self.weight).view(
            words.size(0), -1, WIDTH
        )
        x = torch.tanh(x).pow(3.0) / 1.5 + x.transpose(0, 1).permute(1, 0, 2) @ self.weight
        x = torch.bmm(x, x.mT) * torch.rsqrt(torch.sigmoid(x)).sum(-1, keepdim=True) - torch.relu(
            -x
        ).mean(-1).unsqueeze(-1)
        return F.dropout(x, 0.0).sum()


def test_a_chunk_as_a_function_gives_the_same_value_and_gradients() -> None:
    torch.manual_seed(0)
    model = Everything()
    words = torch.randint(0, 10, (3, LENGTH))
    module = exported(model, words)
    function = compile_chunk(module, "stage 7")
    parameters = [parameter for _, parameter in module.named_parameters()]
    expected = module(words)
    got = function(words)
    expected, got = (
        value[0] if isinstance(value, (tuple, list)) else value for value in (expected, got)
    )
    assert torch.equal(got, expected)
    for one, other in zip(
        torch.autograd.grad(got, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        assert torch.equal(one, other)


def test_a_chunk_as_a_function_sees_weights_that_change_in_place() -> None:
    torch.manual_seed(0)
    module = exported(Everything(), torch.randint(0, 10, (3, LENGTH)))
    function = compile_chunk(module, "stage 7")
    words = torch.randint(0, 10, (2, LENGTH))
    with torch.no_grad():
        before = function(words)
        module.get_parameter("weight").mul_(2.0)
        after = function(words)
        expected = module(words)
    assert not torch.equal(torch.as_tensor(before[0]), torch.as_tensor(after[0]))
    assert torch.equal(torch.as_tensor(after[0]), torch.as_tensor(expected))


def test_an_error_in_a_chunk_shows_its_line() -> None:
    import traceback

    module = exported(Everything(), torch.randint(0, 10, (3, LENGTH)))
    function = compile_chunk(module, "stage 7")
    with pytest.raises(IndexError) as raised:
        function(torch.full((2, LENGTH), 99))
    text = "".join(traceback.format_exception(raised.value))
    assert "<stage 7 of Whale>" in text and "torch.embedding(" in text
