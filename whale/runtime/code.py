"""A chunk as one plain Python function: the same operations in the same order, each called in the
cheapest way.

A small micro-batch spends a few milliseconds in a chunk, which has about a hundred operations.
`module(...)` looks up every weight through nested modules and calls every operation through
`torch.ops`, whatever the device. Without that a forward of 4 layers with 1 x 128 tokens takes 17.6
instead of 18.5 ms of CPU time (docs/log.md); on an accelerator it is launches that come earlier.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from whale.capture.graph import Recomputed
from whale.config_values import REDUCE_OVERHEAD
from whale.lowering.blocks import need, need_in_backward
from whale.lowering.sharded_norms import batch_norm
from whale.lowering.subgroups import sum_over_subgroup
from whale.runtime.split import Deferred, replacements

aten = torch.ops.aten

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.tanh.default: torch.tanh,
    aten.relu.default: torch.relu,
    aten.sigmoid.default: torch.sigmoid,
    aten.rsqrt.default: torch.rsqrt,
    aten.neg.default: torch.neg,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.matmul.default: torch.matmul,
    aten.linear.default: F.linear,
    aten.embedding.default: torch.embedding,
    aten.layer_norm.default: torch.layer_norm,
    aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    aten.gelu.default: F.gelu,
    aten.dropout.default: torch.dropout,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.reshape.default: torch.reshape,
    aten.cat.default: torch.cat,
}
"""functions of torch that take the same arguments in the same places and go straight to the same
operation
"""

METHODS: dict[Any, str] = {
    aten.view.default: "view",
    aten.sym_size.int: "size",
    aten.expand.default: "expand",
}
"""the same for methods of tensors"""


def compile_chunk(
    module: GraphModule,
    name: str,
    deferred: Deferred | None = None,
    with_torch: bool | str = False,
) -> Callable[..., tuple[Tensor, ...]]:
    """What calling the module does; `name` stands in tracebacks. Weights are the module's own
    tensors, which never change identity.

    `deferred`: takes the weight products of the backward, which are then left to the caller
    (`runtime/split.py`). `with_torch`: `torch.compile` makes kernels of it, in this mode where one
    is named. Layers whose weight products are put off, sums between devices and recomputed regions
    stay as they are, and what lies between them is compiled.
    """
    instead: dict[Any, Callable[..., Any]] = (
        {} if deferred is None else dict(replacements(deferred))
    )
    if with_torch:
        instead = {
            operation: torch.compiler.disable(function) for operation, function in instead.items()
        }
        instead |= {
            function: torch.compiler.disable(function)
            for function in (batch_norm, sum_over_subgroup, need, need_in_backward)
        }
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    weights = SimpleNamespace()
    for number, node in enumerate(graph.nodes):
        if node.op == "get_attr":
            setattr(weights, f"w{number}", operator.attrgetter(str(node.target))(module))
            node.target = f"w{number}"
        elif node.op == "call_module":
            # a region that is recomputed in backward, or what a grid does together
            region = module.get_submodule(str(node.target))
            is_split = deferred is not None and isinstance(region, Recomputed)
            called: Callable[..., Any] = _split_region(region, instead) if is_split else region
            setattr(weights, f"m{number}", torch.compiler.disable(called) if with_torch else called)
            node.target = f"m{number}"
        elif node.op == "call_function":
            node.target = instead.get(node.target, node.target)
            _call_directly(node)
    code = graph.python_code("self")
    file_name = f"<{name} of Whale>"
    names = dict(code.globals)
    exec(compile(code.src, file_name, "exec"), names)
    # so that tracebacks show the line
    linecache.cache[file_name] = (
        len(code.src),
        None,
        code.src.splitlines(keepends=True),
        file_name,
    )
    function = names["forward"]
    if with_torch == REDUCE_OVERHEAD:
        # a recorded graph of launches has one shape: another number of samples gets its own
        function = torch.compile(function, mode=REDUCE_OVERHEAD, dynamic=False)
    elif with_torch:
        function = torch.compile(function)
    return partial(function, weights)


def _call_directly(node: Node) -> None:
    if node.target in FUNCTIONS:
        node.target = FUNCTIONS[node.target]
    elif node.target in METHODS:
        node.op = "call_method"
        node.target = METHODS[node.target]


def _split_region(
    region: torch.nn.Module, instead: Mapping[Any, Callable[..., Tensor]]
) -> Recomputed:
    """The region with its layers replaced; those under `torch.utils.checkpoint` are put off
    when the region is recomputed.
    """
    assert isinstance(region, Recomputed)
    graph = Graph()
    graph.output(graph.graph_copy(region.body.graph, {}))
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = instead.get(node.target, node.target)
    split = Recomputed(GraphModule(region.body, graph))
    split.contexts = region.contexts
    return split
