"""FLOPs of one operation of the captured graph, forward.

A multiply-add is two FLOP; only contractions count (an elementwise operation is limited by memory,
not by arithmetic). A contraction over indices of sizes n_1..n_r, each index counted once, costs

    2 * n_1 * ... * n_r.                                                                       (1)

torch's own counter (`torch.utils.flop_counter`) has formulas for what reaches the backend: mm,
addmm, bmm, convolution, ... The captured graph is from before that, so it also holds the operations
that PyTorch users call: the rows of the table name their formulas. Attention is counted without the
half that a causal mask saves, as torch's counter does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """Shape and dtype of one tensor, with the batch symbol replaced by a number."""

    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Arguments = Sequence[Any]
"""the operation's positional arguments, each tensor as a `Value`"""
Formula = Callable[[Arguments, Mapping[str, Any], Value], float]


def flop(
    node: Node,
    formula: Formula | None,
    arguments: Arguments,
    keywords: Mapping[str, Any],
    output: Any,
) -> float:
    """FLOP of one call by the formula of its row, else by torch's own counter; 0 where nothing is
    contracted.
    """
    if formula is not None:
        first_output = output[0] if isinstance(output, (tuple, list)) else output
        return formula(arguments, keywords, first_output)
    registered = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if registered is None:
        return 0.0
    # torch's formulas take tensors; on `meta` a tensor is its shape
    return float(registered(*_on_meta(arguments), **_on_meta(keywords), out_val=_on_meta(output)))


def _on_meta(value: Any) -> Any:
    if isinstance(value, Value):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return type(value)(_on_meta(element) for element in value)
    if isinstance(value, dict):
        return {key: _on_meta(element) for key, element in value.items()}
    return value


def linear(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """Source (..., in) times weight (out, in) or (in,)."""
    source = arguments[0].shape
    weight = arguments[1].shape
    return 2.0 * prod(source) * (weight[0] if len(weight) == 2 else 1)


def bilinear(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """Left (..., l) times weight (out, l, r) times right (..., r)."""
    left = arguments[0].shape
    weight = arguments[2].shape
    # each of the `out` slices: left @ slice, then a dot product with right
    return 2.0 * prod(left[:-1]) * (prod(weight) + weight[0] * weight[2])


def matmul(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """The last dim of the first operand is summed over: also dot, mv and broadcast batch dims."""
    return 2.0 * prod(output.shape) * arguments[0].shape[-1]


def added_matmul(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """Input + first @ second, where the second may be a vector."""
    first = arguments[1].shape
    second = arguments[2].shape
    return 2.0 * prod(first) * (second[-1] if len(second) > 1 else 1)


def grouped_matmul(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """A product for each group of rows."""
    first = arguments[0].shape
    second = arguments[1].shape
    # with one 2-D side the groups cut one of the three sizes; with two 3-D sides each group is a
    # whole product
    num_products = first[0] if len(first) == len(second) == 3 else 1
    return 2.0 * num_products * first[-2] * first[-1] * second[-1]


def tensordot(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """The dims of the third argument are summed over."""
    summed = [arguments[0].shape[dim] for dim in arguments[2]]
    return 2.0 * prod(output.shape) * prod(summed)


def convolution(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """Weight (out, in / groups, *window), applied at every place of the output."""
    weight = arguments[1].shape
    num_spatial = len(weight) - 2
    batch = output.shape[0] if len(output.shape) == len(weight) else 1
    return 2.0 * batch * prod(output.shape[-num_spatial:]) * prod(weight)


def transposed_convolution(
    arguments: Arguments, keywords: Mapping[str, Any], output: Value
) -> float:
    """Weight (in, out / groups, *window), applied at every place of the source."""
    source = arguments[0].shape
    weight = arguments[1].shape
    num_spatial = len(weight) - 2
    batch = source[0] if len(source) == len(weight) else 1
    return 2.0 * batch * prod(source[-num_spatial:]) * prod(weight)


def attention(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """Query and key (..., tokens, width); the keys may have fewer heads."""
    query = arguments[0].shape
    key = arguments[1].shape
    num_queries = prod(output.shape[:-1])
    num_keys = key[-2]
    return 2.0 * num_queries * num_keys * (query[-1] + output.shape[-1])


def recurrent(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """Every weight matrix meets every token once."""
    num_tokens = prod(arguments[0].shape[:-1])
    matrices = [prod(weight.shape) for weight in arguments[2] if len(weight.shape) == 2]
    return 2.0 * num_tokens * sum(matrices)


def einsum(arguments: Arguments, keywords: Mapping[str, Any], output: Value) -> float:
    """Pairs are contracted one after the other, in the order of `path` (else from the left), as
    torch does.
    """
    shapes = [operand.shape for operand in arguments[1]]
    inputs, result = einsum_labels(arguments[0], [len(shape) for shape in shapes])
    terms: list[set[str]] = []
    sizes: dict[str, int] = {}
    for names, shape in zip(inputs, shapes, strict=True):
        # a dim of size 1 is broadcast: it takes no part in a product
        terms.append({name for name, size in zip(names, shape, strict=True) if size != 1})
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    path = keywords.get("path")
    pairs = [(0, 1)] * (len(terms) - 1) if path is None else list(zip(path[::2], path[1::2]))
    total = 0.0
    for pair in pairs:
        second, first = (terms.pop(place) for place in sorted(pair, reverse=True))
        needed = set(result).union(*terms)
        if (first & second) - needed:
            # something is summed: a matrix product; otherwise it is an elementwise one
            alone = (first ^ second) - needed  # summed before the product
            total += 2.0 * prod(sizes[index] for index in (first | second) - alone)
        terms.insert(0 if path is None else len(terms), (first | second) & needed)
    return total


def einsum_labels(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Names of the dims of each operand, of that many dims, and of the result. Dims under `...` are
    named by digits, matched from the right.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        once = sorted(letter for letter in set(left) - set(",.") if left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    num_hidden: list[int] = []
    for term, rank in zip(terms, ranks, strict=True):
        num_hidden.append(rank - len(term.replace("...", "")))
    widest = max(num_hidden)
    inputs = [_spelt(term, number, widest) for term, number in zip(terms, num_hidden, strict=True)]
    return inputs, _spelt(right, widest, widest)


def _spelt(term: str, num_hidden: int, widest: int) -> list[str]:
    before, dots, after = term.partition("...")
    hidden = [str(widest - place) for place in range(num_hidden, 0, -1)] if dots else []
    return [*before, *hidden, *after]
