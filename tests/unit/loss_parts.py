"""Runs the parts of a mini-batch through a captured loss and compares their sum with the loss of
the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.unit.test_kinds import export_graph
from whale.capture.kinds import value_kinds
from whale.capture.losses import LossPlan, rewrite_loss
from whale.capture.samples import SampleFlow

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
SAMPLES = 10
TOKENS = 6
CLASSES = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.head = nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.register_buffer("class_weight", torch.tensor([0.5, 2.0, 1.0, 0.25, 1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))  # (samples, TOKENS, CLASSES)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, CLASSES, (SAMPLES, TOKENS), generator=generator)
    y[0:4] = -100  # the first part of 4, and the first part of 1, have no valid token at all
    y[5, 2:] = -100
    mask = torch.randint(0, 2, (SAMPLES, TOKENS), generator=generator).double()
    mask[:, 0] = 1.0
    return {
        "x": torch.randn(SAMPLES, TOKENS, 3, generator=generator, dtype=torch.float64),
        "y": y,
        "mask": mask,
        "soft": torch.rand(SAMPLES, TOKENS, CLASSES, generator=generator, dtype=torch.float64),
        "label": torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        "num_items": torch.tensor(37),
    }


def run(
    captured: Any, values: dict[str, Tensor], arguments: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Interprets the graph; `values` are parameters, buffers and constants by name."""
    environment: dict[Any, Any] = {}
    placeholders = iter(arguments)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            environment[node] = next(placeholders)
        elif node.op == "get_attr":
            environment[node] = values[node.target]
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), environment.__getitem__)
            environment[node] = node.target(*args, **kwargs)
    return tuple(environment[term] for term in captured.output.args[0])


def run_together(
    captured: Any, values: dict[str, Tensor], parts: Sequence[Sequence[Tensor]]
) -> Tensor:
    """All parts in step, as devices do: a node with `all_reduce` gets the sum of its values over
    the parts. Gives the sum of outputs.
    """
    environments: list[dict[Any, Any]] = [{} for _ in parts]
    iterators = [iter(part) for part in parts]
    for node in captured.graph.nodes:
        for environment, arguments in zip(environments, iterators, strict=True):
            if node.op == "placeholder":
                environment[node] = next(arguments)
            elif node.op == "get_attr":
                environment[node] = values[node.target]
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg(
                    (node.args, node.kwargs), environment.__getitem__
                )
                environment[node] = node.target(*args, **kwargs)
        if node.meta.get("all_reduce"):
            total = sum(environment[node] for environment in environments)
            for environment in environments:
                environment[node] = (
                    total.clone()
                )  # export leaves in-place additions in these graphs
    return sum(
        environment[term] for environment in environments for term in captured.output.args[0]
    )  # type: ignore[return-value]


def state_values(model: nn.Module, captured: Any) -> dict[str, Tensor]:
    named = {
        f"model.{name}": value for name, value in model.named_parameters(remove_duplicate=False)
    }
    named |= {f"model.{name}": value for name, value in model.named_buffers(remove_duplicate=False)}
    return named | captured.constants


def whole_values(plan: LossPlan, values: dict[str, Tensor], batch: Batch) -> tuple[Tensor, ...]:
    assert plan.whole_graph is not None
    assert not list(plan.whole_graph.parameters())
    for attribute, name in plan.whole_buffers.items():
        setattr(plan.whole_graph, attribute, values[name].detach().clone())
    return tuple(plan.whole_graph(*batch.values()))


def cut(batch: Batch, sizes: Sequence[int]) -> list[list[Tensor]]:
    total = sum(sizes)
    parts = []
    start = 0
    for size in sizes:
        parts.append(
            [
                value[start : start + size] if value.dim() and value.shape[0] == total else value
                for value in batch.values()
            ]
        )
        start += size
    return parts


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def check(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    tolerance: float,
    partitions: Sequence[Sequence[int]],
    all_reduce: bool = False,
) -> LossPlan:
    """Compares with eager PyTorch on the whole batch: loss, and gradients relative to the largest
    of the model.
    """
    expected = loss(model, batch)
    expected_gradients = gradients(model, expected)
    captured = export_graph(model, batch, loss)
    plan = rewrite_loss(captured, SampleFlow(captured, value_kinds(captured), all_reduce))
    assert plan.not_additive is None, plan.not_additive and plan.not_additive.message
    assert len(plan.terms) == len(captured.output.args[0])
    values = state_values(model, captured)
    whole = whole_values(plan, values, batch)
    scale = max(gradient.abs().max().item() for gradient in expected_gradients)
    for sizes in partitions:
        parts = [[*part, *whole] for part in cut(batch, sizes)]
        if all_reduce:
            total = run_together(captured, values, parts)
        else:
            total = sum(term for part in parts for term in run(captured, values, part))  # type: ignore[assignment]
        assert total.shape == expected.shape
        assert total.dtype == expected.dtype
        assert abs(total.item() - expected.item()) <= tolerance * max(abs(expected.item()), 1.0), (
            sizes
        )
        for ours, theirs in zip(gradients(model, total), expected_gradients, strict=True):
            assert (ours - theirs).abs().max().item() <= tolerance * max(scale, 1.0), sizes
    return plan
