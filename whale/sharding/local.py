"""The local form of an operation: the same operation where its arguments hold no sizes, with local
sizes where they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from whale.compat import schema
from whale.operations.nodes import op_name
from whale.operations.operation import Shape, Shapes, dims_of_argument
from whale.operations.reductions import SUM
from whale.operations.table import EXPANDS, NEW_LIKE, POOLINGS, SPLITS, VIEWS

aten = torch.ops.aten


def local_call(
    graph: Graph,
    node: Node,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    shapes: Sequence[Shape] | None,
    mean: Shapes | None,
) -> Node:
    """The node of one operation. `shapes`: of its local results; None: it runs whole. `mean`: what
    it takes a mean over is cut: it sums its part and divides by the whole number.
    """
    positional, keywords = arguments
    name = op_name(node)
    if mean is not None:
        return _mean(graph, node, positional, keywords, mean)
    if shapes is not None:
        if name in VIEWS:
            return graph.call_function(aten.reshape.default, (positional[0], list(shapes[0])))
        if name in EXPANDS:
            return graph.call_function(aten.expand.default, (positional[0], list(shapes[0])))
        if name in SPLITS:
            dim = dims_of_argument(node, "dim", len(shapes[0]))[0]
            return graph.call_function(
                aten.split_with_sizes.default,
                (positional[0], [shape[dim] for shape in shapes], dim),
            )
        if name in NEW_LIKE:
            sizes = list(shapes[0])
            return graph.call_function(
                node.target,  # type: ignore[arg-type]
                (positional[0], sizes, *positional[2:]),
                keywords,
            )
        if node.target is aten.repeat_interleave.self_int:
            return _repeat_interleave(graph, node, positional, keywords, shapes[0])
        if name == "type_as":
            return graph.call_function(aten.to.dtype, (positional[0], node.meta["val"].dtype))
        if name.startswith("conv"):
            return _convolution(graph, node, positional, keywords, shapes[0])
        if name in POOLINGS and 0 in shapes[0]:
            return graph.call_function(
                empty_pooling, (positional[0], [list(shape) for shape in shapes])
            )
        if name.startswith("fft_") and 0 in shapes[0]:
            dtype = node.meta["val"].dtype
            return graph.call_function(empty_transform, (positional[0], list(shapes[0]), dtype))
    return graph.call_function(node.target, positional, keywords)  # type: ignore[arg-type]


def _repeat_interleave(
    graph: Graph, node: Node, positional: tuple[Any, ...], keywords: dict[str, Any], shape: Shape
) -> Node:
    """The node of entries that are repeated. A single one (one head of keys for all queries) every
    device has, and repeats it as often as its own part wants.
    """
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    dim = dims_of_argument(node, "dim", x.dim())[0]
    given = {**keywords, "output_size": None}
    if isinstance(x.shape[dim], int) and x.shape[dim] == 1:
        positional = positional[:1]
        given |= {"repeats": shape[dim], "dim": dim}
    return graph.call_function(aten.repeat_interleave.self_int, positional, given)


def _convolution(
    graph: Graph, node: Node, positional: tuple[Any, ...], keywords: dict[str, Any], shape: Shape
) -> Node:
    """The node of a convolution on a device that may have no channels: torch gives a result of the
    wrong shape there.
    """
    bias = positional[2] if len(positional) > 2 else keywords.get("bias")
    others = {name: value for name, value in keywords.items() if name != "bias"}
    arguments: Any = (
        node.target,
        positional[0],
        positional[1],
        bias,
        list(shape),
        list(positional[3:]),
        others,
    )
    return graph.call_function(convolve, arguments)


def convolve(
    target: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: list[int],
    options: list[Any],
    keywords: dict[str, Any],
) -> Tensor:
    """A convolution that also works without channels: zeros, and the bias."""
    if weight.numel():
        result: Tensor = target(x, weight, bias, *options, **keywords)
        return result
    zeros = x.new_zeros(shape) + x.sum() * 0 + weight.sum()  # with a history
    return zeros if bias is None else zeros + bias.view(-1, *[1] * (len(shape) - 2))


def empty_pooling(x: Tensor, shapes: list[list[int]]) -> Tensor | tuple[Tensor, Tensor]:
    """The empty result, with a gradient history, of pooling on a device without channels, which
    torch refuses; where asked for, the indices of the largest, too.
    """
    result = x.new_empty(shapes[0]) + x.sum()
    return result if len(shapes) == 1 else (result, x.new_empty(shapes[1], dtype=torch.int64))


def empty_transform(x: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A Fourier transform on a device without rows, which MKL refuses: nothing, with a history."""
    total = x.sum()
    if total.is_complex() and not dtype.is_complex:
        total = total.real
    return x.new_empty(shape, dtype=dtype) + total


def _mean(
    graph: Graph, node: Node, positional: tuple[Any, ...], keywords: dict[str, Any], shapes: Shapes
) -> Node:
    if op_name(node) != "mean":
        whole_shape = torch.broadcast_shapes(
            *(shapes.of(source.meta["val"]) for source in node.all_input_nodes)
        )
        names = [each.name for each in schema(node.target).arguments]
        given = dict(zip(names, positional)) | keywords | {"reduction": SUM}
        total = graph.call_function(node.target, (), given)  # type: ignore[arg-type]
        return graph.call_function(aten.div.Tensor, (total, float(prod(whole_shape))))
    before = shapes.of(node.args[0].meta["val"])  # type: ignore[union-attr]
    dims = dims_of_argument(node, "dim", len(before))
    keep = bool(positional[2]) if len(positional) > 2 else bool(keywords.get("keepdim", False))
    dtype = {"dtype": keywords["dtype"]} if keywords.get("dtype") is not None else {}
    total = graph.call_function(aten.sum.dim_IntList, (positional[0], dims, keep), dtype)
    return graph.call_function(aten.div.Tensor, (total, float(prod(before[dim] for dim in dims))))
