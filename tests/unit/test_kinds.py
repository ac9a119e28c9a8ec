"""Kinds of values. Also `export_graph`, the test helper that makes a `CapturedGraph` of a module
without the passes of `capture`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import Node

from whale.capture.graph import BatchTensor, CapturedGraph, StateTensor
from whale.capture.inline import inline_regions
from whale.capture.kinds import ValueKind, value_kinds
from whale.operations.nodes import op_name
from whale.operations.table import is_random

BATCH = torch.export.Dim("batch", min=2, max=1 << 20)


class WithBatch(nn.Module):
    """Calls `loss(model, batch)`, so that every test states its loss as one function."""

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.loss(self.model, batch)


def export_graph(
    model: nn.Module,
    batch: dict[str, Tensor],
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
) -> CapturedGraph:
    """Exports with a symbolic batch; parameters, buffers and constants become `get_attr` nodes.
    In-place operations stay.
    """
    size = max(tensor.shape[0] for tensor in batch.values() if tensor.dim())
    batched = {key: tensor.dim() > 0 and tensor.shape[0] == size for key, tensor in batch.items()}
    shapes = ({key: {0: BATCH} if batched[key] else None for key in batch},)
    program = torch.export.export(
        WithBatch(model, loss), (batch,), dynamic_shapes=shapes, strict=False
    )
    inline_regions(program.graph_module)
    graph = program.graph_module.graph
    names = {
        spec.arg.name: (spec.kind.name.lower(), spec.target)
        for spec in program.graph_signature.input_specs
    }
    state = {}
    constants = {}
    symbol = None
    for node in list(graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target):
            graph.erase_node(node)
        elif node.op == "placeholder":
            kind, name = names[node.name]
            if kind == "user_input":
                dims = [size for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
                symbol = dims[0].node.expr if dims else symbol
                continue
            value = (
                program.constants[name]
                if kind == "constant_tensor"
                else program.state_dict.get(name, program.constants.get(name))
            )
            kind = {"constant_tensor": "constant"}.get(kind, kind)
            state[name] = StateTensor(
                name, kind, tuple(value.shape), value.dtype, kind == "parameter"
            )
            if kind == "constant":
                constants[name] = value
            first = next(one for one in graph.nodes if one.op != "placeholder")
            with graph.inserting_before(first):
                attribute = graph.create_node("get_attr", name)
            attribute.meta.update(node.meta)
            node.replace_all_uses_with(attribute)
            graph.erase_node(node)
    inputs = tuple(
        BatchTensor(f"[{key!r}]", tuple(value.shape), value.dtype, batched[key])
        for key, value in batch.items()
    )
    return CapturedGraph(graph, inputs, state, constants, symbol, size)


def find(captured: CapturedGraph, name: str) -> Node:
    return next(node for node in captured.graph.nodes if op_name(node) == name)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))
        self.norm = nn.BatchNorm1d(4)


def test_the_four_kinds() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["x"] > 0
        penalty = model.layer.weight.square().sum()
        scale = model.table.cos()
        return (model.layer(batch["x"]) * mask * scale).sum() / mask.sum() + penalty

    captured = export_graph(Small(), {"x": torch.randn(3, 4)}, loss)
    kinds = value_kinds(captured)
    assert kinds[find(captured, "gt")] is ValueKind.INPUT
    assert kinds[find(captured, "square")] is ValueKind.WEIGHT
    assert kinds[find(captured, "cos")] is ValueKind.CONSTANT
    assert kinds[find(captured, "linear")] is ValueKind.ACTIVATION
    assert kinds[find(captured, "div")] is ValueKind.ACTIVATION


def test_sizes_are_inputs_even_when_read_from_an_activation() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model.layer(batch["x"]).sum() / batch["x"].shape[0]

    captured = export_graph(Small(), {"x": torch.randn(3, 4)}, loss)
    linear = find(captured, "linear")
    with captured.graph.inserting_after(linear):
        size = captured.graph.call_function(torch.ops.aten.sym_size.int, (linear, 0))
    size.meta["val"] = linear.meta["val"].shape[0]
    assert value_kinds(captured)[size] is ValueKind.INPUT


def test_a_buffer_that_the_graph_updates_belongs_to_its_stage() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (batch["x"] * model.table).sum() + model.norm(batch["x"]).sum()

    captured = export_graph(Small(), {"x": torch.randn(3, 4)}, loss)
    kinds = {
        str(node.target): kind
        for node, kind in value_kinds(captured).items()
        if node.op == "get_attr"
    }
    assert kinds["model.table"] is ValueKind.CONSTANT
    assert kinds["model.norm.running_mean"] is ValueKind.ACTIVATION
    captured.buffer_updates["model.table"] = find(captured, "mul")
    kinds = {
        str(node.target): kind
        for node, kind in value_kinds(captured).items()
        if node.op == "get_attr"
    }
    assert kinds["model.table"] is ValueKind.ACTIVATION


def test_random_values_are_activations() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        off = nn.functional.dropout(x, 0.0, True)
        evaluating = nn.functional.dropout(off, 0.5, False)
        on = nn.functional.dropout(evaluating, 0.5, True)
        return (
            on + torch.rand_like(x) + torch.randn(4) + torch.bernoulli(x.sigmoid())
        ).sum() + model.layer.weight.sum()

    captured = export_graph(Small(), {"x": torch.randn(3, 4)}, loss)
    dropouts = [is_random(node) for node in captured.graph.nodes if op_name(node) == "dropout"]
    assert dropouts == [False, False, True]
    kinds = value_kinds(captured)
    for name in ("rand_like", "randn", "bernoulli"):
        assert is_random(find(captured, name)), name
        assert kinds[find(captured, name)] is ValueKind.ACTIVATION, name


def test_attention_is_random_only_with_dropout() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].view(-1, 1, 2, 2)
        attend = nn.functional.scaled_dot_product_attention
        return attend(x, x, x).sum() + attend(x, x, x, dropout_p=0.5).sum() + model.layer.bias.sum()

    captured = export_graph(Small(), {"x": torch.randn(3, 4)}, loss)
    found = [
        is_random(node)
        for node in captured.graph.nodes
        if op_name(node) == "scaled_dot_product_attention"
    ]
    assert found == [False, True]
