"""One node of a captured graph as the rows of the table see it: its tensors by argument name, and
their shapes.

Shapes are read at a prime number of samples: a size that this prime divides holds the samples,
whatever else it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node

from whale.compat import schema
from whale.operations.nodes import OpOverload, argument, op_name, tensor_nodes

PRIME = 1_000_003
"""number of samples at which rows read shapes: no size of a model is a multiple of it by chance"""

Shape = tuple[int, ...]
Label = str | None
"""name of a dim, as in an einsum; None: the operation needs the dim whole"""
Labels = Sequence[Label]

ONLY_FIRST = frozenset({"view_as", "reshape_as", "expand_as", "type_as"})
"""operations that read only the shape or dtype of their second tensor"""


class Shapes:
    """Shapes of fake tensors at some number of samples."""

    def __init__(self, symbol: sympy.Symbol, num_samples: int = PRIME) -> None:
        self.symbol = symbol
        self.num_samples = num_samples

    def of(self, tensor: torch.Tensor) -> Shape:
        """The shape as plain numbers."""
        return tuple(self.size(size) for size in tensor.shape)

    def size(self, size: Any) -> int:
        """One size as a plain number."""
        if isinstance(size, int):
            return size
        return _evaluate(size.node.expr, self.symbol, self.num_samples)

    def tensors(self, node: Node) -> list[Shape]:
        """Shapes of all tensors that a node gives."""
        value = node.meta.get("val")
        values = value if isinstance(value, list | tuple) else [value]
        return [self.of(each) for each in values if isinstance(each, torch.Tensor)]


@lru_cache(maxsize=65536)  # a graph holds few different expressions, each in thousands of shapes
def _evaluate(expression: sympy.Expr, symbol: sympy.Symbol, num_samples: int) -> int:
    others = {other: other_prime(str(other)) for other in expression.free_symbols - {symbol}}
    return int(expression.subs({symbol: num_samples, **others}))


@lru_cache(maxsize=1024)
def other_prime(name: str) -> int:
    """A stand-in for a length, or a size that depends on data: some large prime, the same at every
    call.
    """
    spread = sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 1_000_000
    return int(sympy.nextprime(2_000_003 + spread))


class Operation:
    """One node as the rows see it."""

    def __init__(self, node: Node, shapes: Shapes) -> None:
        self.node = node
        self.name = op_name(node)
        self.inputs: list[Node] = []
        self.slots: dict[str, list[int]] = {}
        """argument -> places in `inputs` of the tensors that it holds"""
        self._values: dict[str, Any] = {}
        target: Any = node.target
        declared = schema(target).arguments if isinstance(target, OpOverload) else ()
        names = [each.name for each in declared] or [str(place) for place in range(len(node.args))]
        self.defaults = {each.name: each.default_value for each in declared}
        for name, value in (*zip(names, node.args), *node.kwargs.items()):
            self._values[name] = value
            found = tensor_nodes(value)
            if self.name in ONLY_FIRST and self.inputs:
                found = []
            self.slots[name] = list(range(len(self.inputs), len(self.inputs) + len(found)))
            self.inputs.extend(found)
        self.shapes = [shapes.tensors(source)[0] for source in self.inputs]
        self.outputs = shapes.tensors(node)

    def argument(self, name: str) -> Any:
        """The argument as given, or its default; None where there is none."""
        return self._values.get(name, self.defaults.get(name))

    def slot(self, name: str) -> int | None:
        """Place among `inputs` of the tensor that is this argument."""
        found = self.slots.get(name, [])
        return found[0] if found else None

    def shape(self, name: str) -> Shape | None:
        """Shape of the tensor that is this argument."""
        slot = self.slot(name)
        return None if slot is None else self.shapes[slot]

    def named(self, /, **labels: Labels) -> list[Labels]:
        """Labels of each input in order, given by argument name; an argument that is not there is
        left out, one without labels has none.
        """
        result: list[Labels] = [(None,) * len(shape) for shape in self.shapes]
        for name, letters in labels.items():
            for slot in self.slots.get(name, []):
                result[slot] = letters
        return result


def dims_of(op: Operation, rank: int, name: str = "dim") -> list[int]:
    """The dims that an argument names, counted from the left; none given means all."""
    return wrapped(op.argument(name), rank)


def dims_of_argument(node: Node, name: str, rank: int) -> list[int]:
    """The dims that an argument of a node names, counted from the left; none given means all."""
    return wrapped(argument(node, name), rank)


def wrapped(given: Any, rank: int) -> list[int]:
    """Dims as non-negative numbers; None and an empty list mean all of them."""
    if given is None or given == [] or given == ():
        return list(range(rank))
    dims = given if isinstance(given, list | tuple) else [given]
    return [int(dim) % max(rank, 1) for dim in dims]


def letters(prefix: str, rank: int, whole: Collection[int] = ()) -> list[Label]:
    """A label for each dim, `d0 d1 d2`, but for those that are needed whole."""
    return [None if dim in whole else f"{prefix}{dim}" for dim in range(rank)]
