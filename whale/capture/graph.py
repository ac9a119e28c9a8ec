"""The captured model: one flat functional graph with a symbolic batch, and what is known about its
inputs and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import checkpoint, noop_context_fn

TRACE_KEYS = ("nn_module_stack", "stack_trace", "custom", "autocast")
"""keys of `node.meta` that say where an operation stands in the user's model: modules, source line,
annotation tags, and the autocast region
"""


@dataclass(frozen=True)
class BatchTensor:
    """One tensor of the batch, in the order of the graph's placeholders."""

    path: str
    """path in the user's batch, in Python's notation: `['input_ids']`, `[0]`"""
    shape: tuple[int, ...]
    """shape in the sample batch"""
    dtype: torch.dtype
    batched: bool
    """dim 0 is the batch; otherwise every device gets the whole tensor"""
    lengths: tuple[tuple[int, str], ...] = ()
    """(dim, name) of dims that vary between batches; dims of one name have one size in a batch"""


_TAKEN = frozenset(dir(GraphModule(torch.nn.Module(), Graph())))
"""names that every GraphModule has itself: `code`, `graph`, `meta`"""
_APART = "whale_"


def attribute_of(name: str) -> str:
    """Where a GraphModule has the tensor of this name, which may be one that is taken."""
    # a name that begins like this by itself must come back from `name_at` as it is
    is_taken = name.partition(".")[0] in _TAKEN or name.startswith(_APART)
    return f"{_APART}{name}" if is_taken else name


def name_at(attribute: object) -> str:
    """The name of the tensor that lies there."""
    return str(attribute).removeprefix(_APART)


@dataclass(frozen=True)
class StateTensor:
    """A parameter, buffer or constant of the model, under its first name."""

    name: str
    kind: str
    """`parameter`, `buffer` or `constant`"""
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    """a parameter that gets a gradient"""
    aliases: tuple[str, ...] = ()
    """further names of the same tensor (tied weights)"""

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Length:
    """A size that varies between batches and is a symbol of the graph: a sequence length, say."""

    name: str
    symbol: sympy.Symbol
    places: tuple[tuple[int, int], ...]
    """(tensor of the batch, dim) that have this size"""
    size: int
    """in the sample batch"""


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
    """number of samples of the sample batch, the hint behind `batch_symbol`"""
    lengths: tuple[Length, ...] = ()
    """further symbols; empty: the graph is for one length"""
    buffer_updates: dict[str, Node] = field(default_factory=dict)
    """buffer name -> node that holds its value after one forward"""
    notes: list[str] = field(default_factory=list)
    """what the user should know: replicated inputs, dropped outputs, recompute requests"""

    @property
    def output(self) -> Node:
        return self.graph.output_node()

    @property
    def results(self) -> list[Node]:
        """What the graph returns, in order."""
        return list(self.output.args[0])  # type: ignore[arg-type]

    @property
    def placeholders(self) -> list[Node]:
        """The tensors of the batch, then the values of the whole mini-batch (`whole_0`, ...)."""
        return self.graph.find_nodes(op="placeholder")  # type: ignore[return-value]

    @property
    def symbols(self) -> frozenset[sympy.Symbol]:
        """What sizes are made of: the number of samples, and lengths."""
        return frozenset([self.batch_symbol, *(length.symbol for length in self.lengths)])

    @property
    def batched_input(self) -> Node:
        """The first tensor of the batch whose dim 0 is the samples."""
        for node, tensor in zip(self.placeholders, self.inputs, strict=False):
            if tensor.batched:
                return node
        raise AssertionError("a batch has a batched tensor")

    def compute_nodes(self) -> Iterable[Node]:
        return (node for node in self.graph.nodes if node.op == "call_function")


def insert_call(
    before: Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: Node,
    value: Any = None,
) -> Node:
    """Returns a new operation in front of `before` that stands where `like` stands in the user's
    model. Its fake value is computed when `value` is not given.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs or {})
    if value is None:
        fake_args, fake_kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with torch.no_grad():
            value = target(*fake_args, **fake_kwargs)
    node.meta.update({key: like.meta[key] for key in TRACE_KEYS if key in like.meta}, val=value)
    return node


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


class Recomputed(torch.nn.Module):
    """A region of a stage whose activations are recomputed in backward: only its inputs are saved.
    `torch.utils.checkpoint` also restores the random state for dropout.
    """

    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self.body = body
        self.contexts: Callable[[], tuple[Any, Any]] = noop_context_fn
        """around one forward and its recomputation; where weights live elsewhere, lowering sets it
        """

    def forward(self, *inputs: object) -> object:
        if not torch.is_grad_enabled():
            return self.body(*inputs)
        return checkpoint(self.body, *inputs, use_reentrant=False, context_fn=self.contexts)


def cut_region(nodes: list[Node], results: set[Node]) -> tuple[Graph, list[Node], list[Node]]:
    """Returns (graph that has one placeholder for each input, inputs, outputs) of a region of
    operations. The caller copies the operations in.
    """
    own = set(nodes)
    inputs: dict[Node, None] = {}
    outputs = []
    for node in nodes:
        inputs.update(dict.fromkeys(each for each in node.all_input_nodes if each not in own))
        if node in results or not own.issuperset(node.users):
            outputs.append(node)
    graph = Graph()
    for source in inputs:
        graph.placeholder(source.name)
    return graph, list(inputs), outputs
