"""A region of a captured graph, run alone: what enters and leaves it, tensors that stand in for its
weights and inputs, and a forward and backward beside the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from whale.calibration.turns import Turn
from whale.capture.graph import CapturedGraph
from whale.costs.layer_times import LayerRegion
from whale.devices import LocalDevice

WEIGHT = 0.02
"""value of all weights: keeps the numbers of any layer small"""


@dataclass(frozen=True)
class Edges:
    """What a region has in common with the rest of the graph."""

    entering: tuple[Node, ...]
    """values of others, sizes among them"""
    state: tuple[Node, ...]
    """parameters, buffers and constants"""
    results: tuple[Node, ...]
    """tensors that others read"""

    @staticmethod
    def of(region: LayerRegion) -> Edges:
        inside = set(region.nodes)
        sources: dict[Node, None] = {}
        for node in region.nodes:
            sources.update(dict.fromkeys(s for s in node.all_input_nodes if s not in inside))
        results = []
        for node in region.nodes:
            is_read_outside = not inside.issuperset(node.users)
            if is_read_outside and isinstance(node.meta.get("val"), Tensor):
                results.append(node)
        return Edges(
            tuple(source for source in sources if source.op != "get_attr"),
            tuple(source for source in sources if source.op == "get_attr"),
            tuple(results),
        )


def stand_in_weight(
    captured: CapturedGraph, name: str, device: LocalDevice, shape: Sequence[int] | None = None
) -> Tensor:
    """A weight or buffer with small values, or the constant itself. `shape`: that of a shard."""
    state = captured.state[name]
    if state.kind == "constant":
        return captured.constants[name].to(device.name)
    size = tuple(state.shape if shape is None else shape)
    if not state.dtype.is_floating_point:
        return torch.zeros(size, dtype=state.dtype, device=device.name)
    value = torch.full(size, WEIGHT, dtype=state.dtype, device=device.name)
    return nn.Parameter(value, state.trainable) if state.kind == "parameter" else value


def stand_in_input(
    source: Node, shape: Sequence[int], device: LocalDevice, has_gradient: bool
) -> Tensor:
    """A tensor in the place of one that another operation would give."""
    dtype = source.meta["val"].dtype
    tensor = torch.zeros(tuple(shape), dtype=dtype, device=device.name)
    if dtype.is_floating_point:
        tensor = torch.rand_like(tensor)
        tensor.requires_grad_(has_gradient)
    return tensor


def timed_turn(
    module: nn.Module, make_inputs: Callable[[], list[Any]], device: LocalDevice
) -> Callable[[], Turn]:
    """A function that runs forward and backward once and gives the seconds of both."""
    inputs: list[Any] = []

    def turn() -> Turn:
        if not inputs:
            inputs.extend(make_inputs())
        synchronise = device.synchronise
        synchronise()
        start = time.perf_counter()
        results = [result for result in module(*inputs) if result.requires_grad]
        synchronise()
        middle = time.perf_counter()
        gradients = [torch.ones_like(result) for result in results]
        synchronise()
        again = time.perf_counter()
        if results:
            torch.autograd.backward(results, gradients)
        synchronise()
        end = time.perf_counter()
        module.zero_grad(set_to_none=True)
        for value in inputs:
            if isinstance(value, Tensor):
                value.grad = None
        return [middle - start, end - again]

    return turn
