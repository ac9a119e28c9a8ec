"""Sizes of captured tensors: expressions of the batch size, evaluated at some number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import sympy
import torch

Size: TypeAlias = "int | torch.SymInt | sympy.Expr"
"""a number, or an expression of symbols"""


def shape_at(shape: Sequence[Size], symbol: sympy.Symbol, num_samples: int) -> tuple[int, ...]:
    """The shape with the batch symbol replaced by a number."""
    return tuple(size_at(size, symbol, num_samples) for size in shape)


def size_at(size: Size, symbol: sympy.Symbol, num_samples: int) -> int:
    """One size with the batch symbol replaced by a number."""
    if isinstance(size, int):
        return size
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    return num_samples if expression == symbol else _evaluate(expression, symbol, num_samples)


@lru_cache(maxsize=65536)  # a graph holds few different expressions, each in thousands of shapes
def _evaluate(expression: sympy.Expr, symbol: sympy.Symbol, num_samples: int) -> int:
    number = expression.subs(symbol, num_samples)
    if number.free_symbols:
        names = ", ".join(sorted(map(str, number.free_symbols)))
        raise ValueError(
            f"the size {expression} of a result depends on what tensors hold ({names}), not only "
            f"on the batch ({symbol}): nothing can be planned with it. Try: keep the full shape "
            "and mask it (`torch.where(mask, x, 0)`), `F.one_hot(y, n).sum(0)` instead of "
            "`bincount`"
        )
    return int(number)
