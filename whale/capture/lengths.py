"""Lengths: sizes that vary between batches (most often of the longest text) and are symbols of the
captured graph, beside the number of samples.

    named     dims that the user declared, or that differ between batches   declared, varying
    captured  `Length` of the graph, with what forward asked of them        lengths_of, conditions
    bound     the numbers of one batch, where the graph holds for them      Conditions.numbers
    specialised  the same graph for one set of numbers, for planning and for grids  CapturedModel.at

A graph with lengths runs batches of every length that its conditions allow: the operations compute
sizes from the batch. Plans need numbers: costs, memory and layouts are those of a specialised one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from whale.capture.batch import BatchLayout
from whale.capture.errors import CaptureError
from whale.capture.graph import BatchTensor, CapturedGraph, Length
from whale.names import nearest

MAX_BATCH = 1 << 20
"""upper bound of the batch symbol where a graph is for every batch; export wants one"""
LEAST = 2
"""a dim of size 0 or 1 is never a symbol: torch reads it as one that broadcasts"""

Place = tuple[str, int]
"""(path of a tensor in the batch, dim)"""
Numbers = Mapping[sympy.Symbol, int]


class NotSymbolic(CaptureError):
    """The model cannot be captured with these dims as symbols."""


@dataclass(frozen=True)
class Declared:
    """What the user said of dims that vary."""

    names: Mapping[Place, str]
    longest: Mapping[str, int]
    """by name, where the user gave it"""


def declared(dynamic: Mapping[Any, Any] | None, layout: BatchLayout) -> Declared:
    """Reads `dynamic=` of `wh.parallelize`: tensor of the batch -> {dim: name}, where a name may
    stand with the longest size: `{"input_ids": {1: ("length", 512)}}`. For a batch of one tensor
    `{dim: name}` is enough.
    """
    names: dict[Place, str] = {}
    longest: dict[str, int] = {}
    by_path = {tensor.path: tensor for tensor in layout.tensors}
    given = dict(dynamic or {})
    if given and not any(isinstance(dims, Mapping) for dims in given.values()):
        given = {next(iter(by_path)): given}
    for key, dims in given.items():
        tensor = _tensor_of(key, by_path)
        if not isinstance(dims, Mapping):
            raise ValueError(
                f'dynamic: {key!r} needs its dims, such as {{1: "length"}}, not {dims!r}'
            )
        for dim, said in dims.items():
            name, most = said if isinstance(said, tuple) else (said, None)
            _check_declared(tensor, dim, name, most)
            names[tensor.path, dim % len(tensor.shape)] = name
            if most is not None:
                longest[name] = max(longest.get(name, 0), most)
    return Declared(names, longest)


def _tensor_of(key: Any, by_path: Mapping[str, BatchTensor]) -> BatchTensor:
    """The tensor that a key of `dynamic=` names: as it stands in the batch, or by its path."""
    for path in (f"[{key!r}]", str(key)):
        if path in by_path:
            return by_path[path]
    known = [path.strip("[']") for path in by_path]
    raise ValueError(
        f"dynamic: the batch has no tensor {key!r}.{nearest(str(key), known)} It has: "
        f"{', '.join(by_path)}"
    )


def _check_declared(tensor: BatchTensor, dim: Any, name: Any, most: Any) -> None:
    rank = len(tensor.shape)
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise ValueError(f"dynamic: {tensor.path} has {rank} dims, none is {dim!r}")
    if not isinstance(name, str):
        raise ValueError(
            f"dynamic: dim {dim} of {tensor.path} needs a name, or a name and the longest size "
            f'("length", 512), not {name!r}'
        )
    if tensor.batched and dim % rank == 0:
        raise ValueError(
            f"dynamic: dim {dim} of {tensor.path} is the batch, which always may vary: leave it out"
        )
    size = tensor.shape[dim]
    if most is not None and (not isinstance(most, int) or most < size):
        raise ValueError(
            f"dynamic: the longest {name!r} is {most!r}, but the sample batch has {size}"
        )


def varying(sample: BatchLayout, other: BatchLayout) -> dict[Place, str]:
    """Names for the dims in which two batches differ, those of the sample's declared lengths
    included. Dims that have the same sizes in both share one name.
    """
    names: dict[Place, str] = {}
    name_of: dict[tuple[int, int], str] = {}
    others = {tensor.path: tensor for tensor in other.tensors}
    for before in sample.tensors:
        known = dict(before.lengths)
        now = others.get(before.path)
        if now is None or len(now.shape) != len(before.shape):
            continue
        for dim in range(before.batched, len(before.shape)):
            sizes = (before.shape[dim], now.shape[dim])
            if dim in known:
                names[before.path, dim] = known[dim]
            elif sizes[0] != sizes[1]:
                names[before.path, dim] = name_of.setdefault(sizes, f"length_{len(name_of)}")
    return names


def can_vary(layout: BatchLayout, names: Mapping[Place, str]) -> bool:
    """Whether these dims are long enough in a batch to become symbols."""
    return all(
        tensor.shape[dim] >= LEAST
        for tensor in layout.tensors
        for dim in range(len(tensor.shape))
        if (tensor.path, dim) in names
    )


def lengths_of(graph: Graph, layout: BatchLayout) -> tuple[Length, ...]:
    """The lengths of an exported graph, each with its symbol."""
    places: dict[str, list[tuple[int, int]]] = {}
    sizes: dict[str, int] = {}
    symbols: dict[str, sympy.Expr] = {}
    nodes = graph.find_nodes(op="placeholder")
    for number, (node, tensor) in enumerate(zip(nodes, layout.tensors, strict=True)):
        for dim, name in tensor.lengths:
            size = node.meta["val"].shape[dim]
            expression = sympy.Integer(size) if isinstance(size, int) else size.node.expr
            if not expression.is_Symbol or symbols.setdefault(name, expression) != expression:
                raise NotSymbolic(
                    f"dim {dim} of {tensor.path} ({name!r}) is {expression} in the captured graph, "
                    "and no size of its own"
                )
            places.setdefault(name, []).append((number, dim))
            sizes[name] = tensor.shape[dim]
    return tuple(Length(name, symbols[name], tuple(places[name]), sizes[name]) for name in places)


# --- what the forward asked of sizes


@dataclass(frozen=True)
class Conditions:
    """Sizes that a graph holds for: what the forward and the export asked of them on the way."""

    lengths: tuple[Length, ...]
    batch_symbol: sympy.Symbol
    ranges: Mapping[sympy.Symbol, tuple[int, float]]
    """smallest and largest size of each length"""
    relations: tuple[sympy.Basic, ...]
    """that must be true, of lengths and of the number of samples"""

    def numbers(self, layout: BatchLayout) -> dict[sympy.Symbol, int] | None:
        """The lengths of a batch; None where this graph is not for it. The number of samples is
        that of the mini-batch: its parts take the path that it would take as a whole.
        """
        found: dict[sympy.Symbol, int] = {}
        for length in self.lengths:
            sizes = {layout.tensors[tensor].shape[dim] for tensor, dim in length.places}
            if len(sizes) != 1:
                return None
            found[length.symbol] = sizes.pop()
            if found[length.symbol] < LEAST:
                return None
        # one sample runs the graph of several: broadcasting makes no difference between samples
        sizes_of = {**found, self.batch_symbol: max(layout.batch_size, LEAST)}
        for symbol, (least, most) in self.ranges.items():
            if not least <= sizes_of[symbol] <= most:
                return None
        return found if all(_is_true(each, sizes_of) for each in self.relations) else None

    @property
    def limits_batch(self) -> bool:
        """Whether the graph is for some sizes of the mini-batch only."""
        least, most = self.ranges.get(self.batch_symbol, (LEAST, float("inf")))
        of_batch = [each for each in self.relations if self.batch_symbol in each.free_symbols]
        return least > LEAST or most < MAX_BATCH or bool(of_batch)


def _is_true(relation: sympy.Basic, numbers: Numbers) -> bool:
    """Whether a relation holds; what cannot be decided does not."""
    value = relation.xreplace({key: sympy.Integer(value) for key, value in numbers.items()})
    return value in (sympy.true, True)


def conditions_of(captured: CapturedGraph) -> Conditions:
    """The conditions of a graph: everything that was asked of its symbols until now."""
    environment = captured.batched_input.meta["val"].fake_mode.shape_env
    ranges: dict[sympy.Symbol, tuple[int, float]] = {}
    for symbol in captured.symbols:
        found = environment.var_to_range[symbol]
        upper = float("inf") if found.upper.is_infinite else float(found.upper)
        ranges[symbol] = (int(found.lower), upper)
    relations: dict[sympy.Basic, None] = {}
    sample = {length.symbol: length.size for length in captured.lengths}
    sample[captured.batch_symbol] = captured.batch_size
    for guard in environment.guards:
        relation = environment.replace(guard.expr)
        if relation in (sympy.true, True) or not relation.free_symbols <= captured.symbols:
            continue
        if _is_true(relation, sample):
            relations[relation] = None
        elif relation.free_symbols - {captured.batch_symbol}:
            raise NotSymbolic(f"the forward asks that {relation}, which Whale cannot decide")
    return Conditions(captured.lengths, captured.batch_symbol, ranges, tuple(relations))


# --- one graph for one set of lengths


class Specialised:
    """Copies of fake values with numbers in place of lengths."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
        self._tensors: dict[Any, torch.Tensor] = {}

    def value(self, value: Any) -> Any:
        """The value of a node, or a part of one."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return type(value)(self.value(each) for each in value)
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        sizes = (*value.shape, *value.stride())
        if not any(self._changes(size) for size in sizes):
            return value
        numbers = tuple(size if isinstance(size, int) else size.node.expr for size in sizes)
        key = (numbers, value.dtype, value.device)
        if key not in self._tensors:
            with value.fake_mode:  # type: ignore[attr-defined]
                self._tensors[key] = torch.empty_strided(
                    [self._size(size) for size in value.shape],
                    [self._size(size) for size in value.stride()],
                    dtype=value.dtype,
                    device=value.device,
                )
        return self._tensors[key]

    def _changes(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and bool(
            size.node.expr.free_symbols & self._numbers.keys()
        )

    def _size(self, size: Any) -> Any:
        if not self._changes(size):
            return size
        expression = size.node.expr.xreplace(self._numbers)
        if expression.is_Integer:
            return int(expression)
        return size.node.shape_env.create_symintnode(expression, hint=None)


def copy_graph(
    captured: CapturedGraph, numbers: Numbers, order: Sequence[Node] = ()
) -> tuple[CapturedGraph, dict[Node, Node]]:
    """(the graph with these numbers as lengths, node -> its copy). The same operations in the same
    order, or in `order`: only what is known of sizes differs.
    """
    specialised = Specialised(numbers)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in order or captured.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
        if "val" in node.meta:
            copies[node].meta["val"] = specialised.value(node.meta["val"])
    inputs = []
    for place, tensor in enumerate(captured.inputs):
        shape = list(tensor.shape)
        for length in captured.lengths:
            for number, dim in length.places:
                if number == place:
                    shape[dim] = numbers.get(length.symbol, shape[dim])
        inputs.append(replace(tensor, shape=tuple(shape)))
    return replace(
        captured,
        graph=graph,
        inputs=tuple(inputs),
        lengths=tuple(length for length in captured.lengths if length.symbol not in numbers),
        buffer_updates={name: copies[node] for name, node in captured.buffer_updates.items()},
    ), copies
