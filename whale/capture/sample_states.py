"""States of values in the walk over the samples (capture/samples.py), and what the rules need to
know of shapes and operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from whale.operations.nodes import named_args, op_name
from whale.operations.table import CREATORS, is_pointwise


@dataclass(frozen=True)
class Irregular:
    """A dim that holds rows of all samples, but not as outer x s x inner. Two such dims match when
    they were made alike.
    """

    sizes: tuple[sympy.Expr, ...] = ()
    """of the values that were concatenated"""
    mask: Node | None = None
    """the mask that picked the rows, sample after sample"""


@dataclass(frozen=True)
class Position:
    """The values of sample i are i x stride + something from `low` on: row numbers of sample i in a
    dim of s x stride rows.
    """

    stride: int
    low: int = 0
    moved: bool = False
    """a tensor was added, which must stay below `stride`"""


@dataclass(frozen=True)
class Shared:
    """A value that does not depend on which part of the batch is computed."""


@dataclass(frozen=True)
class PerSample:
    """One dim holds the samples, and sample i depends on sample i only."""

    dim: int
    outer: int | Irregular = 1
    """how often the samples repeat inside the dim: 1 = the batch is its outermost part, as slicing
    needs
    """
    position: Position | None = None
    """the values say where a sample stands in the batch (`arange(batch)`): good for indexing the
    batch, and nothing else
    """


@dataclass(frozen=True)
class Summed:
    """The value of the mini-batch is the sum of the values of its parts."""

    origin: Node
    """the reduction over the samples"""


@dataclass(frozen=True)
class Whole:
    """Depends on the inputs of all samples, and on no weight."""


@dataclass(frozen=True)
class Size:
    """A number made from the number of samples."""


@dataclass(frozen=True)
class Mixed:
    """The value of a part says nothing simple about the whole."""

    origin: Node
    """the operation that mixed the samples"""
    reason: str


State = Shared | PerSample | Summed | Whole | Size | Mixed
SHARED = Shared()


# --------------------------------------------------------------------------------------------------
# shapes


def expression(size: Any) -> sympy.Expr:
    """A size (int, symbolic int, or the node that holds one) as a sympy expression."""
    if isinstance(size, Node):
        size = size.meta["val"]
    if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return size.node.expr
    return sympy.sympify(size)


def batch_dims(value: Any, symbol: sympy.Symbol) -> list[int]:
    """Dims whose size holds the batch symbol."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return []
    dims: list[int] = []
    for dim, size in enumerate(value.shape):
        if isinstance(size, torch.SymInt) and symbol in expression(size).free_symbols:
            dims.append(dim)
    return dims


def batch_dim(value: Any, symbol: sympy.Symbol) -> int | None:
    """The dim whose size holds the batch symbol, or None (no such dim, or several)."""
    dims = batch_dims(value, symbol)
    return dims[0] if len(dims) == 1 else None


def whole_number(value: sympy.Expr) -> int | None:
    """A positive integer, or None for any other expression."""
    value = sympy.simplify(value)
    return int(value) if value.is_Integer and value > 0 else None


def rank_of(node: Node) -> int:
    """Number of dims of the tensor that a node gives."""
    return len(node.meta["val"].shape)


def value_slot(node: Node, operand: Node) -> str | None:
    """How `node` uses a number: `tensor` (a tensor may stand there as well), `number`, or None: as
    a size, index or bound.
    """
    name = op_name(node)
    if name in CREATORS:
        filled = [value for key, value in named_args(node).items() if key in ("fill_value", "s")]
        return "number" if operand in filled else None
    if not is_pointwise(node):
        return None
    takes_tensor = str(node.target).endswith(".Tensor")
    return "tensor" if takes_tensor and named_args(node).get("other") is operand else "number"
