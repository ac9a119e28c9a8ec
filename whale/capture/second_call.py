"""Whether a model gives in its next call what it gives in a first one: for models whose forward
leaves something behind (`ForwardState`, buffers made anew).

The model is exported once more, called twice:

    first results     of a batch
    second results    of another batch, with buffers as in the beginning and with everything else
                      that the first call left

The second results must be the function of their batch that a first call gives, or a graph of one
call is not the model. Read from the results backwards, the graphs are equal by operations:

    a table that the first call made is read again                      it has the same values
    samples, weights, random numbers of the first call are read again   never
    a number in Python has changed                                      never

No weights are needed, so it holds for models without them too. Values that are made of sizes alone
are computed. The number of samples is another one in the first call. A batch of another layout than
the first one is looked at behind the first and in front of it, and where lengths vary so is a
shorter one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from whale.capture.batch import BatchLayout, read_batch
from whale.capture.clean import flat_graph
from whale.capture.errors import NOWHERE, CaptureError
from whale.capture.export import SECOND_CALL, Exported, Task, export_model
from whale.capture.guards import KEPT, REBUILT, Findings, refuse
from whale.capture.lengths import LEAST
from whale.compat import is_fake
from whale.dtypes import as_bytes
from whale.operations.nodes import aten_name
from whale.operations.table import is_random

MOST_ELEMENTS = 1 << 24
"""of a value that is computed to compare it"""
SAMPLES = 3
"""samples of a batch in such values"""
MORE_SAMPLES = 7
"""samples of the batch of an earlier call"""

OF_ANOTHER = " of another call"

_Symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
_Flat: TypeAlias = tuple[Graph, dict[str, Tensor]]
"""a graph without writes, and its constants"""


def refuse_forward_state(exported: Exported, given: Given, first: BatchLayout | None) -> None:
    """Raises when the second call of the model gives something else than a first one does.
    `first`: layout of the batches before, where that is another one.
    """
    seen = exported.seen
    left = Findings()
    for name in seen.rebuilt:
        left.add(REBUILT, name, NOWHERE)
    for name in seen.changed:
        left.add(KEPT, name, NOWHERE)
    if not left.entries:
        return
    now = given.fixed()
    before = (given.layout if first is None else first).with_lengths({})
    if _depends_elsewhere(given, before):
        refuse(left)
    try:
        depends = now.depends_on(before)
    except CaptureError as error:
        names = ", ".join(f"`{finding.name}`" for finding in left.entries[:4])
        raise ValueError(
            f"forward leaves something for its next call ({names}), and two calls cannot be "
            f"captured to see what comes of it. {error}"
        ) from error
    if depends:
        refuse(left)


def _depends_elsewhere(given: Given, before: BatchLayout) -> bool:
    """Whether batches depend on each other in another order than this one behind one of the layout
    before: with a shorter one, where lengths vary, or the next one of that layout behind this one.
    A table that grows with the longest batch does.
    """
    fixed = given.fixed()
    now = fixed.layout
    if given.layout.length_names:
        with suppress(CaptureError):  # half a sample may be none of this model's batches
            shorter = given.shorter()
            if shorter.depends_on(now) or fixed.depends_on(shorter.layout):
                return True
    if before.key != now.key:
        with suppress(CaptureError):  # in evaluation: batches of training may be none of these
            return given.of_layout(before).depends_on(now)
    return False


@dataclass(frozen=True)
class Given:
    """A model with a batch, as it is captured."""

    model: torch.nn.Module
    layout: BatchLayout
    tensors: list[Tensor]
    task: Task
    with_outputs: bool

    def fixed(self) -> Given:
        """This call with a batch whose lengths are numbers."""
        return replace(self, layout=self.layout.with_lengths({}))

    def of_layout(self, layout: BatchLayout) -> Given:
        """This call with a batch of another layout, of which nothing but the form is known."""
        tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in layout.tensors]
        return replace(self, layout=layout, tensors=tensors)

    def shorter(self) -> Given:
        """This call with its samples cut to half of each length that varies."""
        tensors = list(self.tensors)
        for place, described in enumerate(self.layout.tensors):
            for dim, _ in described.lengths:
                size = max(LEAST, described.shape[dim] // 2)
                tensors[place] = tensors[place].narrow(dim, 0, size)
        layout, _ = read_batch(self.layout.rebuild(tensors), self.layout)
        return replace(self, layout=layout.with_lengths({}), tensors=tensors)

    def depends_on(self, before: BatchLayout) -> bool:
        """Whether a call behind one with a batch of the layout `before` gives something else than a
        call of its own.
        """
        behind = self._graph(before)
        alone = behind if before.key == self.layout.key else self._graph(None)
        num_before = len(before.tensors)
        if not _differ(alone, behind, num_before, {}):
            return False
        return _differ(alone, behind, num_before, self._fixed_buffers())

    def _graph(self, before: BatchLayout | None) -> _Flat:
        graph, _, constants, _ = flat_graph(self._program(before), self.model)
        return graph, constants

    def _program(self, before: BatchLayout | None) -> ExportedProgram:
        return export_model(
            self.model, self.layout, self.tensors, self.task, self.with_outputs, before
        ).program

    def _fixed_buffers(self) -> dict[str, Tensor]:
        """The buffers that no call writes, by name: every call reads the same values."""
        _, state, _, written = flat_graph(self._program(None), self.model)
        changed = {str(node.target) for node in written}
        fixed = {}
        for name, tensor in self.model.named_buffers():
            if name in state and name not in changed:
                fixed[name] = tensor
        return fixed


def _differ(alone: _Flat, behind: _Flat, num_before: int, fixed: Mapping[str, Tensor]) -> bool:
    """Whether the second call of the graph `behind` gives something else than the first one of the
    graph `alone`, which may be the same.
    """
    graph, constants = behind
    second = _Reading(graph, constants, fixed, num_before, is_second=True)
    results = _results(graph)
    wanted = _results(alone[0])
    if alone is behind:
        wanted = wanted[: len(wanted) // 2]
    graph, constants = alone
    first = _Reading(graph, constants, fixed, num_before, is_second=False)
    found = results[len(results) - len(wanted) :]
    return [first.of(each) for each in wanted] != [second.of(each) for each in found]


def _results(graph: Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


class _Reading:
    """The graph as one of the two calls sees it: nodes that compute the same of the batch of that
    call have the same name in both readings.
    """

    def __init__(
        self,
        graph: Graph,
        constants: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor],
        num_before: int,
        is_second: bool,
    ) -> None:
        self._constants = {**constants, **fixed}
        self._fixed = fixed
        """buffers that no call writes"""
        placeholders = graph.find_nodes(op="placeholder")
        skipped = num_before if is_second else 0
        self._inputs = {node: place - skipped for place, node in enumerate(placeholders)}
        """place in the batch of this call; the others have a place outside of it"""
        self._numbers: dict[Any, int] = {}
        # a symbol of both batches stands for sizes that the model wants equal
        for symbol in _symbols(placeholders[:num_before]):
            self._numbers[symbol] = MORE_SAMPLES if is_second else SAMPLES
        for symbol in _symbols(placeholders[skipped:]):
            self._numbers[symbol] = SAMPLES
        self._names: dict[Node, str] = {}
        self._values: dict[Node, Any] = {}
        """of nodes that are made of sizes and constants alone"""
        in_second = False
        self._is_own = not is_second
        """the node that is read belongs to this call"""
        num_draws = 0
        for node in graph.nodes:
            if _call_of(node) and not in_second:
                in_second = True
                self._is_own = is_second
                num_draws = 0
            drawn = ""
            if is_random(node):
                num_draws += 1
                drawn = f"draw {num_draws}{'' if self._is_own else OF_ANOTHER}"
            self._names[node] = self._name(node, drawn)

    def of(self, result: Any) -> str:
        return self._names[result] if isinstance(result, Node) else repr(result)

    def _name(self, node: Node, drawn: str) -> str:
        value = node.meta.get("val")
        if isinstance(value, _Symbolic):
            self._values[node] = self._size(value)
            return repr(self._values[node])
        if node.op == "placeholder":
            return f"input {self._inputs[node]}"
        if node.op == "get_attr":
            constant = self._constants.get(str(node.target))
            if constant is None or is_fake(constant) or constant.is_meta:
                return f"state {node.target}"
            self._values[node] = constant.detach()
            return _digest(constant)
        if _call_of(node) is False and isinstance(node.args[0], Node):
            return self._names[node.args[0]]  # the copy of a buffer
        if not drawn and self._compute(node, value):
            return _digest(self._values[node])
        if aten_name(node) == "slice" and self._is_whole(node):
            return self._names[node.all_input_nodes[0]]
        arguments = map_aggregate((node.args, node.kwargs), self._argument)
        region = node.meta.get("autocast")
        return _hash(f"{node.op} {node.target} {arguments} {region} {drawn}")

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            is_state = value.op == "get_attr" and value not in self._values
            is_state = is_state and str(value.target) not in self._fixed
            # weights and buffers have other values in the next call
            return self._names[value] + (OF_ANOTHER if is_state and not self._is_own else "")
        return repr(self._size(value)) if isinstance(value, _Symbolic) else value

    def _is_whole(self, node: Node) -> bool:
        """Whether a slice takes everything."""
        return self._shape(node.all_input_nodes[0]) == self._shape(node)

    def _shape(self, node: Node) -> list[Any]:
        shape = node.meta["val"].shape
        return [self._size(size) if isinstance(size, _Symbolic) else size for size in shape]

    def _size(self, size: Any) -> Any:
        """A size with numbers for its symbols."""
        expression = size.node.expr
        known = {each: sympy.Integer(number) for each, number in self._numbers.items()}
        value = expression.subs(known) if hasattr(expression, "subs") else expression
        if getattr(value, "free_symbols", None):
            return str(value)  # a symbol of its own, which no batch has
        kind = int if isinstance(size, torch.SymInt) else float
        return bool(value) if isinstance(size, torch.SymBool) else kind(value)

    def _compute(self, node: Node, value: Any) -> bool:
        """Computes the node if it is a tensor made of sizes and constants alone; whether it is."""
        if node.op != "call_function" or not isinstance(value, Tensor):
            return False
        if not all(source in self._values for source in node.all_input_nodes):
            return False
        number = value.numel()
        if (self._size(number) if isinstance(number, torch.SymInt) else number) > MOST_ELEMENTS:
            return False
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        try:
            with torch.no_grad():
                found = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:
            return False  # read by its operations
        if not isinstance(found, Tensor):
            return False
        self._values[node] = found
        return True


def _symbols(inputs: Sequence[Node]) -> set[Any]:
    sizes = [size for node in inputs for size in node.meta["val"].shape]
    return {
        symbol
        for size in sizes
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }


def _call_of(node: Node) -> bool | None:
    """`SECOND_CALL` of a node."""
    return (node.meta.get("custom") or {}).get(SECOND_CALL)


def _digest(tensor: Tensor) -> str:
    form = f"{tensor.dtype} {list(tensor.shape)}"
    plain = tensor.detach().cpu().contiguous()
    return _hash(form, as_bytes(plain).numpy().tobytes() if plain.numel() else b"")


def _hash(text: str, data: bytes = b"") -> str:
    return hashlib.blake2b(text.encode() + data, digest_size=16).hexdigest()
