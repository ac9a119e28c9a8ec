"""Which dims of which values are cut together, and in which granules.

Dims that an option cuts together form a class. All members have the same number of granules, so
that the same granules are on the same device whatever the tensor: the width of a projection and the
heads it is viewed as, tokens [samples x length] and samples.

    size of a dim = segments * count * unit                                                    (1)
    count = greatest common divisor of size / segments over the class

Segments differ inside a class by constant ratios: a fused [q k v] has three for one of its parts. A
class whose ratios contradict each other, or whose sizes are not multiples of them, is never cut. In
a class of samples a granule is one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd

import torch
from torch.fx import Node

from whale.operations.operation import PRIME, Shapes
from whale.plans.layout import Cut
from whale.sharding.options import Option

Value = tuple[Node, int]
"""a tensor of the graph: node, and which of its results"""
Dim = tuple[Value, int]


def value_of(node: Node) -> Value:
    """The tensor that a node holds; `getitem` is another name for a result of the node that it
    takes apart.
    """
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        return node.args[0], int(node.args[1])  # type: ignore[return-value,arg-type]
    return node, 0


def tensor_of(value: Value) -> torch.Tensor:
    """The fake tensor of a value."""
    node, place = value
    held = node.meta["val"]
    tensor: torch.Tensor = held[place] if isinstance(held, list | tuple) else held
    return tensor


@dataclass
class _Class:
    """Dims that are cut together."""

    members: list[tuple[Dim, Fraction]] = field(default_factory=list)
    """with their segments in proportion"""
    torn: bool = False
    """the proportions of its members contradict each other: it is never cut"""
    count: int = 0


@dataclass(frozen=True)
class _Found:
    """What is known of one dim once all classes are: line (1)."""

    count: int
    """granules; those of one sample in a class of samples; 0: never cut"""
    segments: int
    samples: bool


class Granules:
    """The classes of all dims of a stage."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._parent: dict[Dim, tuple[Dim, Fraction]] = {}
        """a member of the same class nearer to its root, and the segments of this dim for one of
        that member's
        """
        self._torn: set[Dim] = set()
        self._found: dict[Dim, _Found] = {}
        self._cuts: dict[tuple[Value, int], tuple[Cut, ...]] = {}

    def add(self, option: Option, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Joins the dims that an option cuts together."""
        values = (*inputs, *outputs)
        segments = option.segments or (1,) * len(values)
        placements = (*option.inputs, *option.outputs)
        apart = [(inputs[slot], option.inputs[slot]) for slot in option.apart]
        found: list[tuple[Dim, Fraction]] = []
        for value, placement, runs in zip(values, placements, segments, strict=True):
            if not isinstance(placement, int):
                continue
            self._root((value, placement))  # known as a dim that can be cut
            if (value, placement) not in apart:
                found.append(((value, placement), Fraction(runs)))
        for (dim, number), (other, its_number) in zip(found, found[1:]):
            self._join(dim, other, number / its_number)

    def _root(self, dim: Dim) -> tuple[Dim, Fraction]:
        """The dim that stands for the whole class, and the segments of `dim` for one of its own
        (union-find with ratios; the path is shortened on the way).
        """
        path: list[tuple[Dim, Fraction]] = []
        self._parent.setdefault(dim, (dim, Fraction(1)))
        while self._parent[dim][0] != dim:
            above, ratio = self._parent[dim]
            path.append((dim, ratio))
            dim = above
        total = Fraction(1)
        for below, ratio in reversed(path):
            total *= ratio
            self._parent[below] = (dim, total)
        return dim, total

    def _join(self, first: Dim, second: Dim, ratio: Fraction) -> None:
        """Makes two classes one, where segments of first = ratio * segments of second."""
        a, of_first = self._root(first)
        b, of_second = self._root(second)
        if a == b:
            if of_first != ratio * of_second:
                self._torn.add(a)
            return
        self._parent[a] = (b, ratio * of_second / of_first)
        if a in self._torn:
            self._torn.add(b)

    def close(self) -> None:
        """Finds the granules of every class by line (1), once all options are known."""
        classes: dict[Dim, _Class] = {}
        for dim in list(self._parent):
            root, ratio = self._root(dim)
            classes.setdefault(root, _Class(torn=root in self._torn)).members.append((dim, ratio))
        for each in classes.values():
            least = min(ratio for _, ratio in each.members)
            for dim, ratio in each.members:
                size = self._size(dim)
                segments = ratio / least
                if segments.denominator != 1 or size is None or size % int(segments):
                    each.torn = True
                    break
                each.count = gcd(each.count, size // int(segments))
            samples = not each.torn and each.count % PRIME == 0
            for dim, ratio in each.members:
                self._found[dim] = _Found(
                    0 if each.torn else each.count,
                    1 if each.torn else int(ratio / least),
                    samples,
                )

    def _size(self, dim: Dim) -> int | None:
        """Size at PRIME samples; None where it is neither constant nor a multiple of the
        samples.
        """
        value, place = dim
        given = tensor_of(value).shape[place]
        size = self._shapes.size(given)
        if isinstance(given, int):
            return size
        only_samples = given.node.expr.free_symbols == {self._shapes.symbol}
        return size if only_samples and size % PRIME == 0 else None

    def is_samples(self, value: Value, dim: int) -> bool:
        """Whether a granule of this dim is a sample."""
        found = self._found.get((value, dim))
        return found is not None and found.samples

    def can_cut(self, value: Value, dim: int) -> bool:
        """Whether there is more than one granule."""
        found = self._found.get((value, dim))
        return found is not None and found.count > 1

    def cuts(self, value: Value, num_samples: int) -> tuple[Cut, ...]:
        """Granules of each dim of a value when there are so many samples."""
        known = self._cuts.get((value, num_samples))
        if known is None:
            sizes = Shapes(self._shapes.symbol, num_samples).of(tensor_of(value))
            known = self._cuts[value, num_samples] = tuple(
                self._cut(value, dim, size) for dim, size in enumerate(sizes)
            )
        return known

    def _cut(self, value: Value, dim: int, size: int) -> Cut:
        found = self._found.get((value, dim))
        if found is None:
            return Cut(size)
        if found.count == 0:
            return Cut(1, size)
        if found.samples:
            at_prime = self._size((value, dim))
            assert at_prime is not None
            unit = at_prime // (PRIME * found.segments)
            return Cut(size // (found.segments * unit), unit, found.segments)
        return Cut(found.count, size // (found.segments * found.count), found.segments)
