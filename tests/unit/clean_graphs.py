"""A captured module made clean, run beside the module itself: values, gradients and buffers must be
equal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from whale.capture.functional import make_functional
from whale.capture.inline import drop_asserts, inline_regions
from whale.capture.simplify import simplify
from whale.operations.nodes import aten_name, written_names

TOLERANCE = 1e-12


class Run(torch.fx.Interpreter):
    """Runs a graph, each node under the autocast that the clean-up passes noted for it."""

    def run_node(self, n: Node) -> Any:
        if "autocast" not in n.meta:
            return super().run_node(n)
        device_type, dtype, enabled, cache = n.meta["autocast"]
        with torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache):
            return super().run_node(n)


class Clean:
    """A module exported and cleaned; its state tensors are those of `module`."""

    def __init__(
        self, module: nn.Module, inputs: tuple[Tensor, ...], dynamic: bool = False
    ) -> None:
        self.module = module
        batch = torch.export.Dim("batch", min=2, max=1 << 20)
        shapes = tuple({0: batch} for _ in inputs) if dynamic else None
        exported = torch.export.export(
            module, tuple(each.clone() for each in inputs), dynamic_shapes=shapes, strict=False
        )
        self.graph_module: GraphModule = exported.graph_module
        self.graph = exported.graph_module.graph
        inline_regions(self.graph_module)
        drop_asserts(self.graph)
        self.updates = make_functional(self.graph)
        simplify(self.graph)
        self.specs = exported.graph_signature.input_specs
        self.constants = exported.constants
        self.names = {spec.arg.name: spec.target for spec in self.specs}
        self.graph.lint()

    def ops(self) -> list[str]:
        return [aten_name(node) for node in self.graph.nodes if node.op == "call_function"]

    def run(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the new value of each buffer that the graph writes."""
        state = {
            **dict(self.module.named_parameters(remove_duplicate=False)),
            **dict(self.module.named_buffers(remove_duplicate=False)),
        }
        rest = iter(inputs)
        values = []
        for spec in self.specs:
            if spec.kind == InputKind.USER_INPUT:
                values.append(next(rest))
            else:
                values.append(
                    state[spec.target] if spec.target in state else self.constants[spec.target]
                )
        graph = copy.deepcopy(self.graph)
        copies = {node.name: node for node in graph.nodes}
        output = copies["output"]
        output.args = ((*output.args[0], *(copies[node.name] for node in self.updates.values())),)
        loss, *finals = Run(GraphModule(self.module, graph)).run(*values)
        names = [self.names[node.name] for node in self.updates]
        return loss, {
            name: value for name, value in zip(names, finals, strict=True) if name is not None
        }


def check_clean(clean: Clean) -> None:
    for node in clean.graph.nodes:
        assert not written_names(node), f"{node.target} is still in place"
        assert getattr(node.target, "namespace", "") != "higher_order"
        assert not aten_name(node).startswith("_assert")
        assert node.op == "output" or node.op == "get_attr" or "val" in node.meta, (
            f"{node.name} has no fake value"
        )


def compare(
    module: nn.Module,
    *inputs: Tensor,
    other: tuple[Tensor, ...] | None = None,
    dynamic: bool = False,
    tolerance: float = TOLERANCE,
) -> Clean:
    """Eager model and clean graph on `other` (or the sample itself): loss, gradients and buffers
    must agree.
    """
    mine = copy.deepcopy(module)
    clean = Clean(mine, inputs, dynamic)
    check_clean(clean)
    given = other or inputs
    before = [each.clone() for each in given]
    torch.manual_seed(7)
    # copies of saved tensors: eager then gives the gradient also where autograd would refuse a
    # later in-place operation
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        expected = module(*(each.clone() for each in given))
    expected.backward()
    torch.manual_seed(7)
    loss, updates = clean.run(given)
    loss.backward()
    for each, old in zip(given, before, strict=True):
        assert torch.equal(each, old), "the batch was written to"
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    assert any(parameter.grad is not None for parameter in module.parameters())

    def same(found: Tensor, wanted: Tensor, what: str) -> None:
        torch.testing.assert_close(
            found, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
        )

    for (name, parameter), (_, twin) in zip(
        module.named_parameters(), mine.named_parameters(), strict=True
    ):
        wanted = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        same(
            twin.grad if twin.grad is not None else torch.zeros_like(twin),
            wanted,
            f"gradient of {name}",
        )
    buffers = dict(mine.named_buffers(remove_duplicate=False)) | updates
    for name, value in module.named_buffers(remove_duplicate=False):
        same(buffers[name], value, f"buffer {name}")
    return clean


class Case(nn.Module):
    """A linear layer and a function of its output: the whole of most cases below."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.register_buffer("mean", torch.rand(6))
        self.register_buffer("count", torch.tensor(3))
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(self, self.linear(x)) * WEIGHTS).sum()


torch.manual_seed(0)
WEIGHTS = torch.rand(6, dtype=torch.float64) + 0.5
SAMPLE = torch.randn(6, 4, dtype=torch.float64)


def case(function: Callable[..., Tensor], **options: Any) -> Clean:
    torch.manual_seed(1)
    return compare(Case(function), SAMPLE, **options)
