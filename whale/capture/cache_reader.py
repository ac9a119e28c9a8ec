"""Reads what capture/cache_format.py writes: a captured graph from JSON. Nothing in a file is run:
an operation is looked up by its name, an expression is built of a few functions, and anything else
that a name might mean is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from whale.annotation import Mark, Strategy
from whale.capture.batch import BatchLayout
from whale.capture.cache_format import CALLED, CannotCache
from whale.capture.clean import Capture
from whale.capture.graph import CapturedGraph, Length, StateTensor
from whale.capture.guards import Finding, Findings
from whale.compat import (
    Operation,
    endless,
    fake_mode,
    neg_view,
    pytree,
    size_functions,
    symbolic_number,
)


def from_document(document: dict[str, Any], layout: BatchLayout) -> Capture:
    """The capture. Raises `CannotCache`, or whatever a damaged document makes Python raise."""
    return _DocumentReader(document, layout).capture()


class _DocumentReader:
    def __init__(self, document: dict[str, Any], layout: BatchLayout) -> None:
        self.document = document
        self.layout = layout
        self.strings: list[str] = document["strings"]
        self.mode = fake_mode()
        self.environment = self.mode.shape_env
        self.symbols: list[sympy.Symbol] = []
        for name, hint, least, most in document["symbols"]:
            self.symbols.append(self._new_symbol(name, hint, least, most))
        self.sizes = [self._expression(tree) for tree in document["sizes"]]
        self.numbers: dict[tuple[str, int], Any] = {}
        """what expressions became, each once"""
        self.nodes: list[Node] = []

    def capture(self) -> Capture:
        document = self.document
        graph = Graph()
        for entry in document["nodes"]:
            self.nodes.append(self._node(graph, *entry))
        for relation in document["relations"]:
            self.environment.evaluate_expr(self.sizes[relation[0]])
        state = {}
        for name, kind, shape, dtype, trainable, aliases in document["state"]:
            state[name] = StateTensor(
                name, kind, tuple(shape), _of_torch(dtype, torch.dtype), trainable, tuple(aliases)
            )
        captured = CapturedGraph(
            graph=graph,
            inputs=self.layout.tensors,
            state=state,
            constants={n: _read_constant(*entry) for n, entry in document["constants"].items()},
            batch_symbol=self.symbols[0],
            batch_size=document["batch_size"],
            lengths=self._lengths(),
            buffer_updates={n: self.nodes[p] for n, p in document["buffer_updates"].items()},
            notes=list(document["notes"]),
        )
        marks = [_mark(*entry) for entry in document["marks"]]
        structure = document["output_structure"]
        return Capture(
            captured,
            marks,
            Findings([Finding(**entry) for entry in document["findings"]]),
            self.layout,
            None if structure is None else pytree.treespec_loads(structure),
            tuple(document["output_is_tensor"]),
            document["has_loss"],
            document["output_is_loss"],
        )

    def _new_symbol(self, name: str, hint: int, least: int, most: int | None) -> sympy.Symbol:
        symbol = sympy.Symbol(name, positive=True, integer=True)
        self.environment.add_backed_var_to_val(symbol, hint)
        upper = endless if most is None else most
        self.environment.constrain_symbol_range(symbol, least, upper)
        return symbol

    def _lengths(self) -> tuple[Length, ...]:
        found = []
        for symbol, (name, places, size) in zip(
            self.symbols[1:], self.document["lengths"], strict=True
        ):
            found.append(Length(name, symbol, tuple((t, d) for t, d in places), size))
        return tuple(found)

    def _expression(self, tree: Any) -> sympy.Basic:
        if isinstance(tree, int):
            return sympy.Integer(tree)
        name, *parts = tree
        if name == "symbol":
            return self.symbols[parts[0]]
        if name == "Rational":
            return sympy.Rational(*parts)
        if name == "Float":
            return sympy.Float(float.fromhex(parts[0]))
        if name == "Boolean":
            return sympy.true if parts[0] else sympy.false
        # as it was written, not simplified again
        return size_functions()[name](*map(self._expression, parts), evaluate=False)

    def _node(
        self, graph: Graph, op: str, target: str, name: str, args: Any, kwargs: Any, meta: Any
    ) -> Node:
        called: Any = _operation(target) if op == "call_function" else target
        given = tuple(self._argument(each) for each in args)
        named = {key: self._argument(each) for key, each in kwargs.items()}
        node = graph.create_node(op, called, given, named, name=name)
        for key, value in meta.items():
            node.meta[key] = self._value(value) if key == "val" else self._trace(key, value)
        return node

    def _trace(self, key: str, value: Any) -> Any:
        if key == "stack_trace":
            return self.strings[value]
        if key == "nn_module_stack":
            texts = self.strings
            return {texts[entry]: (texts[name], texts[kind]) for entry, name, kind in value}
        return self._argument(value)

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        return self._READ[kind](self, content)

    def _list(self, content: Any) -> list[Any]:
        return [self._argument(each) for each in content]

    _READ: dict[str, Callable[[_DocumentReader, Any], Any]] = {
        "node": lambda self, content: self.nodes[content],
        "float": lambda self, content: float.fromhex(content),
        "complex": lambda self, content: complex(*map(float.fromhex, content)),
        "tuple": lambda self, content: tuple(self._list(content)),
        "list": lambda self, content: self._list(content),
        "dict": lambda self, content: {
            self._argument(key): self._argument(each) for key, each in content
        },
        "slice": lambda self, content: slice(*self._list(content)),
        "ellipsis": lambda self, content: ...,
        "dtype": lambda self, content: _of_torch(content, torch.dtype),
        "layout": lambda self, content: _of_torch(content, torch.layout),
        "memory_format": lambda self, content: _of_torch(content, torch.memory_format),
        "device": lambda self, content: torch.device(content),
    }

    def _value(self, value: dict[str, Any]) -> Any:
        ((kind, content),) = value.items()
        if kind == "tensor":
            return self._tensor(*content)
        if kind in ("list", "tuple"):
            values = [self._value(each) for each in content]
            return tuple(values) if kind == "tuple" else values
        return self._argument(content) if kind == "plain" else self._number(kind, content)

    def _number(self, kind: str, size: int | list[int]) -> Any:
        if isinstance(size, int):
            return {"int": int, "float": float, "bool": bool}[kind](size)
        key = kind, size[0]
        if key not in self.numbers:
            self.numbers[key] = symbolic_number(self.environment, self.sizes[size[0]], kind)
        return self.numbers[key]

    def _tensor(
        self, shape: Any, stride: Any, dtype: str, device: str, flags: list[int]
    ) -> torch.Tensor:
        with self.mode:
            made = torch.empty_strided(
                [self._number("int", size) for size in shape],
                [self._number("int", size) for size in stride],
                dtype=_of_torch(dtype, torch.dtype),
                device=device,
            )
            trained, is_conj, is_neg = flags
            if is_conj:
                made = made.conj()
            if is_neg:
                made = neg_view(made)
        return made.requires_grad_() if trained else made


def _operation(target: str) -> Any:
    """The operation or function of this name; raises where there is none."""
    if target in CALLED:
        return CALLED[target]
    namespace, name, overload = target.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    if not isinstance(found, Operation):
        raise CannotCache(f"{target} is no operation")
    return found


def _of_torch(name: str, kind: type) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, kind):
        raise CannotCache(f"torch.{name} is no {kind.__name__}")
    return found


def _read_constant(
    dtype: str, shape: list[int], device: str, requires_grad: bool, text: str
) -> torch.Tensor:
    data = bytearray(base64.b64decode(text))
    made = torch.empty(shape, dtype=_of_torch(dtype, torch.dtype))
    if data:
        flat = torch.frombuffer(data, dtype=torch.uint8).view(made.dtype)
        made = flat.reshape(shape).clone()
    return made.to(device).requires_grad_(requires_grad)


def _mark(order: list[Any], strategy: dict[str, Any], label: str) -> Mark:
    known = {each.name for each in fields(Strategy)}
    given = {name: value for name, value in strategy.items() if name in known}
    grid = given.get("grid")
    given["grid"] = None if grid is None else tuple(grid)
    return Mark((str(order[0]), int(order[1])), Strategy(**given), label)
