"""A captured graph as JSON: what stands in a file of `"capture_cache"` (read by
capture/cache_reader.py).

Only data: operations by their names (`aten.add.Tensor`, and a short list of Python's own), sizes as
trees of a few functions, constants as bytes. Nothing in a file is run, imported or unpickled when
it is read. `torch.export.save` has pickles in its archives and evaluates the text of expressions.

    nodes      [operation, target, name, arguments, named arguments, what is known of the node]
    strings    stack traces and names of modules, each once
    sizes      expressions, each once: ["Mul", 2, ["s", 0]]
    symbols    [name, size in the sample, least, most] of the samples and of each length
    relations  what the forward asked of sizes on the way
"""

from __future__ import annotations

import base64
import math
import operator
from dataclasses import asdict
from typing import Any

import sympy
import torch
from torch.fx import Node

from whale.capture.clean import Capture
from whale.capture.graph import TRACE_KEYS, StateTensor
from whale.compat import Operation, pytree, size_functions
from whale.dtypes import as_bytes
from whale.names import names_of

_OPERATORS = names_of(
    "getitem add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ not_"
)
_OF_TORCH = names_of("sym_float sym_int sym_max sym_min sym_not sym_ite sym_sum")
_OF_MATH = names_of("sqrt ceil floor")
CALLED: dict[str, Any] = {
    **{name: getattr(operator, name) for name in _OPERATORS},
    **{f"torch.{name}": getattr(torch, name) for name in _OF_TORCH},
    **{f"math.{name}": getattr(math, name) for name in _OF_MATH},
}
"""functions of Python that stand in graphs, by the name in a file"""
NAMES = {function: name for name, function in CALLED.items()}
NOT_AGAIN = ("whale_functions",)
"""namespaces of operations that a capture makes: another process does not have them"""
NUMBERS: dict[type, str] = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}


class CannotCache(Exception):
    """The capture has something that a file cannot hold."""


def to_document(capture: Capture) -> dict[str, Any]:
    """Everything of a capture besides the layout of its batch, as JSON values."""
    return _Writer(capture).document()


class _Writer:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.captured = capture.captured
        self.strings: dict[str, int] = {}
        self.sizes: dict[Any, int] = {}
        self.size_trees: list[Any] = []
        lengths = [length.symbol for length in self.captured.lengths]
        self.symbols = [self.captured.batch_symbol, *lengths]
        self.places = {node: place for place, node in enumerate(self.captured.graph.nodes)}

    def document(self) -> dict[str, Any]:
        captured = self.captured
        capture = self.capture
        nodes = [self._node(node) for node in captured.graph.nodes]
        relations = [self._size(each) for each in self._relations()]
        updates = {name: self.places[node] for name, node in captured.buffer_updates.items()}
        constants = {name: _constant(value) for name, value in captured.constants.items()}
        return {
            "nodes": nodes,
            "relations": relations,
            "symbols": [self._symbol(symbol) for symbol in self.symbols],
            "lengths": [[each.name, each.places, each.size] for each in captured.lengths],
            "state": [self._state(each) for each in captured.state.values()],
            "constants": constants,
            "buffer_updates": updates,
            "batch_size": captured.batch_size,
            "notes": captured.notes,
            "marks": [[list(m.order), asdict(m.strategy), m.label] for m in capture.forward_marks],
            "findings": [asdict(each) for each in capture.findings.entries],
            "output_structure": _structure(capture.output_structure),
            "output_is_tensor": list(capture.output_is_tensor),
            "has_loss": capture.has_loss,
            "output_is_loss": capture.output_is_loss,
            # last: the parts above fill them
            "strings": list(self.strings),
            "sizes": self.size_trees,
        }

    def _environment(self) -> Any:
        return self.captured.batched_input.meta["val"].fake_mode.shape_env

    def _relations(self) -> list[sympy.Basic]:
        environment = self._environment()
        found: dict[sympy.Basic, None] = {}
        for guard in environment.guards:
            relation = environment.replace(guard.expr)
            known = relation.free_symbols and relation.free_symbols <= self.captured.symbols
            if known:
                found[relation] = None
        return list(found)

    def _symbol(self, symbol: sympy.Symbol) -> list[Any]:
        environment = self._environment()
        bounds = environment.var_to_range[symbol]
        upper = None if math.isinf(float(bounds.upper)) else int(bounds.upper)
        sizes = {each.symbol: each.size for each in self.captured.lengths}
        hint = sizes.get(symbol, self.captured.batch_size)
        return [symbol.name, hint, int(bounds.lower), upper]

    def _node(self, node: Node) -> list[Any]:
        target = self._target(node) if node.op == "call_function" else str(node.target)
        meta: dict[str, Any] = {}
        if "val" in node.meta:
            meta["val"] = self._value(node.meta["val"])
        for key in TRACE_KEYS:
            if node.meta.get(key):
                meta[key] = self._trace(key, node.meta[key])
        args = [self._argument(each) for each in node.args]
        kwargs = {name: self._argument(each) for name, each in node.kwargs.items()}
        return [node.op, target, node.name, args, kwargs, meta]

    def _target(self, node: Node) -> str:
        target = node.target
        if isinstance(target, Operation):
            if target.namespace in NOT_AGAIN:
                raise CannotCache(f"{target} is an autograd.Function of the model")
            return str(target)
        name = NAMES.get(target)  # type: ignore[arg-type]
        if name is None:
            raise CannotCache(f"the graph calls {target}")
        return name

    def _trace(self, key: str, value: Any) -> Any:
        if key == "stack_trace":
            return self._string(value)
        if key == "nn_module_stack":
            return [
                [self._string(str(entry)), self._string(name), self._string(str(kind))]
                for entry, (name, kind) in value.items()
            ]
        return self._argument(value)

    def _string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def _argument(self, value: Any) -> Any:
        """Plain values stand for themselves, others in a dict of one item that names their kind."""
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if isinstance(value, Node):
            return {"node": self.places[value]}
        if isinstance(value, float):
            return {"float": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, tuple):
            return {"tuple": [self._argument(each) for each in value]}
        if isinstance(value, list):
            return {"list": [self._argument(each) for each in value]}
        if isinstance(value, dict):
            pairs = [[self._argument(key), self._argument(each)] for key, each in value.items()]
            return {"dict": pairs}
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return {"slice": [self._argument(each) for each in parts]}
        if value is ...:
            return {"ellipsis": 0}
        for kind in ("dtype", "layout", "memory_format"):
            if isinstance(value, getattr(torch, kind)):
                return {kind: str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise CannotCache(f"an argument is a {type(value).__name__}")

    def _value(self, value: Any) -> Any:
        """The fake value of a node."""
        if isinstance(value, torch.Tensor):
            flags = (value.requires_grad, value.is_conj(), value.is_neg())
            return {
                "tensor": [
                    [self._size(size) for size in value.shape],
                    [self._size(size) for size in value.stride()],
                    str(value.dtype).removeprefix("torch."),
                    str(value.device),
                    list(map(int, flags)),
                ]
            }
        if type(value) in NUMBERS:
            return {NUMBERS[type(value)]: self._size(value.node.expr)}
        if isinstance(value, (list, tuple)):
            order = "tuple" if isinstance(value, tuple) else "list"
            return {order: [self._value(each) for each in value]}
        return {"plain": self._argument(value)}

    def _size(self, size: Any) -> int | list[int]:
        """A number, or the place of an expression in a list of its own."""
        if isinstance(size, int):
            return size
        expression = size.node.expr if isinstance(size, torch.SymInt) else size
        if expression.is_Integer:
            return int(expression)
        if expression not in self.sizes:
            tree = self._tree(expression)
            self.sizes[expression] = len(self.size_trees)
            self.size_trees.append(tree)
        return [self.sizes[expression]]

    def _tree(self, expression: sympy.Basic) -> Any:
        if expression.is_Integer:
            return int(expression)  # type: ignore[call-overload]
        if expression.is_Symbol:
            if expression not in self.symbols:
                raise CannotCache(f"a size ({expression}) depends on what the tensors hold")
            return ["symbol", self.symbols.index(expression)]
        if expression.is_Rational:
            return ["Rational", int(expression.p), int(expression.q)]  # type: ignore[attr-defined]
        if expression.is_Float:
            return ["Float", float(expression).hex()]
        if expression in (sympy.true, sympy.false):
            return ["Boolean", int(bool(expression))]
        name = expression.func.__name__
        if size_functions().get(name) is not expression.func:
            raise CannotCache(f"a size has the function {name}")
        return [name, *(self._tree(part) for part in expression.args)]

    def _state(self, state: StateTensor) -> list[Any]:
        dtype = str(state.dtype).removeprefix("torch.")
        return [state.name, state.kind, state.shape, dtype, state.trainable, state.aliases]


def _constant(value: torch.Tensor) -> list[Any]:
    data = as_bytes(value.detach()).cpu().numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    text = base64.b64encode(data).decode()
    return [dtype, list(value.shape), str(value.device), value.requires_grad, text]


def _structure(structure: Any) -> str | None:
    if structure is None:
        return None
    try:
        text = pytree.treespec_dumps(structure)
        is_same = pytree.treespec_loads(text) == structure
    except Exception as error:
        raise CannotCache(f"the model's output has a structure of its own: {error}") from error
    if not is_same:
        raise CannotCache("the model's output has a structure of its own")
    return str(text)
