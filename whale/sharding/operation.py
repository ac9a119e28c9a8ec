"""What the rules know of one operation: its tensor inputs by name, shapes, and the options that its
dims give.

An **option** says for one axis how all tensors of an operation lie along it: each is cut on one of
its dims, the same everywhere, or a partial sum. Most rules only name the dims: dims with the same
letter run along each other, as in an einsum. Cutting a letter cuts every tensor that has it; a
tensor without it is the same everywhere; a result without it is a partial sum when the letter is
summed over.

Shapes are read at a prime number of samples: a size that this prime divides holds the samples,
whatever else it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from whale.capture.kinds import op_name
from whale.capture.ops import OpOverload, argument
from whale.compat import schema

SAME = "same"
PARTIAL = "partial"
Placement = int | str
"""along one axis: the dim that is cut, SAME or PARTIAL"""

PRIME = 1_000_003
"""number of samples at which rules read shapes: no size of a model is a multiple of it by chance"""

Shape = tuple[int, ...]
Label = str | None
ONLY_FIRST = frozenset({"view_as", "reshape_as", "expand_as", "type_as"})
"""operations that read only the shape or dtype of their second tensor"""


@dataclass(frozen=True)
class Option:
    """One way to run an operation along one axis."""

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local: str = ""
    """what runs instead of the operation itself: a key of `emit.LOCAL`"""
    segments: tuple[int, ...] = ()
    """how many runs of the dim each input, then each output has in proportion to the others; () =
    all alike
    """
    apart: tuple[int, ...] = ()
    """inputs that are cut in granules of their own: experts, while the tokens are cut by samples"""

    @property
    def is_cut(self) -> bool:
        return any(isinstance(placement, int) for placement in (*self.inputs, *self.outputs))


class Shapes:
    """Shapes of fake tensors at some number of samples."""

    def __init__(self, symbol: sympy.Symbol, num_samples: int = PRIME) -> None:
        self.symbol = symbol
        self.num_samples = num_samples

    def of(self, tensor: torch.Tensor) -> Shape:
        return tuple(self.size(size) for size in tensor.shape)

    def size(self, size: Any) -> int:
        return (
            size
            if isinstance(size, int)
            else _evaluate(size.node.expr, self.symbol, self.num_samples)
        )

    def tensors(self, node: Node) -> list[Shape]:
        """Of every tensor that a node gives."""
        value = node.meta.get("val")
        values = value if isinstance(value, list | tuple) else [value]
        return [self.of(each) for each in values if isinstance(each, torch.Tensor)]


@lru_cache(maxsize=65536)
def _evaluate(expression: sympy.Expr, symbol: sympy.Symbol, num_samples: int) -> int:
    others = {other: _other_prime(str(other)) for other in expression.free_symbols - {symbol}}
    return int(expression.subs({symbol: num_samples, **others}))


def _other_prime(name: str) -> int:
    """A size that depends on data: some large prime, the same at every call."""
    return int(
        sympy.nextprime(
            2_000_003
            + sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 1_000_000
        )
    )


class Operation:
    """One node as the rules see it."""

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
        self._defaults = {each.name: each.default_value for each in declared}
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
        """As given, or the default; None where there is none."""
        return self._values.get(name, self._defaults.get(name))

    def slot(self, name: str) -> int | None:
        """Place among `inputs` of the tensor that is this argument."""
        found = self.slots.get(name, [])
        return found[0] if found else None

    def shape(self, name: str) -> Shape | None:
        slot = self.slot(name)
        return None if slot is None else self.shapes[slot]

    def named(self, /, **labels: Sequence[Label]) -> list[Sequence[Label]]:
        """Labels of each input in order, given by argument name; an argument that is not there is
        left out, one without labels has none.
        """
        result: list[Sequence[Label]] = [(None,) * len(shape) for shape in self.shapes]
        for name, letters in labels.items():
            for slot in self.slots.get(name, []):
                result[slot] = letters
        return result


def tensor_nodes(value: Any) -> list[Node]:
    """Nodes inside an argument that hold tensors, in order."""
    found: list[Node] = []
    map_arg(
        value,
        lambda node: found.append(node) if isinstance(node.meta.get("val"), torch.Tensor) else None,
    )
    return found


# ------------------------------------------------------------------------------------------------------------
# options from labels


def labelled(
    op: Operation,
    inputs: Sequence[Sequence[Label]],
    outputs: Sequence[Sequence[Label]],
    *,
    sums: Collection[str] = (),
    added: Collection[int | None] = (),
    local: Mapping[str, str] | None = None,
    after: Mapping[str, Placement] | None = None,
) -> list[Option]:
    """One option for each letter. `sums`: letters that results are summed over; `added`: inputs
    that are added to the sum, so only once; `local`: what runs when a letter is cut; `after`: how a
    result without that letter lies then (else it must be in every result)."""
    letters = dict.fromkeys(
        label for labels in (*inputs, *outputs) for label in labels if label is not None
    )
    options = []
    for letter in letters:
        ends = after.get(letter) if after else None
        option = _cut(op, letter, inputs, outputs, PARTIAL if letter in sums else ends)
        if option is None:
            continue
        before, results = option
        if letter in sums:
            before = tuple(PARTIAL if place in added else one for place, one in enumerate(before))
        options.append(Option(letter, before, results, (local or {}).get(letter, "")))
    return options


def _cut(
    op: Operation,
    letter: str,
    inputs: Sequence[Sequence[Label]],
    outputs: Sequence[Sequence[Label]],
    without: Placement | None,
) -> tuple[tuple[Placement, ...], tuple[Placement, ...]] | None:
    """Placements when this letter is cut; None when that cannot be."""
    shapes = [*op.shapes, *op.outputs]
    largest = max(
        (
            shape[dim]
            for shape, labels in zip(shapes, (*inputs, *outputs), strict=True)
            for dim, one in enumerate(labels)
            if one == letter
        ),
        default=1,
    )
    placements: list[Placement] = []
    for place, (shape, labels) in enumerate(zip(shapes, (*inputs, *outputs), strict=True)):
        dims = [
            dim
            for dim, one in enumerate(labels)
            if one == letter and (shape[dim] > 1 or largest == 1)
        ]
        if len(dims) > 1 or largest == 1:
            return None
        if dims:
            placements.append(dims[0])
        elif place < len(inputs):
            placements.append(SAME)
        elif without is not None:
            placements.append(without)
        else:
            return None
    return tuple(placements[: len(inputs)]), tuple(placements[len(inputs) :])


def partial_options(op: Operation, groups: Iterable[Collection[int | None]]) -> list[Option]:
    """Options in which some inputs are partial sums, and so are the results: the operation is
    linear in each of these groups of inputs.
    """
    options = []
    for number, group in enumerate(groups):
        inputs = tuple(PARTIAL if place in group else SAME for place in range(len(op.inputs)))
        options.append(Option(f"partial {number}", inputs, (PARTIAL,) * len(op.outputs)))
    return options


def whole_option(op: Operation) -> Option:
    """Every device does all of it."""
    return Option("whole", (SAME,) * len(op.inputs), (SAME,) * len(op.outputs))


Rule = Callable[[Operation], list[Option]]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Registers the rule of operations by name, separated by blanks."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def dims_of(op: Operation, rank: int, name: str = "dim") -> list[int]:
    """The dims that an argument names, counted from the left; none given means all."""
    return wrapped(op.argument(name), rank)


def dims_of_argument(node: Node, name: str, rank: int) -> list[int]:
    """The same from a node alone."""
    return wrapped(argument(node, name), rank)


def wrapped(given: Any, rank: int) -> list[int]:
    if given is None or given == []:
        return list(range(rank))
    return [
        int(dim) % max(rank, 1) for dim in (given if isinstance(given, list | tuple) else [given])
    ]


def letters(prefix: str, rank: int) -> list[Label]:
    """`d0 d1 d2`: a label for each dim."""
    return [f"{prefix}{dim}" for dim in range(rank)]
