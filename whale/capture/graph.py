"""The captured model: one flat functional graph with a symbolic batch, and what is known about its
inputs and weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import Graph, Node


@dataclass(frozen=True)
class BatchTensor:
    """One tensor of the batch, in the order of the graph's placeholders."""

    path: str
    """where it stands in the user's batch, as he would write it: `['input_ids']`, `[0]`"""
    shape: tuple[int, ...]
    """shape in the sample batch"""
    dtype: torch.dtype
    batched: bool
    """dim 0 is the batch; otherwise every device gets the whole tensor"""


@dataclass(frozen=True)
class StateTensor:
    """A parameter, buffer or constant of the model, under its first name."""

    name: str
    kind: str
    """`parameter`, `buffer` or `constant`"""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    aliases: tuple[str, ...] = ()
    """further names of the same tensor (tied weights)"""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass
class CapturedGraph:
    """What `capture` gives: see docs/internals.md section 1 for the conventions of `graph`."""

    graph: Graph
    inputs: tuple[BatchTensor, ...]
    state: dict[str, StateTensor]
    constants: dict[str, torch.Tensor]
    """values of the `constant` entries of `state`"""
    batch_symbol: sympy.Symbol
    batch_size: int
    """of the sample batch, the hint behind `batch_symbol`"""
    buffer_updates: dict[str, Node] = field(default_factory=dict)
    """buffer name -> node that holds its value after one forward"""
    notes: list[str] = field(default_factory=list)
    """what the user should know: replicated inputs, dropped outputs, recompute requests"""

    @property
    def output(self) -> Node:
        return next(node for node in reversed(self.graph.nodes) if node.op == "output")

    def compute_nodes(self) -> Iterable[Node]:
        return (node for node in self.graph.nodes if node.op == "call_function")


def user_line(node: Node) -> str:
    """`file.py:12: the source line` of the user's code that made this node, or the node's
    own name.
    """
    trace = node.meta.get("stack_trace")
    if not trace:
        return node.name
    lines = [line.strip() for line in trace.strip().splitlines()]
    places = [index for index, line in enumerate(lines) if line.startswith("File ")]
    # the innermost frame outside torch is what the user wrote
    foreign = ("/torch/", "/whale/capture/", "<eval_with_key>")
    own = [index for index in places if not any(part in lines[index] for part in foreign)] or places
    frame = lines[own[-1]].split('"')
    file_name = frame[1].rsplit("/", 1)[-1]
    line_number = frame[2].split("line ")[1].split(",")[0]
    source = lines[own[-1] + 1] if own[-1] + 1 < len(lines) else ""
    return f"{file_name}:{line_number}: {source}"


def module_name(node: Node) -> str:
    """Name of the innermost module that this node was called in (`''` is the model itself)."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [value[0] for value in stack.values()]
    return str(names[-1]) if names else ""
